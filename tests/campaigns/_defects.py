"""Defects that the differential campaign has to notice.

Each one replaces functions of the package in this process.  The ends of a program are forked from
this process afterwards, so the ends over SMC-R have the defect.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import trio

from trio_smc.connecting.listener import SmcListener
from trio_smc.datapath import receiver as receiving
from trio_smc.datapath.connection import Connection
from trio_smc.datapath.receiver import Receiver
from trio_smc.sockets.drop_in import OverSmc, Unconnected
from trio_smc.streams.parking import Busy, Parking
from trio_smc.streams.rdma_stream import RdmaStream
from trio_smc.streams.socket_options import StreamOptions

__all__ = ["DEFECTS", "Defect"]

_CONNECTED: Final = 0
_CONNECTING: Final = 4
_PROCESSES: Final = 9


@dataclass(frozen=True, slots=True)
class Defect:
    """An attribute of the package, and a defective one in its place.

    Attributes:
      batch: the batch of the campaign whose programs can notice the defect.
    """

    owner: Any
    attribute: str
    replacement: Any
    batch: int = _CONNECTED


_receive: Final = RdmaStream.receive_some
_on_endings: Final = vars(Connection)["_on_endings"]
_shut_down_reading: Final = RdmaStream.shut_down_reading
_raise_socket_error: Final[Callable[..., NoReturn]] = vars(OverSmc)["_raise_socket_error"]
_connect: Final = vars(Unconnected)["_connect"]
_stop: Final = SmcListener.stop
_copy: Final[Callable[[Receiver, int], bytes]] = vars(Receiver)["_copy"]


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _always(value: object) -> Callable[..., object]:
    return lambda *_, **__: value


async def _reset_in_place_of_the_end(self: RdmaStream, max_bytes: int | None = None) -> bytes:
    data = await _receive(self, max_bytes)
    if not data:
        raise trio.BrokenResourceError from _error(errno.ECONNRESET)
    return data


async def _last_byte_lost(self: RdmaStream, max_bytes: int | None = None) -> bytes:
    data = await _receive(self, max_bytes)
    return data[:-1] if len(data) > 1 and self._receiver.peer_done else data


async def _byte_lost_after_a_cancellation(self: RdmaStream, max_bytes: int | None = None) -> bytes:
    try:
        data = await _receive(self, max_bytes)
    except trio.Cancelled:
        self.__dict__["was_cancelled"] = True
        raise
    return data[1:] if len(data) > 1 and self.__dict__.pop("was_cancelled", False) else data


def _in_disorder(self: Receiver, length: int) -> bytes:
    start = (self.consumed - self._ring_start) % self.usable
    end = start + length
    if end <= self.usable:
        return _copy(self, length)
    return b"".join((self._ring[: end - self.usable], self._ring[start:]))


def _error_again(self: Receiver) -> OSError | None:
    return None if self.error is None else _error(self.error.errno or 0)


def _no_first_send(self: Connection, _: int) -> NoReturn:
    self.check_sendable()
    raise _error(errno.EPIPE)


def _no_wakeup(self: Connection, endings: int, all_arrived: bool) -> None:
    waiters = self.on_readable, self.on_writable, self.on_urgent
    self.on_readable = self.on_writable = self.on_urgent = None
    _on_endings(self, endings, all_arrived)
    self.on_readable, self.on_writable, self.on_urgent = waiters


def _arrived_data_dropped(self: RdmaStream) -> None:
    self._receiver.drop_unread()
    _shut_down_reading(self)


def _as_a_close(self: RdmaStream) -> None:
    self._end()
    self.write_shut = True


def _bad_descriptor(self: OverSmc, error: Exception, *, sending: bool = False) -> NoReturn:
    if isinstance(error, trio.ClosedResourceError):
        raise _error(errno.EBADF)
    _raise_socket_error(self, error, sending=sending)


def _data_only(self: RdmaStream) -> bool:
    self._pump.drain_if_pending()
    return bool(self._receiver.readable)


async def _closes_after_a_refusal(self: Unconnected, resolved: Any, *, bound: bool) -> Any:
    try:
        return await _connect(self, resolved, bound=bound)
    except OSError:
        self.plain.close()
        raise


def _closes(self: SmcListener) -> None:
    _stop(self)
    self.socket.close()


DEFECTS: Final[dict[str, Defect]] = {
    "a reset in place of the end": Defect(RdmaStream, "receive_some", _reset_in_place_of_the_end),
    "a byte lost before the end": Defect(RdmaStream, "receive_some", _last_byte_lost),
    "a byte lost by a cancelled read": Defect(
        RdmaStream, "receive_some", _byte_lost_after_a_cancellation
    ),
    "a ring read in disorder": Defect(Receiver, "_copy", _in_disorder),
    "EPIPE in place of ECONNRESET": Defect(receiving, "_failure", lambda _: _error(errno.EPIPE)),
    "an error reported twice": Defect(Receiver, "take_error", _error_again),
    "no send after the peer's close": Defect(Connection, "_send_without_reader", _no_first_send),
    "SO_LINGER ignored": Defect(StreamOptions, "linger", property(_always(None))),
    "a peek that consumes": Defect(Receiver, "peek", Receiver.receive),
    "notify_closing without effect": Defect(Parking, "end_waits", _always(None)),
    "no wakeup at the end": Defect(Connection, "_on_endings", _no_wakeup),
    "no reset for unread data": Defect(Connection, "unread", property(_always(False))),
    "a reset at each close": Defect(Connection, "close", lambda self: self.abort()),
    "arrived data dropped by SHUT_RD": Defect(
        RdmaStream, "shut_down_reading", _arrived_data_dropped
    ),
    "SHUT_RDWR as a close": Defect(RdmaStream, "_shut_both", _as_a_close),
    "data accepted after SHUT_RDWR": Defect(Connection, "refuse_data", _always(None)),
    "EBADF in place of ClosedResourceError": Defect(
        OverSmc, "_raise_socket_error", _bad_descriptor
    ),
    "an end that is not readable": Defect(RdmaStream, "is_readable", _data_only),
    "no error in SO_ERROR": Defect(OverSmc, "getsockopt", _always(0)),
    "two readers": Defect(Busy, "__enter__", _always(None)),
    "names after the end": Defect(RdmaStream, "has_ended", property(_always(False))),
    "a refusal closes the socket": Defect(
        Unconnected, "_connect", _closes_after_a_refusal, _CONNECTING
    ),
    "a listener closed by SHUT_RD": Defect(SmcListener, "stop", _closes, _CONNECTING),
    "a second task refused by accept": Defect(SmcListener, "_queued", _always(-1000), _CONNECTING),
    "data of a killed process lost": Defect(
        Connection, "_peer_ended_untrusted", _always(None), _PROCESSES
    ),
}
