"""Answers of the kernel are cached until the kernel reports a change."""

from __future__ import annotations

import errno
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Self

import pytest

from trio_smc.host import netlink, pnet
from trio_smc.host.netlink import AnswerCache, Message, Request, query


class Kernel:
    """A kernel that counts the queries, and reports changes on demand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queries = 0
        self.answer: bytes | None = b"\1\2"
        self.subscribers = 0
        self.ours: socket.socket | None = None
        monkeypatch.setattr(netlink, "query_or_warn", self._query)
        monkeypatch.setattr(netlink, "subscribe", self._subscribe)

    def _query(self, request: Request) -> list[Message] | None:
        self.queries += 1
        return None if self.answer is None else [Message(bytes((n,)), {}) for n in self.answer]

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
    """True if the answer is cached; a change of the machine's network may prevent that."""
    _, generation = AnswerCache.get("is_kept")
    AnswerCache.put("is_kept", [answer], generation)
    return AnswerCache.get("is_kept")[0] == [answer]


def twice(message: Message) -> int:
    return 2 * message.head[0]


def double(key: str = "numbers") -> list[int]:
    return query(request_of(key), twice)


def request_of(key: str) -> Request:
    return Request(1, key.encode(), 1)


def test_without_an_open_cache(kernel: Kernel) -> None:
    assert double() == double() == [2, 4]
    assert kernel.queries == 2
    assert kernel.subscribers == 0


def test_kept_until_something_changes(kernel: Kernel) -> None:
    with closing(AnswerCache()) as memory:
        memory.open()
        assert double() == double() == [2, 4]
        assert kernel.queries == 1
        double("others")
        assert kernel.queries == 2, "another question"
        kernel.answer = b"\7"
        assert double() == [2, 4]
        kernel.change()
        kernel.change()
        assert double() == double() == [14]
        assert double("others") == [14]
        assert kernel.queries == 4
    assert double() == [14]
    assert kernel.queries == 5, "no cache is open any more"


def test_two_that_remember_share(kernel: Kernel) -> None:
    one, other = AnswerCache(), AnswerCache()
    one.open()
    other.open()
    double()
    one.close()
    one.close()
    double()
    assert (kernel.queries, kernel.subscribers) == (1, 1)
    other.close()
    double()
    assert kernel.queries == 2


def test_no_answer_is_not_kept(kernel: Kernel) -> None:
    with closing(AnswerCache()) as memory:
        memory.open()
        kernel.answer = None
        assert double() == []
        kernel.answer = b"\1"
        assert double() == [2]


def test_a_change_during_a_query(kernel: Kernel) -> None:
    """This thread reads the change afterwards, or another thread has read it in between."""
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
    monkeypatch.setattr(netlink, "MAX_ANSWERS", 3)
    with closing(AnswerCache()) as memory:
        memory.open()
        for number in range(10):
            double(str(number))
            assert sum(
                AnswerCache.get((request_of(str(each)), twice))[0] is not None for each in range(10)
            ) in range(1, 4)


def test_a_kernel_that_reports_nothing(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> socket.socket:
        raise PermissionError

    monkeypatch.setattr(netlink, "subscribe", refuse)
    with closing(AnswerCache()) as memory:
        memory.open()
        double()
        double()
        assert kernel.queries == 2


def test_a_forked_child_leaves_the_reports_to_its_parent(kernel: Kernel) -> None:
    with closing(AnswerCache()) as memory:
        memory.open()
        double()
        child = os.fork()
        if child == 0:
            double()
            double()
            os._exit(0 if kernel.queries == 3 else 1)  # neither answer is cached
        assert os.waitpid(child, 0)[1] == 0
        assert double() == [2, 4]
        assert kernel.queries == 1


def test_the_real_kernel() -> None:
    """The kernel accepts the subscription, and reports nothing while nothing changes."""
    before = pnet.interfaces()
    with closing(AnswerCache()) as memory:
        memory.open()
        assert any(is_kept(number) for number in range(100)), "no subscription"
        assert pnet.interfaces() == pnet.interfaces() == before
        assert pnet.route_interface("127.0.0.1", "127.0.0.1") in before


# --- messages -------------------------------------------------------------------------------------


class FakeSocket:
    """A netlink socket with answers of the test; each answer is a datagram and its sender."""

    def __init__(self, *answers: tuple[bytes, int]) -> None:
        self._answers = list(answers)
        self.requests: list[bytes] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def sendto(self, data: bytes, address: tuple[int, int]) -> None:
        assert address == (0, 0)
        self.requests.append(data)

    def recvfrom(self, size: int) -> tuple[bytes, tuple[int, int]]:
        if not self._answers:
            raise BlockingIOError
        data, sender = self._answers.pop(0)
        return data, (sender, 0)


def message(kind: int, content: bytes = b"", flags: int = 2) -> bytes:
    data = struct.pack("=IHHII", 16 + len(content), kind, flags, 1, 0) + content
    return data + bytes(-len(data) % 4)


INTERRUPTED = 0x12
DONE = message(3, bytes(4))
ADDRESSES = Request(22, bytes(8), 8, dump=True)


def use(monkeypatch: pytest.MonkeyPatch, *sockets: FakeSocket) -> None:
    left = list(sockets)
    monkeypatch.setattr(netlink, "open_socket", lambda protocol: left.pop(0))


def dumped(*numbers: int, flags: int = 2) -> bytes:
    return b"".join(
        message(20, bytes(8) + netlink.attribute(number, b"x" * number), flags)
        for number in numbers
    )


def numbers(answer: list[Message] | None) -> list[int] | None:
    return None if answer is None else [next(iter(each.attributes)) for each in answer]


def test_a_dump_in_several_datagrams(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeSocket((dumped(1, 2), 0), (dumped(3), 0), (DONE, 0))
    use(monkeypatch, fake)
    answer = netlink.query_now(ADDRESSES)
    assert numbers(answer) == [1, 2, 3]
    assert answer is not None
    assert [each.attributes for each in answer] == [{n: b"x" * n} for n in (1, 2, 3)]
    assert fake.requests == [struct.pack("=IHHII", 24, 22, 0x301, 1, 0) + bytes(8)]


def test_messages_of_other_processes_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeSocket((dumped(9) + DONE, 4711), (dumped(1) + DONE, 0)))
    assert numbers(netlink.query_now(ADDRESSES)) == [1]


def test_an_interrupted_dump_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted = (dumped(1, flags=INTERRUPTED) + DONE, 0)
    use(monkeypatch, FakeSocket(interrupted), FakeSocket((dumped(2) + DONE, 0)))
    assert numbers(netlink.query_now(ADDRESSES)) == [2]
    late = (dumped(1) + message(3, bytes(4), INTERRUPTED), 0)
    use(monkeypatch, *(FakeSocket(late) for _ in range(3)))
    assert netlink.query_now(ADDRESSES) is None


@pytest.mark.parametrize("kind", [2, 3])
def test_errors_of_the_kernel(monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    refused = (message(kind, struct.pack("=i", -errno.ENETUNREACH)), 0)
    use(monkeypatch, FakeSocket(refused), FakeSocket(refused))
    with pytest.raises(OSError, match="unreachable") as caught:
        netlink.query_now(ADDRESSES)
    assert caught.value.errno == errno.ENETUNREACH
    assert query(ADDRESSES, twice) == []


def test_a_kernel_without_an_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeSocket())
    assert query(ADDRESSES, twice) == []


def test_a_query_imports_nothing_and_is_short() -> None:
    """The first connection of a program makes the query on the Trio thread."""
    code = (
        "import sys, time, trio_smc\n"
        "from trio_smc.host import addresses, netlink, pnet\n"
        "before = set(sys.modules)\n"
        "began = time.process_time()\n"
        "pnet.interfaces(), addresses.all_prefixes(), netlink.kernel_ueids()\n"
        "pnet.route_interface('127.0.0.1', '127.0.0.1')\n"
        "took = time.process_time() - began\n"
        "print(*sorted(set(sys.modules) - before), took < 0.02)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "True\n"


# --- UEIDs of the kernel --------------------------------------------------------------------------

ONE, TWO = b"PLANT-7".ljust(32), b"OTHER".ljust(32)
NO_FAMILY = message(2, struct.pack("=i", -errno.ENOENT))
FAMILY = message(16, bytes(4) + netlink.attribute(1, struct.pack("=H", 40)))


def named(*values: bytes | None) -> bytes:
    return b"".join(
        message(40, bytes(4) + (b"" if value is None else netlink.attribute(1, value)))
        for value in values
    )


@pytest.mark.v2("v2.1/5")
@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (message(2, struct.pack("=i", -errno.EPROTONOSUPPORT)), None),
        (DONE, ()),
        (named(None) + DONE, ()),
        (named(ONE + b"\0", TWO) + DONE, (ONE, TWO)),
        (named(b"PLANT-7\0") + DONE, (ONE,)),
        (
            named(*(b"N%d" % n for n in range(9))) + DONE,
            tuple(b"N%d".ljust(33) % n for n in range(8)),
        ),
    ],
)
def test_ueids_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch, answers: bytes, expected: tuple[bytes, ...] | None
) -> None:
    families, table = FakeSocket((FAMILY, 0)), FakeSocket((answers, 0))
    use(monkeypatch, families, table)
    assert netlink.kernel_ueids() == expected
    assert families.requests == [
        struct.pack("=IHHIIBBH", 40, 16, 1, 1, 0, 3, 1, 0)
        + netlink.attribute(2, b"SMC_GEN_NETLINK\0")
    ]
    assert table.requests == [struct.pack("=IHHIIBBH", 20, 40, 0x301, 1, 0, 9, 1, 0)]


@pytest.mark.v2("v2.1/5")
def test_without_smc_in_the_kernel_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeSocket((NO_FAMILY, 0)))
    assert netlink.kernel_ueids() is None


@pytest.mark.v2("v2.1/5")
def test_elsewhere_than_on_linux_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert netlink.kernel_ueids() is None
