"""Runs checks and finds their verdicts.

A silence is judged by a probe: another connection, right after it.  If the probe is served within
a fraction of the patience, the implementation runs, and the check is repeated: a second silence is
a failure.  Otherwise nothing was found out, and the check is inconclusive.  A probe also follows
each failure, and each check that treats the implementation badly.  If the suite's own process did
not run for a while, a failure is inconclusive, too.
"""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Final

import trio

from smc_conform.peer import Peer
from smc_conform.registry import Check, Steps
from smc_conform.roles import Role
from smc_conform.session import Options, Session
from smc_conform.verdicts import Outcome, Result, Silence, Verdict
from trio_smc.rnic.verbs import RnicError

__all__ = ["Runner"]

_PROBES: Final = 3
"""New connections of which one must work after a check; a slow one is not a failure."""
_CHECK_FACTOR: Final = 12
"""A check ends after so many times the patience."""


class Runner:
    """Runs the checks of one session.

    Attributes:
      gone: why the implementation could not be reached any more; empty if it could be.
      suspects: the IDs of the checks that ran when it went.
    """

    def __init__(self, session: Session) -> None:
        self.gone = ""
        self.suspects: tuple[str, ...] = ()
        self._session = session
        self._options = session.options

    def provides(self) -> frozenset[str]:
        """The keys of `registry.NEEDS` that this run has."""
        session, options = self._session, self._options
        found = {
            f"version-{options.version}",
            "roce" if session.roce else "soft",
        } | options.provides
        if options.role is Role.SERVER:
            found.add("parallel")
        if len(session.devices) > 1:
            found.add("two-rnics")
        if options.daytime is not None:
            found.add("daytime")
        if options.discard is not None:
            found.add("discard")
        return frozenset(found)

    def missing(self, check: Check) -> str:
        """The needs of the check that this run does not meet, in words; empty: none."""
        if self._options.role not in check.roles:
            return f"for an implementation that is the {' or '.join(sorted(check.roles))}"
        lacks = sorted(check.needs - self.provides())
        return f"needs {', '.join(lacks)}" if lacks else ""

    async def run(self, check: Check) -> Result:
        """Run one check, and the probe after it if there is a need."""
        begin = time.monotonic()
        lacks = self.missing(check)
        if lacks:
            return Result(check.id, Verdict.NOT_APPLICABLE, lacks)
        verdict, detail, peer = await self._judge(check.steps, check.slow)
        if verdict is None:
            verdict, detail, peer = await self._judge_silence(check, detail, peer)
        if verdict is Verdict.FAIL or (check.robust and verdict is not Verdict.INCONCLUSIVE):
            alive = await self._serves()
            if alive:
                verdict = Verdict.FAIL
                detail = f"{detail}; " if detail else ""
                detail += f"a new connection afterwards: {alive}"
        still = self._session.stood_still(begin)
        if still and verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE):
            verdict = Verdict.INCONCLUSIVE
            detail = f"the suite itself stood still for {still:.1f} s; {detail}"
        seconds = time.monotonic() - begin
        if verdict is Verdict.PASS:
            return Result(check.id, verdict, "", seconds)
        trace = peer.trace
        return Result(
            check.id, verdict, detail, seconds, trace.ladder, trace.messages, trace.capture
        )

    async def _judge_silence(
        self, check: Check, silence: str, peer: Peer
    ) -> tuple[Verdict, str, Peer]:
        """The verdict after a silence: a failure if the check meets it again."""
        begin = trio.current_time()
        alive = await self._serves()
        took = trio.current_time() - begin
        if not alive and took > self._options.patience / 2:
            alive = f"took {took:.1f} s"
        if alive:
            detail = f"{silence}; a new connection afterwards: {alive}"
            return Verdict.INCONCLUSIVE, detail, peer
        verdict, detail, peer = await self._judge(check.steps, check.slow)
        if verdict is Verdict.PASS:
            return Verdict.INCONCLUSIVE, f"{silence}; when repeated, the check passed", peer
        return verdict or Verdict.FAIL, detail, peer

    async def _judge(self, steps: Steps, slow: bool = False) -> tuple[Verdict | None, str, Peer]:
        """Run the steps; the verdict is None after a silence."""
        limit = _CHECK_FACTOR * self._options.patience + (self._options.timers if slow else 0)
        verdict: Verdict | None = Verdict.INCONCLUSIVE
        detail = f"the check did not end within {limit:g} s"
        async with trio.open_nursery() as nursery:
            peer = Peer(self._session, nursery)
            try:
                with trio.move_on_after(limit):
                    await steps(peer)
                    verdict, detail = Verdict.PASS, ""
            except Silence as silence:
                verdict, detail = None, str(silence)
            except Outcome as outcome:
                verdict, detail = outcome.verdict, str(outcome)
            except (RnicError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
                detail = f"the suite could not continue: {type(error).__name__}: {error}"
            except Exception as error:  # one defect must not end the run
                detail = f"the check has a defect: {type(error).__name__}: {error}"
                for line in traceback.format_exc().splitlines():
                    peer.trace.note(line)
            finally:
                peer.close()
                nursery.cancel_scope.cancel()
        return verdict, detail, peer

    async def _serves(self) -> str:
        """Use new connections, until one works; returns what was wrong, or an empty text."""
        detail = ""
        for _ in range(_PROBES):
            verdict, detail, _ = await self._judge(Peer.still_serves)
            if verdict is Verdict.PASS:
                return ""
        if not self._session.unreached:
            self._session.doubt(detail)
        return detail

    async def run_all(
        self,
        checks: Iterable[Check],
        report: Callable[[Check, Result], None],
        postponed: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Run the checks in a random order, as many at a time as the options allow.

        Inconclusive checks run again at the end, one after the other.  If the run ends before that,
        their first results are reported.  If the implementation is gone, `gone` has the reason, and
        the checks that ran at that moment are inconclusive: any of them may be the cause.  A single
        one keeps its verdict.

        report: called with each check and its final result.
        postponed: called with the number of inconclusive checks that will run again.
        """
        course = _Course(self, report, postponed, self._options)
        try:
            await course.run(checks)
        finally:
            course.end()

    async def find_gone(self, running: Iterable[Check]) -> None:
        """Set `gone` and `suspects` if the implementation cannot be reached any more."""
        if not self.gone:
            self.gone = await self._session.gone()
            self.suspects = tuple(each.id for each in running) if self.gone else ()


class _Course:
    """The checks of a run: those that wait, that run, and that were inconclusive."""

    def __init__(
        self,
        runner: Runner,
        report: Callable[[Check, Result], None],
        postponed: Callable[[int], None],
        options: Options,
    ) -> None:
        self._runner = runner
        self._report = report
        self._postponed = postponed
        self._options = options
        self._waiting: list[Check] = []
        self._running: list[Check] = []
        self._again: list[tuple[Check, Result]] = []
        self._looks = trio.Lock()
        self._failures = 0

    @property
    def _is_over(self) -> bool:
        return bool(self._runner.gone) or self._failures == self._options.max_failures

    async def run(self, checks: Iterable[Check]) -> None:
        """Run all checks, and at the end those again that were inconclusive."""
        self._waiting = list(checks)
        random.Random(self._options.seed).shuffle(self._waiting)
        async with trio.open_nursery() as nursery:
            for _ in range(self._options.jobs):
                nursery.start_soon(self._work, nursery.cancel_scope)
        while self._again and not self._is_over:
            check, _ = self._again[0]
            result = await self._run(check)
            del self._again[0]
            self._postponed(len(self._again))
            if result is not None:
                self._report(check, result)

    def end(self) -> None:
        """Report the checks that have no final result."""
        for pair in self._again:
            self._report(*pair)
        runner = self._runner
        if runner.gone:
            detail = f"{runner.gone}; running then: {', '.join(runner.suspects)}"
            for check in self._running:
                self._report(check, Result(check.id, Verdict.INCONCLUSIVE, detail))

    async def _work(self, scope: trio.CancelScope) -> None:
        while self._waiting and not self._is_over:
            check = self._waiting.pop()
            result = await self._run(check)
            if result is None:
                pass
            elif result.verdict is Verdict.INCONCLUSIVE:
                self._again.append((check, result))
                self._postponed(len(self._again))
            else:
                self._report(check, result)
                self._failures += result.verdict is Verdict.FAIL
        if self._is_over:
            scope.cancel()

    async def _run(self, check: Check) -> Result | None:
        """Run a check; None if the implementation is gone, and perhaps by another check."""
        async with self._looks:  # no check begins while another one finds out
            self._running.append(check)
        result = await self._runner.run(check)
        if result.verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE):
            async with self._looks:
                await self._runner.find_gone(self._running)
            if self._runner.gone and len(self._runner.suspects) > 1:
                return None
        self._running.remove(check)
        return result
