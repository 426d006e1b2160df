"""The suite's software RNIC for version 2 (`smc_conform.routable`)."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from smc_conform.routable import RoutableRnic
from tests.timing import PATIENCE
from trio_smc.rnic.verbs import RnicError, WcOpcode

MAPPED = bytes(10) + b"\xff\xff"


def test_messages_of_any_length_arrive_whole_and_in_order(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        rnics = [RoutableRnic(), RoutableRnic()]
        pairs = []
        for rnic in rnics:
            rnic.open(tmp_path)
            stack.callback(rnic.close)
            assert rnic.gid.startswith(MAPPED)
            pairs.append(rnic.create_qp(rnic.alloc_pd(), 4352))
        for own, other, rnic in zip(pairs, reversed(pairs), reversed(rnics), strict=True):
            own.to_init()
            own.post_receive(64)
            own.to_rtr(gid=rnic.gid, qp_num=other.qp_num, psn=1, mtu=3)
        for own in pairs:
            own.to_rts(psn=1)
        sent = [bytes((size % 251,)) * size for size in (1, 44, 48, 49, 88, 4152, 44)]
        for number, message in enumerate(sent):
            pairs[0].post_send(number, message)
        received: list[bytes] = []
        deadline = time.monotonic() + PATIENCE
        while len(received) < len(sent) and time.monotonic() < deadline:
            rnics[0].poll()
            found = [each for each in rnics[1].poll() if each.opcode == WcOpcode.RECV]
            received.extend(each.data or b"" for each in found)
        assert received == sent
        with pytest.raises(RnicError):
            pairs[0].post_send(1, bytes(5000))
