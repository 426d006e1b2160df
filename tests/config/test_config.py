"""`Config`: what it takes, what it refuses, and what a call may change."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from trio_smc import Config, SoftRnic
from trio_smc.config.config import software_receive_buffer
from trio_smc.host.caches import private_cache
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
    "checkpoints": "amortised",
    "handshake_timeout": 1,
    "close_timeout": 1,
    "max_handshakes": 1,
    "handshake_limit": 1,
    "allow": (80,),
    "deny": ("192.0.2.0/24",),
    "learn_short": True,
    "urgent_inline": True,
}


def test_defaults() -> None:
    config = Config()
    assert (config.rnics, config.discovery, config.assume) == ("auto", "auto", ())
    assert (config.require_smc, config.rmbe_eye_catcher, config.urgent_inline) == (False,) * 3
    assert (config.spin, config.wake, config.checkpoints) == (50e-6, "auto", None)
    assert (config.handshake_timeout, config.first_contact_timeout, config.llc_timeout) == (6, 5, 2)
    assert (config.test_link_interval, config.test_link_timeout) == (30, 2)
    assert (config.close_timeout, config.link_group_idle) == (60, 600)
    assert (config.shutdown_timeout, config.max_handshakes) == (5, 128)


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
        ("max_handshakes", 0),
        ("max_handshakes", 1.5),
        ("max_handshakes", True),
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
        ("urgent_inline", "no"),
        ("control", 0),
        ("log_events", "yes"),
        ("directory", 5),
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


@pytest.mark.parametrize(
    ("cache", "size"),
    [(0, 4), (MIB, 4), (2 * MIB - 1, 4), (2 * MIB, 8), (3 * MIB, 8), (16 * MIB, 8)],
)
def test_default_receive_buffers(cache: int, size: int) -> None:
    """Larger than what two processors keep for themselves, where that is not too much."""
    assert software_receive_buffer(cache) == size * MIB
    assert Config().receive_buffer_for("software") == software_receive_buffer(private_cache())
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
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    monkeypatch.setattr("os.getuid", lambda: 77)
    assert Config().private_directory() == Path("/tmp/trio-smc-77")
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
