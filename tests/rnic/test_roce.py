"""`VerbsRnic` with fake verbs: devices, GID tables and failing devices."""

from __future__ import annotations

import ctypes
import enum
import errno
import gc
import ipaddress
import os
import select
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trio_smc.config.config import Config
from trio_smc.host.netlink import Message, Request
from trio_smc.host.routes import neighbour_request, route_request
from trio_smc.rnic.roce import device as roce_device
from trio_smc.rnic.roce import gids, neighbours, pyverbs
from trio_smc.rnic.roce.device import VerbsRnic
from trio_smc.rnic.roce.hotplug import is_rdma_event
from trio_smc.rnic.roce.pyverbs import ROCE_V1, ROCE_V2, Gid, Reusable
from trio_smc.rnic.verbs import RECEIVE_SIZE, RnicError, RnicEvent
from trio_smc.wire import llc

# --- choosing an entry of the GID table -----------------------------------------------------------


def gid(text: str) -> bytes:
    """An address as a GID."""
    address = ipaddress.ip_address(text)
    return address.packed if address.version == 6 else bytes(10) + b"\xff\xff" + address.packed


LOCAL = gid("fe80::5054:ff:fe00:1")
OTHER = gid("fe80::5054:ff:fe00:2")
PRIVATE = gid("fe80::1234:5678:9abc:def0")
IPV4 = gid("192.0.2.1")
# Like the table of an adapter: each GID for both encapsulations.
TABLE = [
    Gid(0, ROCE_V1, 2, LOCAL),
    Gid(1, ROCE_V2, 2, LOCAL),
    Gid(2, ROCE_V1, 2, IPV4),
    Gid(3, ROCE_V2, 2, IPV4),
    Gid(4, ROCE_V1, 7, LOCAL),  # of a VLAN interface
    Gid(5, ROCE_V2, 7, LOCAL),
]
V2_ONLY = [each for each in TABLE if each.kind == ROCE_V2]
V1_ONLY = [each for each in TABLE if each.kind == ROCE_V1]


@pytest.mark.parametrize(
    ("peer", "own", "expected"),
    [
        (gid("192.0.2.9"), 3, 3),  # an IPv4-mapped GID: RoCE v2
        (gid("2001:db8::9"), 3, 3),
        (PRIVATE, 3, 3),  # a link-local GID that is not made from the MAC address
        (OTHER, 3, 2),  # Linux uses RoCE v1 for SMC-R version 1, whatever our GID is
        (OTHER, 1, 0),
        (OTHER, 0, 0),
        (gid("192.0.2.9"), 0, 1),
        (OTHER, 5, 4),  # the VLAN's, although the GID is the same
    ],
)
def test_the_entry_fits_the_roce_version_of_the_peer(peer: bytes, own: int, expected: int) -> None:
    found = gids.entry_for_peer(peer, TABLE, TABLE[own], fixed=False)
    assert found == TABLE[expected]


@pytest.mark.parametrize("peer", [OTHER, gid("192.0.2.9")])
def test_the_only_entry_is_used_for_any_peer(peer: bytes) -> None:
    """Soft-RoCE supports v2 only, and an adapter may support v1 only."""
    for table in (V2_ONLY, V1_ONLY):
        for own in table:
            assert gids.entry_for_peer(peer, table, own, fixed=False) == own


@pytest.mark.parametrize("peer", [OTHER, gid("192.0.2.9")])
def test_the_entry_that_the_user_chose_is_fixed(peer: bytes) -> None:
    for own in TABLE:
        assert gids.entry_for_peer(peer, TABLE, own, fixed=True) == own
    assert gids.entry_for_peer(peer, V2_ONLY, TABLE[0], fixed=True) is None


def test_an_entry_is_found_by_its_gid_and_not_by_its_index() -> None:
    moved = [each._replace(number=each.number + 8) for each in TABLE]
    found = gids.entry_for_peer(gid("192.0.2.9"), moved, TABLE[3], fixed=False)
    assert found is not None
    assert found.number == 11
    gone = [each for each in TABLE if each.value != IPV4]
    assert gids.entry_for_peer(gid("192.0.2.9"), gone, TABLE[3], fixed=False) is None


def test_a_port_prefers_roce_v2_and_an_ip_address() -> None:
    assert gids.choose_entry(TABLE, None) == TABLE[3], "RoCE v2 and an IP address"
    assert gids.choose_entry(V1_ONLY, None) == TABLE[2]
    assert gids.choose_entry(TABLE, 4) == TABLE[4]
    assert gids.choose_entry(TABLE, 6) is None
    assert gids.choose_entry([], None) is None


# --- failing devices ------------------------------------------------------------------------------


class FakeVerbsError(Exception):
    """The error that the fake verbs raise."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.error_code = errno.EIO


class Device:
    """Fake of `pyverbs.Verbs` for one device; `closed` lists the closed objects."""

    error = FakeVerbsError
    port_active = 4
    fatal_events = frozenset({8})
    signaled, solicited, inline = 1, 2, 4

    def __init__(self) -> None:
        self.gone = False
        self.closed: list[str] = []
        self.events: list[int] = []
        self.state, self.mtu = 4, 3
        self.most_inline = 0
        self.posted: list[int] = []
        self.modified: list[dict[str, Any]] = []
        self.fds = [os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)]

    @contextmanager
    def refusals(self, what: str) -> Iterator[None]:
        try:
            yield
        except FakeVerbsError as refused:
            raise self.refusal(what, refused) from refused

    refusal = staticmethod(pyverbs.Verbs.refusal)

    def do(self, result: object = None) -> Any:
        if self.gone:
            raise FakeVerbsError("no such device")
        return result

    def thing(self, name: str, **more: object) -> Any:
        def close() -> None:
            if name != "request":  # requests are memory of the library, not of the device
                self.closed.append(name)
                self.do()

        return SimpleNamespace(close=close, **more)

    def event(self, kind: int) -> None:
        self.events.append(kind)
        os.eventfd_write(self.fds[0], 1)

    def take_event(self) -> Any:
        self.do()
        os.eventfd_read(self.fds[0])
        return SimpleNamespace(event_type=self.events.pop(0), ack=lambda: None)

    def context(self, name: str) -> tuple[Any, int]:
        context = self.thing(
            "context",
            query_port=lambda port: self.do(SimpleNamespace(state=self.state, active_mtu=self.mtu)),
            query_device=lambda: SimpleNamespace(max_cqe=32767),
            get_async_event=self.take_event,
        )
        self.do()
        return context, self.fds[0]

    def gids(self, context: object, port: int) -> list[Gid]:
        self.do()
        return [each._replace(ifindex=1) for each in TABLE]

    def channel(self, context: object) -> tuple[Any, int]:
        return self.thing(
            "channel", get_cq_event=lambda _: self.do(os.eventfd_read(self.fds[1]))
        ), self.fds[1]

    def cq(self, context: object, size: int, channel: object) -> Any:
        return self.thing(
            "cq",
            poll=lambda count: self.do((0, ())),
            req_notify=lambda solicited: self.do(),
            ack_events=lambda count: None,
        )

    def pd(self, context: object) -> Any:
        return self.thing("pd")

    def mr(self, *args: object, **more: object) -> Any:
        return self.thing("mr", lkey=1, rkey=2)

    def qp(self, pd: object, cq: object, *, inline: int, **more: object) -> tuple[Any, int]:
        if inline > self.most_inline:
            raise FakeVerbsError("so much is not sent inline")

        def post_send(request: Any) -> None:
            self.posted.append(request.send_flags)

        qp = self.thing("qp", qp_num=77, post_send=post_send)
        return qp, self.most_inline

    def sge(self, address: int, length: int, lkey: int) -> Any:
        return self.thing("request", addr=address, length=length)

    def recv_wr(self, wr_id: int, sge: object) -> Any:
        return self.thing("request")

    def reusable(self, lkey: int, *, write: bool) -> Reusable:
        made = self.thing("request", set_wr_rdma=lambda rkey, address: None)
        return Reusable(made, SimpleNamespace(), made)

    def modify_to_init(self, qp: object, port: int) -> None:
        self.do()

    def modify_to_rtr(self, qp: object, **attributes: Any) -> None:
        self.modified.append(self.do(attributes))

    def modify_to_rts(self, qp: object, *, psn: int) -> None:
        self.do()

    def modify_to_err(self, qp: object) -> None:
        self.do()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()
    monkeypatch.setattr(pyverbs, "load", lambda: made)
    monkeypatch.setattr(neighbours, "query_now", lambda question: None)  # no netlink
    yield made
    for fd in made.fds:
        os.close(fd)


@pytest.fixture
def rnic(device: Device, tmp_path: Path) -> Iterator[VerbsRnic]:
    made = VerbsRnic("made_up0")
    made.open(tmp_path)
    yield made
    made.close()


def test_a_queue_pair_takes_the_entry_of_its_peer(device: Device, rnic: VerbsRnic) -> None:
    with pytest.raises(RnicError, match="larger"):
        to_peer(rnic, OTHER, mtu=4)
    to_peer(rnic, OTHER, mtu=3)
    to_peer(rnic, gid("192.0.2.9"), mtu=1)
    assert [(each["gid_index"], each["mtu"]) for each in device.modified] == [(2, 3), (3, 1)]


@pytest.mark.parametrize(("chosen", "expected"), [(None, 0), (3, 1)])
def test_with_gid_uses_another_gid_of_the_port(
    device: Device, tmp_path: Path, chosen: int | None, expected: int
) -> None:
    """The other GID is fixed if the user has chosen one."""
    port = VerbsRnic("made_up0", gid_index=chosen)
    with closing(port.with_gid(1)) as rnic:
        rnic.open(tmp_path)
        assert rnic.name == "made_up0#1"
        to_peer(rnic, OTHER, mtu=1)
    assert device.modified[0]["gid_index"] == expected


def to_peer(rnic: VerbsRnic, peer: bytes, mtu: int) -> None:
    pd = rnic.alloc_pd()
    qp = rnic.create_qp(pd)
    try:
        qp.to_init()
        qp.to_rtr(gid=peer, qp_num=5, psn=1, mtu=mtu)
    finally:
        qp.close()
        pd.close()


@pytest.mark.parametrize(("most", "expected"), [(0, [2, 0, 0]), (64, [6, 4, 0]), (256, [6, 4, 4])])
def test_short_data_is_sent_inline(
    device: Device, rnic: VerbsRnic, most: int, expected: list[int]
) -> None:
    """Data is sent inline if the adapter supports its length; messages are always solicited."""
    device.most_inline = most
    pd = rnic.alloc_pd()
    with closing(rnic.create_qp(pd)) as qp:
        qp.to_init()
        qp.to_rtr(gid=OTHER, qp_num=5, psn=1, mtu=1)
        qp.to_rts(psn=1)
        qp.post_send(1, bytes(44), signaled=False)
        for length in (64, 65):
            qp.post_write(1, memoryview(bytes(length)), None, address=1, rkey=1)
    pd.close()
    assert device.posted == expected


def test_port_events_update_the_port(device: Device, rnic: VerbsRnic) -> None:
    events: list[RnicEvent] = []
    rnic.on_event = events.append
    for state, mtu in ((1, 3), (1, 3), (4, 5), (4, 4)):
        device.state, device.mtu = state, mtu
        device.event(10)
        rnic.service()
        assert (rnic.port_active, rnic.mtu) == (state == 4, mtu)
    assert events == [RnicEvent.PORT_DOWN, RnicEvent.PORT_UP]


def test_completions_and_events_have_separate_descriptors(device: Device, rnic: VerbsRnic) -> None:
    """The descriptor for completions does not report events of the port, and vice versa."""
    events: list[RnicEvent] = []
    rnic.on_event = events.append
    fd = rnic.completion_fd()
    assert fd == rnic.completion_fd() == device.fds[1]
    both = select.poll()
    for each in (fd, rnic.wait_fd()):
        both.register(each, select.POLLIN)
    os.eventfd_write(device.fds[1], 1)
    assert [each for each, _ in both.poll(0)] == [fd]
    rnic.service()
    assert rnic.acknowledge()
    assert both.poll(0) == []
    device.event(8)
    assert [each for each, _ in both.poll(0)] == [rnic.wait_fd()]
    rnic.service()
    assert events == [RnicEvent.FATAL]
    assert not rnic.acknowledge(), "a failed device has no completions"


@pytest.mark.parametrize("how", ["event", "event refused", "port", "arm", "poll"])
def test_a_failed_device_is_reported_once(device: Device, rnic: VerbsRnic, how: str) -> None:
    """The RNIC reports the failure once, raises no error, and can be closed."""
    events: list[RnicEvent] = []
    rnic.on_event = events.append
    pd = rnic.alloc_pd()
    qp = rnic.create_qp(pd)
    qp.to_init()
    memory = rnic.alloc_memory(4096)
    region = pd.register(memory)
    device.gone = how != "event"
    if how in ("event", "event refused"):
        device.event(8)
        rnic.service()
    elif how == "port":
        rnic.refresh_port()
    elif how == "poll":
        assert rnic.poll() == []
        assert events == [], "a poll must not call `on_event`"
        assert not rnic.arm(), "`arm` must let the caller poll again"
    else:
        assert not rnic.arm()
    device.gone = True
    assert events == [RnicEvent.FATAL]
    assert rnic.failed
    assert not rnic.port_active
    assert rnic.poll() == []
    assert rnic.arm()
    rnic.service()
    with pytest.raises(RnicError):
        rnic.create_qp(pd)
    qp.to_err()
    qp.close()
    region.close()
    pd.close()
    memory.close()
    rnic.close()
    assert events == [RnicEvent.FATAL]
    assert device.closed == ["qp", "mr", "mr", "pd", "cq", "channel", "context"]


def test_a_refusal_of_a_device_that_works_is_raised(device: Device, rnic: VerbsRnic) -> None:
    pd = rnic.alloc_pd()
    device.gone = True
    with pytest.raises(RnicError, match="ibv_dealloc_pd"):
        pd.close()
    device.gone = False


# --- uevents --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uevent", "expected"),
    [
        (b"add@/devices/virtual/infiniband/rxe1\0ACTION=add\0SUBSYSTEM=infiniband\0", True),
        (b"remove@/devices/virtual/infiniband_verbs/uverbs1\0ACTION=remove\0", True),
        (b"add@/devices/pci0000:00/0000:00:02.0/infiniband/mlx5_0\0", True),
        (b"add@/devices/virtual/net/veth0\0INTERFACE=veth0\0", False),
        (b"change@/devices/virtual/block/loop0\0NAME=/infiniband\0", False),
        (b"libudev\0\xfe\xed\xca\xfe", False),
        (b"", False),
    ],
)
def test_uevents_of_rdma_devices_are_recognised(uevent: bytes, expected: bool) -> None:
    assert is_rdma_event(uevent) is expected


# --- the peer's address ---------------------------------------------------------------------------


class Kernel:
    """A kernel with one route and one neighbour; `queried` lists the queried neighbours."""

    def __init__(self, route: Message | OSError | None, state: int | OSError | None) -> None:
        self._route, self._state = route, state
        self.queried: list[tuple[str, int]] = []

    def query(self, request: Request) -> list[Message] | None:
        if self._route is None:
            return None
        if request == route_request("192.0.2.1", "192.0.2.9", LOOPBACK):
            if isinstance(self._route, OSError):
                raise self._route
            return [self._route]
        for hop in ("192.0.2.9", "192.0.2.254", "fe80::9"):
            if request == neighbour_request(hop, LOOPBACK):
                self.queried.append((hop, LOOPBACK))
                if isinstance(self._state, OSError):
                    raise self._state
                assert self._state is not None
                return [Message(struct.pack("=BxxxiHBB", 2, LOOPBACK, self._state, 0, 1), {})]
        raise AssertionError(request)


def route(kind: int = 1, attributes: dict[int, bytes] | None = None) -> Message:
    """The kernel's answer to a query of a route: unicast over the loopback interface by default."""
    head = struct.pack("=8BI", 2, 32, 0, 0, 254, 0, 0, kind, 0)
    return Message(head, {4: struct.pack("=I", LOOPBACK), **(attributes or {})})


GATEWAY = {5: ipaddress.ip_address("192.0.2.254").packed}  # RTA_GATEWAY
VIA = {18: struct.pack("=H", 10) + ipaddress.ip_address("fe80::9").packed}  # RTA_VIA
LOOPBACK = 1  # the interface of the fake device's GIDs
NO_ENTRY = OSError(errno.ENOENT, "no such neighbour")
UNKNOWN = OSError(errno.EOPNOTSUPP, "no such question")


@pytest.mark.parametrize(
    ("route", "neighbour", "known", "queried"),
    [
        (route(), 0x02, True, ["192.0.2.9"]),
        (route(), 0x04, True, ["192.0.2.9"]),  # stale: the kernel still uses it
        (route(), 0x80, True, ["192.0.2.9"]),
        (route(), 0x20, False, ["192.0.2.9"]),  # failed: the neighbour did not answer
        (route(), NO_ENTRY, False, ["192.0.2.9"]),
        (route(), 0x01, False, ["192.0.2.9"]),  # the query is pending
        (route(), UNKNOWN, True, ["192.0.2.9"]),  # Linux 4
        (route(attributes=GATEWAY), 0x02, True, ["192.0.2.254"]),
        (route(attributes=VIA), 0x20, False, ["fe80::9"]),
        (route(2), NO_ENTRY, True, []),  # a local address
        (OSError(errno.ENETUNREACH, "no route"), NO_ENTRY, True, []),
        (None, None, True, []),  # no netlink
    ],
)
def test_an_address_is_known_if_its_neighbour_is_resolved(
    monkeypatch: pytest.MonkeyPatch,
    device: Device,
    rnic: VerbsRnic,
    route: Message | OSError | None,
    neighbour: int | OSError | None,
    known: bool,
    queried: list[str],
) -> None:
    """A queue pair enters RTR only if the MAC address of its peer is known."""
    kernel = Kernel(route, neighbour)
    resolved: list[tuple[str, int]] = []
    monkeypatch.setattr(neighbours, "query_now", kernel.query)
    monkeypatch.setattr(neighbours, "resolve", lambda *target: resolved.append(target))
    monkeypatch.setattr(roce_device, "RESOLVED_FOR", 60.0)  # also on a slow machine
    peer = gid("192.0.2.9")
    assert rnic.address_known(peer) is known
    assert kernel.queried == [(each, LOOPBACK) for each in queried]
    assert resolved == ([] if known or neighbour == 0x01 else [("192.0.2.9", LOOPBACK)])
    if known:
        to_peer(rnic, peer, mtu=1)
    else:
        with pytest.raises(RnicError, match="address") as refused:
            to_peer(rnic, peer, mtu=1)
        assert refused.value.errno == errno.EHOSTUNREACH
    assert len(device.modified) == int(known)
    if known:
        assert len(kernel.queried) == len(queried), "a known address was queried again"


@pytest.mark.v2("v2.8/1")
@pytest.mark.parametrize(
    ("route", "direct"),
    [
        (route(), True),
        (route(2), True),  # a local address
        (route(3), None),  # a broadcast address
        (route(5), None),  # a multicast address
        (route(attributes=GATEWAY), False),
        (route(attributes=VIA), False),
        (OSError(errno.ENETUNREACH, "no route"), None),
        (None, None),  # no netlink
    ],
)
def test_a_route_through_a_gateway_is_not_direct(
    monkeypatch: pytest.MonkeyPatch,
    rnic: VerbsRnic,
    route: Message | OSError | None,
    direct: bool | None,
) -> None:
    kernel = Kernel(route, NO_ENTRY)

    def query(request: Request, read: Callable[[Message], object]) -> list[object]:
        try:
            return [read(message) for message in kernel.query(request) or ()]
        except OSError:
            return []  # like `netlink.query`

    monkeypatch.setattr(neighbours, "query", query)
    assert rnic.is_direct(gid("192.0.2.9")) is direct
    assert kernel.queried == [], "a MAC address was queried"
    assert rnic.is_direct(gid("2001:db8::9")) is None, (
        "the GID of the RNIC has another address family"
    )


@pytest.mark.v2("v2.9/7")
def test_a_queue_pair_of_version_2_has_fewer_and_longer_receives(rnic: VerbsRnic) -> None:
    for size, depth in ((RECEIVE_SIZE, 256), (llc.V2.largest, 64)):
        pd = rnic.alloc_pd()
        qp = rnic.create_qp(pd, size)
        assert qp.receive_depth == depth
        qp.close()
        pd.close()


@pytest.mark.v2("v2.7/6")
@pytest.mark.parametrize(("number", "routable"), [(0, False), (1, False), (2, False), (3, True)])
def test_only_an_ipv4_gid_of_roce_v2_serves_version_2(
    device: Device, tmp_path: Path, number: int, routable: bool
) -> None:
    """Version 2 needs an IPv4-mapped GID of RoCE v2."""
    port = VerbsRnic("made_up0", gid_index=number)
    port.open(tmp_path)
    assert port.routable is routable
    port.close()


def test_registered_memory_keeps_its_pages(rnic: VerbsRnic) -> None:
    """The adapter pins the pages, and peers would still write to pages that were freed."""
    memory = rnic.alloc_memory(1 << 20)
    memory.view[:] = b"x" * len(memory.view)
    region = rnic.alloc_pd().register(memory)
    at = 0
    while at < memory.size:
        at = memory.wipe(at, memory.size, 1 << 18)
    assert os.fstat(memory.fd).st_blocks * 512 == memory.size
    assert bytes(memory.view) == bytes(memory.size)
    region.close()
    memory.close()


def test_memory_that_is_closed_is_not_registered(rnic: VerbsRnic) -> None:
    memory = rnic.alloc_memory(4096)
    memory.close()
    pd = rnic.alloc_pd()
    with pytest.raises(RnicError, match="closed") as refused:
        pd.register(memory)
    assert refused.value.errno == errno.EFAULT


def test_some_addresses_are_known_without_a_query(
    monkeypatch: pytest.MonkeyPatch, rnic: VerbsRnic
) -> None:
    monkeypatch.setattr(neighbours, "query_now", lambda question: pytest.fail("a query"))
    assert rnic.address_known(OTHER), "with RoCE v1 the GID contains the MAC address"
    assert rnic.address_known(gid("2001:db8::9")), "to_rtr refuses the other address family"
    rnic.close()
    assert rnic.address_known(gid("192.0.2.9")), "to_rtr refuses a closed RNIC"


# --- versions of pyverbs --------------------------------------------------------------------------


class Heap:
    """Allocations of fake SGEs and requests, so that a double free is a KeyError."""

    def __init__(self) -> None:
        self.lists: dict[int, Any] = {}

    def take(self, fields: list[tuple[int, int, int]]) -> int:
        made = (ctypes.c_uint64 * (2 * len(fields)))(
            *(word for addr, length, lkey in fields for word in (addr, length | lkey << 32))
        )
        place = ctypes.addressof(made)
        self.lists[place] = made
        return place

    def free(self, place: int) -> None:
        del self.lists[place]


def requests_of(version: int, heap: Heap) -> ModuleType:
    """Fake of ``pyverbs.wr``, which frees memory like this version of rdma-core."""
    frees_itself = version >= 65

    class SGE:
        def __init__(self, addr: int, length: int, lkey: int) -> None:
            self.place = heap.take([(addr, length, lkey)])

        def close(self) -> None:
            if self.place or not frees_itself:
                heap.free(self.place)
                self.place = 0 if frees_itself else self.place

        addr = property(
            lambda self: heap.lists[self.place][0],
            lambda self, value: heap.lists[self.place].__setitem__(0, value),
        )
        length = property(
            lambda self: heap.lists[self.place][1] & 0xFFFFFFFF,
            lambda self, value: heap.lists[self.place].__setitem__(
                1, heap.lists[self.place][1] >> 32 << 32 | value
            ),
        )
        if frees_itself:
            __del__ = close

    class SendWR:
        def __init__(self, *, num_sge: int, sg: list[SGE], opcode: int) -> None:
            self.place = heap.take(
                [(w[0], w[1] & 0xFFFFFFFF, w[1] >> 32) for w in (heap.lists[e.place] for e in sg)]
            )

        def close(self) -> None:
            if self.place or not frees_itself:
                heap.free(self.place)
                self.place = 0 if frees_itself else self.place

        def _share(self, sge: SGE) -> None:
            self.place = sge.place

        sg_list = property((lambda self: self.place) if version >= 63 else None, _share)
        if frees_itself:
            __del__ = close

    made = ModuleType("pyverbs.wr")
    vars(made).update(SGE=SGE, SendWR=SendWR)
    return made


def constants_of(version: int) -> ModuleType:
    """Fake module with the constants, named as in this version of rdma-core."""
    kinds = {
        "ibv_send_flags": {"IBV_SEND_SIGNALED": 2, "IBV_SEND_SOLICITED": 4, "IBV_SEND_INLINE": 8},
        "ibv_port_state": {"IBV_PORT_ACTIVE": 4},
        "ibv_event_type": {"IBV_EVENT_CQ_ERR": 0, "IBV_EVENT_DEVICE_FATAL": 8},
        "ibv_wr_opcode": {"IBV_WR_RDMA_WRITE": 0, "IBV_WR_SEND": 2},
    }
    constants = ModuleType("pyverbs.libibverbs_enums" if version >= 59 else "pyverbs.enums")
    for kind, members in kinds.items():
        if version >= 59:
            setattr(constants, kind, enum.IntFlag(kind, members))
        else:
            vars(constants).update(members)
    return constants


@pytest.mark.parametrize("version", [44, 59, 63, 65])
@pytest.mark.parametrize("closed", [True, False])
def test_no_request_frees_its_sge_twice(
    monkeypatch: pytest.MonkeyPatch, version: int, closed: bool
) -> None:
    """No version of pyverbs frees memory twice, at close or at garbage collection."""
    heap = Heap()
    for name in [each for each in sys.modules if each.partition(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)
    package = ModuleType("pyverbs")
    monkeypatch.setitem(sys.modules, "pyverbs", package)
    parts = [ModuleType(f"pyverbs.{name}") for name in ("addr", "cq", "device", "mr", "pd", "qp")]
    errors = ModuleType("pyverbs.pyverbs_error")
    vars(errors).update(PyverbsError=FakeVerbsError)
    for module in (*parts, errors, requests_of(version, heap), constants_of(version)):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        setattr(package, module.__name__.rpartition(".")[2], module)
    lib = pyverbs.Verbs()
    assert (type(lib.signaled), lib.signaled, lib.solicited, lib.inline) == (int, 2, 4, 8)
    assert (lib.port_active, lib.fatal_events) == (4, {0, 8})
    both = [lib.reusable(9, write=write) for write in (False, True)]
    for number in (0, 1):
        both[number].entry.addr = 1 << 40 | number
        both[number].entry.length = 100 + number
    requests: list[Any] = [each.request for each in both]
    assert [list(heap.lists[each.place]) for each in requests] == [
        [1 << 40 | number, 9 << 32 | 100 + number] for number in (0, 1)
    ]
    each = both[0]
    if closed:
        for each in both:
            each.owner.close()
        assert heap.lists == {}
    both.clear()
    requests.clear()
    del each
    gc.collect()
    # Before version 65, garbage collection frees no memory.
    assert len(heap.lists) == (2 if version < 65 and not closed else 0)


@pytest.mark.rfc("C.7/2")
def test_a_write_fails_before_a_first_contact_times_out() -> None:
    """An RNIC may wait up to four times as long as configured for each retry. The rest of the
    timeout is for the Decline.
    """
    tries = pyverbs.RETRY_COUNT + 1
    longest = 4 * 4.096e-6 * 2**pyverbs.ACK_TIMEOUT * tries
    assert longest + 1 < Config().first_contact_timeout


def test_the_event_file_of_a_device_never_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A blocking read would hold the GIL and stop the whole process."""
    ours: list[int] = []
    monkeypatch.setattr(pyverbs, "open_event_files", lambda: set(ours))

    def make() -> str:
        ours.append(os.eventfd(0, os.EFD_CLOEXEC))
        return "a device"

    made, fd = pyverbs.with_event_file(make)
    try:
        assert (made, [fd]) == ("a device", ours)
        assert not os.get_blocking(fd)
    finally:
        os.close(fd)
