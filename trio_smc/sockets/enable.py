"""`enable`: SMC-R for programs that were written for TCP.

Theory of operation
-------------------
Trio has a hook for this: a socket factory.  If a run has one, it creates every socket of
`trio.socket.socket`, and so the sockets of `trio.open_tcp_stream`, `trio.serve_tcp`, AnyIO's
`connect_tcp`, and everything built on them.  A factory is a setting of one run.  So `enable` wraps
the functions that start a run, and each run sets the factory.  A program passes sockets of the
standard library to Trio by `trio.socket.from_stdlib_socket` (as hypercorn and AnyIO do with their
listeners), and descriptors by `trio.socket.fromfd` and ``trio.socket.socket(fileno=...)`` (as
systemd passes them).  These functions are replaced, too: all return the same kind of socket.  A
`trio.SocketStream` of an SMC-R socket calls the SMC-R stream directly.  Data does not arrive at the
descriptor of such a socket, so `trio.lowlevel.wait_readable`, `wait_writable` and `notify_closing`
are replaced by functions that know these sockets, by each name that a program may have for them
(trio_smc/sockets/exposed.py).

`trio.open_tcp_stream` tries the addresses of a name in parallel, with a nursery, and a task and a
cancel scope for each address.  A single address needs none of these, which take about a quarter of
the time of a connection with one request (170 of 745 µs, docs/decisions.md).
`trio.serve_listeners` (used by `trio.serve_tcp` and hypercorn) passes each accepted connection from
one task to another; for drop-in sockets the handler's task starts with the handshake.

Not covered: a name that a module imported from Trio before `enable` (``from trio import run`` or
``from trio.socket import from_stdlib_socket``; with an old `trio.open_tcp_stream`, connections use
SMC-R but are slower), sockets that were created before `enable`, and data that bypasses Trio
through sockets of the standard library.
"""

from __future__ import annotations

import errno
import logging
import socket as stdlib_socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial, wraps
from typing import Any, Final, cast

import trio

from trio_smc._api import current_config, default_config, find_stack, set_default_config
from trio_smc._base.reasons import Mode
from trio_smc._base.waits import notify_closing
from trio_smc.config.config import Config
from trio_smc.connecting.dial import Target, numeric_targets
from trio_smc.connecting.listener import CAPACITY_ERRORS, CAPACITY_PAUSE, Incoming
from trio_smc.rnic.roce import pyverbs
from trio_smc.rnic.roce.hotplug import active_ports
from trio_smc.sockets.drop_in import DropInFactory, DropInSocket, find_drop_in

__all__ = [
    "RUNS",
    "disable",
    "enable",
]


_Handler = Callable[[trio.SocketStream], Awaitable[object]]

_LOGGER: Final = logging.getLogger("trio.serve_listeners")
_FACTORY: Final = DropInFactory(find_stack, current_config)
RUNS: Final = tuple(
    (module, name)
    for module, name in (
        (trio, "run"),
        (trio.lowlevel, "start_guest_run"),
        (sys.modules.get("trio._core"), "run"),  # `trio.testing.trio_test` takes it from there
    )
    if hasattr(module, name)
)
"""The functions that start a run.  `run_starters` in trio_smc/tools/site/sitecustomize.py repeats
the list."""
_originals: dict[tuple[Any, str], Any] = {}


def enable(config: Config | None = None) -> None:
    """Use SMC-R, where possible, for all TCP connections of Trio and AnyIO in this process.

    Call this before Trio runs, or inside a run for that run and later ones.  The call affects
    sockets that are created afterwards.  Outside of `open_stack` these use the default stack.  A
    second call changes the settings for runs that start afterwards.

    Args:
      config: the settings of the default stack; None: do not change them. At first they are those
        of the environment (`load_settings`).

    Raises:
      ValueError: the environment has no valid settings.
    """
    if config is not None:
        set_default_config(config)
    default_config()  # raises ValueError here, and not when the first socket is made
    if not _originals:
        for module, name in RUNS:
            _patch(module, name, _with_factory(getattr(module, name)))
        _patch(trio.socket, "from_stdlib_socket", _from_stdlib_socket)
        _patch(trio.socket, "fromfd", _fromfd)
        _patch(trio.socket, "socket", _socket)
        _patch(trio.lowlevel, "notify_closing", _notify_closing)
        for name in ("wait_readable", "wait_writable"):
            _patch(trio.lowlevel, name, _with_drop_ins(name, getattr(trio.lowlevel, name)))
        _patch(trio.SocketStream, "__init__", _with_fast_path(trio.SocketStream.__init__))
        _patch(trio, "open_tcp_stream", _without_nursery(trio.open_tcp_stream))
        _patch(trio, "serve_listeners", _with_hand_out(trio.serve_listeners))
    if trio.lowlevel.in_trio_run():
        trio.socket.set_custom_socket_factory(_FACTORY)


def disable() -> None:
    """Undo `enable` for sockets that are created from now on, in this run and in later ones."""
    for (module, name), original in _originals.items():
        setattr(module, name, original)
    _originals.clear()
    set_default_config(None)
    if trio.lowlevel.in_trio_run():
        trio.socket.set_custom_socket_factory(None)


def _patch(module: Any, name: str, replacement: Any) -> None:
    _originals[module, name] = getattr(module, name)
    setattr(module, name, replacement)


def _load_verbs() -> None:
    """Import pyverbs if this host has RoCE ports, before the run starts.

    Otherwise the first connection of the run would import it, and stop all other tasks meanwhile.
    """
    with suppress(OSError):  # the stack tries again, and logs the reason
        if default_config().rnics == "auto" and active_ports():
            pyverbs.load()


def _with_factory(start: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``start``, which starts a run, so that the run sets the factory."""

    @wraps(start)
    def start_with_factory(async_fn: Any, *args: Any, **options: Any) -> Any:
        _load_verbs()

        if not callable(async_fn):
            return start(async_fn, *args, **options)  # Trio explains the mistake

        # Trio names the main task after this function.
        @wraps(async_fn.func if isinstance(async_fn, partial) else async_fn)
        def main(*args: Any) -> Any:
            started = async_fn(*args)
            # Anything else is a mistake, which Trio explains.
            return _set_factory(started) if isinstance(started, Coroutine) else started

        return start(main, *args, **options)

    return start_with_factory


async def _set_factory(main: Coroutine[Any, Any, Any]) -> Any:
    """Set the factory, and run the program's main task."""
    # Keep a factory that the program has set before, for example in a test.
    previous = trio.socket.set_custom_socket_factory(_FACTORY)
    if previous is not None:
        trio.socket.set_custom_socket_factory(previous)
    return await main


@wraps(trio.socket.from_stdlib_socket)
@trio.lowlevel.enable_ki_protection
def _from_stdlib_socket(sock: stdlib_socket.socket) -> trio.socket.SocketType:
    return _FACTORY.wrap(sock)


_make_from_descriptor: Final = trio.socket.fromfd
_make_socket: Final = trio.socket.socket


@wraps(_make_from_descriptor)
@trio.lowlevel.enable_ki_protection
def _fromfd(*args: Any, **options: Any) -> trio.socket.SocketType:
    copy = _make_from_descriptor(*args, **options)
    try:
        return _from_stdlib_socket(cast(Any, copy)._sock)
    except BaseException:
        copy.close()
        raise


@wraps(_make_socket)
@trio.lowlevel.enable_ki_protection
def _socket(*args: Any, **options: Any) -> trio.socket.SocketType:
    made = _make_socket(*args, **options)
    if len(args) < 4 and options.get("fileno") is None:
        return made  # by the factory of this run
    try:
        return _from_stdlib_socket(cast(Any, made)._sock)
    except BaseException:
        made.detach()  # the descriptor stays the caller's
        raise


@wraps(notify_closing)
@trio.lowlevel.enable_ki_protection
def _notify_closing(fd: Any) -> None:
    sock = find_drop_in(fd)
    if sock is None:
        notify_closing(fd)
    else:
        sock.end_waits()


def _with_drop_ins(name: str, wait: Callable[[Any], Awaitable[None]]) -> Any:
    """Let ``wait`` find drop-in sockets, whose descriptors do not show arrived data."""

    @wraps(wait)
    @trio.lowlevel.enable_ki_protection
    def wait_for_socket(fd: Any) -> Awaitable[None]:
        # A plain function: a coroutine would add a frame to every wait.
        sock = find_drop_in(fd)
        if sock is None:
            return wait(fd)
        return getattr(sock, name)()  # type: ignore[no-any-return]

    return wait_for_socket


def _without_nursery(
    open_tcp_stream: Callable[..., Awaitable[trio.SocketStream]],
) -> Callable[..., Awaitable[trio.SocketStream]]:
    @wraps(open_tcp_stream)
    @trio.lowlevel.enable_ki_protection
    async def open_tcp_stream_directly(
        host: str | bytes, port: int, **options: Any
    ) -> trio.SocketStream:
        targets: Sequence[Target] = ()
        # Trio's function rejects invalid arguments.
        if not options and type(port) is int and type(host) in (str, bytes):
            try:  # noqa: SIM105 - each connection comes here, and this takes half the time
                targets = numeric_targets(host, port)
            except (OSError, UnicodeError, OverflowError):
                pass
        if len(targets) != 1:
            return await open_tcp_stream(host, port, **options)
        await trio.lowlevel.checkpoint_if_cancelled()
        [(*kind, address)] = targets
        sock = trio.socket.socket(*kind)
        try:
            if isinstance(sock, DropInSocket):
                await sock.connect_to(address)
            else:
                await sock.connect(address)
            return trio.SocketStream(sock)
        except OSError as error:
            sock.close()
            name = host if isinstance(host, str) else host.decode("ascii")
            name = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
            failure = f"all attempts to connect to {name} failed"  # as Trio's message
            raise OSError(failure) from ExceptionGroup(failure, [error])
        except BaseException:
            sock.close()
            raise

    return open_tcp_stream_directly


def _with_hand_out(serve_listeners: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @wraps(serve_listeners)
    @trio.lowlevel.enable_ki_protection
    async def serve_by_hand_out(
        handler: _Handler,
        listeners: list[Any],
        *,
        handler_nursery: trio.Nursery | None = None,
        task_status: trio.TaskStatus[list[Any]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        if not _are_drop_in_listeners(listeners):
            await serve_listeners(
                handler, listeners, handler_nursery=handler_nursery, task_status=task_status
            )
            return
        async with trio.open_nursery() as nursery:
            for listener in listeners:
                nursery.start_soon(_serve, listener, handler_nursery or nursery, handler)
            task_status.started(listeners)

    return serve_by_hand_out


def _are_drop_in_listeners(listeners: object) -> bool:
    # Trio's function serves listeners of an iterator, and explains what is wrong with others.
    return (
        isinstance(listeners, (list, tuple))
        and bool(listeners)
        and all(map(_is_drop_in_listener, listeners))
    )


def _is_drop_in_listener(listener: object) -> bool:
    if type(listener) is not trio.SocketListener or not isinstance(listener.socket, DropInSocket):
        return False
    return listener.socket.can_hand_out


@trio.lowlevel.enable_ki_protection
async def _serve(listener: trio.SocketListener, nursery: trio.Nursery, handler: _Handler) -> None:
    """Run the handler for each connection, with the errors of `trio.serve_listeners`."""
    sock: Any = listener.socket
    context = copy_context()  # handlers have the context of the server

    def take(incoming: Incoming) -> None:
        context.run(nursery.start_soon, _handle, sock, incoming, handler)

    async with listener:
        while True:
            try:
                await sock.hand_out(take)
            except OSError as error:
                if error.errno == errno.EBADF:
                    raise trio.ClosedResourceError from None
                if error.errno not in CAPACITY_ERRORS:
                    raise
                name = errno.errorcode[error.errno]
                _LOGGER.exception("cannot accept: %s; retrying in %s s", name, CAPACITY_PAUSE)
                await trio.sleep(CAPACITY_PAUSE)


async def _handle(listening: DropInSocket, incoming: Incoming, handler: _Handler) -> None:
    smc_stream = await incoming.stream()
    if smc_stream is None:
        return
    accepted, _ = listening.wrap_stream(smc_stream)
    stream = trio.SocketStream(accepted)
    try:
        await handler(stream)
    finally:
        accepted.close()  # the same as `trio.aclose_forcefully`, which takes longer
    if smc_stream.mode is Mode.SMC_R:
        await incoming.spin_for_next()


def _with_fast_path(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    @trio.lowlevel.enable_ki_protection
    def __init__(self: trio.SocketStream, socket: trio.socket.SocketType) -> None:  # noqa: N807
        init(self, socket)
        if isinstance(socket, DropInSocket):
            socket.bind_fast_path(self)

    return __init__
