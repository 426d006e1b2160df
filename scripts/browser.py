"""Debian's chromium without a window: opens pages, evaluates expressions, takes screenshots.

The browser is driven by its own protocol (Chrome DevTools Protocol), JSON over a WebSocket.  It has
a temporary profile and no access to the network; requests that a page makes nevertheless are
recorded in `Page.requests`.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import trio
from trio_websocket import WebSocketConnection, open_websocket_url

__all__ = ["Page", "open_page"]

COMMAND: Final = "chromium"
PATIENCE: Final = 60.0
"""Seconds for the browser to start, and for each answer."""
_LARGEST_ANSWER: Final = 64 * 1024 * 1024  # a screenshot of a long page
_WIDTH, _HEIGHT = 1400, 900
_OPTIONS: Final = (
    "--headless=new",
    "--remote-debugging-port=0",
    f"--window-size={_WIDTH},{_HEIGHT}",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    # Only this machine has a name and a route: any other request fails, and is recorded.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


class Page:
    """One tab: its requests, its errors, and expressions evaluated in it."""

    def __init__(self, socket: WebSocketConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.requests: list[str] = []
        """Addresses requested since the last `open`."""
        self.complaints: list[str] = []
        """Errors of the page's scripts and of the browser since then."""
        self._loaded = False
        self._width = _WIDTH

    async def start(self) -> None:
        """Create the tab."""
        target = (await self._call("Target.createTarget", url="about:blank"))["targetId"]
        attached = await self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self._call(f"{domain}.enable")

    async def open(self, url: str) -> None:
        """Open an address, and wait until the whole page is loaded."""
        self.requests, self.complaints, self._loaded = [], [], False
        answer = await self._call("Page.navigate", url=url)
        if "errorText" in answer:
            self.complaints.append(answer["errorText"])
            return
        with trio.fail_after(PATIENCE):
            while not self._loaded:
                self._note(json.loads(await self._socket.get_message()))

    async def show(self, width: int, scheme: str) -> None:
        """Give the window a width, and prefer a colour scheme, "light" or "dark".

        The page is laid out anew, not loaded again.
        """
        self._width = width
        await self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=_HEIGHT,
            deviceScaleFactor=1,
            mobile=False,
        )
        await self._call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    async def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        answer = await self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise ValueError(f"{expression}: {answer['exceptionDetails']['text']}")
        return answer["result"].get("value")

    async def photograph(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        height = await self.evaluate("document.documentElement.scrollHeight")
        answer = await self._call(
            "Page.captureScreenshot",
            captureBeyondViewport=True,
            clip={"x": 0, "y": 0, "width": self._width, "height": height, "scale": 1},
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        await trio.Path(path).write_bytes(base64.b64decode(answer["data"]))

    async def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        with trio.fail_after(PATIENCE):
            await self._socket.send_message(json.dumps(message))
            while True:
                reply = json.loads(await self._socket.get_message())
                if reply.get("id") == number:
                    break
                self._note(reply)
        if "error" in reply:
            raise ValueError(f"{method}: {reply['error']['message']}")
        result: dict[str, Any] = reply["result"]
        return result

    def _note(self, event: dict[str, Any]) -> None:
        """Record an event of the tab."""
        values = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(values["request"]["url"])
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.exceptionThrown":
                self.complaints.append(values["exceptionDetails"]["text"])
            case "Log.entryAdded" if values["entry"]["level"] == "error":
                entry = values["entry"]
                self.complaints.append(f"{entry['text']} {entry.get('url', '')}".rstrip())


@asynccontextmanager
async def open_page() -> AsyncIterator[Page]:
    """Start a browser with one tab.  Raises FileNotFoundError if there is no chromium."""
    program = shutil.which(COMMAND)
    if program is None:
        raise FileNotFoundError(f"{COMMAND} is not installed")
    options = list(_OPTIONS)
    if os.geteuid() == 0:
        options.append("--no-sandbox")  # the browser's sandbox refuses to start as root
    with tempfile.TemporaryDirectory(prefix="smc-browser-", ignore_cleanup_errors=True) as profile:
        process = await trio.lowlevel.open_process(
            [program, *options, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": profile, "XDG_RUNTIME_DIR": profile},
        )
        try:
            address = await _address(process, trio.Path(profile) / "DevToolsActivePort")
            async with open_websocket_url(address, max_message_size=_LARGEST_ANSWER) as socket:
                page = Page(socket)
                await page.start()
                yield page
        finally:
            with trio.CancelScope(shield=True):
                process.terminate()
                with trio.move_on_after(10):
                    await process.wait()
                if process.returncode is None:
                    process.kill()
                    await process.wait()


async def _address(process: trio.Process, report: trio.Path) -> str:
    """Return the address on which the browser listens; it writes that to a file of its profile."""
    with trio.fail_after(PATIENCE):
        while True:
            if process.poll() is not None:
                raise OSError(f"{COMMAND} ended with {process.returncode}")
            lines = (await report.read_text()).split("\n") if await report.exists() else []
            if len(lines) > 1:
                return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
            await trio.sleep(0.05)
