"""What needs a process of its own: forks, and systems other than Linux."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import trio

from tests.api.api_peers import PATIENCE


async def run(program: str) -> str:
    """What a program prints; it must end well."""
    with trio.fail_after(PATIENCE):
        done = await trio.run_process(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
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
                for _ in range(5):  # a schedule point may come first
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
        # Leaving takes nothing away from the parent.
        try:
            stack.runtime.shut_down().send(None)
        except StopIteration:
            pass
        listener.publication._made.remove()
        stack.runtime._free()

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
        print("the parent goes on")

    trio.run(main)
"""


async def test_use_in_a_forked_child() -> None:
    assert await run(FORK) == "the parent goes on\n"


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


async def test_a_child_that_starts_anew() -> None:
    """Nothing is inherited between two runs, so a child may begin one of its own."""
    assert await run(FORK_BETWEEN_RUNS) == "both\n"


# --- other systems -------------------------------------------------------------------------------

ELSEWHERE = """
    import fcntl, logging, mmap, os, select, socket, sys
    import encodings.idna
    import statemachine
    import trio

    # As far as this can be pretended: Trio itself needs its epoll and a socket pair.
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
    for name in ("fcntl", "termios", "resource", "pyroute2"):
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


async def test_other_systems() -> None:
    expected = "tcp unsupported-platform tcp unsupported-platform\n"
    for platform in ("darwin", "win32", "freebsd14"):
        output = await run(ELSEWHERE.format(platform=platform))
        assert output == (
            expected + expected.replace("tcp unsupported-platform\n", "tcp peer-not-capable\n")
            + expected + "unsupported-platform\n"
        ), platform  # fmt: skip
