"""A failure while a stack opens causes an error or a fallback, no hang and no leak."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

import trio_smc
from tests.timing import PATIENCE
from trio_smc import Config, _api
from trio_smc._stack import Stack
from trio_smc.capture import sinks
from trio_smc.control.server import ControlSocket, RunReport
from trio_smc.host import pnet
from trio_smc.host.netlink import AnswerCache
from trio_smc.rendezvous.discovery.same_host import Discovery
from trio_smc.rnic.poller import Poller
from trio_smc.rnic.pump import Pump
from trio_smc.rnic.roce.hotplug import PortWatch
from trio_smc.rnic.soft.device import SoftRnic
from trio_smc.stack import rnics, runtime
from trio_smc.stack.groups import GroupTable
from trio_smc.stack.runtime import Runtime
from trio_smc.stack.tcp_watch import TcpWatch

HOST = "127.0.0.1"
STEPS: dict[str, tuple[Any, str]] = {
    "directory": (Config, "private_directory"),
    "PNET table": (pnet, "table_of"),
    "ports": (rnics.StackRnics, "_unused_ports"),
    "RNIC": (SoftRnic, "open"),
    "pump": (Pump, "add"),
    "netlink": (AnswerCache, "open"),
    "peer ID": (rnics.StackRnics, "new_peer_id"),
    "groups": (GroupTable, "__init__"),
    "TCP watch": (runtime, "TcpWatch"),
    "discovery": (Discovery, "__init__"),
    "poller": (Poller, "__init__"),
    "port watch": (PortWatch, "open"),
    "pump's task": (Pump, "run"),
    "port watch's task": (rnics.StackRnics, "follow"),
    "TCP watch's task": (TcpWatch, "run"),
    "timers' task": (Runtime, "_run_timers"),
    "capture": (sinks, "FileCapture"),
    "observer": (_api, "EventObserver"),
    "control socket": (ControlSocket, "__init__"),
    "control socket's task": (ControlSocket, "_accept"),
    "attach": (Runtime, "attach"),
    "report": (_api, "RunReport"),
    "report's task": (RunReport, "run"),
}
FALLS_BACK = {"ports", "RNIC", "pump", "port watch", "control socket"}
"""Steps that a stack can do without if the system refuses them."""


def fail(monkeypatch: pytest.MonkeyPatch, step: str, error: Exception) -> None:
    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(*STEPS[step], failing)


def causes(error: BaseException | None) -> list[BaseException]:
    """Return the exception, its causes, and those of an exception group."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        if isinstance(error, BaseExceptionGroup):
            for each in error.exceptions:
                found += causes(each)
        error = error.__cause__
    return found


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "injected"), RuntimeError("injected")])
@pytest.mark.parametrize("step", STEPS)
async def test_an_explicit_stack_raises_or_falls_back(
    step: str, error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRIO_SMC_RUN", str(tmp_path / "missing"))
    config = Config(log_events=True, capture=tmp_path / "capture.pcapng")
    fail(monkeypatch, step, error)
    raised: Exception | None = None
    opened: Stack | None = None
    with trio.fail_after(PATIENCE):
        try:
            async with trio_smc.open_stack(config) as opened:
                await trio.testing.wait_all_tasks_blocked()
        except Exception as caught:
            raised = caught
    if step in FALLS_BACK and isinstance(error, OSError):
        assert raised is None
        assert opened is not None
    else:
        assert error in causes(raised)
    with trio.fail_after(PATIENCE):
        monkeypatch.undo()
        async with trio_smc.open_stack(config):
            pass


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "injected"), RuntimeError("injected")])
@pytest.mark.parametrize("step", sorted(STEPS.keys() - {"capture", "observer"}))
async def test_the_default_stack_raises_or_falls_back(
    step: str, error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRIO_SMC_RUN", str(tmp_path / "missing"))
    [listener] = await trio.open_tcp_listeners(0, host=HOST)
    port = listener.socket.getsockname()[1]
    fail(monkeypatch, step, error)
    async with listener:
        for _ in range(2):
            with trio.fail_after(PATIENCE):
                raised: Exception | None = None
                try:
                    stream = await trio_smc.open_stream(HOST, port)
                except (OSError, trio.ClosedResourceError) as caught:
                    raised = caught
                else:
                    assert stream.mode == "tcp"
                    await stream.aclose()
                assert raised is None or error in causes(raised)


PROGRAM = """
import sys, trio, trio_smc.control.server as server, trio_smc.rnic.soft.device as device

def failing(*_, **__):
    raise RuntimeError("injected")

setattr({"control": server.ControlSocket, "RNIC": device.SoftRnic}[sys.argv[2]],
        {"control": "__init__", "RNIC": "open"}[sys.argv[2]], failing)

async def main():
    try:
        stream = await trio.open_tcp_stream("127.0.0.1", int(sys.argv[1]))
    except OSError as error:
        print(error, flush=True)
    else:
        print("connected", flush=True)
    await trio.sleep_forever()

trio.run(main)
"""


@pytest.mark.parametrize("step", ["control", "RNIC"])
async def test_a_program_under_run_reports_the_error(step: str) -> None:
    """The program under `trio-smc run` reports the error, and Ctrl-C ends it."""
    [listener] = await trio.open_tcp_listeners(0, host=HOST)
    port = str(listener.socket.getsockname()[1])
    command = ["-m", "trio_smc.tools", "run", "--", sys.executable, "-c", PROGRAM, port, step]
    async with listener:
        process = await trio.lowlevel.open_process(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdout is not None
        with trio.fail_after(2 * PATIENCE):
            output = await process.stdout.receive_some()
            process.send_signal(signal.SIGINT)
            await process.wait()
            await process.stdout.aclose()
    assert b"all attempts to connect" in output or b"no default stack" in output
    assert process.returncode != 0
