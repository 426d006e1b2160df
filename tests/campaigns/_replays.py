"""A finding of a campaign can be repeated by the command that it prints."""

from __future__ import annotations

from typing import Protocol

__all__ = ["finds_and_replays"]


class _Result(Protocol):
    @property
    def failures(self) -> list[str]: ...


class _Run(Protocol):
    def __call__(self, cases: int, seed: int, *, first: int = 0) -> _Result: ...


def finds_and_replays(run: _Run, text: str, *, seed: int, step: int, most: int) -> None:
    """Run cases, ``step`` at a time and ``most`` of them, until a failure says ``text``.

    Some defects show rarely.  The case that its line names must say it, too, when run alone.
    """
    line = None
    for first in range(0, most, step):
        line = next((each for each in run(step, seed, first=first).failures if text in each), None)
        if line is not None:
            break
    assert line is not None
    case = int(line.rsplit("--case ", 1)[1])
    [again] = run(1, seed, first=case).failures
    assert text in again
