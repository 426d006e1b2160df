"""Tests in processes of their own: forks, and systems other than Linux."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import trio

from tests.timing import PATIENCE


async def run(program: str, *arguments: str) -> str:
    """Run a program that must exit with 0, and return its output."""
    with trio.fail_after(PATIENCE):
        done = await trio.run_process(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(program), *arguments],
            capture_stdout=True,
            stderr=subprocess.STDOUT,
            check=False,
        )
    output = str(done.stdout.decode())
    assert done.returncode == 0, output
    return output


# --- forks ---------------------------------------------------------------------------------------

FORK = """
    import os, traceback
    import outcome, trio, trio_smc
    from trio_smc import Config

    def refuses(call, *args, **options):
        try:
            result = call(*args, **options)
            if hasattr(result, "send"):
                for _ in range(5):  # the call may yield before the error
                    result.send(outcome.Value(None) if _ else None)
        except RuntimeError as error:
            assert "forked child" in str(error), error
        else:
            raise AssertionError(call)

    def in_the_child(stack, listener, mine, other, group):
        address = ("127.0.0.1", 1)
        for use in (trio_smc, stack):
            refuses(use.open_stream, *address)
            refuses(use.open_listeners, 0)
            refuses(use.serve, print, 0)
        refuses(listener.accept)
        refuses(listener.aclose)
        for stream in (mine, other):
            refuses(stream.send_all, b"from the child")
            refuses(stream.receive_some)
            refuses(stream.wait_send_all_might_not_block)
            refuses(stream.send_eof)
            refuses(stream.statistics)
        refuses(mine.aclose)
        refuses(other.abort)
        refuses(group.terminate)
        refuses(stack.statistics)
        stack.runtime.pump.drain()
        # The end of the stack in the child changes nothing for the parent.
        try:
            stack.runtime.shut_down().send(None)
        except StopIteration:
            pass
        listener.publication._made.remove()
        stack.runtime.free()

    async def main():
        async with trio_smc.open_stack(Config(receive_buffer=16384)) as stack:
            [listener] = await stack.open_listeners(0, host="127.0.0.1")
            address = listener.socket.getsockname()
            mine = await stack.open_stream(*address)
            other = await listener.accept()
            await mine.send_all(b"before")
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    in_the_child(stack, listener, mine, other, stack.link_groups[0])
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            assert os.waitpid(child, 0)[1] == 0
            assert await other.receive_some() == b"before"
            await other.send_all(b"after")
            assert await mine.receive_some() == b"after"
            async with await stack.open_stream(*address) as again:
                assert again.mode == "smc-r"
                await (await listener.accept()).aclose()
            await mine.aclose()
            await other.aclose()
        print("the parent continues")

    trio.run(main)
"""


async def test_a_forked_child_may_use_no_object_of_its_parent() -> None:
    assert await run(FORK) == "the parent continues\n"


LASTING_CHILD = """
    import gc, hashlib, multiprocessing, os, pathlib, signal, sys, threading, time, warnings
    import trio, trio_smc
    from trio_smc import Config
    from trio_smc.control import server
    from trio_smc.rendezvous.discovery import publication

    # Since Python 3.12, a fork warns if the process has several threads.
    warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
    HOW, LOCKED = sys.argv[1], sys.argv[2] == "locked"
    server.NAME_INTERVAL = publication.NAME_INTERVAL = 0.05
    private = Config().private_directory()
    capture = private.parent / "capture"
    ready, go = os.pipe(), os.pipe()

    def files():
        return sorted(str(each) for each in private.parent.rglob("*"))

    async def let_time_pass():
        # Let each timer fire, and each task run that waits for a descriptor.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            await trio.sleep(0.6)
            gc.collect()

    def in_a_child_without_trio():
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        gc.collect()

    async def main():
        # Short, so that timers fire in the child.
        config = Config(receive_buffer=16384, test_link_interval=0.1, test_link_timeout=0.1,
                        link_group_idle=0.1, capture=capture, shutdown_timeout=0.5)
        async with trio_smc.open_stack(config) as stack:
            [listener] = await stack.open_listeners(0, host="127.0.0.1")
            address = listener.socket.getsockname()
            mine = await stack.open_stream(*address)
            other = await listener.accept()
            child = os.fork() if HOW == "fork" else 0
            if HOW == "fork" and child == 0:
                # Parent and child share Trio's epoll instance, so only one of them may run.
                os.write(ready[1], b"x")
                os.read(go[0], 1)
                before = files()
                await let_time_pass()
                os._exit(0 if files() == before else 7)
            process = None
            if HOW == "multiprocessing":
                process = multiprocessing.get_context("fork").Process(
                    target=in_a_child_without_trio
                )
                await trio.to_thread.run_sync(process.start)
            await trio.to_thread.run_sync(os.read, ready[0], 1)
            await trio.sleep(0.3)
            await mine.send_all(b"to and")
            assert await other.receive_some() == b"to and"
            await other.send_all(b"fro")
            assert await mine.receive_some() == b"fro"
            async with await stack.open_stream(*address) as again:
                assert again.mode == "smc-r", again.fallback
                await (await listener.accept()).aclose()
            await mine.aclose()
            await other.aclose()
            await listener.aclose()
        left = [each for each in files() if pathlib.Path(each).is_socket()]
        assert left == [], left
        # The child has closed the descriptor that it inherited, so the file is not locked.
        async with trio_smc.open_stack(Config(rnics=(), control=False, capture=capture)):
            pass
        digest = hashlib.sha256(capture.read_bytes()).digest()
        before = files()
        os.write(go[1], b"x")
        if process is None:
            assert os.waitpid(child, 0)[1] == 0
        else:
            await trio.to_thread.run_sync(process.join)
            assert process.exitcode == 0, process.exitcode
        assert files() == before, (files(), before)
        assert hashlib.sha256(capture.read_bytes()).digest() == digest
        capture.unlink()
        print("the parent continues")

    if LOCKED:
        # A thread of the parent holds the capture's lock at the moment of each fork.
        from trio_smc.capture import sinks
        holding, release = threading.Event(), threading.Event()
        found = []
        initialise = sinks.FileCapture.__init__

        def note(self, *args):
            initialise(self, *args)
            found.append(self)

        sinks.FileCapture.__init__ = note

        def hold():
            with found[0]._wakeup._cond:
                holding.set()
                release.wait(5)

        def before_fork():
            if found:
                holding.clear()
                release.clear()
                threading.Thread(target=hold, daemon=True).start()
                holding.wait(5)

        os.register_at_fork(before=before_fork, after_in_parent=release.set)
    trio.run(main)
"""


@pytest.mark.parametrize("held", ["free", "locked"])
@pytest.mark.parametrize("how", ["fork", "multiprocessing"])
async def test_a_forked_child_that_keeps_running_touches_nothing(how: str, held: str) -> None:
    """The child changes no name, file or shared memory, before and after the parent's stack
    closes."""
    assert await run(LASTING_CHILD, how, held) == "the parent continues\n"


DAEMON = """
    import os
    import trio, trio_smc

    async def main():
        [listener] = await trio_smc.open_listeners(0, host="127.0.0.1")
        async with await trio_smc.open_stream(*listener.socket.getsockname()) as stream:
            other = await listener.accept()
            for _ in range(3):
                if os.fork():
                    assert os.wait()[1] == 0
                    break
            else:
                os._exit(0)
            if os.getpid() != parent:
                os._exit(0)
            await other.send_all(b"the parent continues")
            print(str(await stream.receive_some(), "ascii"))
            await other.aclose()
        await listener.aclose()

    parent = os.getpid()
    trio.run(main)
"""


async def test_children_of_forked_children_print_no_traceback() -> None:
    assert await run(DAEMON) == "the parent continues\n"


FORK_BETWEEN_RUNS = """
    import os
    import trio, trio_smc

    async def main():
        async with trio.open_nursery() as nursery:
            [listener] = await trio_smc.open_listeners(0, host="127.0.0.1")
            async with await trio_smc.open_stream(*listener.socket.getsockname()) as stream:
                assert stream.mode == "smc-r"
                await (await listener.accept()).aclose()
            await listener.aclose()

    trio.run(main)
    child = os.fork()
    trio.run(main)
    if child:
        assert os.waitpid(child, 0)[1] == 0
        print("both")
"""


async def test_a_forked_child_that_starts_a_new_run() -> None:
    """Two Trio runs share nothing, so a child may start a run of its own."""
    assert await run(FORK_BETWEEN_RUNS) == "both\n"


# --- other systems -------------------------------------------------------------------------------

ELSEWHERE = """
    import fcntl, logging, mmap, os, select, socket, sys
    import encodings.idna
    import trio

    # Imitate another system as far as possible: Trio itself needs epoll and a socket pair.
    sys.platform = {platform!r}
    for module, names in {{
        os: ("eventfd", "eventfd_read", "eventfd_write", "memfd_create", "getuid", "geteuid",
             "EFD_NONBLOCK", "EFD_CLOEXEC", "MFD_CLOEXEC", "MFD_ALLOW_SEALING", "sched_yield",
             "O_DIRECTORY", "O_NOFOLLOW", "register_at_fork", "fork"),
        socket: ("SCM_RIGHTS", "SO_PEERCRED", "TCP_INFO", "MSG_CMSG_CLOEXEC",
                 "IP_BIND_ADDRESS_NO_PORT", "AF_NETLINK"),
        mmap: ("MAP_SHARED", "PROT_READ", "PROT_WRITE"),
    }}.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    for name in ("fcntl", "termios", "resource"):
        sys.modules[name] = None

    import trio_smc

    logging.disable()
    from trio_smc import Config

    async def talk(config):
        async with trio_smc.open_stack(config) as stack:
            assert stack.rnics == stack.link_groups == ()
            assert len(stack.peer_id) == 8
            [listener] = await trio_smc.open_listeners(0, host="127.0.0.1")
            mine = await trio_smc.open_stream(
                *listener.socket.getsockname(), local_address="127.0.0.1"
            )
            await mine.send_all(b"hello")
            other = await listener.accept()
            assert await other.receive_some() == b"hello"
            print(mine.mode, mine.fallback.reason, other.mode, other.fallback.reason)
            await mine.aclose()
            await other.aclose()
            await listener.aclose()

    async def main():
        await talk(None)
        await talk(Config(discovery="assume"))
        await talk(Config(rnics=(trio_smc.SoftRnic(),)))
        try:
            await talk(Config(require_smc=True))
        except trio_smc.SmcUnavailable as error:
            print(error.fallback.reason)

    trio.run(main)
"""


async def test_other_systems_use_tcp() -> None:
    expected = "tcp unsupported-platform tcp unsupported-platform\n"
    for platform in ("darwin", "win32", "freebsd14"):
        output = await run(ELSEWHERE.format(platform=platform))
        assert output == (
            expected + expected.replace("tcp unsupported-platform\n", "tcp peer-not-capable\n")
            + expected + "unsupported-platform\n"
        ), platform  # fmt: skip
