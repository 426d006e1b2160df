"""The hook: loaded by every Python under `trio-smc run`, it enables SMC-R once Trio is imported.

Python imports `sitecustomize` when it starts, from the first directory of `sys.path` that has one.
`trio-smc run` puts the directory of this module first in PYTHONPATH.  If a later directory has
another `sitecustomize`, this module runs that one, too.

`_report` sends messages to the command: this Python has the hook, Trio runs, trio_smc is missing,
or asyncio opens TCP connections, which cannot be SMC-R.  Sending never waits.  If a message cannot
be sent, it is counted as dropped, and the next message includes that count.

Connections of asyncio are noticed by an audit hook, because the event loop of asyncio creates a
Python socket for each connection.  So does the event loop of trio-asyncio, which runs inside a Trio
run.  uvloop creates no Python sockets, so two methods of its loop are
wrapped.  With ``--require-smc`` these connections fail.

This file must also work in a Python that has no trio_smc, so it imports no module of trio_smc at
its top.
"""

from __future__ import annotations

import errno
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_REQUIRED = bool(os.environ.get("TRIO_SMC_REQUIRE"))
_reported: set[str] = set()
_dropped = 0


class _WhenImported(importlib.abc.MetaPathFinder):
    """Calls a function after the first import of a module.

    Args:
      after: the functions, each by the name of its module.
    """

    def __init__(self, after: dict[str, Callable[[], None]]) -> None:
        self._after = after

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._after:
            return None
        found = (each.find_spec(name, path, target) for each in sys.meta_path if each is not self)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = self._afterwards(name, loader.exec_module)
        return spec

    def _afterwards(
        self, name: str, execute: Callable[[ModuleType], None]
    ) -> Callable[[ModuleType], None]:
        # The function is called in `exec_module` and not in `find_spec`, because a program may call
        # `importlib.util.find_spec` without an import.
        def exec_module(module: ModuleType) -> None:
            before, action = self._after, self._after.get(name)
            # `_enable` is registered for trio and for trio_smc.  It is removed for both names,
            # before the first of them is imported, because that import may import the other.
            self._after = {k: v for k, v in before.items() if v is not action}
            try:
                execute(module)
            except BaseException:
                self._after = before
                raise
            if action is not None:
                action()

        return exec_module


def _enable() -> None:
    try:
        from dataclasses import replace

        import trio_smc
    except ImportError as error:
        received = _report("missing", executable=sys.executable, error=str(error))
        if _REQUIRED:
            # Without trio_smc the program would use TCP.  If the message was sent, the command
            # prints the problem, else this process does.
            sys.exit(1 if received else f"trio-smc run: {error}")
        return
    try:
        config = _settings(trio_smc)
        if _REQUIRED:
            config = replace(config, require_smc=True)
    except ValueError as error:
        sys.exit(f"trio-smc run: {error}")
    trio_smc.enable(config)
    import trio

    for module, name in run_starters(trio):
        setattr(module, name, _reporting(getattr(module, name)))


def run_starters(trio: Any) -> list[tuple[Any, str]]:
    """The functions of Trio that start a run.

    The same list as `RUNS` in trio_smc/sockets/enable.py.  It is repeated because this file must
    also work with a trio_smc of an older release, which does not have it.
    """
    core = sys.modules.get("trio._core")
    found = (trio, "run"), (trio.lowlevel, "start_guest_run"), (core, "run")
    return [(module, name) for module, name in found if hasattr(module, name)]


def _settings(trio_smc: Any) -> Any:
    """The settings of the environment.  The trio_smc of this Python may be of a release that does
    not know TRIO_SMC_DIRECTORY."""
    if hasattr(trio_smc, "load_settings"):
        return trio_smc.load_settings().config
    from dataclasses import replace

    path = os.environ.get("TRIO_SMC_CONFIG")
    config = trio_smc.load_config(path) if path else trio_smc.Config()
    directory = os.environ.get("TRIO_SMC_DIRECTORY")
    return replace(config, directory=directory) if directory else config


def _reporting(start: Callable[..., Any]) -> Callable[..., Any]:
    from functools import wraps

    @wraps(start)
    def reporting(*args: Any, **options: Any) -> Any:
        _report_once("trio")
        return start(*args, **options)

    return reporting


# --- asyncio ---------------------------------------------------------------------------------


def _watch_asyncio() -> None:
    import asyncio
    import socket

    families = socket.AF_INET, socket.AF_INET6

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event != "socket.__new__" or args[1] not in families:
            return
        if args[2] & 0xF != socket.SOCK_STREAM or _in_trio():
            return
        # Looked up each time, because trio-asyncio replaces the function.
        if asyncio._get_running_loop() is not None:
            _on_asyncio_connection()

    sys.addaudithook(audit)


def _watch_uvloop() -> None:
    import uvloop

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        async def connect_or_listen(*args: Any, **options: Any) -> Any:
            _on_asyncio_connection()
            return await call(*args, **options)

        return connect_or_listen

    for name in ("create_connection", "create_server"):
        setattr(uvloop.Loop, name, watched(getattr(uvloop.Loop, name)))


def _in_trio() -> bool:
    """True in a Trio run, even as a guest of asyncio.  Then the socket belongs to Trio.

    False in a callback of trio-asyncio's event loop, although a Trio run executes it.
    """
    trio = sys.modules.get("trio")
    if trio is None or not trio.lowlevel.in_trio_run():
        return False
    # Trio and trio-asyncio both set this name when they change from one library to the other.
    library = getattr(sys.modules.get("sniffio"), "thread_local", None)
    return getattr(library, "name", None) != "asyncio"


def _on_asyncio_connection() -> None:
    _report_once("asyncio")
    if _REQUIRED:
        raise OSError(errno.EPROTONOSUPPORT, "asyncio's connections cannot be SMC-R")


# --- messages to the command -------------------------------------------------------------------


def _report_once(kind: str) -> None:
    if kind not in _reported:
        _reported.add(kind)
        _report(kind)


def _report(kind: str, **more: str) -> bool:
    """Send a message to `trio-smc run`; True if it was sent."""
    path = os.environ.get("TRIO_SMC_RUN")
    if not path:
        return False
    # Not `socket` and `json`, because every Python runs this function when it starts, and these
    # modules take long to import.
    import _socket

    global _dropped
    text = f'{{"kind": "{kind}", "dropped": {_dropped}}}'
    if more:
        import json

        text = json.dumps({"kind": kind, "dropped": _dropped, **more})
    try:
        sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        try:
            sock.setblocking(False)
            sock.connect(path)
            sock.send(text.encode())
        finally:
            sock.close()
    except OSError:
        _dropped += 1
        return False
    _dropped = 0
    return True


def _run_next_sitecustomize() -> None:
    other_paths = [each for each in sys.path if os.path.abspath(each or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", other_paths)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(
    0,
    _WhenImported(
        {
            "trio": _enable,
            "trio_smc": _enable,
            "asyncio": _watch_asyncio,
            "uvloop": _watch_uvloop,
        }
    ),
)
_report("python")
os.register_at_fork(after_in_child=lambda: _report("python"))
_run_next_sitecustomize()
