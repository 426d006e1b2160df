"""RoCE adapters and the kernel's soft-RoCE through pyverbs.

Theory of operation.  One completion queue on one completion channel serves all queue pairs of an
RNIC: with pyverbs 44 a channel of two queues cannot be read safely.  The channel's descriptor and
that of the asynchronous events sit in one epoll instance, which is what `wait_fd` gives:
level-triggered, so that it stays readable until `service` has taken the event.

Verbs have no way to look whether something has completed without taking it, so `arm` keeps what
it finds for the next `poll`.

A device may fail or be pulled out at any moment: then every verb is refused.  That is told as
FATAL, by `service` or at the latest by `arm`; from then on what is closed keeps quiet about
refusals, and `poll` gives nothing.

Everything closes exactly once and in the order queue pair, region, domain, completion queue,
channel, device: a call on a closed object of pyverbs crashes the process.
"""

from __future__ import annotations

import errno
import select
from pathlib import Path
from typing import Final

from trio_smc.rnic.memory import Memory
from trio_smc.rnic.roce import pyverbs as _pyverbs
from trio_smc.rnic.roce.port import RocePort
from trio_smc.rnic.roce.queue_pair import Domain, RoceQueuePair
from trio_smc.rnic.verbs import Completion, ProtectionDomain, QueuePair, RnicError

__all__ = [
    "VerbsRnic",
]


_BATCH: Final = 16
_CQ_SIZE: Final = 32767
"""Soft-RoCE's largest: room for all that 63 queue pairs can have posted."""


class VerbsRnic(RocePort):
    """A port of an RDMA device that runs RoCE (RFC 7609, 2.1).

    Args:
      device: the device's name, as ``rdma link`` shows it ("rxe0").
      port: its port, from 1.
      gid_index: the GID to use; None: a RoCE v2 GID made from a global address, if there is one.

    Attributes:
      failed: the device is gone or does not answer; set when FATAL is told, until the next `open`.
      gid_is_fixed: the user chose the GID, and with it RoCE v1 or v2.
    """

    copies_on_post = True
    send_depth = 256
    receive_depth = 256

    def __init__(self, device: str, port: int = 1, gid_index: int | None = None) -> None:
        super().__init__(device, port, gid_index)
        self._pairs: dict[int, RoceQueuePair] = {}
        self._domains: set[Domain] = set()
        self._found: list[Completion] = []
        self._refusal = ""

    def open(self, directory: Path) -> None:
        if self._lib is not None:
            raise RnicError(errno.EBUSY, f"{self.name} is open already")
        lib = _pyverbs.load()
        with lib.refusals(f"opening {self.device}"):
            self._context, self._async_fd = lib.context(self.device)
        self._lib = lib
        self._refusal = ""
        self.failed = False
        self._channel: _pyverbs.Channel | None = None
        self._cq: _pyverbs.Cq | None = None
        self._epoll = select.epoll()
        try:
            self._read_port(lib)
            with lib.refusals("ibv_create_comp_channel, ibv_create_cq"):
                self._channel, self._channel_fd = lib.channel(self._context)
                size = min(_CQ_SIZE, self._context.query_device().max_cqe)
                self._cq = lib.cq(self._context, size, self._channel)
            self._cq_size = size
            self._epoll.register(self._channel_fd, select.EPOLLIN)
            self._epoll.register(self._async_fd, select.EPOLLIN)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._lib is None:
            return
        for pair in list(self._pairs.values()):
            pair.close()
        for domain in list(self._domains):
            for region in list(domain.regions):
                region.close()
            domain.close()
        opened = (self._cq, self._channel, self._context)
        self._cq = self._channel = None
        self._found.clear()
        self._epoll.close()
        for each in opened:
            if each is not None:
                with self.releasing(f"closing {self.device}"):
                    each.close()
        self._lib = None
        self.port_active = False

    def alloc_memory(self, size: int) -> Memory:
        return Memory(size)

    def alloc_pd(self) -> ProtectionDomain:
        lib = self._opened()
        domain = Domain(self, self._context, lib, self._domains.discard)
        self._domains.add(domain)
        return domain

    def create_qp(self, pd: ProtectionDomain) -> QueuePair:
        self._opened()
        if not isinstance(pd, Domain) or pd.rnic is not self or pd.closed or self._cq is None:
            raise RnicError(errno.EINVAL, f"not an open protection domain of {self.name}")
        if self.failed:
            raise RnicError(errno.EIO, f"{self.name} has failed")
        each = self.send_depth + self.receive_depth
        if (len(self._pairs) + 1) * each > self._cq_size:
            raise RnicError(errno.ENOMEM, f"{self.name} has no completion queue room left")
        pair = RoceQueuePair(self, pd, self._cq, self.detach)
        self._pairs[pair.qp_num] = pair
        return pair

    def detach(self, pair: RoceQueuePair) -> None:
        """A queue pair closes: take its completions out, its number may be given again."""
        self._take(self._found)
        del self._pairs[pair.qp_num]
        self._found = [found for found in self._found if found.qp_num != pair.qp_num]

    def poll(self) -> list[Completion]:
        found = self._found
        if found:
            self._found = []
        else:
            found = []
        if self._lib is not None:
            self._take(found)
        return found

    def _take(self, found: list[Completion]) -> None:
        cq, lib, pairs = self._cq, self._lib, self._pairs
        if cq is None or lib is None or self.failed:
            return
        count = _BATCH
        while count == _BATCH:
            try:
                count, completions = cq.poll(_BATCH)
            except lib.error as refused:
                self._refusal = f"ibv_poll_cq: {refused}"  # this may be deep inside of anything
                return
            for wc in completions:
                pair = pairs.get(wc.qp_num)
                if pair is not None:
                    pair.complete(wc, found)

    def arm(self) -> bool:
        lib = self._opened()
        if self.failed:
            return not self._found
        if self._cq is not None:
            # For every completion: no rule makes a peer's messages solicited.
            try:
                self._cq.req_notify(0)
            except lib.error as refused:
                self._refusal = f"ibv_req_notify_cq: {refused}"
        # What completed before arming raises no event.
        self._take(self._found)
        if self._refusal:
            self._fail(self._refusal)
            return False
        return not self._found

    def wait_fd(self) -> int:
        self._opened()
        return self._epoll.fileno()

    def service(self) -> None:
        lib = self._opened()
        # Until nothing is readable: a sleeper that waits for edges sees no second event otherwise.
        while not self.failed and (ready := self._epoll.poll(0)):
            for fd, _ in ready:
                try:
                    if fd == self._async_fd:
                        self._take_event(lib)
                    else:
                        self._take_notification(lib)
                except lib.error as refused:
                    self._fail(str(refused))

    def _take_notification(self, lib: _pyverbs.Verbs) -> None:
        if self._channel is None or self._cq is None or self.failed:
            return
        try:
            self._channel.get_cq_event(self._cq)
        except lib.error as refused:
            if not lib.would_block(refused):
                raise
        else:
            self._cq.ack_events(1)

    def _take_event(self, lib: _pyverbs.Verbs) -> None:
        event = self._context.get_async_event()
        kind = event.event_type
        event.ack()
        if kind in lib.fatal_events:
            self._fail(f"event {kind}")
        else:
            self.look_at_port()  # the event names neither port nor GID

    def _fail(self, why: str) -> None:
        if not self.failed:
            for fd in (self._channel_fd, self._async_fd):
                self._epoll.unregister(fd)
        super()._fail(why)
