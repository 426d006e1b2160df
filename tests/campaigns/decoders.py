"""Hostile bytes against every decoder.

    python -m tests.campaigns.decoders --cases 50000 [--seed N] [--case K]

Each case makes one piece of bytes (random, or a valid message truncated, lengthened, with bits
flipped, bytes set or another message spliced in) and hands it to every decoder.  A decoder may
raise ProtocolError and nothing else; what a value it returns encodes to must be read as the same
value (reserved bits are not kept).  A case depends on the seed and its number only: ``--seed N
--case K`` replays case K alone.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.campaigns._options import parse
from tests.wire import vectors
from trio_smc._base.errors import ProtocolError
from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous.discovery import messages as local
from trio_smc.rnic.soft import messages as fabric
from trio_smc.wire import cdc, clc, llc

__all__ = ["Result", "piece", "run"]

_VALID: dict[str, list[bytes]] = {
    codec: [data for _, data in group.values()] + [item.data for item in vectors.captured(codec)]
    for codec, group in vectors.ALL.items()
}
_VALID["clc"] += [item.data for item in vectors.captured_v2("clc")]
_VALID["llc of version 2"] = [item.data for item in vectors.captured_v2("llc")]
_VALID["fabric"] = [
    fabric.Hello(gid=bytes(range(16)), qp_num=17, peer_qp_num=1 << 23, peer_psn=3).encode(),
    fabric.Register(rkey=1 << 31, slot=9, address=1 << 40, length=1 << 20).encode(),
    fabric.Register(rkey=5, slot=0, address=4096, length=1 << 14, progress=True).encode(),
    fabric.Revoke(rkey=77).encode(),
]
_VALID["local"] = [
    local.prove(local.four_tuple(("127.0.0.1", 1), ("127.0.0.2", 65535)), bytes(range(16))),
    local.listening(local.four_tuple(("::1", 40000), ("fe80::1%2", 7)), 80, bytes(range(16))),
    *(local.refused(reason) for reason in FallbackReason),
    local.accepted(bytes(range(8)), 4),
    local.accepted(bytes(range(8)), 4, required=True),
    local.not_mine(bytes(range(8))),
]
_CODECS = list(_VALID)


@dataclass
class Result:
    """The result of a campaign.

    Fields:
      cases, seed, seconds: how many, replayed how, in what time.
      decoded, refused: values and ProtocolErrors by decoder.
      failures: one line for each case that broke the rule, with what replays it.
    """

    cases: int
    seed: int
    seconds: float = 0.0
    decoded: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True if no case broke the rule."""
        return not self.failures


def _random(rng: random.Random, _: bytes) -> bytes:
    data = rng.randbytes(rng.choice((0, 1, 7, 8, 28, 43, 44, 45, 52, 68, 92, rng.randrange(200))))
    # Plain noise never gets past the first check: give half of it a plausible start.
    starts = (b"", clc.EYE_CATCHER, b"\xfe\x2c", bytes((rng.randrange(1, 10), 44)))
    start = rng.choice(starts)
    return start + data[len(start) :]


def _truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def _lengthen(rng: random.Random, data: bytes) -> bytes:
    return data + rng.randbytes(rng.randrange(1, 60))


def _flip(rng: random.Random, data: bytes) -> bytes:
    raw = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return bytes(raw)


def _set(rng: random.Random, data: bytes) -> bytes:
    raw = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        raw[rng.randrange(len(raw))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(raw)


def _splice(rng: random.Random, data: bytes) -> bytes:
    other = rng.choice(_VALID[rng.choice(_CODECS)])
    if rng.random() < 0.5:  # the rest is another message's
        at = rng.randrange(len(data))
        return data[:at] + other[at : len(data)]
    return data[: rng.randrange(len(data))] + other[rng.randrange(len(other)) :]


def _relabel(rng: random.Random, data: bytes) -> bytes:
    """Make the lengths that a message states fit, or nearly fit, other parts than it has."""
    raw = bytearray(data)
    if raw.startswith(clc.EYE_CATCHER) and len(raw) >= 12:
        raw[4] = rng.choice((raw[4], rng.randrange(6)))
        if rng.random() < 0.5:
            at = rng.randrange(8, len(raw) - 3)
            raw[at:at] = rng.randbytes(rng.choice((1, 4, 16, 17, 34, 40)))
        raw[5:7] = (len(raw) + rng.choice((0, 0, 0, -1, 1, 17))).to_bytes(2, "big")
    else:
        kind = rng.choice((*llc.MessageType, 0xFE, rng.randrange(256)))
        raw[0] = kind
        if kind < 0x20 and rng.random() < 0.5:  # version 2, whose length is the message's
            raw[0] |= 0x20
            raw[1:3] = len(raw).to_bytes(2, rng.choice(("little", "big")))
    return bytes(raw)


def _as_it_is(_: random.Random, data: bytes) -> bytes:
    return data


_DAMAGES = (_random, _truncate, _lengthen, _flip, _flip, _set, _set, _splice, _relabel, _as_it_is)


def piece(seed: int, case: int) -> bytes:
    """The bytes of one case."""
    rng = random.Random(f"{seed}:{case}")
    data = rng.choice(_VALID[rng.choice(_CODECS)])
    for _ in range(rng.choice((1, 1, 1, 2))):
        if data:
            data = rng.choice(_DAMAGES)(rng, data)
    return data


def _length(data: bytes) -> bytes:
    # What the header says holds for the message, if there is one.
    length = clc.message_length_untrusted(data)
    if not clc.HEADER_SIZE <= length <= clc.MAX_MESSAGE_SIZE:
        raise AssertionError(f"a length of {length}")
    return data


def _fast_path(data: bytes) -> bytes:
    items = cdc.unpack_untrusted(data)
    if cdc.pack(*items[1:]) != cdc.decode_untrusted(data).encode():
        raise AssertionError(f"not what the value has: {items}")
    return data


def _fabric(data: bytes) -> bytes:
    # Also with a wrong number of descriptors for its kind, which the RNIC's own tests cover.
    for descriptors in (0, 1, 3):
        with contextlib.suppress(ProtocolError):
            again = fabric.decode_untrusted(data, descriptors).encode()
            return again[:6] + data[6:8] + again[8:]  # padding
    raise ProtocolError("refused with any number of descriptors")


def _local(data: bytes) -> bytes:
    # What a later version may append is skipped, so only this much comes back.
    message = local.decode_untrusted(data)
    body = message.token + message.connection + message.name
    end = 8 + len(body)
    return data[:8] + body + data[end:]


def _clc(data: bytes) -> bytes:
    return _again(clc.decode_untrusted(data), clc.decode_untrusted, data)


def _llc(data: bytes) -> bytes:
    return _again(llc.decode_untrusted(data), llc.decode_untrusted, data)


def _llc_v2(data: bytes) -> bytes:
    message: Any = llc.V2.decode_untrusted(data)
    if llc.V2.decode_untrusted(llc.V2.encode(message)) != message:
        raise AssertionError(f"{message} is written as {llc.V2.encode(message).hex()}")
    return data


def _cdc(data: bytes) -> bytes:
    return _again(cdc.decode_untrusted(data), cdc.decode_untrusted, data)


def _again(message: Any, decode: Callable[[bytes], Any], data: bytes) -> bytes:
    # Reserved bits are not kept: what is written for a message must be read as the same one.
    again = message.encode()
    if decode(again) != message:
        raise AssertionError(f"{message} is written as {again.hex()}")
    return data


DECODERS: dict[str, Callable[[bytes], bytes]] = {
    "clc": _clc,
    "clc length": _length,
    "llc": _llc,
    "llc of version 2": _llc_v2,
    "cdc": _cdc,
    "cdc fast path": _fast_path,
    "fabric": _fabric,
    "local": _local,
}


def _try(result: Result, case: int) -> None:
    data = piece(result.seed, case)
    for name, decode in DECODERS.items():
        try:
            again = decode(data)
        except ProtocolError:
            result.refused[name] += 1
            continue
        except Exception as error:  # anything else is what we are looking for
            failure = repr(error)
        else:
            result.decoded[name] += 1
            if again == data:
                continue
            failure = f"encodes to {again.hex()}"
        result.failures.append(
            f"{name}: {failure}; input {data.hex()}; --seed {result.seed} --case {case}"
        )


def run(cases: int, seed: int, first: int = 0) -> Result:
    """Run ``cases`` cases from number ``first`` on."""
    result = Result(cases=cases, seed=seed)
    start = time.perf_counter()
    for case in range(first, first + cases):
        _try(result, case)
    result.seconds = time.perf_counter() - start
    return result


def main() -> int:
    """Return the exit code: 0 when every case kept the rule."""
    arguments = parse(__doc__, replay="case")
    seed = arguments.seed
    if arguments.case is not None:
        print(f"input: {piece(seed, arguments.case).hex()}")
        result = run(1, seed, first=arguments.case)
    else:
        result = run(arguments.cases, seed)
    for line in result.failures[:20]:
        print(line)
    for name in DECODERS:
        print(f"{name}: {result.decoded[name]} decoded, {result.refused[name]} refused")
    print(
        f"decoders: {result.cases} cases, seed {result.seed}, {result.seconds:.1f} s,"
        f" {len(result.failures)} failures"
    )
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
