"""The counts that may only fall: each kind is noticed, and a list that is not kept fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import ratchets

COUNTED = {
    "words": [
        '"""The task, or whoever it belongs to."""\n',
        "def test_who_waits_is_woken() -> None: ...\n",
        "for_nobody = 1\n",
    ],
    "openings": [
        'def is_idle() -> bool:\n    """Whether no connection is open."""\n',
        'LIMIT = 3\n"""What a ring may hold."""\n',
        'class A:\n    limit: int = 3\n    """Whether it is set."""\n',
    ],
    "pronouns": ["# It is the ring of the peer.\n", "ring = 1  # its peer has another\n"],
    "verbs": ["def tell_peer() -> None: ...\n", "def test_the_peer_is_told() -> None: ...\n"],
    "variables": ["told = 1\n", "for said in (): ...\n", "with a as (b, asking): ...\n"],
    "titles": ["def test_what_is_lost_is_sent_again() -> None: ...\n"],
    "private": [
        "print(stream._core)\n",
        "print(module._LIMIT)\n",
        'monkeypatch.setattr(module, "_limit", 1)\n',
        'monkeypatch.setattr("trio_smc.module._limit", 1)\n',
        "from trio_smc.config import _KEYS\n",
        'ring = attrgetter("peer._ring.armed")(qp)\n',
        'copy = vars(Receiver)["_copy"]\n',
        'PROGRAM = """\n    import trio_smc\n    print(stack._core)\n"""\n',
    ],
}
CASES = [(kind, text) for kind, texts in COUNTED.items() for text in texts]


def kinds(path: str, text: str) -> list[str]:
    return [place.kind for place in ratchets.count(path, text)]


def test_every_kind_has_a_case() -> None:
    assert set(COUNTED) == set(ratchets.KINDS)


@pytest.mark.parametrize(("kind", "text"), CASES)
def test_each_kind_is_noticed(kind: str, text: str) -> None:
    assert kinds("tests/rnic/test_pump.py", text) == [kind]


@pytest.mark.parametrize(
    ("path", "text", "kind"),
    [
        ("Makefile", "\t@echo 'programs nobody here wrote'\n", "words"),
        ("examples/systemd/app.service", "[Unit]\n# Its client.\n", "pronouns"),
        ("tests/requirements.toml", "x = 1 # it is a number\n", "pronouns"),
        ("docs/security.md", "Whoever connects.\n", "words"),
    ],
)
def test_files_of_other_languages_are_read(path: str, text: str, kind: str) -> None:
    assert kinds(path, text) == [kind]


def test_all_text_files_are_listed() -> None:
    listed = ratchets.tracked_files()
    assert {"Makefile", ".ci/run", "pyproject.toml", "README.md", "tests/conftest.py"} < {*listed}
    assert not [name for name in listed if name.endswith((".pcapng", ".svg", ".json"))]


@pytest.mark.parametrize(
    "text",
    [
        '"""True if no connection is open."""\n',
        "def test_the_peer_is_notified() -> None: ...\n",
        "class A:\n    def f(self) -> None:\n        self._core = 1\n",
        "# The ring is full.\n",
        "x = __name__\n",
        'ring = "# It is a string"\n',
        "LIMIT = 3\n'The most that a ring holds.'\n",
        'send_as_nobody("nobody", NOBODY)\n',
        "from trio_smc import _api\n",
        'PROSE = """\nfrom here on\nstack._core is not shown\n"""\n',
        'monkeypatch.setattr(module, "LIMIT", 1)\n',
    ],
)
def test_plain_text_is_not_counted(text: str) -> None:
    assert kinds("tests/rnic/test_pump.py", text) == []


@pytest.mark.parametrize(
    "text",
    [
        "print(edge._replace(target=None))\n",
        """class Tcp:
    def send(self, data):
        self.peer._arrive(data)

    def _arrive(self, data): ...
""",
    ],
    ids=["a named tuple", "another object of the same class"],
)
def test_names_that_only_look_private(text: str) -> None:
    assert not list(ratchets.count("tests/rnic/test_pump.py", text))


def test_private_names_count_for_their_file_and_words_for_their_room() -> None:
    private = next(iter(ratchets.count("tests/rnic/test_pump.py", COUNTED["private"][0])))
    word = next(iter(ratchets.count("trio_smc/rnic/soft/ring.py", COUNTED["words"][0])))
    assert (private.where, word.where) == ("tests/rnic/test_pump.py", "trio_smc/rnic/soft")


@pytest.mark.parametrize(("change", "message"), [(-1, "at most"), (+1, "--write")])
def test_a_count_that_differs_fails(
    change: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found: dict[str, dict[str, int]] = {kind: {} for kind in ratchets.KINDS}
    found["words"]["trio_smc/rnic"] = 3
    monkeypatch.setattr(ratchets, "counts", lambda: found)
    listed = {**found, "words": {"trio_smc/rnic": 3 + change}}
    other = tmp_path / "list.json"
    other.write_text(json.dumps(listed))
    monkeypatch.setattr(ratchets, "LIST", other)
    assert ratchets.main([]) == 1
    assert message in capsys.readouterr().err
    # A higher count is never written into the list; a lower one is.
    assert ratchets.main(["--write"]) == (1 if change < 0 else 0)
    assert (json.loads(other.read_text()) == listed) == (change < 0)
