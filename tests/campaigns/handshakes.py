"""Live handshakes of two whole stacks with everything going wrong that can.

    python -m tests.campaigns.handshakes --cases 50000 [--seed N] [--case K]

A case is one TCP connection between two stacks (one in ten: of a stack with itself) that may
have talked before.  On its way something is damaged, on either side: CLC messages and LLC
messages are changed bit by bit or with a lie in one field, cut short, lengthened, doubled,
swapped, replaced or lost; the TCP connection falls silent, ends or is reset; a link breaks, a send
fails, memory or queue pairs run out; an address gets no answer, or a late one; bytes come
one by one.  Then both applications send, and everything is closed.  Time is a number, so time-outs
cost nothing.

What holds in every case:

1. Both sides come to an outcome, Established, FellBack or Failed, within the sum of the
   deadlines; nothing raises, nothing is logged with a traceback.
2. A side that fell back has taken whole CLC messages from TCP and not a byte more; its
   application gets exactly what follows.  So it gets no CLC byte, unless damage on the way put
   one behind a Decline, where no side may look for it (RFC 7609, C.6), or took away a Decline.
3. When one side is Established and the other is not, no application gets a byte, and the
   established side is reset as soon as what the other sends, or its reset, arrives.
4. Established on both sides: each application gets what the other sent and nothing else, or
   an error.  (Only a lie about credentials, which no checksum protects, may change the bytes.)
5. Nothing happened on the way, or it came too late: Established on both sides.
6. Connections that were open before work afterwards, or are reset on both sides.
7. After both stacks are closed nothing is left: no group, queue pair, region, memory, timer.

A case depends on the seed and its number only: ``--seed N --case K`` replays case K alone.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.campaigns._options import parse
from tests.rendezvous.rendezvous_pair import SIZE, Call, End, Side, World
from tests.rnic.memory_rnic import PlainQueuePair
from trio_smc._base.errors import ProtocolError
from trio_smc._base.reasons import Origin
from trio_smc.datapath.connection import Connection
from trio_smc.rendezvous.negotiation import Established, Failed, FellBack
from trio_smc.wire import clc, llc
from trio_smc.wire.cdc import CDC_TYPE

__all__ = ["Result", "run"]

_NEVER = 1 << 30
_LONGEST = 45.0
"""Seconds: 6 for each CLC message, 5 for each LLC message of a first contact, 2 for later ones."""


@dataclass
class Result:
    """The result of a campaign.

    Fields:
      outcomes: by (client's, server's) outcome.
      damages: how often each kind of damage was done.
      failures: one line for each case that broke a rule, with what replays it.
    """

    cases: int
    seed: int
    seconds: float = 0.0
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    damages: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True if no case broke a rule."""
        return not self.failures


# --- damage to bytes ---------------------------------------------------------------------------

_Damage = Callable[[random.Random, bytes], bytes]


def _flip(rng: random.Random, data: bytes) -> bytes:
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return bytes(raw)


def _set(rng: random.Random, data: bytes) -> bytes:
    raw = bytearray(data)
    raw[rng.randrange(len(raw))] = rng.choice((0, 1, 2, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(raw)


def _truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def _extend(rng: random.Random, data: bytes) -> bytes:
    return data + rng.randbytes(rng.randrange(1, 60))


def _double(_: random.Random, data: bytes) -> bytes:
    return data + data


def _unchanged(data: bytes) -> bytes:
    return data


def _lose(_rng: random.Random, _data: bytes) -> bytes:
    return b""


def _noise(rng: random.Random, data: bytes) -> bytes:
    return rng.randbytes(len(data))


def _number(rng: random.Random, old: int, known: list[int]) -> int:
    return rng.choice((0, 1, 2, old ^ 1, old + 1, rng.getrandbits(8), *known))


def _lie(rng: random.Random, message: object, numbers: list[int], names: list[bytes]) -> bytes:
    """The message with one field, or two, saying something else."""
    assert dataclasses.is_dataclass(message)
    assert not isinstance(message, type)
    changes: dict[str, object] = {}
    for each in rng.sample(dataclasses.fields(message), k=rng.choice((1, 1, 2))):
        old = getattr(message, each.name)
        if isinstance(old, bool):
            changes[each.name] = not old
        elif isinstance(old, int):
            changes[each.name] = _number(rng, old, numbers)
        elif isinstance(old, bytes) and old:
            same = [name for name in names if len(name) == len(old)]
            changes[each.name] = rng.choice((*same, rng.randbytes(len(old)), bytes(len(old))))
    try:
        changed = dataclasses.replace(message, **changes)
        return changed.encode()  # type: ignore[attr-defined,no-any-return]
    except ValueError:
        return b"?"


def _other_clc(rng: random.Random, call: Call, numbers: list[int]) -> bytes:
    """A well-formed CLC message of any kind, out of place or full of lies."""
    side = rng.choice((call.client.side, call.server.side))
    kind = rng.randrange(4)
    if kind == 0:
        return call.proposal.encode()
    if kind == 1:
        return clc.Decline(
            peer_id=side.stack.groups.peer_id,
            diagnosis=rng.choice((0x03010000, 0x04000000, rng.getrandbits(32))),
            out_of_sync=rng.random() < 0.5,
            more_diagnosis=rng.choice((None, (0, 1, 2, 3))),
        ).encode()
    cls = clc.Accept if kind == 2 else clc.Confirm
    return cls(
        first_contact=rng.random() < 0.5 and kind == 2,  # version 1 has none in Confirm
        peer_id=side.stack.groups.peer_id,
        gid=side.rnic.gid,
        mac=side.rnic.mac,
        qp_number=rng.choice(numbers) % (1 << 24) or 1,
        rkey=rng.choice(numbers) % (1 << 32),
        rmbe_index=rng.choice((1, 1, 2, 255)),
        alert_token=rng.getrandbits(32),
        buffer_size_code=rng.choice((0, 5, 6, 15)),
        qp_mtu=rng.choice((5, 5, 1, 0, 15)),
        rmb_address=rng.choice(numbers) % (1 << 62),
        initial_psn=rng.getrandbits(24),
    ).encode()


def _other_llc(rng: random.Random, call: Call, numbers: list[int]) -> bytes:
    """A well-formed LLC or CDC message of any kind, out of place or full of lies."""
    side = rng.choice((call.client.side, call.server.side))
    reply, flag = rng.random() < 0.5, rng.random() < 0.5
    mac, gid = side.rnic.mac, side.rnic.gid
    link, number = rng.choice((1, 1, 2, 0)), rng.choice(numbers)
    rkey, address = number % (1 << 32), rng.choice(numbers) % (1 << 62)
    qp = number % (1 << 24)
    pick = rng.randrange(11)
    if pick == 0:
        return llc.ConfirmLink(
            reply=reply, mac=mac, gid=gid, qp_number=qp, link_number=link, link_user_id=7,
            max_links=rng.choice((0, 1, 2, 255)),
        ).encode()  # fmt: skip
    if pick == 1:
        return llc.AddLink(
            reply=reply, rejected=flag, reason=rng.randrange(4), mac=mac, gid=gid, qp_number=qp,
            link_number=link, qp_mtu=rng.choice((0, 5, 9)),
        ).encode()  # fmt: skip
    if pick == 2:
        return llc.AddLinkContinuation(reply=reply, link_number=link, tokens_left=0).encode()
    if pick == 3:
        return llc.DeleteLink(
            reply=reply, all_links=flag, orderly=rng.random() < 0.5, link_number=link, reason=1
        ).encode()
    if pick == 4:
        return llc.ConfirmRkey(
            reply=reply, negative=flag, retry=rng.random() < 0.5, other_tokens=0, rkey=rkey,
            address=address,
        ).encode()  # fmt: skip
    if pick == 5:
        return llc.ConfirmRkey(
            reply=reply,
            other_tokens=1,
            rkey=rkey,
            address=address,
            others=(llc.LinkRToken(link_number=link, rkey=rkey, address=address),),
        ).encode()
    if pick == 6:
        return llc.ConfirmRkeyContinuation(reply=reply, tokens_left=0).encode()
    if pick == 7:
        return llc.DeleteRkey(reply=reply, negative=flag, rkeys=(rkey,)).encode()
    if pick == 8:
        return llc.TestLink(reply=reply, user_data=rng.randbytes(16)).encode()
    if pick == 9:
        return bytes((0x80 | rng.randrange(64), 44)) + rng.randbytes(42)
    return bytes((CDC_TYPE, 44)) + rng.randbytes(2) + rkey.to_bytes(4, "big") + rng.randbytes(36)


_BYTES: dict[str, _Damage] = {
    "flip": _flip,
    "set": _set,
    "truncate": _truncate,
    "extend": _extend,
    "double": _double,
    "lose": _lose,
    "noise": _noise,
}
_PLACES = (
    "clc", "clc", "clc", "llc", "llc", "llc", "tcp", "link", "rnic", "address", "none",
)  # fmt: skip


class Case:
    """One handshake and what happens to it."""

    def __init__(self, seed: int, case: int) -> None:
        self.rng = random.Random(f"{seed}/{case}")
        self.damages: list[str] = []
        self.credentials_damaged = False
        self.damaged_streams: set[int] = set()
        self.before: list[Call] = []
        self._later: list[tuple[int, Callable[[], None]]] = []
        self._held: bytes = b""
        self._llc_count = 0

    def run(self) -> tuple[str, str]:
        """Run it; AssertionError says which rule was broken."""
        rng = self.rng
        with World(announces_end=rng.random() < 0.5) as world:
            self.world = world
            client = world.side()
            server = client if rng.random() < 0.1 else world.side()
            for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 4))):
                self.before.append(world.connect(client, server, size=self._size()))
            self.call = call = world.call(client, server, size=self._size())
            for place in rng.choices(_PLACES, k=rng.choice((1, 1, 1, 2))):
                getattr(self, f"_plan_{place}")()
            if rng.random() < 0.2:
                rng.choice(call.ends).pieces = rng.choice((1, 1, 3, 20))
            self._shuffle()
            took = world.finish()
            assert took <= _LONGEST, f"1: it took {took} seconds"
            world.fabric.tamper = None
            for tcp in call.tcp:
                tcp.tamper = _unchanged
            for each in (client.rnic, server.rnic):
                each.most_qps, each.no_memory = None, False
            self._check_outcomes()
            self._use_earlier_ones()
            self._close_all()
        return _name(call.client), _name(call.server)

    def _size(self) -> int:
        # Four elements in an RMB, one, or more than the RMB's usual size.
        return self.rng.choice((SIZE, SIZE, SIZE, SIZE, 4 * SIZE, SIZE // 2))

    def _shuffle(self) -> None:
        """Things happen in any order, and the damages that wait for their moment with them."""
        rng, world, call = self.rng, self.world, self.call
        for step in range(rng.choice((10, 60, 60))):
            while self._later and self._later[0][0] <= step:
                self._later.pop(0)[1]()
            pick = rng.randrange(6)
            if pick < 4:
                call.ends[pick % 2].step(world.clock.now)
            elif pick == 4:
                world.fabric.deliver(rng.choice((1, 2)))
            else:
                rng.choice(world.sides).stack.pump.drain()
                if world.tcp_changes:
                    world.tcp_changes.popleft().process_change()
        for _, late in self._later:
            late()

    def _at(self, damage: str, action: Callable[[], None]) -> None:
        def do() -> None:
            if all(end.outcome is None for end in self.call.ends):
                self.damages.append(damage)
                action()

        self._later.append((self.rng.randrange(60), do))
        self._later.sort(key=lambda item: item[0])

    def _known_numbers(self) -> list[int]:
        """Numbers with a meaning in some field: the most plausible lies."""
        numbers = [1]
        for side in self.world.sides:
            numbers += list(side.rnic.qps)
            for qp in side.rnic.qps.values():
                for region in qp.domain.regions.values():
                    numbers += [region.rkey, region.address, region.address + SIZE]
            for group in side.groups:
                numbers += list(group.connections)
        return numbers

    def _known_names(self) -> list[bytes]:
        sides = self.world.sides
        return [
            name
            for side in sides
            for name in (side.stack.groups.peer_id, side.rnic.gid, side.rnic.mac)
        ]

    # --- what goes wrong ---------------------------------------------------------------------

    def _plan_none(self) -> None:
        pass

    def _plan_clc(self) -> None:
        """One CLC message of one side is damaged."""
        sender, place = self.rng.choice(((0, 0), (0, 1), (0, 1), (1, 0), (1, 0)))
        kind = self.rng.choice((*_BYTES, "lie", "lie", "lie", "replace", "insert", "swap"))
        tcp = self.call.tcp[sender]
        count = 0

        def tamper(piece: bytes) -> bytes:
            nonlocal count
            count += 1
            if kind == "swap":
                return self._swap(piece, count)
            if count != place + 1:
                return piece
            return self._damage_clc(kind, piece, sender)

        # Two plans for one stream: the first is enough.
        if sender not in self.damaged_streams:
            self.damaged_streams.add(sender)
            tcp.tamper = tamper

    def _swap(self, piece: bytes, count: int) -> bytes:
        """A message comes after the next one, or never."""
        self.damages.append("clc swap")
        if count == 1:
            self._held = piece
            return b""
        held, self._held = self._held, b""
        return piece + held

    def _damage_clc(self, kind: str, piece: bytes, sender: int) -> bytes:
        rng = self.rng
        self.damages.append(f"clc {kind}")
        numbers = self._known_numbers()
        if kind == "lie":
            damaged = _lie(rng, clc.decode_untrusted(piece), numbers, self._known_names())
        elif kind == "replace":
            damaged = _other_clc(rng, self.call, numbers)
        elif kind == "insert":
            damaged = _other_clc(rng, self.call, numbers) + piece
        else:
            damaged = _BYTES[kind](rng, piece)
        if damaged == piece:
            self.damages.pop()
            self.damaged_streams.discard(sender)
        elif piece[4] in (clc.MessageType.ACCEPT, clc.MessageType.CONFIRM):
            self.credentials_damaged = True
        return damaged

    def _plan_llc(self) -> None:
        """One LLC message, of either side, is damaged."""
        nth = self.rng.randrange(6)
        kind = self.rng.choice((*_BYTES, "lie", "lie", "lie", "replace", "insert", "fail"))
        if self.world.fabric.tamper is not None:
            return

        def tamper(_: PlainQueuePair, message: bytes) -> list[bytes] | None:
            if all(end.outcome is not None for end in self.call.ends):
                return [message]  # too late: this is no handshake any more
            self._llc_count += 1
            if self._llc_count != nth + 1:
                return [message]
            return self._damage_llc(kind, message)

        self.world.fabric.tamper = tamper

    def _damage_llc(self, kind: str, message: bytes) -> list[bytes] | None:
        rng = self.rng
        self.damages.append(f"llc {kind}")
        numbers = self._known_numbers()
        if kind == "fail":
            return None
        if kind == "double":
            return [message, message]
        if kind == "lose":
            return []
        if kind in ("insert", "replace"):
            other = _other_llc(rng, self.call, numbers)
            if other[0] == llc.MessageType.CONFIRM_LINK:
                # The receiver believes that the peer's elements have eye catchers, so the data of
                # one direction starts four bytes too late.  No other field shows the lie.
                self.credentials_damaged = True
            return [other, message] if kind == "insert" else [other]
        if message[0] != CDC_TYPE:
            self.credentials_damaged = True  # RTokens and the layout of elements
        if kind == "lie" and message[0] != CDC_TYPE:
            try:
                return [_lie(rng, llc.decode_untrusted(message), numbers, self._known_names())]
            except ProtocolError:
                return [message]
        damaged = _BYTES.get(kind, _flip)(rng, message)
        if message[0] == CDC_TYPE:
            self.credentials_damaged = True  # cursors
        return [damaged[:48]]

    def _plan_tcp(self) -> None:
        """The TCP connection falls silent, ends, or carries something else."""
        tcp = self.rng.choice(self.call.tcp)
        kind = self.rng.choice(("silent", "fin", "rst", "both rst", "bytes"))

        def do() -> None:
            if kind == "silent":
                tcp.silent = True
            elif kind == "bytes":
                self.damaged_streams.add(self.call.tcp.index(tcp.peer))
                tcp.inbox += self.rng.choice((b"x", clc.EYE_CATCHER, self.rng.randbytes(30)))
                tcp.wake()
            elif kind == "both rst":
                tcp.end("rst")
                tcp.peer.ended = tcp.ended = "rst"
            elif kind == "fin":
                tcp.peer.ended = tcp.peer.ended or "fin"
            else:
                tcp.end("rst")

        self._at(f"tcp {kind}", do)

    def _plan_link(self) -> None:
        """A queue pair or a port fails."""
        kind = self.rng.choice(("qp", "port", "delete", "terminate"))
        side: Side = self.rng.choice((self.call.client.side, self.call.server.side))

        def do() -> None:
            groups = side.groups
            if kind == "qp" and side.rnic.qps:
                self.rng.choice(list(side.rnic.qps.values())).to_err()
            elif kind == "port":
                side.rnic.port_active = False
            elif kind == "delete" and groups:
                self.rng.choice(groups).deletion.delete_link(1)
            elif kind == "terminate" and groups:
                self.rng.choice(groups).terminate()
            else:
                self.damages.pop()

        self._at(f"link {kind}", do)

    def _plan_rnic(self) -> None:
        """No more memory or queue pairs."""
        kind = self.rng.choice(("qps", "qps", "memory"))
        side: Side = self.rng.choice((self.call.client.side, self.call.server.side))
        self.damages.append(f"rnic {kind}")
        if kind == "qps":
            side.rnic.most_qps = len(side.rnic.qps) + self.rng.choice((0, 1))
        else:
            side.rnic.no_memory = True

    def _plan_address(self) -> None:
        """The address of one side gets no answer, at first or at all."""
        side: Side = self.rng.choice((self.call.client.side, self.call.server.side))
        looks = self.rng.choice((1, 3, 9, 17, _NEVER))
        self.world.fabric.looks[side.rnic.gid] = looks
        if looks == _NEVER:  # in time it is no damage
            self.damages.append("address")

    # --- what must hold ----------------------------------------------------------------------

    def _check_outcomes(self) -> None:
        world, call = self.world, self.call
        for end in call.ends:
            assert isinstance(end.outcome, (Established, FellBack, Failed))
            if isinstance(end.outcome, Failed):
                assert isinstance(end.error, OSError)
                assert end.error.errno or "TCP" in str(end.error)
        consumed = [_check_consumed(end) for end in call.ends]
        modes = [type(end.outcome) for end in call.ends]
        if not self.damages:
            assert modes == [Established, Established], f"5: {modes} although nothing happened"
        texts = (b"from the client " * 20, b"from the server " * 20)
        failed = [_send(end, text) for end, text in zip(call.ends, texts, strict=True)]
        world.settle()
        if any(damage.startswith("link") for damage in self.damages):
            world.pass_time(70.0)  # a dead peer is noticed by TEST LINK
        got = [_receive(end, error) for end, error in zip(call.ends, failed, strict=True)]
        if modes == [Established, Established]:
            for place, (data, error) in enumerate(got):
                if not self.credentials_damaged:
                    text = texts[1 - place]
                    assert data == text or (error and text.startswith(data)), f"4: {data!r}"
        elif modes == [FellBack, FellBack]:
            for place, (data, _) in enumerate(got):
                text = texts[1 - place]
                tcp = call.tcp[place]
                assert bytes(tcp.taken[: consumed[place]]) + data == bytes(tcp.taken), "2"
                peer_declined = call.ends[place].fallback.origin is Origin.PEER
                if self._whole(1 - place) and (peer_declined or self._whole(place)):
                    broken = tcp.ended or tcp.cut or tcp.peer.silent
                    assert data == text or (broken and text.startswith(data)), f"2: {data!r}"
        else:
            self._check_mixed(got)

    def _whole(self, sender: int) -> bool:
        """True if the bytes that this side sent over TCP arrived unchanged."""
        return sender not in self.damaged_streams

    def _check_mixed(self, got: list[tuple[bytes, bool]]) -> None:
        for place, (end, (data, error)) in enumerate(zip(self.call.ends, got, strict=True)):
            other = self.call.ends[1 - place]
            if isinstance(end.outcome, Established):
                assert not data, f"3: {data!r}"
                # Behind a FIN nothing of the other side arrives that could tell.
                unheard = other.tcp.silent or end.tcp.ended == "fin"
                assert error or unheard, "3: the established side was not notified"
            elif isinstance(end.outcome, FellBack) and self._whole(1 - place):
                assert not data, f"3: {data!r}"

    def _use_earlier_ones(self) -> None:
        """Rule 6."""
        world = self.world
        for side in world.sides:
            side.rnic.port_active = True
        for number, call in enumerate(self.before):
            texts = (b"client %d" % number, b"server %d" % number)
            failed = [_send(end, text) for end, text in zip(call.ends, texts, strict=True)]
            world.pass_time(70.0)  # a dead peer is noticed by TEST LINK
            got = [_receive(end, error) for end, error in zip(call.ends, failed, strict=True)]
            errors = [error for _, error in got]
            assert errors in ([False, False], [True, True]), f"6: {errors}"
            if not any(errors):
                data = [data for data, _ in got]
                assert self.credentials_damaged or data == [texts[1], texts[0]], f"6: {data}"

    def _close_all(self) -> None:
        for call in (*self.before, self.call):
            for end in call.ends:
                if isinstance(end.outcome, Established):
                    end.connection.close()
                elif isinstance(end.outcome, FellBack):
                    end.tcp.end("fin")
        self.world.settle()


def _name(end: End) -> str:
    return type(end.outcome).__name__


def _check_consumed(end: End) -> int:
    """Rule 2: what was taken from TCP are whole messages."""
    taken = bytes(end.tcp.taken)
    if isinstance(end.outcome, FellBack):
        assert not end.reader.halfway, "2: part of something was taken"
        rest = taken
        while rest:
            assert rest.startswith(clc.EYE_CATCHER), f"2: {rest!r} was taken"
            length = clc.message_length_untrusted(rest)
            assert len(rest) >= length, "2: part of a message was taken"
            rest = rest[length:]
    return len(taken)


def _send(end: End, text: bytes) -> bool:
    """Send; True if the application gets an error."""
    try:
        if isinstance(end.outcome, Established):
            end.connection.send(memoryview(text))
        elif isinstance(end.outcome, FellBack):
            end.tcp.send(text)
    except OSError:
        return True
    return False


def _receive(end: End, failed: bool) -> tuple[bytes, bool]:
    """The bytes that the application gets; True if it gets an error before or after them.

    ``failed``: its `_send` got the error.  As over TCP, no later call reports that error again.
    """
    if isinstance(end.outcome, Established):
        connection: Connection = end.connection
        data = b""
        try:
            while piece := connection.receiver.receive(1 << 16):
                data += piece
        except OSError:
            return data, True
        return data, failed or connection.state == "CLOSED"
    if isinstance(end.outcome, FellBack):
        data = b""
        try:
            while piece := end.tcp.receive(1 << 16) or b"":
                data += piece
        except OSError:
            return data, True
        return data, bool(end.tcp.ended)
    return b"", True


def run(cases: int, seed: int, first: int = 0) -> Result:
    """Run ``cases`` cases from number ``first`` on."""
    result = Result(cases=cases, seed=seed)
    start = time.perf_counter()
    logger = logging.getLogger("trio_smc")
    logger.propagate = False  # thousands of warnings are as it should be
    try:
        _run(result, first)
    finally:
        logger.propagate = True
    result.seconds = time.perf_counter() - start
    return result


def _run(result: Result, first: int) -> None:
    seed = result.seed
    for number in range(first, first + result.cases):
        case = Case(seed, number)
        try:
            result.outcomes[case.run()] += 1
        except Exception as error:  # anything is what we are looking for
            what = f"{type(error).__name__}: {error}"
            result.failures.append(f"{what}; {case.damages}; --seed {seed} --case {number}")
        result.damages.update(case.damages)


def main() -> int:
    """Return the exit code: 0 when every case kept the rules."""
    arguments = parse(__doc__, replay="case")
    seed = arguments.seed
    if arguments.case is not None:
        case = Case(seed, arguments.case)
        try:
            print(*case.run())
        finally:
            print(case.damages)
        return 0
    result = run(arguments.cases, seed)
    for line in result.failures[:20]:
        print(line)
    for (client, server), count in sorted(result.outcomes.items()):
        print(f"client {client}, server {server}: {count}")
    print(", ".join(f"{name} {count}" for name, count in sorted(result.damages.items())))
    print(
        f"handshakes: {result.cases} cases, seed {result.seed}, {result.seconds:.1f} s,"
        f" {len(result.failures)} failures"
    )
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
