"""What an SMC-R stream shows of its TCP connection: names and TCP-level options.

After the switch to SMC-R the TCP connection carries no data: bytes read from it or written to it
would be a protocol violation.  So nothing that moves data is here.
"""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    import trio
    from typing_extensions import Buffer

__all__ = [
    "SmcSocket",
]


class SmcSocket:
    """The TCP connection of an SMC-R stream: `SmcStream.socket` while the mode is "smc-r".

    Once the connection is CLOSED its descriptor is gone, and everything but ``family``, ``type``,
    ``proto`` and `fileno` raises OSError (EBADF), and so do names unless they were kept.
    """

    __slots__ = ("_accepted", "_names", "_sock")

    def __init__(self, sock: trio.socket.SocketType, accepted: Any = None) -> None:
        """``accepted``: the peer's address, as ``accept`` gave it."""
        self._sock = sock
        self._accepted = accepted
        self._names: tuple[Any, Any] | None = None

    def keep_names(self) -> None:
        """Have both names also when the descriptor is gone."""
        if self._names is None:
            try:
                peer = self.getpeername()
            except OSError:
                peer = None  # it has reset TCP already
            self._names = self._sock.getsockname(), peer

    @property
    def family(self) -> socket.AddressFamily:
        """AF_INET or AF_INET6."""
        return self._sock.family

    @property
    def type(self) -> socket.SocketKind:
        """SOCK_STREAM."""
        return self._sock.type

    @property
    def proto(self) -> int:
        """The protocol number."""
        return self._sock.proto

    def fileno(self) -> int:
        """The descriptor, for looking at the connection from outside; -1 once it is closed."""
        return self._sock.fileno()

    def getsockname(self) -> Any:
        """The local address, as `socket.socket.getsockname` gives it."""
        return self._names[0] if self._names is not None else self._sock.getsockname()

    def getpeername(self) -> Any:
        """The peer's address, as `socket.socket.getpeername` gives it."""
        if self._names is not None and self._names[1] is not None:
            return self._names[1]
        try:
            return self._sock.getpeername()
        except OSError as error:
            # The peer of a socket may have reset TCP before `accept` handed it out.
            if error.errno != errno.ENOTCONN or self._accepted is None:
                raise
            return self._accepted

    @overload
    def getsockopt(self, level: int, optname: int, /) -> int: ...

    @overload
    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes: ...

    def getsockopt(self, level: int, optname: int, buflen: int | None = None, /) -> int | bytes:
        """An option of the TCP connection; `SmcStream.getsockopt` knows those of SMC-R."""
        if buflen is None:
            return self._sock.getsockopt(level, optname)
        return self._sock.getsockopt(level, optname, buflen)

    @overload
    def setsockopt(self, level: int, optname: int, value: int | Buffer, /) -> None: ...

    @overload
    def setsockopt(self, level: int, optname: int, value: None, optlen: int, /) -> None: ...

    def setsockopt(
        self, level: int, optname: int, value: int | Buffer | None, optlen: int | None = None, /
    ) -> None:
        """Set an option of the TCP connection; `SmcStream.setsockopt` sets those of SMC-R."""
        if value is not None:
            self._sock.setsockopt(level, optname, value)
        elif optlen is not None:
            self._sock.setsockopt(level, optname, None, optlen)
        else:
            raise TypeError("setsockopt: a None value needs a length")

    def __repr__(self) -> str:
        return f"<SmcSocket of {self._sock!r}>"
