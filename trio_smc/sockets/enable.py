"""`enable`: programs that know nothing of SMC-R get it.

Theory of operation
-------------------
Trio has a hook of its own: a socket factory, set in a run, is asked for every socket that
`trio.socket.socket` makes, and so by `trio.open_tcp_stream`, `trio.serve_tcp`, AnyIO's
`connect_tcp` and all that is built on them.  It is a setting of one run, so the functions that
start runs are wrapped to make it in each.  Sockets that come from the standard library pass through
`trio.socket.from_stdlib_socket` (hypercorn's and AnyIO's listeners do); it is wrapped too.  And a
`trio.SocketStream` that is made of a socket over SMC-R makes its data calls there.

What is not reached: a name that a module took from Trio before `enable` (``from trio import run``
or ``from trio.socket import from_stdlib_socket``), sockets that were made before, and bytes moved
past Trio, by the standard library's sockets themselves.
"""

from __future__ import annotations

import socket as stdlib_socket
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, Final

import trio

from trio_smc._api import find_stack, set_default_config
from trio_smc.config.config import Config
from trio_smc.sockets.drop_in import DropInFactory, DropInSocket

__all__ = [
    "disable",
    "enable",
]


_FACTORY: Final = DropInFactory(find_stack)
_RUNS: Final = (
    (trio, "run"),
    (trio.lowlevel, "start_guest_run"),
)
_originals: dict[tuple[Any, str], Any] = {}


def enable(config: Config | None = None) -> None:
    """Let every TCP connection of Trio and AnyIO programs in this process use SMC-R where it can.

    To be called before the program runs, or inside a run for that run and later ones.  Sockets
    made from then on are affected.  Outside of `open_stack` they use the default stack.  Calling
    it again changes the settings for runs that begin afterwards.  Where `Config.checkpoints` is
    left at None these sockets have amortised checkpoints.

    Args:
      config: the default stack's settings; None: leave them as they are.
    """
    if config is not None:
        set_default_config(config)
    if not _originals:
        for module, name in _RUNS:
            _replace(module, name, _with_factory(getattr(module, name)))
        _replace(trio.socket, "from_stdlib_socket", _from_stdlib_socket)
        _replace(trio.SocketStream, "__init__", _init_and_carry(trio.SocketStream.__init__))
    if trio.lowlevel.in_trio_run():
        trio.socket.set_custom_socket_factory(_FACTORY)


def disable() -> None:
    """Undo `enable`: for sockets made from now on, in this run and in later ones."""
    for (module, name), original in _originals.items():
        setattr(module, name, original)
    _originals.clear()
    set_default_config(None)
    if trio.lowlevel.in_trio_run():
        trio.socket.set_custom_socket_factory(None)


def _replace(module: Any, name: str, ours: Any) -> None:
    _originals[module, name] = getattr(module, name)
    setattr(module, name, ours)


def _with_factory(start: Callable[..., Any]) -> Callable[..., Any]:
    """``start``, which runs an async function, with the factory set in that run."""

    @wraps(start)
    def start_with_factory(
        async_fn: Callable[..., Awaitable[Any]], *args: Any, **options: Any
    ) -> Any:
        @wraps(async_fn)
        async def main(*args: Any) -> Any:
            # A program with a factory of its own, as one of tests, keeps it.
            theirs = trio.socket.set_custom_socket_factory(_FACTORY)
            if theirs is not None:
                trio.socket.set_custom_socket_factory(theirs)
            return await async_fn(*args)

        return start(main, *args, **options)

    return start_with_factory


@wraps(trio.socket.from_stdlib_socket)
def _from_stdlib_socket(sock: stdlib_socket.socket) -> trio.socket.SocketType:
    return _FACTORY.wrap(sock)


def _init_and_carry(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def __init__(self: trio.SocketStream, socket: trio.socket.SocketType) -> None:  # noqa: N807
        init(self, socket)
        if isinstance(socket, DropInSocket):
            socket.carry(self)

    return __init__
