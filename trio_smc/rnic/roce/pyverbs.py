"""The interface to pyverbs: only this module imports it, and types the parts that are used.

pyverbs is untyped, slow to import and optional, so the first `load` imports it.  This module works
around its peculiarities, from rdma-core 44 to 65:

* The import configures the root logger (``logging.basicConfig``).  This module undoes that.
* pyverbs does not expose the file descriptors of a completion channel and of the asynchronous
  events.  Each is found as the one event file that the constructor opens, and made non-blocking:
  pyverbs holds the GIL in every call, so a blocking call would stop the whole process.
* A call on a closed object crashes the process.  Up to rdma-core 64 the garbage collector never
  frees SGEs and work requests, and closing one twice is a double free.  Since 65 each work request
  frees its list of SGEs itself, and a list that two requests share is a double free.  So work
  requests are created once per queue pair, each is closed once, and none shares its SGE with
  another (`Reusable`).
* The constants are in ``pyverbs.enums``, since 59 in enumerations of ``pyverbs.libibverbs_enums``.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import ipaddress
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, Protocol, TypeVar

from trio_smc.rnic.verbs import RnicError

__all__ = [
    "ACK_TIMEOUT",
    "RETRY_COUNT",
    "ROCE_V1",
    "ROCE_V2",
    "Closable",
    "CompChannel",
    "Context",
    "Cq",
    "Gid",
    "Mr",
    "Qp",
    "RecvWr",
    "Reusable",
    "SendWr",
    "Sge",
    "Verbs",
    "Wc",
    "load",
    "open_event_files",
    "with_event_file",
]


_T = TypeVar("_T")

ROCE_V1 = 1
ROCE_V2 = 2
"""``enum ibv_gid_type`` in the result of `ibv_query_gid_table`."""

# The values of Linux (net/smc/smc_ib.c: SMC_QP_TIMEOUT, SMC_QP_RETRY_CNT, SMC_QP_RNR_RETRY,
# SMC_QP_MIN_RNR_TIMER) except for the retry count, which is 7 there: with 7 soft-RoCE retries for
# ever and never reports a lost peer.  With 15 and 6 soft-RoCE reports the loss after 0.94 s
# (4.096 µs x 2^15 x 7).
ACK_TIMEOUT = 15
RETRY_COUNT = 6
_RNR_RETRY = 7
_MIN_RNR_TIMER = 5


class Closable(Protocol):
    def close(self) -> None: ...


class Context(Closable, Protocol):
    def query_port(self, port: int) -> Any: ...
    def query_gid_table(self, max_entries: int) -> Sequence[Any]: ...
    def query_device(self) -> Any: ...
    def get_async_event(self) -> Any: ...


class Mr(Closable, Protocol):
    lkey: int
    rkey: int


class Wc(Protocol):
    wr_id: int
    status: int
    qp_num: int
    byte_len: int


class Cq(Closable, Protocol):
    cqe: int

    def poll(self, num_entries: int) -> tuple[int, Sequence[Wc]]: ...
    def req_notify(self, solicited_only: int) -> None: ...
    def ack_events(self, count: int) -> None: ...


class CompChannel(Closable, Protocol):
    def get_cq_event(self, expected: Cq) -> None: ...


class Sge(Closable, Protocol):
    addr: int
    length: int


class SendWr(Closable, Protocol):
    wr_id: int
    send_flags: int

    def set_wr_rdma(self, rkey: int, address: int) -> None: ...


class RecvWr(Closable, Protocol):
    wr_id: int


class Entry(Protocol):
    """The part of an SGE that changes between posts."""

    addr: int
    length: int


class Reusable(NamedTuple):
    """A send request with its own SGE, which can be changed and posted again.

    Fields:
      request: the request to post; must not be closed.
      entry: its SGE.
      owner: the object that owns the memory of that SGE; must be closed, once.
    """

    request: SendWr
    entry: Entry
    owner: Closable


class _RawSge(ctypes.Structure):
    """``struct ibv_sge``."""

    _fields_ = (("addr", ctypes.c_uint64), ("length", ctypes.c_uint32), ("lkey", ctypes.c_uint32))

    addr: int
    length: int


class Qp(Closable, Protocol):
    qp_num: int

    def modify(self, attributes: object, mask: int) -> None: ...
    def post_send(self, request: SendWr) -> None: ...
    def post_recv(self, request: RecvWr) -> None: ...


class Gid(NamedTuple):
    """An entry of a port's GID table."""

    number: int
    kind: int
    ifindex: int
    value: bytes


_event_files = threading.Lock()


def _after_fork() -> None:
    """Replace the lock: another thread of the parent process may have held it."""
    global _event_files
    _event_files = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def open_event_files() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if "infinibandevent" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
        except OSError:  # closed in the meantime, like the descriptor of the listing itself
            continue
    return found


def with_event_file(make: Callable[[], _T]) -> tuple[_T, int]:
    # The lock, because two threads could not tell their new files apart.
    with _event_files:
        before = open_event_files()
        made = make()
        (fd,) = open_event_files() - before
    os.set_blocking(fd, False)
    return made, fd


def _constants(module: ModuleType) -> SimpleNamespace:
    """The constants of libibverbs as plain integers, because enumerations are slow."""
    found: dict[str, int] = {}
    for name, value in vars(module).items():
        if isinstance(value, type) and issubclass(value, enum.IntEnum | enum.IntFlag):
            found.update((each, int(member)) for each, member in value.__members__.items())
        elif name.startswith("IBV_") and isinstance(value, int):
            found[name] = int(value)
    return SimpleNamespace(**found)


@contextmanager
def _keep_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    try:
        yield
    finally:
        root.setLevel(level)
        for handler in root.handlers[:]:
            if handler not in handlers:
                root.removeHandler(handler)
                handler.close()


class Verbs:
    """The used parts of pyverbs, typed.

    Attributes:
      error: the base class of all exceptions of pyverbs.
    """

    def __init__(self) -> None:
        with _keep_root_logger():
            from pyverbs import addr, cq, device, mr, pd, pyverbs_error, qp, wr

            try:
                from pyverbs import libibverbs_enums as constants
            except ImportError:
                from pyverbs import enums as constants
        enums = self._enums = _constants(constants)
        self._lib: Any = SimpleNamespace(
            addr=addr, cq=cq, device=device, mr=mr, pd=pd, qp=qp, wr=wr
        )
        self.error: type[Exception] = pyverbs_error.PyverbsError
        self.signaled: int = enums.IBV_SEND_SIGNALED
        self.solicited: int = enums.IBV_SEND_SOLICITED
        self.inline: int = enums.IBV_SEND_INLINE
        self.port_active: int = enums.IBV_PORT_ACTIVE
        self.fatal_events: set[Any] = {enums.IBV_EVENT_DEVICE_FATAL, enums.IBV_EVENT_CQ_ERR}

    @contextmanager
    def refusals(self, what: str) -> Iterator[None]:
        """Turn exceptions of pyverbs into RnicError.  For calls off the hot path."""
        try:
            yield
        except self.error as refused:
            raise self.refusal(what, refused) from refused

    @staticmethod
    def refusal(what: str, refused: Exception) -> RnicError:
        """The RnicError for an exception of pyverbs."""
        code = getattr(refused, "error_code", 0)
        return RnicError(code if code > 0 else errno.EIO, f"{what}: {refused}")

    @staticmethod
    def would_block(refused: Exception) -> bool:
        """True if a non-blocking get_cq_event failed because there was no event."""
        return getattr(refused, "error_code", 0) == errno.EAGAIN

    def context(self, device: str) -> tuple[Context, int]:
        """Open a device; returns it and the descriptor of its asynchronous events."""
        return with_event_file(lambda: self._lib.device.Context(name=device))

    @staticmethod
    def gids(context: Context, port: int) -> list[Gid]:
        """The used entries of the port's GID table."""
        return [
            Gid(e.gid_index, e.gid_type, e.ndev_ifindex, ipaddress.ip_address(e.gid_str()).packed)
            for e in context.query_gid_table(256)
            if e.port_num == port
        ]

    def channel(self, context: Context) -> tuple[CompChannel, int]:
        """A completion channel and its descriptor."""
        return with_event_file(lambda: self._lib.cq.CompChannel(context))

    def cq(self, context: Context, cqe: int, channel: CompChannel) -> Cq:
        made: Cq = self._lib.cq.CQ(context, cqe, None, channel, 0)
        return made

    def pd(self, context: Context) -> Closable:
        made: Closable = self._lib.pd.PD(context)
        return made

    def mr(self, pd: Closable, address: int, length: int, *, remote_write: bool) -> Mr:
        access = self._enums.IBV_ACCESS_LOCAL_WRITE
        if remote_write:
            access |= self._enums.IBV_ACCESS_REMOTE_WRITE
        made: Mr = self._lib.mr.MR(pd, length, access, address=address)
        return made

    def qp(
        self, pd: Closable, cq: Cq, *, send_depth: int, receive_depth: int, inline: int
    ) -> tuple[Qp, int]:
        """Create a reliably connected queue pair in state RESET, with at most two gather entries.

        Returns the queue pair and its limit of inline data, which may exceed ``inline``.
        """
        cap = self._lib.qp.QPCap(
            max_send_wr=send_depth, max_recv_wr=receive_depth, max_send_sge=2, max_recv_sge=1,
            max_inline_data=inline,
        )  # fmt: skip
        kind = self._enums.IBV_QPT_RC
        init = self._lib.qp.QPInitAttr(qp_type=kind, scq=cq, rcq=cq, cap=cap, sq_sig_all=0)
        made: Qp = self._lib.qp.QP(pd, init)
        return made, int(init.max_inline_data)

    def modify_to_init(self, qp: Qp, port: int) -> None:
        e = self._enums
        attr = self._lib.qp.QPAttr(qp_state=e.IBV_QPS_INIT, port_num=port)
        attr.qp_access_flags = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        attr.pkey_index = 0
        qp.modify(
            attr, e.IBV_QP_STATE | e.IBV_QP_PKEY_INDEX | e.IBV_QP_PORT | e.IBV_QP_ACCESS_FLAGS
        )

    def modify_to_rtr(
        self, qp: Qp, *, port: int, gid_index: int, gid: bytes, qp_num: int, psn: int, mtu: int
    ) -> None:
        e, addr = self._enums, self._lib.addr
        # pyverbs accepts a GID only as eight groups of four digits.
        spelt = gid.hex(":", 2)
        route = addr.GlobalRoute(dgid=addr.GID(spelt), sgid_index=gid_index, hop_limit=64)
        attr = self._lib.qp.QPAttr(qp_state=e.IBV_QPS_RTR, path_mtu=mtu)
        attr.ah_attr = addr.AHAttr(port_num=port, is_global=1, gr=route, dlid=0)
        attr.dest_qp_num, attr.rq_psn = qp_num, psn
        attr.max_dest_rd_atomic, attr.min_rnr_timer = 1, _MIN_RNR_TIMER
        mask = e.IBV_QP_STATE | e.IBV_QP_AV | e.IBV_QP_PATH_MTU | e.IBV_QP_DEST_QPN
        mask |= e.IBV_QP_RQ_PSN | e.IBV_QP_MAX_DEST_RD_ATOMIC | e.IBV_QP_MIN_RNR_TIMER
        qp.modify(attr, mask)

    def modify_to_rts(self, qp: Qp, *, psn: int) -> None:
        e = self._enums
        attr = self._lib.qp.QPAttr(qp_state=e.IBV_QPS_RTS)
        attr.timeout, attr.retry_cnt, attr.rnr_retry = ACK_TIMEOUT, RETRY_COUNT, _RNR_RETRY
        attr.sq_psn, attr.max_rd_atomic = psn, 1
        mask = e.IBV_QP_STATE | e.IBV_QP_TIMEOUT | e.IBV_QP_RETRY_CNT | e.IBV_QP_RNR_RETRY
        qp.modify(attr, mask | e.IBV_QP_SQ_PSN | e.IBV_QP_MAX_QP_RD_ATOMIC)

    def modify_to_err(self, qp: Qp) -> None:
        state = self._enums.IBV_QPS_ERR
        qp.modify(self._lib.qp.QPAttr(qp_state=state), self._enums.IBV_QP_STATE)

    def sge(self, address: int, length: int, lkey: int) -> Sge:
        made: Sge = self._lib.wr.SGE(address, length, lkey)
        return made

    def recv_wr(self, wr_id: int, sge: Sge) -> RecvWr:
        """A receive request with a copy of ``sge``; to be closed once."""
        made: RecvWr = self._lib.wr.RecvWR(wr_id=wr_id, num_sge=1, sg=[sge])
        return made

    def reusable(self, lkey: int, *, write: bool) -> Reusable:
        """A send request, for the memory of ``lkey``, that can be changed and posted again."""
        sge = self.sge(0, 0, lkey)
        made = self.gather_wr([sge], write=write)
        try:
            address: int = made.sg_list
        except AttributeError:  # before rdma-core 63 the address of its SGE list is hidden
            made.close()
            made.sg_list = sge
            return Reusable(made, sge, sge)
        sge.close()
        return Reusable(made, _RawSge.from_address(address), made)

    def gather_wr(self, sges: Sequence[Sge], *, write: bool) -> Any:
        """A `SendWr` with copies of ``sges``; to be closed once."""
        e = self._enums
        opcode = e.IBV_WR_RDMA_WRITE if write else e.IBV_WR_SEND
        return self._lib.wr.SendWR(num_sge=len(sges), sg=list(sges), opcode=opcode)


@cache
def load() -> Verbs:
    """Import pyverbs.  Raises RnicError if it is not installed or cannot be loaded."""
    try:
        return Verbs()
    except ImportError as missing:
        raise RnicError(errno.ENOSYS, f"pyverbs cannot be imported: {missing}") from missing
