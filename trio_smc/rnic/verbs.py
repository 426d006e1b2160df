"""The verbs that SMC-R needs, as one interface for every kind of RNIC.

The shape is that of the InfiniBand verbs, so that a RoCE adapter fits without change:

======================================  ==========================================================
here                                    ibverbs
======================================  ==========================================================
``Rnic.open``, ``close``                ``ibv_open_device``, ``ibv_close_device``,
                                        ``ibv_query_port``, ``ibv_create_comp_channel``,
                                        ``ibv_create_cq``
``Rnic.alloc_pd``                       ``ibv_alloc_pd``
``ProtectionDomain.register``           ``ibv_reg_mr`` (local and remote write)
``MemoryRegion.close``                  ``ibv_dereg_mr``
``Rnic.create_qp``                      ``ibv_create_qp`` (RC), state RESET
``QueuePair.to_init/to_rtr/to_rts/...`` ``ibv_modify_qp``
``QueuePair.post_receive``              ``ibv_post_recv``, one per buffer
``QueuePair.post_send``                 ``ibv_post_send`` (SEND, solicited)
``QueuePair.post_write``                ``ibv_post_send`` (RDMA WRITE, at most two gather entries)
``Rnic.poll``                           ``ibv_poll_cq``
``Rnic.arm``                            ``ibv_req_notify_cq`` followed by one more poll
``Rnic.wait_fd``                        the completion channel's and async event file descriptors
``Rnic.completion_fd``                  the completion channel's alone
``RnicEvent``                           ``ibv_get_async_event``
======================================  ==========================================================

There are two differences.  Receive buffers belong to the RNIC: a completion carries the bytes.  And
the data of a write is given as memoryviews of any memory: an RNIC that can send registered memory
only first copies it into its own send ring (`Rnic.copies_on_post`).

All methods are called on the Trio thread; the RNIC's own thread only sleeps on `Rnic.wait_fd`.
Completions of one queue arrive in the order in which the work was posted.  When a queue pair fails,
its two queues have no order between them: flushed receives may complete before the request that
failed.
"""

from __future__ import annotations

import contextlib
import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from .memory import PROGRESS_SIZE, Memory
from .words import Words

__all__ = [
    "AWAKE",
    "RECEIVE_SIZE",
    "Completion",
    "DeliveryUnknown",
    "MemoryRegion",
    "PlainCompletion",
    "ProtectionDomain",
    "QpState",
    "QueueFull",
    "QueuePair",
    "Rnic",
    "RnicError",
    "RnicEvent",
    "WcOpcode",
    "WcStatus",
    "refusals",
]

RECEIVE_SIZE: Final = 48
"""Bytes of a posted receive buffer.  An LLC or CDC message has 44 (RFC 7609, A.3, A.4); 48 is what
Linux uses (SMC_WR_BUF_SIZE).  LLC messages of SMC-R version 2 are longer and need larger
buffers."""

AWAKE: Final = memoryview(bytes(8)).cast("Q")
"""`QueuePair.peer_asleep` of an RNIC that cannot see whether the peer sleeps."""
_UNREAD: Final = memoryview(bytearray(PROGRESS_SIZE)).cast("Q")  # words that no peer reads


class RnicError(OSError):
    """An RNIC refused an operation: wrong state, no memory, device gone.

    `trio_smc.open_stack` raises it if an RNIC of ``Config.rnics`` cannot be opened.
    """


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turn the OSErrors of system calls that a verb makes into RnicErrors."""
    try:
        yield
    except RnicError:
        raise
    except OSError as problem:
        raise RnicError(problem.errno, str(problem)) from problem


class QueueFull(RnicError):
    """More work was posted than the queue was created for."""

    def __init__(self) -> None:
        super().__init__(errno.ENOMEM, "the work queue is full")


class DeliveryUnknown(Exception):
    """The data and the message of `QueuePair.deliver` may or may not have arrived."""


class QpState(StrEnum):
    """States of a queue pair, in their order."""

    RESET = "RESET"
    INIT = "INIT"
    RTR = "RTR"
    RTS = "RTS"
    ERR = "ERR"


class WcOpcode(IntEnum):
    """The kind of work request that completed."""

    SEND = 0
    RDMA_WRITE = 1
    RECV = 128


class WcStatus(IntEnum):
    """The result of a work request; the numbers are those of ``enum ibv_wc_status``."""

    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13
    FATAL_ERR = 18
    GENERAL_ERR = 21


class RnicEvent(StrEnum):
    """Asynchronous events of a device."""

    PORT_DOWN = "port-down"
    PORT_UP = "port-up"
    FATAL = "fatal"


class Completion(NamedTuple):
    """One completed work request.  ``opcode`` and ``data`` are valid only if ``status`` is 0."""

    qp_num: int
    opcode: int
    status: int
    wr_id: int
    data: bytes | None
    """The bytes received, for WcOpcode.RECV."""


PlainCompletion: TypeAlias = "tuple[int, int, int, int, bytes | None]"
"""The items of a `Completion`, without their names: made and unpacked in a third of the time."""


class MemoryRegion(ABC):
    """Memory that peers of one protection domain may write into by RDMA."""

    rkey: int
    address: int
    """The address of the first byte, as peers use it (64 bits)."""
    length: int

    @abstractmethod
    def close(self) -> None:
        """Revoke the RKey: later writes of peers fail with REM_ACCESS_ERR.  Idempotent."""


class ProtectionDomain(ABC):
    """Separates the memory that one link's peer may access from all other memory (RFC 7609, 5)."""

    @abstractmethod
    def register(self, memory: Memory) -> MemoryRegion:
        """Let the queue pairs of this domain be the target of writes into ``memory``."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent; its regions and queue pairs must be closed before."""


class QueuePair(ABC):
    """A reliably connected queue pair."""

    qp_num: int
    """24 bits, never 0."""
    state: QpState
    receive_depth: int
    """Receives that can be posted."""

    @abstractmethod
    def to_init(self) -> None:
        """RESET to INIT: receives may be posted.  Raises RnicError in another state."""

    @abstractmethod
    def to_rtr(self, *, gid: bytes, qp_num: int, psn: int, mtu: int) -> None:
        """INIT to RTR: connect to the peer's queue pair.  Never waits: raises RnicError
        (EHOSTUNREACH) if the peer's address is not known (`Rnic.address_known`).

        Args:
          gid: the peer RNIC's GID, 16 bytes.
          qp_num: the peer's queue pair number.
          psn: the peer's initial packet sequence number, 24 bits.
          mtu: path MTU as the verbs' enumeration (1 = 256 bytes ... 5 = 4096 bytes).
        """

    @abstractmethod
    def to_rts(self, *, psn: int) -> None:
        """RTR to RTS: sends may be posted; ``psn`` is our own initial sequence number."""

    @abstractmethod
    def to_err(self) -> None:
        """Any state to ERR: everything posted is flushed with WR_FLUSH_ERR."""

    @abstractmethod
    def post_receive(self, count: int) -> None:
        """Post ``count`` receive buffers of the size given to `Rnic.create_qp`.  If no buffer is
        posted, a peer's send waits."""

    @abstractmethod
    def post_send(self, wr_id: int, data: bytes, *, signaled: bool = True) -> None:
        """Send ``data``, at most as many bytes as a receive buffer has.  The bytes are copied
        before this returns.

        Raises QueueFull.
        """

    @abstractmethod
    def post_write(
        self,
        wr_id: int,
        data: memoryview,
        more: memoryview | None,
        address: int,
        rkey: int,
        *,
        signaled: bool = False,
    ) -> None:
        """Write ``data`` and then ``more`` to the peer's memory at ``address``.

        Unless `Rnic.copies_on_post`, both must stay unchanged until a completion of this or a
        later request of the same queue pair.  Raises QueueFull.  Later errors (RKey, bounds, peer
        gone) are reported by an error completion, and the queue pair is then in ERR.
        """

    def deliver(
        self, message: bytes, data: bytes | memoryview | None, address: int, rkey: int
    ) -> bool:
        """Write ``data``, if any, and send ``message`` at once, if that is possible.

        It is possible only if the peer's memory is on this host and nothing is queued.

        Returns:
          True: both have arrived, after everything that was posted before.  No completion follows.
          False: nothing was done; use `post_write` and `post_send`.

        Raises:
          DeliveryUnknown: the peer's queue pair ended at the same time and may have received them.
            This queue pair is in ERR, and a completion reports that.
        """
        return False

    @abstractmethod
    def write_capacity(self) -> int:
        """Bytes that `post_write` accepts now; bounded only if `Rnic.copies_on_post`.

        The number grows with completions, and only signaled requests have completions.  So a caller
        that waits for room posts a signaled request after its writes.
        """

    received_all: bool = False
    """True if the peer's queue pair has ended without a message, as the end of its process leaves
    it, and everything that the peer has posted has been received.  Only a software RNIC knows."""

    def peer_lives(self) -> bool:
        """True if the peer's process exists and can receive, even if it does not run now.

        False if this side does not know.
        """
        return False

    def progress_words(self, address: int, rkey: int, size: int) -> tuple[Words, int] | None:
        """Where to store the number of bytes that were written into an element of the peer.

        If this process ends before it has announced the data, the peer finds the number there
        (`Memory.written`).  The word that is `PROGRESS_WORDS` further takes the number of bytes
        that were taken out of this side's element (`Memory.taken`).  When the queue pair has ended,
        storing raises ValueError.

        Args:
          address: the first byte of the element.
          rkey: the RKey of its region.
          size: bytes of the element.

        Returns:
          The words and the index of the element's word; a word that no peer reads if the RNIC has
          none.  None: the peer's memory is not known yet.
        """
        return _UNREAD, 0

    def peer_asleep(self) -> Words:
        """One word that is not 0 while the peer sleeps until the next message arrives.

        Always 0 if the RNIC cannot see that.  The peer can store any value there.  When the queue
        pair has ended, reading raises ValueError.
        """
        return AWAKE

    def lacks_resources(self) -> bool:
        """True if requests wait until this process has resources to reach the peer."""
        return False

    def can_reach(self, rkey: int) -> bool:
        """False if this side cannot write to a region that the peer has announced.

        That happens if writing needs resources of this side, and either side lacks some.  To refuse
        the region costs the peer one registration; a write to it would end the queue pair.
        """
        return True

    @abstractmethod
    def close(self) -> None:
        """Destroy the queue pair.  Idempotent; completions not yet polled are dropped."""


class Rnic(ABC):
    """An RNIC port: made by the user, opened and closed by one stack."""

    name: str
    kind: Literal["software", "roce"]
    copies_on_post: bool
    gid: bytes
    """16 bytes; valid while open, as are the next three."""
    mac: bytes
    mtu: int
    """Active MTU as the verbs' enumeration (1 = 256 bytes ... 5 = 4096 bytes)."""
    port_active: bool
    on_event: Callable[[RnicEvent], None] | None = None
    """Called on the Trio thread, from within `service`."""
    send_depth: int
    """Work requests a queue pair's send queue holds."""
    routable: bool = False
    """True if `gid` serves SMC-R version 2: of RoCE version 2, and IPv4-mapped."""

    @abstractmethod
    def open(self, directory: Path) -> None:
        """Open the device.  ``directory``: the user's private directory.  Raises RnicError."""

    @abstractmethod
    def close(self) -> None:
        """Close the device and everything that was created from it.  Idempotent."""

    def abandon(self) -> None:  # noqa: B027 - most devices have nothing to release
        """Release everything that would keep peers from noticing the end of the parent process.

        To be called in a forked child.  The device belongs to the parent process, so the child must
        neither use nor close it.
        """

    @abstractmethod
    def alloc_memory(self, size: int) -> Memory:
        """Allocate ``size`` zeroed bytes.  Only such memory can be registered with this RNIC.

        Each kind of RNIC zeroes registered memory in its own way (`Memory.wipe`).
        """

    @abstractmethod
    def alloc_pd(self) -> ProtectionDomain:
        """A new protection domain."""

    @abstractmethod
    def create_qp(self, pd: ProtectionDomain, receive_size: int = RECEIVE_SIZE) -> QueuePair:
        """A new queue pair in state RESET.

        Args:
          receive_size: bytes of a posted receive buffer, `RECEIVE_SIZE` or more.  Software RNICs
            support `RECEIVE_SIZE` only.
        """

    def is_direct(self, gid: bytes) -> bool | None:
        """True if no gateway is on the way to the peer with this GID; None: there is no route."""
        return True

    def address_known(self, gid: bytes) -> bool:
        """True if the verbs connect a queue pair to the peer with this GID, or refuse it, without
        waiting.  Otherwise this starts to resolve the peer's address; call it again later."""
        return True

    @abstractmethod
    def poll(self) -> list[Completion]:
        """Take all completions, oldest first; an empty list if there are none."""

    def poll_plain(self) -> Sequence[PlainCompletion]:
        """As `poll`, for the hot path."""
        return self.poll()

    def has_pending(self) -> bool:
        """True if `poll` may return something.  Cheaper than `poll`; used while spinning.

        Always True for an RNIC that cannot find out without polling.
        """
        return True

    @abstractmethod
    def arm(self) -> bool:
        """Request a wakeup at the next completion.

        Returns False if there are completions already; then poll again instead of sleeping.
        """

    def disarm(self) -> None:
        """Undo `arm` because the loop is awake, which saves a wakeup.

        Optional.  Does nothing if the RNIC is not armed.
        """
        return

    @abstractmethod
    def wait_fd(self) -> int:
        """A file descriptor that the thread sleeps on: readable if `service` has work."""

    def completion_fd(self) -> int | None:
        """A descriptor for a loop that waits for completions itself; valid until `close`.

        After this call completions make this descriptor readable, and everything else `wait_fd`.
        None: this RNIC cannot separate the two.
        """
        return None

    def acknowledge(self) -> bool:
        """Clear the readiness of `completion_fd`.  The next `poll` returns the completions.

        False: the RNIC has failed, and the descriptor will not become readable again.
        """
        return False

    @abstractmethod
    def service(self) -> None:
        """Clear the readiness of `wait_fd` and handle device events and peers that connect or
        leave.  The next `poll` returns the completions that result."""
