"""The calls of a `SocketFace` that move data; see there."""

from __future__ import annotations

import errno
import os
import socket as stdlib_socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

import trio

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from trio_smc._rdma_stream import RdmaStream

__all__ = ["FaceData", "socket_errors", "unsupported"]

_DONT_WAIT: Final = getattr(stdlib_socket, "MSG_DONTWAIT", 0)
_NO_SIGNAL: Final = getattr(stdlib_socket, "MSG_NOSIGNAL", 0)


@contextmanager
def socket_errors() -> Iterator[None]:
    """Errors of a stream as those of a socket."""
    try:
        yield
    except trio.ClosedResourceError as error:
        raise os_error(errno.EBADF) from error
    except trio.BrokenResourceError as error:
        number = getattr(error.__cause__, "errno", None) or errno.ECONNRESET
        raise os_error(number) from error


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def unsupported() -> NoReturn:
    raise os_error(errno.EOPNOTSUPP)


class FaceData(trio.socket.SocketType):
    """Receives and sends through the stream when there is one over SMC-R, else by TCP."""

    plain: trio.socket.SocketType
    _rdma: RdmaStream | None
    _read_shut: bool
    _write_shut: bool

    async def recv(self, buflen: int, flags: int = 0, /) -> bytes:
        """As `socket.socket.recv`; MSG_PEEK is the only flag."""
        rdma = self._rdma
        if rdma is None:
            return await self.plain.recv(buflen, flags)
        if self._read_shut or not buflen:
            await trio.lowlevel.checkpoint()
            return b""
        with socket_errors():
            if flags & ~_DONT_WAIT:
                return await self._peek(rdma, buflen, flags)
            return await rdma.receive_some(buflen)

    async def _peek(self, rdma: RdmaStream, buflen: int, flags: int) -> bytes:
        if flags & ~_DONT_WAIT != stdlib_socket.MSG_PEEK:
            unsupported()
        return await rdma.peek_some(buflen)

    async def recv_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0) -> int:
        """As `socket.socket.recv_into`."""
        if self._rdma is None:
            return await self.plain.recv_into(buffer, nbytes, flags)
        with memoryview(buffer).cast("B") as view:
            wanted = nbytes or len(view)
            if not (flags or self._read_shut) and 0 < wanted <= len(view):
                with socket_errors(), view[:wanted] as place:
                    return await self._rdma.receive_some_into(place)
            data = await self.recv(wanted, flags)
            view[: len(data)] = data
        return len(data)

    async def recvfrom(self, bufsize: int, flags: int = 0, /) -> tuple[bytes, Any]:
        """As `socket.socket.recvfrom`: of a connected socket, without an address."""
        if self._rdma is None:
            return await self.plain.recvfrom(bufsize, flags)
        return await self.recv(bufsize, flags), None

    async def recvfrom_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0) -> Any:
        """As `socket.socket.recvfrom_into`."""
        if self._rdma is None:
            return await self.plain.recvfrom_into(buffer, nbytes, flags)
        return await self.recv_into(buffer, nbytes, flags), None

    async def recvmsg(self, bufsize: int, ancbufsize: int = 0, flags: int = 0, /) -> Any:
        """As `socket.socket.recvmsg`; there is never any ancillary data."""
        if self._rdma is None:
            return await self.plain.recvmsg(bufsize, ancbufsize, flags)
        return await self.recv(bufsize, flags), [], 0, None

    async def recvmsg_into(self, buffers: Any, ancbufsize: int = 0, flags: int = 0, /) -> Any:
        """As `socket.socket.recvmsg_into`."""
        if self._rdma is None:
            return await self.plain.recvmsg_into(buffers, ancbufsize, flags)
        views = [memoryview(each).cast("B") for each in buffers]
        data = await self.recv(sum(map(len, views)), flags)
        left = memoryview(data)
        for view in views:
            view[: len(left)] = left[: len(view)]
            left = left[len(view) :]
        return len(data), [], 0, None

    async def send(self, data: Buffer, flags: int = 0, /) -> int:
        """As `socket.socket.send`: at least one byte, and as many as there is room for."""
        rdma = self._rdma
        if rdma is None:
            return await self.plain.send(data, flags)
        if flags & ~(_NO_SIGNAL | _DONT_WAIT | stdlib_socket.MSG_OOB):
            unsupported()
        if self._write_shut:
            raise os_error(errno.EPIPE)
        view = memoryview(data).cast("B")
        with socket_errors():
            if flags & stdlib_socket.MSG_OOB:
                await rdma.send_urgent(view)
                return len(view)
            return await rdma.send_some(view)

    async def sendto(self, *arguments: Any) -> int:
        """As `socket.socket.sendto`; a connected socket takes no destination."""
        if self._rdma is None:
            return await self.plain.sendto(*arguments)
        if arguments[-1] is not None:
            raise os_error(errno.EISCONN)
        return await self.send(*arguments[:-1])

    async def sendmsg(
        self, buffers: Any, ancdata: Any = (), flags: int = 0, address: Any = None, /
    ) -> int:
        """As `socket.socket.sendmsg`, without ancillary data."""
        if self._rdma is None:
            return await self.plain.sendmsg(buffers, ancdata, flags, address)
        if list(ancdata):
            unsupported()
        return await self.sendto(b"".join(buffers), flags, address)

    async def wait_writable(self) -> None:
        """Wait until `send` might send something (`trio.SocketStream` asks)."""
        if self._rdma is None:
            await cast(Any, self.plain).wait_writable()
            return
        with socket_errors():
            await self._rdma.wait_send_all_might_not_block()
