"""The example and campaign of faults under traffic: they find what they are for."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from examples.chaos import KINDS as FAULTS
from examples.chaos import Chaos, Policy
from examples.chaos_load import KINDS, Conversation, EndedEarly, Wrong
from examples.chaos_log import CONNECTIONS, MESSAGES, Recollection
from examples.chaos_peer import outcome
from examples.chaos_result import Result
from examples.chaos_sides import Side, Sides
from tests.timing import PATIENCE
from trio_smc.wire import cdc

# TEST LINK takes its time.
QUICK = {kind: weight for kind, weight in FAULTS.items() if kind != "link-silent"}

Damage = Callable[[bytes], bytes]


class Tampered:
    """A stream whose received data is changed on the way."""

    def __init__(self, stream: Any, damage: Damage) -> None:
        self._stream = stream
        self._damage = damage

    async def receive_some(self, most: int) -> bytes:
        return self._damage(bytes(await self._stream.receive_some(most)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def number_of(kind: str, seed: int) -> int:
    """A conversation of that kind."""
    return next(
        number
        for number in range(1000)
        if Conversation(stream=object(), seed=seed, number=number).kind == kind  # type: ignore[arg-type]
    )


async def converse(kind: str, seed: int, damage: Damage = bytes) -> list[str]:
    """How it ended for the client, whose received data is damaged, and for the server."""
    a, b = trio.testing.memory_stream_pair()
    how: list[str] = ["", ""]

    async def client() -> None:
        one = Conversation(
            stream=Tampered(a, damage),  # type: ignore[arg-type]
            seed=seed,
            number=number_of(kind, seed),
            scale=1,
        )
        how[0] = await outcome(one)
        await a.aclose()

    async def server() -> None:
        two = await Conversation.accept(b)  # type: ignore[arg-type]
        assert two.kind == kind
        how[1] = await outcome(two)
        await b.aclose()

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client)
            nursery.start_soon(server)
    return how


class TestLoad:
    @pytest.mark.parametrize("kind", ["stream", "request", "half-close"])
    async def test_undamaged(self, kind: str, seed: int) -> None:
        assert await converse(kind, seed) == ["done", "done"]

    @pytest.mark.parametrize("kind", ["stream", "half-close"])
    @pytest.mark.parametrize(
        "damage",
        [
            lambda data: data[:-1] + bytes([data[-1] ^ 1]) if data else data,
            lambda data: data[1:],
            lambda data: data + data[-1:],
            lambda data: data[::-1],
        ],
        ids=["changed", "lost", "doubled", "swapped"],
    )
    async def test_damage_is_found(self, kind: str, damage: Damage, seed: int) -> None:
        client, _ = await converse(kind, seed, damage)
        # If the only byte of a piece is lost, the stream has ended.
        assert client.startswith(("wrong", "ended early")), client

    async def test_a_byte_too_many_is_found_even_if_it_is_the_right_one(self, seed: int) -> None:
        a, b = trio.testing.memory_stream_pair()
        tampered: Any = Tampered(a, lambda data: data + bytes(1))
        one = Conversation(stream=tampered, seed=seed, number=0)
        await b.send_all(b"ab")
        with pytest.raises(Wrong, match="3 bytes where 2 were asked for"):
            await one._receive(2)

    async def test_an_early_end_is_found(self, seed: int) -> None:
        a, b = trio.testing.memory_stream_pair()
        one = Conversation(stream=a, seed=seed, number=number_of("half-close", seed), client=False)  # type: ignore[arg-type]
        await b.aclose()
        with pytest.raises(EndedEarly, match="too early"):
            await one.run()

    @pytest.mark.parametrize(("breaks", "how"), [(True, "reset"), (False, "ended early")])
    async def test_an_end_beside_an_error_is_part_of_it(
        self, breaks: bool, how: str, seed: int
    ) -> None:
        """As over TCP: one task gets the error, the other one the end."""
        over = trio.Event()

        class Ending:
            header_is_sent = False

            async def send_all(self, data: bytes) -> None:
                if self.header_is_sent:
                    await over.wait()
                    if breaks:
                        raise trio.BrokenResourceError
                    await trio.sleep_forever()
                self.header_is_sent = True

            async def receive_some(self, most: int) -> bytes:
                await over.wait()
                return b""

        ending: Any = Ending()
        found: list[str] = []

        async def talk() -> None:
            number = number_of("stream", seed)
            found.append(await outcome(Conversation(stream=ending, seed=seed, number=number)))

        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(talk)
                await trio.testing.wait_all_tasks_blocked()
                over.set()
        assert found[0].startswith(how)

    def test_all_kinds_come(self, seed: int) -> None:
        assert {
            Conversation(stream=object(), seed=seed, number=number).kind  # type: ignore[arg-type]
            for number in range(1000)
        } == set(KINDS)


class TestJudgement:
    def judged(self, *, resets: set[int], due: dict[int, bool]) -> list[str]:
        chaos = Chaos(Policy(seed=1), lambda text: None)
        chaos.result.resets = resets
        chaos.result.due = due
        chaos.judge()
        return chaos.result.problems

    def test_only_and_all_that_must_be_reset(self) -> None:
        assert self.judged(resets={3, 4}, due={3: True, 4: False, 5: False}) == []
        assert self.judged(resets={3}, due={}) == [
            "connection 3 was reset, and nothing of it was lost"
        ]
        assert self.judged(resets=set(), due={3: True}) == [
            "connection 3 went on, and a message of it was lost"
        ]


class TestWhole:
    """When the next fault may come: one that comes too early may take the last link."""

    def links(self, *ids: int, coming: bool = False) -> dict[str, Any]:
        return {
            "groups": 1, "kind": "single" if coming else "symmetric", "ids": list(ids),
            "links": list(ids[:-1] if coming else ids), "coming": coming,
        }  # fmt: skip

    def sides(self) -> Sides:
        sides = Sides(Policy(seed=1), Result(seed=1, rnics=2), lambda text: None)
        process: Any = None
        sides.both = [Side(role, process) for role in ("server", "client")]
        self.report_links(sides, 1, 2)
        return sides

    def report_links(self, sides: Sides, *ids: int, coming: bool = False) -> None:
        for side in sides.both:
            sides.on_links(side, **self.links(*ids, coming=coming))

    async def test_a_link_that_a_fault_has_met_must_have_gone(self) -> None:
        sides = self.sides()
        assert sides.whole()
        server, _ = sides.both
        sides.on_struck(server, "link-down", "server-1", self.links(1, 2), hit=[2])
        assert not sides.whole()
        self.report_links(sides, 1)
        assert not sides.whole()
        self.report_links(sides, 1, 3)
        assert sides.whole()

    async def test_so_must_one_that_was_coming(self) -> None:
        """A struck link may count as usable for a moment, until the failure is noticed."""
        sides = self.sides()
        server, _ = sides.both
        self.report_links(sides, 1, 3, coming=True)
        struck = self.links(1, 3, coming=True)
        sides.on_struck(server, "port-flap", "server-1", struck, hit=[3])
        self.report_links(sides, 1, 3)
        assert not sides.whole()
        self.report_links(sides, 1, 4)
        assert sides.whole()

    async def test_all_that_were_met_one_after_the_other(self) -> None:
        sides = self.sides()
        server, _ = sides.both
        for hit in ([1], [2]):
            sides.on_struck(server, "link-down", "server-0", self.links(1, 2), hit=hit)
        self.report_links(sides, 1, 3)
        assert not sides.whole()
        self.report_links(sides, 3, 4)
        assert sides.whole()

    async def test_a_harmless_fault_costs_no_link(self) -> None:
        sides = self.sides()
        server, _ = sides.both
        sides.on_struck(server, "delay", "server-0", self.links(1, 2), hit=[1])
        assert sides.whole()


class TestRecollection:
    def test_the_history_of_a_connection(self) -> None:
        recollection = Recollection()
        for name, text in (
            ("trio_smc.failover", "<Connection 0x00000007 ACTIVE> continues on link 2"),
            ("trio_smc.failover", "<Connection 0x00000008 ACTIVE> continues on link 2"),
            ("trio_smc.link", "<Link 2 ACTIVE> failed"),
        ):
            recollection.handle(logging.makeLogRecord({"name": name, "msg": text}))
        recollection.sent("a", 5, cdc.pack(3, 7, 0, 0, 0, 0), 0)
        recollection.sent("a", 6, cdc.pack(3, 7, 0, 0, 0, 0, cdc.FAILOVER_VALIDATION), 0)
        recollection.sent("a", 5, cdc.pack(4, 8, 0, 0, 0, 0), 0)
        recollection.sent("a", 5, bytes(44), 0)
        records = [text for _, text in recollection.of([7, 9])]
        assert records == [
            "trio_smc.failover: <Connection 0x00000007 ACTIVE> continues on link 2",
            "trio_smc.link: <Link 2 ACTIVE> failed",
            "a, queue pair 5: sent message 3 to 0x00000007, flags 0x00, status 0",
            "a, queue pair 6: validation of message 3 to 0x00000007, flags 0x00, status 0",
        ]

    def test_it_forgets(self) -> None:
        recollection = Recollection()
        for token in range(2 * CONNECTIONS):
            recollection.sent("a", 5, cdc.pack(1, token, 0, 0, 0, 0), 0)
        for sequence in range(2 * MESSAGES):
            recollection.sent("a", 5, cdc.pack(sequence, 7, 0, 0, 0, 0), 0)
        assert recollection.of([CONNECTIONS - 2]) == []
        assert len(recollection.of([2 * CONNECTIONS - 1])) == 1
        assert len(recollection.of([7])) == MESSAGES


async def test_a_problem_is_reported_with_the_history_of_both_sides(
    runtime_directory: object, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault is kept from the judge, so the reset that it causes seems to have no reason."""
    struck = Sides.on_struck

    def keep_quiet(self: Sides, side: Any, number: int | None = None, **event: Any) -> None:
        struck(self, side, number=None, **event)

    monkeypatch.setattr(Sides, "on_struck", keep_quiet)
    policy = Policy(
        seed=seed & 0xFFFF, faults=6, rnics=2, connections=8, scale=10, during=0,
        kinds={"not-placed": 1},
    )  # fmt: skip
    with trio.fail_after(2 * PATIENCE):
        result = await Chaos(policy, lambda text: None).run()
    assert any("nothing of it was lost" in problem for problem in result.problems)
    records = "\n".join(result.recollections())
    for part in ("not-placed on", "validation of message", "data was lost with a link", "sent"):
        assert part in records
    assert "client: " in records
    assert "server: " in records


async def test_the_server_goes_on_until_the_client_has_ended() -> None:
    """A connection that it has accepted and heard nothing of would end with it."""
    records: list[tuple[str, bool]] = []

    class FakeSide:
        ended = False

        def __init__(self, role: str) -> None:
            self.role = role

        async def send_command(self, do: str) -> None:
            assert do == "stop"
            records.append((self.role, client.ended))
            nursery.start_soon(self.end)

        async def end(self) -> None:
            await trio.testing.wait_all_tasks_blocked()
            self.ended = True
            sides._changed.set()

    server, client = FakeSide("server"), FakeSide("client")
    result = Result(seed=1, rnics=2)
    sides: Any = Sides(Policy(seed=1), result, lambda text: None)
    sides.both = [server, client]
    async with trio.open_nursery() as nursery:
        await sides.finish()
    assert records == [("client", False), ("server", True)]
    assert server.ended
    assert result.problems == []


async def test_one_rnic(runtime_directory: object, seed: int) -> None:
    """With its only link each connection is lost; new ones come, and what came is right."""
    policy = Policy(seed=seed & 0xFFFF, faults=5, rnics=1, connections=5, during=0, scale=10)
    lines: list[str] = []
    with trio.fail_after(2 * PATIENCE):
        result = await Chaos(policy, lines.append).run()
    assert result.problems == [], lines
    assert result.injected >= 5
    assert result.bytes > 0


async def test_two_rnics(
    runtime_directory: object, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost, and only connections with a message that was not placed are reset.

    Each fault names the link that it has struck.
    """
    struck, met = Sides.on_struck, Counter[int]()

    def note(self: Sides, side: Any, kind: str, *records: Any, **event: Any) -> None:
        if kind not in ("process-stop", "port-flap"):
            met[len(event["hit"])] += 1
        struck(self, side, kind, *records, **event)

    monkeypatch.setattr(Sides, "on_struck", note)
    policy = Policy(seed=seed & 0xFFFF, faults=25, rnics=2, connections=8, scale=10, kinds=QUICK)
    lines: list[str] = []
    with trio.fail_after(2 * PATIENCE):
        result = await Chaos(policy, lines.append).run()
    assert result.problems == [], lines
    assert result.injected >= 25
    assert result.failovers > 0
    assert set(met) == {1}
