"""`open_stack`, `open_stream`, `open_listeners`, `serve`: the functions that users call.

These functions use the stack of the innermost `open_stack`, or else the default stack of the Trio
run.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AsyncContextDecorator,
    asynccontextmanager,
    suppress,
)
from contextvars import ContextVar
from typing import TYPE_CHECKING, Self

import trio

from trio_smc._base.errors import NoStack
from trio_smc._base.interrupts import protect_module
from trio_smc._base.resources import is_lack
from trio_smc._events import EventObserver, log_event
from trio_smc._stack import Stack
from trio_smc.config.config import Config, short_repr
from trio_smc.config.file import environment_config, load_settings
from trio_smc.connecting.listener import SmcListener
from trio_smc.control.protocol import REPORT_EVERY, REPORT_TO, report_interval
from trio_smc.control.server import ControlSocket, RunReport
from trio_smc.stack.rnics import check_descriptors
from trio_smc.streams.stream import SmcStream

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["open_listeners", "open_stack", "open_stream", "serve"]

LOGGER = logging.getLogger("trio_smc")

_current: ContextVar[Stack | None] = ContextVar("trio_smc.stack", default=None)
_default: trio.lowlevel.RunVar[_DefaultStack | None] = trio.lowlevel.RunVar(
    "trio_smc.default_stack"
)
_warned: trio.lowlevel.RunVar[bool] = trio.lowlevel.RunVar("trio_smc.warned", False)
"""True if this run has logged that its default stack cannot be opened."""
_default_config: Config | None = None


def set_default_config(config: Config | None) -> None:
    """Set the configuration of default stacks that are opened from now on."""
    global _default_config
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config: {short_repr(config)} is not a Config")
    _default_config = config


def default_config() -> Config:
    """The configuration of default stacks that are opened from now on.

    Raises:
      ValueError: the environment has no valid settings (`load_settings`).
    """
    return _default_config or environment_config()


def current_config() -> Config:
    """The settings of the stack that `find_stack` would return."""
    stack = _current.get()
    if stack is not None:
        return stack.config
    return default_config()


class _DefaultStack:
    """The stack of calls outside any `open_stack`; one for each Trio run."""

    def __init__(self) -> None:
        self.ready = trio.Event()
        self.stack: Stack | None = None
        self.error: Exception | None = None

    async def run(self) -> None:
        """Run in a system task. Raises nothing, because that would crash the Trio run."""
        try:
            # A part of a stack would take descriptors, too.
            check_descriptors()
            async with open_stack(_default_config) as stack:
                self.stack = stack
                self.ready.set()
                await trio.sleep_forever()
        except Exception as error:
            if self.stack is None and _is_lack(error):
                # Each new connection tries again.
                level = logging.DEBUG if _warned.get() else logging.WARNING
                _warned.set(True)
                LOGGER.log(level, "no SMC-R: the default stack cannot be opened: %s", error)
            else:
                LOGGER.error("the default stack ended", exc_info=error)
            self.error = error
        finally:
            self.ready.set()


def _is_lack(error: Exception | None) -> bool:
    return isinstance(error, OSError) and is_lack(error)


async def find_stack() -> Stack:
    """The stack of this context: of the innermost `open_stack`, or else the default stack."""
    stack = _current.get()
    if stack is not None:
        return stack
    default = _default.get(None)
    if default is None:
        default = _DefaultStack()
        _default.set(default)
        trio.lowlevel.spawn_system_task(default.run)
    if default.stack is None:
        await default.ready.wait()
    if default.stack is None:
        # For example there were no more descriptors. The next call tries again.
        if _default.get(None) is default:
            _default.set(None)
        if isinstance(default.error, ValueError):
            raise ValueError(str(default.error)) from None  # a wrong setting
        number = default.error.errno if isinstance(default.error, OSError) else None
        error = NoStack(number, "trio_smc has no default stack")
        error.allows_tcp = _is_lack(default.error) and not default_config().require_smc
        raise error from default.error
    return default.stack


def open_stack(config: Config | None = None) -> AbstractAsyncContextManager[Stack]:
    """Open a stack for the block; calls inside the block use this stack.

    When the block is left, the stack closes its listeners. It closes streams that are still open as
    the system closes a socket, with a ResourceWarning for each: sent data arrives, then the end; if
    data is unread, the connection is reset. It waits until closed streams are finished, for at most
    ``shutdown_timeout`` seconds altogether or until Ctrl-C. Then it terminates the link groups and
    joins all threads. Calls in progress that use the stack, and later ones, raise
    `trio.ClosedResourceError`. An exception from the block is passed on unchanged.

    Args:
      config: the stack's settings, and the default settings of calls inside the block. None: those
        of the environment (`load_settings`).

    Raises:
      RnicError: an OSError; an RNIC of ``config.rnics`` cannot be opened.
      OSError: ``config.capture`` cannot be written.
      ValueError: the environment has no valid settings.
    """
    return _StackBlock(config)


class _StackBlock(AbstractAsyncContextManager[Stack, bool | None], AsyncContextDecorator):
    """The block of `open_stack`.

    The context managers of the standard library are not protected from KeyboardInterrupt, which
    would leave the nursery of `_run_stack` open.
    """

    def __init__(self, config: Config | None) -> None:
        self._config = config
        self._block = _run_stack(config)

    def _recreate_cm(self) -> Self:
        return type(self)(self._config)

    async def __aenter__(self) -> Stack:
        return await self._block.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return await self._block.__aexit__(kind, error, traceback)


@asynccontextmanager
async def _run_stack(config: Config | None) -> AsyncIterator[Stack]:
    """Run a stack during the block."""
    await trio.lowlevel.checkpoint_if_cancelled()
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config: {short_repr(config)} is not a Config")
    # Not `environment_config`: each stack opens RNICs of its own.
    stack = Stack(load_settings().config if config is None else config)
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        try:
            try:
                with trio.CancelScope(shield=True):
                    await nursery.start(stack.runtime.run)
            except BaseException:
                stack.runtime.cancel()
                raise
            async with _capture_and_shut_down(stack):
                _attach(stack)
                token = _current.set(stack)
                try:
                    yield stack
                finally:
                    # pytest may finish a fixture in another context than it was started in.
                    with suppress(ValueError):
                        _current.reset(token)
        except BaseException as error:
            # The nursery would wrap it in an ExceptionGroup.
            failure = error
    try:
        for text in stack.runtime.unclosed:
            warnings.warn(text, ResourceWarning, stacklevel=2)
    finally:
        if failure is None:
            failure = stack.runtime.failure
        if failure is not None:
            raise failure


def _attach(stack: Stack) -> None:
    """Attach the services beside a stack: event log, control socket, report of `trio-smc run`."""
    config = stack.config
    if config.log_events:
        stack.add_observer(EventObserver(stack.runtime.groups.endpoint_of, log_event))
    if config.control and sys.platform == "linux":
        control = ControlSocket.open(stack, config.private_directory())
        if control is not None:
            try:
                stack.runtime.attach(control)
            except BaseException:
                control.close()
                raise
    report_to = os.environ.get(REPORT_TO)
    # A set-user-ID program must not send to a path from its caller's environment.
    if report_to and os.getuid() == os.geteuid():
        interval = report_interval(os.environ.get(REPORT_EVERY, "inf"))
        stack.runtime.attach(RunReport(stack, report_to, interval))


@asynccontextmanager
async def _capture_and_shut_down(stack: Stack) -> AsyncIterator[None]:
    """Shut the stack down after the block. `Config.capture` records its last messages, too."""
    config = stack.config
    capture = None
    try:
        if config.capture is not None:
            from trio_smc.capture.sinks import FileCapture

            capture = FileCapture(stack, config.capture, config.capture_payload)
            stack.runtime.call_in_forked_child(capture.abandon)
        yield
    finally:
        try:
            await stack.runtime.shut_down()
        finally:
            if capture is not None:
                capture.end()
                with trio.CancelScope(shield=True):
                    # The disk may be slow, so a thread waits, for at most `shutdown_timeout`.
                    await trio.to_thread.run_sync(capture.join, config.shutdown_timeout)


async def open_stream(
    host: str | bytes,
    port: int,
    *,
    happy_eyeballs_delay: float | None = 0.25,
    local_address: str | None = None,
    config: Config | None = None,
) -> SmcStream:
    """Connect to ``host`` and ``port``: over SMC-R if both ends can, otherwise over TCP.

    In all other respects like `trio.open_tcp_stream`.

    Args:
      host: name or address.
      port: TCP port.
      happy_eyeballs_delay: seconds before the next address is tried as well (RFC 8305); None:
        the default.
      local_address: local IP address to connect from.
      config: settings for this call only.

    Raises:
      OSError: the name is unknown, or no address could be connected; or the handshake broke
        (ECONNRESET) or timed out (ETIMEDOUT), after which there is no fallback (RFC 7609, C.5,
        C.6).
      SmcUnavailable: an OSError; ``config.require_smc`` is set and SMC-R cannot be used.
      NoStack: an OSError; the default stack cannot be opened.
      trio.ClosedResourceError: the stack was left.
      ValueError: ``config`` changes a setting of the stack.
      RuntimeError: called in a forked child.
    """
    stack = await find_stack()
    return await stack.open_stream(
        host,
        port,
        happy_eyeballs_delay=happy_eyeballs_delay,
        local_address=local_address,
        config=config,
    )


async def open_listeners(
    port: int,
    *,
    host: str | bytes | None = None,
    backlog: int | None = None,
    config: Config | None = None,
) -> list[SmcListener]:
    """Listen on ``port`` for SMC-R and TCP clients, like `trio.open_tcp_listeners`.

    Args:
      port: TCP port; 0: a free port, another one for each listener.
      host: address or name to listen on; None: all addresses, IPv4 and IPv6.
      backlog: of the TCP sockets; None: as large as the system allows.
      config: settings for connections of these listeners only.

    Raises:
      OSError: the address cannot be listened on.
      NoStack: an OSError; the default stack cannot be opened.
      trio.ClosedResourceError: the stack was left.
      ValueError: ``config`` changes a setting of the stack.
      RuntimeError: called in a forked child.
    """
    stack = await find_stack()
    return await stack.open_listeners(port, host=host, backlog=backlog, config=config)


async def serve(
    handler: Callable[[SmcStream], Awaitable[object]],
    port: int,
    *,
    host: str | bytes | None = None,
    backlog: int | None = None,
    config: Config | None = None,
    handler_nursery: trio.Nursery | None = None,
    task_status: trio.TaskStatus[list[SmcListener]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Listen on ``port`` and run ``handler(stream)`` for each connection, until cancelled.

    Like `trio.serve_tcp`: a handler's exception ends the server; listeners are closed at the end.

    Args:
      handler: called with an `SmcStream`, which is closed when the handler returns.
      port, host, backlog, config: as for `open_listeners`.
      handler_nursery: the nursery of the handlers; None: a nursery of this call.
      task_status: ``nursery.start(serve, ...)`` returns the list of `SmcListener`.

    Raises:
      OSError, trio.ClosedResourceError, ValueError, RuntimeError: as for `open_listeners`.
    """
    stack = await find_stack()
    await stack.serve(
        handler,
        port,
        host=host,
        backlog=backlog,
        config=config,
        handler_nursery=handler_nursery,
        task_status=task_status,
    )


protect_module(globals())
