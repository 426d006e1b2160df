"""Two connection cores under random schedules of all that ends them; more run as a campaign."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.campaigns import endings
from trio_smc.datapath.connection import Connection
from trio_smc.datapath.messenger import Messenger
from trio_smc.datapath.receiver import Receiver
from trio_smc.datapath.rmb import Rmbe


def test_random_schedules(seed: int, full: bool) -> None:
    result = endings.run(20_000 if full else 800, seed)
    assert sum(result.kinds.values()) == result.cases
    assert set(result.kinds) == set(endings.KINDS)
    assert result.received > 50 * result.cases
    assert result.urgent > 100
    assert result.timers > 20
    assert result.half_closed > 20
    assert len(result.untaken) < 25, result.untaken


def test_one_command_replays_a_case(seed: int) -> None:
    number = seed % (1 << 32)
    command = [sys.executable, "-m", "tests.campaigns.endings"]
    command += ["--seed", str(number), "--case", "5"]
    text = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.decode()
    trace: list[str] = []
    endings.run_case(number, 5, trace)
    assert text.splitlines()[:-1] == trace
    assert any("CLOSED" in line for line in trace)


def _next_byte(self: Any, count: int) -> int:
    return int(self._ring[(count - self._ring_start) % self._usable])


def _forget(self: Any) -> None:
    self._hidden = 0


def _no_hold(self: Any) -> int:
    self.urgent_goal = 0
    return 0x60


def _freed_at_once(self: Any) -> None:
    self._machine.send("abort")
    self._machine.send("abort_timeout")
    self._host.gave_up = False


def _take_more(self: Any, max_bytes: int) -> int:
    length = min(int(self.received - self.consumed), max_bytes)
    return length if self.open else 0


def _clear_less(original: Callable[..., None]) -> Callable[..., None]:
    return lambda self, used: original(self, max(0, used - 1))


def _announced_again(original: Callable[..., bool]) -> Callable[..., bool]:
    def update(self: Any, flags: int, arrived: bool) -> bool:
        changed = original(self, flags, arrived)
        if self.urgent_mark and self._urgent_byte is None and not self.urgent_inline:
            self._urgent_byte = self._byte_before(self.urgent_mark)
        return changed

    return update


def _wake_at_moves_only(self: Any, event: str) -> None:
    before = self.state
    self._machine.send(event)
    if self.state != before:
        self.wake_all()


MUTATIONS: dict[str, tuple[type, str, Any]] = {
    "the wrong urgent byte": (Receiver, "_byte_before", _next_byte),
    "the urgent byte twice": (
        Receiver, "flags_untrusted", _announced_again(Receiver.flags_untrusted)
    ),
    "the urgent byte in the stream too": (Receiver, "_available", _take_more),
    "the urgent byte not skipped": (Receiver, "_skip_hidden", _forget),
    "writes behind the urgent byte": (Messenger, "_take_urgent_flags", _no_hold),
    "an element freed at once": (Connection, "abort", _freed_at_once),
    "an element not cleared": (Rmbe, "clear", _clear_less(Rmbe.clear)),
    "an end that waits for ever": (Connection, "unsent", property(lambda self: True)),
    "a message after the last": (
        Messenger, "final_posted", property(lambda self: False, lambda self, value: None)
    ),
    "a task that is not woken": (Connection, "_process", _wake_at_moves_only),
    "an abort that is not told": (Connection, "send_abort", lambda self: None),
}  # fmt: skip


@pytest.mark.pure
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_model_notices(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, wrong = MUTATIONS[name]
    monkeypatch.setattr(owner, attribute, wrong)
    found = failure(seed)
    assert found is not None, "20,000 schedules and not one promise broken"
    assert "--case" in "".join(found.__notes__), found


def failure(seed: int) -> Exception | None:
    """The error of a campaign: a broken promise, or an exception of the core; or None."""
    try:
        endings.run(20_000, seed)
    except Exception as error:
        return error
    return None
