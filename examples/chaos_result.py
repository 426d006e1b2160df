"""What `chaos.py` is told to do, and what it says happened."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["HARMLESS", "KINDS", "Policy", "Result"]

# Kinds of faults, and how often they come in relation to each other.
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
    """What is to be done.

    seconds, faults: whichever comes first; None = no limit.
    during: one failure in so many comes in the middle of a failover; 0 = none.
    scale: how much a conversation says, in percent.
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
    """What happened.  `problems` is what must not happen, in words."""

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
    """Conversations that met "not-placed": whether they must be reset, or only may be."""
    refused: int = 0
    fallbacks: int = 0
    failovers: int = 0
    bytes: int = 0
    longest_pause: float = 0.0
    seconds: float = 0.0
    recoveries: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    recalled: dict[int, list[tuple[float, str]]] = field(default_factory=dict)
    """What both sides remember of conversations that ended as they perhaps should not."""

    @property
    def injected(self) -> int:
        """Failures: faults that end a link at least."""
        return sum(count for kind, count in self.faults.items() if kind not in HARMLESS)

    def recollections(self) -> list[str]:
        """What led to those problems that are about one conversation."""
        lines = []
        for number, records in self.recalled.items():
            if any(f"connection {number} " in problem for problem in self.problems):
                lines.append(f"connection {number}:")
                lines += [f"{when % 3600:9.4f} {text}" for when, text in sorted(set(records))]
        return lines

    def rows(self) -> list[tuple[str, str]]:
        """The table at the end."""
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
