"""Open announcements: endless datagrams, a closed client, a forked child."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from tests.rendezvous.discovery.world import (
    announce,
    bound,
    claimed,
    deadline_after,
    names_below,
    serving,
)
from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous.discovery import messages
from trio_smc.rendezvous.discovery.same_host import Discovery

NO_ANSWERS = {
    "garbage": b"",
    "denial": messages.not_mine(bytes(8)),
    "request": messages.prove(bytes(36), bytes(16)),
    "refusal": messages.refused(FallbackReason.NO_RNIC),
}


@pytest.mark.parametrize("kind", NO_ANSWERS)
async def test_datagrams_that_never_end(
    private: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client stops receiving them after some time."""
    received = 0

    def receive(*_: object) -> tuple[messages.Message | None, int | None]:
        nonlocal received
        received += 1
        assert received < 1000
        if kind == "garbage":
            return None, None
        return messages.decode_untrusted(NO_ANSWERS[kind]), None

    async with claimed(private) as pair:
        assert pair.claim.accept()
        with monkeypatch.context() as patch:
            patch.setattr(messages, "receive", receive)
            assert not pair.announcement.is_too_late()
        assert received > 1


async def test_an_announcement_that_outlives_its_client(private: Path) -> None:
    """The end of the client withdraws the announcement."""
    async with serving(private) as server, bound() as client:
        before = len(os.listdir("/proc/self/fd"))
        discovery = Discovery(private)
        announcement = await announce(discovery, client, server.address)
        assert len(names_below(private)) == 1
        discovery.close()
        assert names_below(private) == []
        assert len(os.listdir("/proc/self/fd")) == before
        announcement.close()


async def test_a_forked_child_leaves_the_block_of_an_announcement(private: Path) -> None:
    """The child neither fails nor denies the announcement of its parent."""
    with contextlib.closing(Discovery(private)) as discovery:
        async with claimed(private, discovery=discovery) as pair:
            assert pair.claim.accept()
            assert pair.announcement.is_too_late()  # this call receives ACCEPTED
            child = os.fork()
            if child == 0:
                status = 1
                with contextlib.suppress(BaseException):
                    discovery.deny = None  # type: ignore[assignment, method-assign]
                    discovery.abandon()
                    pair.announcement.close()
                    status = 0
                os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0  # noqa: ASYNC222
            assert len(names_below(private)) == 1
            assert await pair.announcement.accepted(deadline_after()) is None
