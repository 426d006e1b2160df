"""The counts that may only fall: each kind is noticed, and a list that is not kept fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import ratchets

COUNTED = {
    "words": '"""The task, or whoever it belongs to."""\n',
    "openings": 'def is_idle() -> bool:\n    """Whether no connection is open."""\n',
    "pronouns": "# It is the ring of the peer.\n",
    "verbs": "def tell_peer() -> None: ...\n",
    "private": "print(stream._core)\n",
}


def kinds(path: str, text: str) -> list[str]:
    return [place.kind for place in ratchets.count(path, text)]


@pytest.mark.parametrize("kind", COUNTED)
def test_each_kind_is_noticed(kind: str) -> None:
    assert kind in kinds("tests/rnic/test_pump.py", COUNTED[kind])


@pytest.mark.parametrize(
    "text",
    [
        '"""True if no connection is open."""\n',
        "def test_say_nothing() -> None: ...\n",
        "class A:\n    def f(self) -> None:\n        self._core = 1\n",
        "# The ring is full.\n",
        "x = __name__\n",
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
    private = next(iter(ratchets.count("tests/rnic/test_pump.py", COUNTED["private"])))
    word = next(iter(ratchets.count("trio_smc/rnic/soft/ring.py", COUNTED["words"])))
    assert (private.where, word.where) == ("tests/rnic/test_pump.py", "trio_smc/rnic/soft")


def test_the_list_is_that_of_the_tree() -> None:
    assert ratchets.main([]) == 0


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
