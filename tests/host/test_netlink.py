"""Answers of the kernel are kept until it reports a change, and never longer."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any, Self

import pytest
from pyroute2.netlink.exceptions import NetlinkError

from trio_smc.host import netlink, pnet
from trio_smc.host.netlink import AnswerCache, query


class Kernel:
    """A kernel that counts what it is asked, and reports changes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self.answer: list[int] | None = [1, 2]
        self.subscribers = 0
        self.ours: socket.socket | None = None
        monkeypatch.setattr(netlink, "_query_or_warn", self._query)
        monkeypatch.setattr(netlink, "_subscribe", self._subscribe)

    def _query(self, question: object) -> list[int] | None:
        self.asked += 1
        return self.answer

    def _subscribe(self) -> socket.socket:
        self.subscribers += 1
        self.close()
        theirs, self.ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        theirs.setblocking(False)
        return theirs

    def change(self) -> None:
        assert self.ours is not None
        self.ours.send(b"something has changed")

    def close(self) -> None:
        if self.ours is not None:
            self.ours.close()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    made = Kernel(monkeypatch)
    yield made
    made.close()


def is_kept(answer: int) -> bool:
    """True if the answer is remembered; a change of the machine's network may prevent it."""
    _, generation = AnswerCache.get("is_kept")
    AnswerCache.put("is_kept", [answer], generation)
    return AnswerCache.get("is_kept")[0] == [answer]


def double(key: str = "numbers") -> list[int]:
    return query(lambda route: (), lambda number: 2 * number, key)


def test_without_anybody_who_remembers(kernel: Kernel) -> None:
    assert double() == double() == [2, 4]
    assert kernel.asked == 2
    assert kernel.subscribers == 0


def test_kept_until_something_changes(kernel: Kernel) -> None:
    with closing(AnswerCache()) as memory:
        memory.open()
        assert double() == double() == [2, 4]
        assert kernel.asked == 1
        double("others")
        assert kernel.asked == 2, "another question"
        kernel.answer = [7]
        assert double() == [2, 4]
        kernel.change()
        kernel.change()
        assert double() == double() == [14]
        assert double("others") == [14]
        assert kernel.asked == 4
    assert double() == [14]
    assert kernel.asked == 5, "no cache is open any more"


def test_two_that_remember_share(kernel: Kernel) -> None:
    one, other = AnswerCache(), AnswerCache()
    one.open()
    other.open()
    double()
    one.close()
    one.close()
    double()
    assert (kernel.asked, kernel.subscribers) == (1, 1)
    other.close()
    double()
    assert kernel.asked == 2


def test_no_answer_is_not_kept(kernel: Kernel) -> None:
    with closing(AnswerCache()) as memory:
        memory.open()
        kernel.answer = None
        assert double() == []
        kernel.answer = [1]
        assert double() == [2]


def test_a_change_while_it_is_asked(kernel: Kernel) -> None:
    """Be it read by this thread afterwards, or by another one in between."""
    with closing(AnswerCache()) as memory:
        memory.open()
        _, generation = AnswerCache.get("numbers")
        kernel.change()
        AnswerCache.put("numbers", [1], generation)
        assert AnswerCache.get("numbers")[0] is None
        _, generation = AnswerCache.get("numbers")
        kernel.change()
        AnswerCache.get("others")
        AnswerCache.put("numbers", [1], generation)
        assert AnswerCache.get("numbers")[0] is None


def test_not_more_than_so_many(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netlink, "_MAX_ANSWERS", 3)
    with closing(AnswerCache()) as memory:
        memory.open()
        for number in range(10):
            double(str(number))
            assert sum(AnswerCache.get(str(each))[0] is not None for each in range(10)) <= 3


def test_a_kernel_that_reports_nothing(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> socket.socket:
        raise PermissionError

    monkeypatch.setattr(netlink, "_subscribe", refuse)
    with closing(AnswerCache()) as memory:
        memory.open()
        double()
        double()
        assert kernel.asked == 2


def test_a_forked_child_leaves_the_reports_to_its_parent(kernel: Kernel) -> None:
    with closing(AnswerCache()) as memory:
        memory.open()
        double()
        child = os.fork()
        if child == 0:
            double()
            double()
            os._exit(0 if kernel.asked == 3 else 1)  # neither answer was kept
        assert os.waitpid(child, 0)[1] == 0
        assert double() == [2, 4]
        assert kernel.asked == 1


def test_the_real_kernel() -> None:
    """It takes the subscription, and reports nothing while nothing changes."""
    before = pnet.interfaces()
    with closing(AnswerCache()) as memory:
        memory.open()
        assert any(is_kept(number) for number in range(100)), "no subscription"
        assert pnet.interfaces() == pnet.interfaces() == before
        assert pnet.route_interface("127.0.0.1", "127.0.0.1") in before


# --- UEIDs of the kernel --------------------------------------------------------------------------


class SmcNetlink:
    """SMC's generic netlink: none, or one that answers with these."""

    prid = 40
    answers: list[object] | Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def bind(self, family: str, kind: type) -> None:
        assert family == "SMC_GEN_NETLINK"
        if self.answers is None:
            raise NetlinkError(errno.ENOENT)

    def nlm_request(self, request: Any, *, msg_type: int, msg_flags: int) -> list[object]:
        assert (request["cmd"], request["version"], msg_type) == (9, 1, self.prid)
        if isinstance(self.answers, Exception):
            raise self.answers
        assert self.answers is not None
        return self.answers


def named(value: bytes | None) -> SimpleNamespace:
    return SimpleNamespace(get_attr={"SMC_NLA_EID_TABLE_ENTRY": value}.get)


ONE, TWO = b"PLANT-7".ljust(32), b"OTHER".ljust(32)


@pytest.mark.v2("v2.1/5")
@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (None, None),  # the module is not loaded
        (OSError(errno.EPROTONOSUPPORT, "no netlink"), None),
        (RuntimeError("another event loop is running"), None),
        ([], ()),
        ([named(None)], ()),
        ([named(ONE + b"\0"), named(TWO)], (ONE, TWO)),
        ([named(b"PLANT-7\0")], (ONE,)),
        ([named(b"N%d" % n) for n in range(9)], tuple(b"N%d".ljust(33) % n for n in range(8))),
    ],
)
def test_ueids_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
    answers: list[object] | Exception | None,
    expected: tuple[bytes, ...] | None,
) -> None:
    monkeypatch.setattr("pyroute2.netlink.generic.GenericNetlinkSocket", SmcNetlink)
    monkeypatch.setattr(SmcNetlink, "answers", answers)
    assert netlink.kernel_ueids() == expected


@pytest.mark.v2("v2.1/5")
def test_elsewhere_than_on_linux_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert netlink.kernel_ueids() is None
