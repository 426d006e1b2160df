"""The functions users call, and which stack they use."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar

import trio

from trio_smc._base.config import Config
from trio_smc._connect import connect_stream
from trio_smc._listener import SmcListener
from trio_smc._stack import Stack
from trio_smc._stream import SmcStream

__all__ = ["open_listeners", "open_stack", "open_stream", "serve"]

LOGGER = logging.getLogger("trio_smc")

_current: ContextVar[Stack | None] = ContextVar("trio_smc.stack", default=None)
_default: trio.lowlevel.RunVar[_DefaultStack] = trio.lowlevel.RunVar("trio_smc.default_stack")


class _DefaultStack:
    """The stack that calls outside of any `open_stack` share, one for each Trio run."""

    def __init__(self) -> None:
        self.ready = trio.Event()
        self.stack: Stack | None = None
        self.error: Exception | None = None

    async def run(self) -> None:
        """A system task: nothing may escape, it would be a crash of the whole run."""
        try:
            async with open_stack() as stack:
                self.stack = stack
                self.ready.set()
                await trio.sleep_forever()
        except Exception as error:
            LOGGER.error("the default stack ended", exc_info=error)
            self.error = error
            self.ready.set()


async def _find_stack() -> Stack:
    stack = _current.get()
    if stack is not None:
        stack.check_usable()
        return stack
    try:
        default = _default.get()
    except LookupError:
        default = _DefaultStack()
        _default.set(default)
        trio.lowlevel.spawn_system_task(default.run)
    await default.ready.wait()
    if default.stack is None:
        raise OSError("trio_smc has no default stack") from default.error
    default.stack.check_usable()
    return default.stack


def _effective(stack: Stack, config: Config | None) -> Config:
    if config is None:
        return stack.config
    config.check_call(stack.config)
    return config


@asynccontextmanager
async def open_stack(config: Config | None = None) -> AsyncIterator[Stack]:
    """Open RNICs and link groups for the block; calls inside it use this stack.

    Leaving it finishes what closed streams still owe within ``shutdown_timeout`` seconds, aborts
    streams that are still open (ResourceWarning), terminates the link groups and joins all
    threads.

    Args:
      config: the stack's settings, and the default for the calls inside.

    Raises:
      OSError: an RNIC that ``config.rnics`` names cannot be opened.
    """
    stack = Stack(config or Config())
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        await nursery.start(stack.run)
        token = _current.set(stack)
        try:
            yield stack
        except BaseException as error:
            # Kept out of the nursery, which would wrap it in an ExceptionGroup.
            failure = error
        finally:
            _current.reset(token)
            await stack.shut_down()
    if failure is not None:
        raise failure


async def open_stream(
    host: str | bytes,
    port: int,
    *,
    happy_eyeballs_delay: float = 0.25,
    local_address: str | None = None,
    config: Config | None = None,
) -> SmcStream:
    """Connect to ``host`` and ``port``: over SMC-R where both ends can, else over TCP.

    Args:
      host: name or address.
      port: TCP port.
      happy_eyeballs_delay: seconds before the next address is tried as well.
      local_address: local IP address to connect from.
      config: settings for this call only.

    Raises:
      OSError: nothing could be connected; or the handshake broke (ECONNRESET) or timed out
        (ETIMEDOUT), after which there is no fallback (RFC 7609, C.5, C.6).
      SmcUnavailable: ``config.require_smc`` is set and SMC-R cannot be used.
      ValueError: ``config`` changes what belongs to the stack.
    """
    stack = await _find_stack()
    return await connect_stream(
        stack,
        host,
        port,
        happy_eyeballs_delay=happy_eyeballs_delay,
        local_address=local_address,
        config=_effective(stack, config),
    )


async def open_listeners(
    port: int,
    *,
    host: str | bytes | None = None,
    backlog: int | None = None,
    config: Config | None = None,
) -> list[SmcListener]:
    """Listen on ``port``, as `trio.open_tcp_listeners` does, for SMC-R and TCP clients alike.

    Args:
      port: TCP port; 0 for any.
      host: address or name to listen on; None for all.
      backlog: of the TCP sockets.
      config: settings for connections of these listeners only.
    """
    stack = await _find_stack()
    effective = _effective(stack, config)
    listeners = await trio.open_tcp_listeners(port, host=host, backlog=backlog)
    return [SmcListener(stack, listener.socket, effective) for listener in listeners]


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
    """Listen on ``port`` and run ``handler(stream)`` for each connection, for ever.

    Args and behaviour as of `trio.serve_tcp`, with ``config`` as in `open_listeners`.
    """
    listeners = await open_listeners(port, host=host, backlog=backlog, config=config)
    await trio.serve_listeners(
        handler, listeners, handler_nursery=handler_nursery, task_status=task_status
    )
