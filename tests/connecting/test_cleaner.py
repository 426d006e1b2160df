"""A cleaner of /tmp removes the files in the private directory."""

from __future__ import annotations

import shutil

import pytest
import trio

import trio_smc
from tests.api.api_peers import HOST, QUICK, address_of
from tests.timing import PATIENCE
from trio_smc import Config, Mode
from trio_smc.control import protocol as control
from trio_smc.control import server
from trio_smc.rendezvous.discovery import publication


@pytest.mark.usefixtures("runtime_directory")
@pytest.mark.parametrize("everything", [False, True])
async def test_removed_sockets_return(everything: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections between new processes are SMC-R again, even after the loss of the directories."""
    for module in (publication, server):
        monkeypatch.setattr(module, "NAME_INTERVAL", 0.05)
    private = Config().private_directory()
    async with trio_smc.open_stack(QUICK) as stack:
        [listener] = await stack.open_listeners(0, host=HOST)
        before = {each.parent for each in private.rglob("*") if each.is_socket()}
        assert len(before) == 3  # RNIC, discovery, control
        if everything:
            shutil.rmtree(private)
        else:
            for each in list(private.rglob("*")):
                if each.is_socket():
                    each.unlink()
        with trio.fail_after(PATIENCE):
            async with trio_smc.open_stack(QUICK) as client:
                while True:
                    stream = await client.open_stream(*address_of(listener))
                    accepted = await listener.accept()
                    modes = stream.mode, accepted.mode
                    stream.abort()
                    accepted.abort()
                    if modes == (Mode.SMC_R, Mode.SMC_R):
                        break
                    await trio.sleep(0.05)
            while not list((private / control.DIRECTORY).iterdir()):  # noqa: ASYNC110
                await trio.sleep(0.05)
        await listener.aclose()
