"""`Config`: accepted and refused values, and the settings that a call may change."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import trio_smc
from trio_smc import Config, SoftRnic
from trio_smc.config import config as config_module
from trio_smc.host import private_directory
from trio_smc.host.pnet import read_table
from trio_smc.wire.fields import rmbe_size_code, rmbe_size_of

KIB = 1024
MIB = 1024 * KIB
STACK_FIELDS: dict[str, Any] = {
    "rnics": (),
    "directory": "/nowhere",
    "tcp_option": "/nowhere",
    "pnet": (("eth0", "rxe0"),),
    "spin": 0.0,
    "wake": "thread",
    "rmbe_eye_catcher": True,
    "ueids": ("TRIO",),
    "first_contact_timeout": 1,
    "llc_timeout": 1,
    "test_link_interval": 1,
    "test_link_timeout": 1,
    "link_group_idle": 1,
    "shutdown_timeout": 1,
    "capture": "/nowhere/capture.pcapng",
    "capture_payload": 64,
    "control": False,
    "log_events": True,
}
CALL_FIELDS: dict[str, Any] = {
    "discovery": "assume",
    "assume": ("192.0.2.0/24",),
    "require_smc": True,
    "receive_buffer": 16 * KIB,
    "checkpoints": "strict",
    "handshake_timeout": 1,
    "close_timeout": 1,
    "handshake_limit": 1,
    "allow": (80,),
    "deny": ("192.0.2.0/24",),
    "learn_short": False,
}


def test_defaults() -> None:
    config = Config()
    assert (config.rnics, config.discovery, config.assume) == ("auto", "auto", ())
    assert (config.require_smc, config.rmbe_eye_catcher) == (False, False)
    assert (config.spin, config.wake, config.checkpoints) == (50e-6, "auto", "amortised")
    assert config.learn_short
    assert config.learns_short
    assert not Config(require_smc=True).learns_short
    assert not Config(learn_short=False).learns_short
    assert (config.handshake_timeout, config.first_contact_timeout, config.llc_timeout) == (6, 5, 2)
    assert (config.test_link_interval, config.test_link_timeout) == (30, 2)
    assert (config.close_timeout, config.link_group_idle) == (60, 600)
    assert (config.shutdown_timeout, config.handshake_limit) == (5, None)


@pytest.mark.v2("v2.1/1", "v2.1/3")
@pytest.mark.parametrize("ueids", [(), ("A",), ("A" * 32, "0.B-C"), ("A",) * 8, "kernel"])
def test_ueids(ueids: Any) -> None:
    assert Config(ueids=ueids).ueids == ueids


def test_immutable_and_keyword_only() -> None:
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.spin = 0  # type: ignore[misc]
    with pytest.raises(TypeError):
        Config("auto")  # type: ignore[call-arg]
    assert dataclasses.replace(config, spin=0.0).spin == 0
    assert Config() == Config()
    assert hash(Config(assume=("::1/128",))) == hash(Config(assume=("::1/128",)))


@pytest.mark.v2("v2.1/2", "v2.1/3")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("discovery", "guess"),
        ("checkpoints", "sometimes"),
        ("rnics", "all"),
        ("rnics", [SoftRnic()]),
        ("spin", -1),
        ("wake", "interrupt"),
        ("spin", math.nan),
        ("handshake_timeout", "6"),
        ("handshake_timeout", None),
        ("close_timeout", True),
        ("handshake_limit", -1),
        ("handshake_limit", 1.5),
        ("handshake_limit", True),
        ("capture_payload", -1),
        ("capture_payload", 4097),
        ("capture_payload", 1.0),
        ("receive_buffer", 0),
        ("receive_buffer", -1),
        ("receive_buffer", 1.0),
        ("receive_buffer", (16 * KIB << 15) + 1),
        ("assume", "192.0.2.0/24"),
        ("assume", ["192.0.2.0/24"]),
        ("assume", ("192.0.2.1", 7000)),
        ("assume", ("192.0.2.1/24",)),
        ("assume", ("example.org",)),
        ("assume", (("example.org", 0),)),
        ("assume", (("example.org", 65536),)),
        ("assume", (("example.org", "80"),)),
        ("assume", (["example.org", 80],)),
        ("assume", (("example.org",),)),
        ("assume", (7,)),
        ("require_smc", 1),
        ("rmbe_eye_catcher", None),
        ("ueids", "TRIO"),
        ("ueids", ["TRIO"]),
        ("ueids", (b"TRIO",)),
        ("ueids", ("trio",)),
        ("ueids", ("",)),
        ("ueids", (".TRIO",)),
        ("ueids", ("T" * 33,)),
        ("ueids", ("TRIO",) * 9),
        ("learn_short", 100),
        ("control", 0),
        ("log_events", "yes"),
        ("directory", 5),
        ("directory", "~/smc"),
        ("directory", "smc"),
        ("directory", Path("run/smc")),
        ("capture", Path("~/smc.pcapng")),
        ("tcp_option", None),
        ("capture", True),
        ("capture", b"x.pcapng"),
    ],
)
def test_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        Config(**{field: value})  # type: ignore[arg-type]


@pytest.mark.rfc("A.2.3/9")
@pytest.mark.parametrize(
    ("wanted", "software", "roce"),
    [
        (1, 16 * KIB, 16 * KIB),
        (16 * KIB, 16 * KIB, 16 * KIB),
        (16 * KIB + 1, 32 * KIB, 32 * KIB),
        (100_000, 128 * KIB, 128 * KIB),
        (512 * KIB, 512 * KIB, 512 * KIB),
        (512 * KIB + 1, MIB, 512 * KIB),
        (16 * KIB << 15, 16 * KIB << 15, 512 * KIB),
    ],
)
def test_receive_buffer(wanted: int | None, software: int, roce: int) -> None:
    config = Config(receive_buffer=wanted)
    assert config.receive_buffer_for("software") == software
    assert config.receive_buffer_for("roce") == roce


def test_default_receive_buffers() -> None:
    assert Config().receive_buffer_for("software") == 4 * MIB
    assert Config().receive_buffer_for("roce") == 512 * KIB


def test_size_codes() -> None:
    for code in range(16):
        size = rmbe_size_of(code)
        assert size == 16384 << code
        assert rmbe_size_code(size) == code
        assert rmbe_size_code(size + 1) == code + 1


def test_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert Config().private_directory() == Path("/run/user/7/trio-smc")
    monkeypatch.setattr("os.getuid", lambda: 77)
    for unset, is_usable, place in (
        ("", True, "/dev/shm"), ("", False, "/tmp"), ("relative/7", True, "/dev/shm"),
    ):  # fmt: skip
        monkeypatch.setenv("XDG_RUNTIME_DIR", unset)
        with monkeypatch.context() as patch:
            patch.setattr(private_directory, "is_for_all_users", lambda path: is_usable)  # noqa: B023
            assert Config().private_directory() == Path(place, "trio-smc-77")
            for each in ("/dev/shm", "/tmp"):
                assert not private_directory.is_named(Path(each, "trio-smc-77"))
    assert Config(directory="/x").private_directory() == Path("/x")


@pytest.mark.parametrize(
    ("entry", "address", "expected"),
    [
        ("192.0.2.0/24", ("192.0.2.7", 1), True),
        ("192.0.2.7", ("192.0.2.7", 1), True),
        ("192.0.2.0/24", ("192.0.3.7", 1), False),
        ("192.0.2.0/24", ("2001:db8::1", 1), False),
        ("192.0.2.0/24", ("example.org", 1), False),
        ("203.0.112.0/24", ("example.org", 1), False),
        ("fe80::/10", ("fe80::1%eth0", 1), True),
        (("192.0.2.7", 80), ("192.0.2.7", 80), True),
        (("192.0.2.7", 80), ("192.0.2.7", 81), False),
        (("2001:DB8::0:1", 80), ("2001:db8::1", 80), True),
        (("Example.org", 80), ("example.ORG", 80), True),
        (("example.org", 80), ("www.example.org", 80), False),
    ],
)
def test_assume(entry: Any, address: tuple[str, int], expected: bool) -> None:
    assert Config(assume=("198.51.100.0/24", entry)).assumes(address) is expected
    assert Config(assume=(entry,)).assumes(("203.0.113.9", 9), address) is expected
    assert Config(assume=(entry,), discovery="assume").assumes(address)
    assert not Config(assume=(entry,), discovery="tcp-option").assumes(address)


def test_every_field_belongs_to_the_stack_or_to_calls() -> None:
    names = {field.name for field in dataclasses.fields(Config)}
    assert names == STACK_FIELDS.keys() | CALL_FIELDS.keys()


@pytest.mark.v2("v2.1/4")
@pytest.mark.parametrize("field", STACK_FIELDS)
def test_a_call_may_not_change(field: str) -> None:
    changed = Config(**{field: STACK_FIELDS[field]})
    with pytest.raises(ValueError, match=f"{field} belongs to the stack"):
        changed.check_call(Config())
    changed.check_call(changed)
    Config().check_call(changed)


@pytest.mark.parametrize("field", CALL_FIELDS)
def test_a_call_may_change(field: str) -> None:
    Config(**{field: CALL_FIELDS[field]}).check_call(Config())


# --- every field, and values of every kind -------------------------------------------------------

NESTED: Any = ()
for _ in range(10_000):
    NESTED = (NESTED,)


class Hostile:
    """A value that cannot be shown, compared or converted."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    __hash__ = None  # type: ignore[assignment]

    def __float__(self) -> float:
        raise RuntimeError("no number")


def _raise(_: object) -> None:
    raise RuntimeError("no class")


# Even `isinstance` fails for its objects.
HostileClass: Any = type("HostileClass", (), {"__class__": property(_raise)})


def _raising(kind: type[Any], value: object) -> Any:
    """An instance of a subclass of ``kind`` whose own methods raise."""

    def fail(*_: object) -> None:
        raise RuntimeError("no answer")

    names = ("eq", "hash", "le", "lt", "ge", "gt", "len", "repr", "iter", "fspath", "getitem")
    return type(f"Raising_{kind.__name__}", (kind,), {f"__{name}__": fail for name in names})(value)


def extremes() -> dict[str, Any]:
    """Made for each test, because other tests scan all objects and would find the hostile ones."""
    return {
        "huge": 10**400,
        "huger": 10**5000,
        "minus": -(10**400),
        "minus one": -1,
        "inf": math.inf,
        "minus inf": -math.inf,
        "nan": math.nan,
        "1e308": 1e308,
        "true in a list": (True,),
        "bytes": b"x",
        "bytearray": bytearray(b"x"),
        "list": [],
        "dict": {},
        "set": set(),
        "complex": 1j,
        "object": object(),
        "hostile": Hostile(),
        "hostiles": (Hostile(),),
        "class": Config,
        "function": print,
        "nul": "a\0b",
        "surrogate": "\ud800",
        "long": "x" * 10**6,
        "empty": "",
        "escape": "\x1b[2J",
        "many": ("192.0.2.1",) * 100_000,
        "nested": NESTED,
        "names": ("x",),
        "nones": (None,),
        "pair": (("a\0b", 80),),
        "surrogates": (("\ud800", 80),),
        "huge port": (("h", 10**400),),
        "true port": (("h", True),),
        "long host": (("h" * 10**6, 1),),
        "raising int": _raising(int, 7),
        "raising huge int": _raising(int, 10**400),
        "raising float": _raising(float, 1.5),
        "raising tuple": _raising(tuple, ("a", 80)),
        "raising tuples": (_raising(tuple, ("a", "b", "c")),),
        "raising bytes": _raising(bytes, b"x"),
        "raising port": (_raising(int, 80.0), _raising(str, "x")),
        "raising class": HostileClass(),
        "raising classes": (HostileClass(),),
        "raising path": _raising(type(Path()), "x"),
        "nul path": Path("a\0b"),
        "long path": Path("x" * 10**4),
        "pairs": (("eth0",),),
    }


FINE = {
    "directory": {"escape"}, "tcp_option": {"escape"}, "pnet": {"escape"}, "capture": {"escape"},
}  # fmt: skip
"""A file may have any name; messages show it as it has to be shown."""


@pytest.mark.parametrize("field", [each.name for each in dataclasses.fields(Config)])
def test_no_field_accepts_values_outside_its_range(field: str) -> None:
    """The message is one short line with the field and its range."""
    for kind, value in extremes().items():
        if kind in FINE.get(field, ()):
            continue
        for make in (Config, partial(dataclasses.replace, Config())):
            message = f"{field} takes {kind}"
            try:
                make(**{field: value})
            except ValueError as error:
                message = str(error)
            assert message.startswith(f"{field}: "), message
            assert len(message) < 300
            assert message.isprintable()


@pytest.mark.parametrize("field", [each.name for each in dataclasses.fields(Config)])
def test_each_field_has_a_range(field: str) -> None:
    """With a new field without a range no `Config` can be made."""
    assert field in config_module.CHECKS
    assert set(config_module.CHECKS) == {each.name for each in dataclasses.fields(Config)}


@pytest.mark.parametrize(
    ("field", "least", "most"),
    [
        ("spin", 0, 1),
        ("handshake_timeout", 0.001, 86400),
        ("first_contact_timeout", 0.001, 86400),
        ("llc_timeout", 0.001, 86400),
        ("test_link_interval", 0.001, 365 * 86400),
        ("test_link_timeout", 0.001, 86400),
        ("close_timeout", 0, 86400),
        ("link_group_idle", 0, 365 * 86400),
        ("shutdown_timeout", 0, 86400),
        ("handshake_limit", 0, 1 << 20),
        ("receive_buffer", 1, 16 * KIB << 15),
        ("capture_payload", 0, 4096),
    ],
)
def test_ranges(field: str, least: float, most: float) -> None:
    for value in (least, most):
        assert getattr(Config(**{field: value}), field) == value  # type: ignore[arg-type]
    for value in (least - 1, most + 1, -least if least else -1e-9, least * 0.999 - 1e-9):
        with pytest.raises(ValueError, match=f"^{field}: .* from {least:g} to {most}$"):
            Config(**{field: value})  # type: ignore[arg-type]


def test_a_boolean_is_no_port_even_if_it_is_cached() -> None:
    """1 equals True, also as a key of a cache."""
    assert Config(allow=(1, ("h", 1))).permits(("h", 1))
    for entry in (True, 1.0, ("h", True), ("h", 1.0)):
        with pytest.raises(ValueError, match=r"^allow: "):
            Config(allow=(entry,))  # type: ignore[arg-type]


async def test_each_call_refuses_other_objects_than_configs() -> None:
    wrongs: tuple[Any, ...] = ({}, "config.toml", 0, Config)
    for wrong in wrongs:
        with pytest.raises(TypeError, match=r"^config: .* is not a Config$"):
            trio_smc.enable(wrong)
        with pytest.raises(TypeError, match=r"^config: .* is not a Config$"):
            async with trio_smc.open_stack(wrong):
                pass
    async with trio_smc.open_stack(Config(rnics=(), control=False)) as stack:
        with pytest.raises(TypeError, match=r"^config: .* is not a Config$"):
            await stack.open_stream("127.0.0.1", 1, config={})  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"^config: .* is not a Config$"):
            await stack.open_listeners(0, config="x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("spin = " + "9" * 400, "spin: an integer of 1329 bits is not a number of seconds"),
        ("spin = " + "9" * 5000, "integer"),
        ("spin = nan", "spin: nan is not a number of seconds from 0 to 1"),
        ("close_timeout = inf", "close_timeout: inf is not a number of seconds from 0 to 86400"),
        ("first_contact_timeout = 0", "first_contact_timeout: 0 is not a number of seconds"),
        ("allow = " + "[" * 100_000, "nested too deeply"),
        ("allow = " + "[" * 100 + "]" * 100, "allow: "),
        ("allow = " + "{a=" * 50_000, "nested too deeply"),
        ("a." * 20 + "b = 1", "there is no setting 'a'"),
        ("a." * 500_000 + "b = 1", "a key has more than 32 parts"),
        ('x = {"a" . ' + "'a' . " * 100_000 + "b = 1}", "a key has more than 32 parts"),
        ("[" + "a." * 500_000 + "b]", "a key has more than 32 parts"),
        ("x = 1 # " + "x" * (1 << 20), "more than 1048576 bytes"),
        ('rnics = ["x"]', "rnics: 'x' is neither software:NAME"),
        ('rnics = ["roce:a:256"]', "rnics: 'roce:a:256' is neither"),
        ('rnics = ["roce:a:1:999"]', "rnics: 'roce:a:1:999' is neither"),
        ('rnics = ["roce:a:' + "1" * 5000 + '"]', "rnics: "),
        ("rnics = [7]", "rnics: 7 is not a name of an RNIC"),
        ('rnics = ["software:\\u001b[2J"]', "rnics: "),
        ('capture = "a\\u0000b"', "capture: 'a\\x00b' is not a path"),
        ("directory = 1979-05-27", "directory: "),
        ("[rnics]\nx = 1", "rnics: "),
        ('"\\u001b[2J" = 1', "there is no setting '\\x1b[2J'"),
        ('"' + "k" * 100_000 + '" = 1', "there is no setting 'kkk"),
        ("urgent_inline = true", "'urgent_inline': set the socket option SO_OOBINLINE"),
    ],
)
def test_hostile_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match="^" + re.escape(str(path))) as caught:
        trio_smc.load_config(path)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["allow", "assume", "deny", "pnet", "rnics", "ueids"])
def test_an_error_names_the_form_in_toml(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(f"{name} = 7")
    with pytest.raises(ValueError, match=f"^{path}: {name}: 7 is not .*; in TOML: ") as caught:
        trio_smc.load_config(path)
    form = str(caught.value).partition("; in TOML: ")[2]
    path.write_text(form)
    assert getattr(trio_smc.load_config(path), name) != getattr(Config(), name)


def test_a_setting_of_an_earlier_release(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("max_handshakes = 128")
    with pytest.raises(ValueError, match=r"no setting 'max_handshakes': set handshake_limit$"):
        trio_smc.load_config(path)


@pytest.mark.parametrize("path", ["/dev/zero", "a\0b", "\ud800", "", "/", "/nowhere/x.toml"])
def test_paths_that_are_no_files(path: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        trio_smc.load_config(path)
    assert len(str(caught.value)) < 200


def test_a_pnet_table_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "table"
    path.write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(ValueError, match="more than 1048576 bytes"):
        read_table(path)
    with pytest.raises(ValueError, match="not a regular file"):
        read_table(Path("/dev/zero"))


@pytest.mark.parametrize("read", [trio_smc.load_config, read_table])
def test_a_fifo_does_not_block(tmp_path: Path, read: Callable[[Path], object]) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    # Without the check, the open or the read would wait for this descriptor.
    writer = os.open(path, os.O_RDWR)
    try:
        with pytest.raises(ValueError, match="not a regular file"):
            read(path)
    finally:
        os.close(writer)
        path.unlink()


@pytest.mark.parametrize("read", ["load_config", "read_table"])
def test_a_kernel_log_without_news_does_not_block(read: str) -> None:
    """A regular file whose read waits: /proc/kmsg, from which another process reads it all."""
    if os.geteuid():
        pytest.skip("only root may open it")
    code = (
        "import pathlib, sys, trio_smc, trio_smc.host.pnet as pnet\n"
        "read = {'load_config': trio_smc.load_config, 'read_table': pnet.read_table}[sys.argv[1]]\n"
        "for _ in range(3):\n"
        "    try: read(pathlib.Path('/proc/kmsg'))\n"
        "    except ValueError: print('refused')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, read], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "refused\n" * 3
