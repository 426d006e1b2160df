"""Settings of `chaos.py`, and its result."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["HARMLESS", "KINDS", "Policy", "Result"]

# Kinds of faults, and their relative frequencies.
KINDS = {
    "link-down": 20,
    "link-down-here": 20,
    "port-flap": 15,
    "completion-lost": 10,
    "message-lost": 10,
    "write-lost": 10,
    "not-placed": 5,
    "delay": 3,
    "wakeup": 3,
    "process-stop": 2,
    "link-silent": 1,
}
HARMLESS = frozenset({"delay", "wakeup", "process-stop"})


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Settings.

    seconds, faults: the limits; the first that is reached counts; None: no limit.
    during: one failure in this many is injected during a failover; 0: none.
    scale: size of a conversation, in percent of the usual one.
    log: a directory for the logs of both processes.
    """

    seed: int
    seconds: float | None = None
    faults: int | None = None
    rnics: int = 2
    connections: int = 50
    during: int = 5
    scale: int = 100
    log: str | None = None
    kinds: dict[str, int] = field(default_factory=lambda: dict(KINDS))


@dataclass(kw_only=True)
class Result:
    """The result. `problems` describes each event that must not happen."""

    seed: int
    rnics: int
    during: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    during_failover: int = 0
    missed: int = 0
    replaced: int = 0
    conversations: Counter[str] = field(default_factory=Counter)
    resets: set[int] = field(default_factory=set)
    due: dict[int, bool] = field(default_factory=dict)
    """Conversations struck by "not-placed": True if they must be reset, False if they may be."""
    refused: int = 0
    fallbacks: int = 0
    failovers: int = 0
    bytes: int = 0
    longest_pause: float = 0.0
    seconds: float = 0.0
    recoveries: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    recalled: dict[int, list[tuple[float, str]]] = field(default_factory=dict)
    """Records of both sides about conversations that may have ended wrongly."""

    @property
    def injected(self) -> int:
        """Number of failures: faults that end at least one link."""
        return sum(count for kind, count in self.faults.items() if kind not in HARMLESS)

    def recollections(self) -> list[str]:
        """Return the records about conversations with a problem."""
        lines = []
        for number, records in self.recalled.items():
            if any(f"connection {number} " in problem for problem in self.problems):
                lines.append(f"connection {number}:")
                lines += [f"{when % 3600:9.4f} {text}" for when, text in sorted(set(records))]
        return lines

    def rows(self) -> list[tuple[str, str]]:
        """Return the table that is printed at the end."""
        rows = [(f"fault {kind}", str(count)) for kind, count in sorted(self.faults.items())]
        recoveries = sorted(self.recoveries) or [0.0]
        middle = recoveries[len(recoveries) // 2]
        return [
            *rows,
            ("failures", f"{self.injected}, {self.during_failover} of them during a failover"),
            ("whole again after", f"{middle * 1e3:.0f} ms, {recoveries[-1] * 1e3:.0f} ms at most"),
            ("RNICs taken out and in", str(self.replaced)),
            ("connections moved", str(self.failovers)),
            ("connections reset", f"{len(self.resets)}, {sum(self.due.values())} had to be"),
            ("connections ended", ", ".join(
                f"{kind} {count}" for kind, count in sorted(self.conversations.items()))),
            ("refused, or TCP", f"{self.refused}, {self.fallbacks}"),
            ("bytes checked", f"{self.bytes / 1e6:.1f} MB"),
            ("longest pause", f"{self.longest_pause * 1000:.0f} ms"),
            ("problems", str(len(self.problems))),
        ]  # fmt: skip
