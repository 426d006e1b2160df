"""What a socket does and a Trio stream does not: part of a send, a look ahead, endings at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from trio_smc._stream import writable

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from trio_smc.datapath.connection import Connection

__all__ = ["RdmaCalls"]

_READER: Final = "on_readable"
_WRITER: Final = "on_writable"


class RdmaCalls:
    """Methods of `RdmaStream`, whose attributes these are."""

    _core: Connection
    _closed: bool
    _sending: bool
    _receiving: bool
    _strict: bool

    async def send_some(self, view: memoryview) -> int:
        """Send at least one byte of ``view`` (format "B"), and as many as there is room for.

        Returns:
          How many were sent; 0 only for an empty view.  Cancelled, nothing was.

        Raises:
          trio.ClosedResourceError, trio.BrokenResourceError, trio.BusyResourceError: as
            `SmcStream.send_all`.
        """
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._sending = True
        try:
            await trio.lowlevel.checkpoint()
            while True:
                if self._closed or self._core.write_closed:
                    raise trio.ClosedResourceError("the stream was closed for sending")
                sent = self._send_some(view, False) if view else 0
                if sent or not view:
                    # The caller may change its buffer from now on, and may not wait any more.
                    self._core.keep_copies()
                    return sent
                await self._park(_WRITER)
        finally:
            self._sending = False

    async def receive_some_into(self, buffer: Buffer) -> int:
        """See `SmcStream.receive_some_into`."""
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving on this stream")
        self._receiving = True
        try:
            with writable(buffer) as view:
                await trio.lowlevel.checkpoint_if_cancelled()
                parked = False
                while True:
                    if self._closed:
                        raise trio.ClosedResourceError("the stream was closed")
                    try:
                        size = self._core.receive_into(view)
                    except OSError as error:
                        raise self._translated(error) from error
                    if size or self._core.at_eof:
                        break
                    parked = await self._park(_READER) or parked
            if not parked and (self._strict or self._is_due()):
                await trio.lowlevel.cancel_shielded_checkpoint()
            return size
        finally:
            self._receiving = False

    async def peek_some(self, max_bytes: int) -> bytes:
        """What `receive_some` would return, left where it is; same errors."""
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving on this stream")
        self._receiving = True
        try:
            await trio.lowlevel.checkpoint()
            while True:
                if self._closed:
                    raise trio.ClosedResourceError("the stream was closed")
                try:
                    data = self._core.peek(max_bytes)
                except OSError as error:
                    raise self._translated(error) from error
                if data or self._core.at_eof:
                    return data
                await self._park(_READER)
        finally:
            self._receiving = False

    def shut_down_writing(self) -> None:
        """`SmcStream.send_eof` without its checkpoint.

        Raises:
          trio.ClosedResourceError, trio.BrokenResourceError: as there.
        """
        if self._closed:
            raise trio.ClosedResourceError("the stream was closed")
        if self._core.error is not None:
            raise trio.BrokenResourceError("the connection is broken") from self._core.error
        self._core.shutdown_write()

    def close(self) -> None:
        """`SmcStream.aclose` without the wait: what was sent still arrives.  Idempotent."""
        if not self._closed:
            self._close_now()

    async def _park(self, waiter: str) -> bool:
        raise NotImplementedError

    def _send_some(self, view: memoryview, urgent: bool) -> int:
        raise NotImplementedError

    def _is_due(self) -> bool:
        raise NotImplementedError

    def _close_now(self) -> None:
        raise NotImplementedError

    def _translated(self, error: OSError) -> Exception:
        raise NotImplementedError
