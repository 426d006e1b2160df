"""The Linux kernel's side of a test: blocking SMC sockets, controlled by `tests.lab.kernel`.

``python3 -m tests.lab.kernel_agent PORT``.  Each line of JSON is one call, [number, function,
arguments]; each is answered by [number, result, null] or [number, null, [error name, text]],
in the order in which they end: every call has a thread of its own.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import socket
import subprocess
import sys
import termios
import threading
import time
from typing import Any

from tests.lab import smc_netlink

PIECE = 256 * 1024
AF_SMC = 43
IPPROTO_SMC = 256
SMCPROTO_SMC6 = 1
OPENING = 16


class Agent:
    """Sockets by number, and the calls on them: every method is a call."""

    def __init__(self) -> None:
        self._sockets: dict[int, socket.socket] = {}
        self._numbers = itertools.count(1)
        self._dump: dict[int, dict[str, Any]] = {}
        self._programs: dict[int, subprocess.Popen[str]] = {}

    def _keep(self, sock: socket.socket) -> int:
        number = next(self._numbers)
        self._sockets[number] = sock
        return number

    def listen(self, kind: str, port: int, host: str = "0.0.0.0", options: Any = ()) -> int:
        sock = make(kind)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for name, value in options:
            sock.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        sock.bind((host, port))
        sock.listen(256)
        return self._keep(sock)

    def accept(self, number: int) -> int:
        return self._keep(self._sockets[number].accept()[0])

    def connect(
        self, kind: str, host: str, port: int, options: Any = (), local: str | None = None
    ) -> int:
        sock = make(kind)
        for name, value in options:
            sock.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        if local:
            sock.bind((local, 0))
        try:
            sock.connect((host, port))
        except BaseException:
            sock.close()
            raise
        return self._keep(sock)

    def info(self, number: int) -> Any:
        return smc_netlink.socket_info(self._sockets[number].fileno())

    def links(self) -> Any:
        return smc_netlink.links()

    def fallbacks(self) -> Any:
        return smc_netlink.fallback_counts()

    def send_file(self, number: int, path: str, count: int) -> float:
        """Send the file's first bytes; returns the seconds."""
        sock = self._sockets[number]
        start = time.monotonic()
        with open(path, "rb") as file:
            while count:
                piece = file.read(min(PIECE, count))
                sock.sendall(piece)
                count -= len(piece)
        return time.monotonic() - start

    def receive(self, number: int, count: int | None = None) -> Any:
        """Receive that many bytes, or until the end; returns number, SHA-256 and seconds."""
        sock, digest, got = self._sockets[number], hashlib.sha256(), 0
        start = time.monotonic()
        while count is None or got < count:
            data = sock.recv(PIECE if count is None else min(PIECE, count - got))
            if not data:
                break
            digest.update(data)
            got += len(data)
        return [got, digest.hexdigest(), time.monotonic() - start]

    def arrived(self, number: int, count: int) -> None:
        """Wait until at least that many bytes have arrived, and leave them unread."""
        while _waiting(self._sockets[number]) < count:
            time.sleep(0.001)

    def receive_full(self, number: int, count: int, ring: int) -> Any:
        """Receive that many bytes, each time only when the ring, of ``ring`` bytes, is full."""
        sock, digest, got = self._sockets[number], hashlib.sha256(), 0
        while got < count:
            self.arrived(number, min(ring, count - got))
            data = sock.recv(ring)
            digest.update(data)
            got += len(data)
        return [got, digest.hexdigest()]

    def send(self, number: int, text: str) -> None:
        self._sockets[number].sendall(text.encode())

    def fill(self, number: int, idle: float) -> int:
        """Send zeros until no send succeeds for ``idle`` seconds; returns the number of bytes."""
        sock, sent = self._sockets[number], 0
        sock.settimeout(idle)
        try:
            while True:
                sent += sock.send(bytes(16384))
        except TimeoutError:
            return sent
        finally:
            sock.settimeout(None)

    def text(self, number: int, count: int) -> str:
        return self._sockets[number].recv(count, socket.MSG_WAITALL).decode()

    def send_urgent(self, number: int, text: str) -> int:
        return self._sockets[number].send(text.encode(), socket.MSG_OOB)

    def urgent(self, number: int) -> str:
        """Wait for the urgent byte."""
        sock = self._sockets[number]
        while True:
            try:
                return sock.recv(1, socket.MSG_OOB).decode()
            except OSError as none_yet:
                if none_yet.errno not in (errno.EINVAL, errno.EAGAIN):
                    raise
                time.sleep(0.01)

    def echo(self, number: int) -> int:
        """Send all received bytes back until the end; returns their number."""
        sock, total = self._sockets[number], 0
        while data := sock.recv(PIECE):
            sock.sendall(data)
            total += len(data)
        return total

    def error(self, number: int) -> str | None:
        """Wait for the peer's end; returns the name of the error, if there is one."""
        sock = self._sockets[number]
        while sock.recv(PIECE):
            pass
        code: int = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return errno.errorcode[code] if code else None

    def shutdown(self, number: int) -> None:
        self._sockets[number].shutdown(socket.SHUT_WR)

    def close(self, number: int) -> None:
        self._sockets.pop(number).close()

    def many_connect(self, kind: str, host: str, port: int, count: int, text: str) -> Any:
        """Open that many connections at once, send text on all; returns smc_diag's modes."""
        meeting = threading.Barrier(count)
        # The kernel gives up on a handshake after six seconds, and a guest without KVM makes some
        # ten in a second: not all at the same moment, but all are open at once.
        opening = threading.Semaphore(OPENING)

        def one(_: int) -> str:
            try:
                with opening:
                    number = self.connect(kind, host, port)
            except OSError as refused:
                meeting.abort()
                return errno.errorcode[refused.errno or 0]
            with contextlib.suppress(threading.BrokenBarrierError):  # the result tells
                meeting.wait(100)
            self.send(number, text)
            assert self.text(number, len(text)) == text
            return self._met(meeting, number)

        return self._together(one, count)

    def many_accept(self, number: int, count: int, size: int) -> Any:
        """The other side: accept that many, echo on all of them; returns their modes."""
        accepted = [self.accept(number) for _ in range(count)]
        meeting = threading.Barrier(count)

        def one(place: int) -> str:
            each = accepted[place]
            text = self.text(each, size)
            meeting.wait(100)  # all carry data now
            self.send(each, text)
            return self._met(meeting, each)

        return self._together(one, count)

    def _met(self, meeting: threading.Barrier, number: int) -> str:
        """Close the socket; returns smc_diag's report from when all were open."""
        sock = self._sockets[number]
        if meeting.wait(100) == 0:
            # One dump for all: it goes by positions, so sockets that open or close hide others.
            self._dump = smc_netlink.sockets()
        meeting.wait(100)
        mode = str(self._dump[os.fstat(sock.fileno()).st_ino]["mode"])
        self.shutdown(number)
        assert not sock.recv(1)
        self.close(number)
        return mode

    def _together(self, one: Any, count: int) -> dict[str, int]:
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            modes = list(pool.map(one, range(count)))
        return {mode: modes.count(mode) for mode in modes}

    def shell(self, command: str) -> str:
        """Run a shell command with this guest's functions (`init.sh`); returns its output."""
        done = subprocess.run(
            ["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise OSError(done.returncode, done.stdout)
        return done.stdout

    def program(self, command: list[str], by: str, library: str) -> int:
        """Start a program whose TCP sockets become SMC sockets, by "family" or "protocol"."""
        number = next(self._numbers)
        self._programs[number] = subprocess.Popen(
            command, env={**os.environ, "LD_PRELOAD": library, "SMC_BY": by},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        return number

    def modes_of(self, number: int) -> list[str]:
        """smc_diag's report of the program's open connections (states of TCP: 1 is open)."""
        place = f"/proc/{self._programs[number].pid}/fd"
        names = [os.readlink(f"{place}/{each}") for each in os.listdir(place)]
        known = smc_netlink.sockets()
        found = (known.get(int(name[8:-1])) for name in names if name.startswith("socket:["))
        return [info["mode"] for info in found if info and info["state"] == 1]

    def ended(self, number: int, stop: bool = False) -> list[Any]:
        """Wait for the program's end, or end it; returns status and output."""
        program = self._programs.pop(number)
        if stop:
            program.terminate()
        output = program.communicate()[0]
        return [program.returncode, output]

    def ueid(self, name: str, add: bool = True) -> None:
        smc_netlink.ueid(name, add=add)

    def versions(self) -> dict[str, int]:
        return smc_netlink.versions()

    def pnet(self, name: str, interface: str | None = None, device: str | None = None) -> None:
        smc_netlink.pnet_add(name, interface=interface, device=device)

    def pnet_flush(self) -> None:
        smc_netlink.pnet_flush()


def _waiting(sock: socket.socket) -> int:
    """Bytes that recv() would give now."""
    answer = fcntl.ioctl(sock.fileno(), termios.FIONREAD, bytes(4))
    return int.from_bytes(answer, sys.byteorder)


def make(kind: str) -> socket.socket:
    """A TCP socket ("tcp"), or one of SMC by its address family or its protocol number."""
    if kind not in ("smc", "smc6"):
        protocol = IPPROTO_SMC if kind == "ipproto" else 0
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol)
    # CPython packs no addresses for a family it does not know: the kernel takes those of IP.
    ip, protocol = (socket.AF_INET6, SMCPROTO_SMC6) if kind == "smc6" else (socket.AF_INET, 0)
    family = socket.socket(AF_SMC, socket.SOCK_STREAM, protocol)
    return socket.socket(ip, socket.SOCK_STREAM, 0, fileno=family.detach())


def main() -> None:
    agent = Agent()
    [port] = map(int, sys.argv[1:])
    with socket.create_server(("0.0.0.0", port)) as listener:
        control = listener.accept()[0]
    lock = threading.Lock()

    def perform(number: int, function: str, arguments: dict[str, Any]) -> None:
        result, problem = None, None
        try:
            result = getattr(agent, function)(**arguments)
        except Exception as error:
            name = errno.errorcode.get(getattr(error, "errno", None) or 0, type(error).__name__)
            problem = [name, str(error)]
        with lock:
            control.sendall(json.dumps([number, result, problem]).encode() + b"\n")

    for line in control.makefile():
        number, function, arguments = json.loads(line)
        threading.Thread(target=perform, args=(number, function, arguments), daemon=True).start()
    sys.stdout.write("ended\n")
    sys.stdout.flush()
    # Threads may be blocked in sockets, and the kernel takes its time to close those whose peer
    # has gone: the caller waits for the line, not for the end of the process.
    os._exit(0)


if __name__ == "__main__":
    main()
