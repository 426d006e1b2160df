"""The faults of `chaos.py`: one at a time, each when the link group is whole again.

Sometimes one more is injected during a failover, on purpose. On a slow machine a fault strikes
late; so this module waits for each fault, and withdraws a fault that found no message to strike.
"""

from __future__ import annotations

import random
import signal

import trio

from examples.chaos_result import HARMLESS, Policy, Result
from examples.chaos_sides import SETTINGS, Side, Sides

__all__ = ["Trouble"]

# These last longer than the failover that they should disturb.
NOT_DURING = frozenset({"process-stop", "link-silent"})
# Seconds until a group counts as not recovered, and an armed fault as one that cannot strike.
WHOLE_WITHIN, MEETS_WITHIN = 40.0, 1.0
# Seconds after which an operator would act.
PATIENCE = 1.0


class Trouble:
    """Injects faults into two processes, as the policy and its seed choose them."""

    def __init__(self, policy: Policy, result: Result, sides: Sides) -> None:
        self._policy = policy
        self._result = result
        self._sides = sides
        self._rng = random.Random(policy.seed)

    async def make(self) -> None:
        """Inject faults until a limit is reached or a problem has occurred."""
        sides, kinds = self._sides, list(self._policy.kinds)
        while self._goes_on():
            # Checked even after a harmless fault: it may have struck late.
            if not await sides.until(sides.whole, WHOLE_WITHIN):
                self._result.problems.append(f"the link group is not whole: {sides.state()}")
                return
            links = len(sides.both[0].links["links"])
            [kind] = self._rng.choices(kinds, list(self._policy.kinds.values()))
            target = self._target()
            begun = trio.current_time()
            if not await self._strike(kind, target) or kind in HARMLESS:
                continue
            if self._is_to_be_disturbed():
                # With two links the other one must not fail too: only a new link may be struck.
                await self._disturb(target if links < 3 else None)
            if await self._recovers(kind, target):
                self._result.recoveries.append(trio.current_time() - begun)
            else:
                self._result.problems.append(
                    f"after fault {sides.struck} ({kind}) the group is not whole: {sides.state()}"
                )
                return

    def _goes_on(self) -> bool:
        policy = self._policy
        if any(side.ended for side in self._sides.both):
            return False
        if policy.faults is not None and self._result.injected >= policy.faults:
            return False
        return policy.seconds is None or self._sides.elapsed() < policy.seconds

    async def _recovers(self, kind: str, target: tuple[Side, int]) -> bool:
        """Wait until the group is whole again.

        A link that fails while it is being added is tried again only after a while (RFC 7609,
        C.8), or when an RNIC appears; this method makes an RNIC appear.
        """
        sides = self._sides
        silent = 2 * SETTINGS["test_link_interval"] + SETTINGS["llc_timeout"]
        if await sides.until(sides.whole, PATIENCE + silent * (kind == "link-silent")):
            return True
        side, rnic = target
        self._result.replaced += 1
        sides.show_line(f"{side.role}-{rnic} is taken out and put back")
        return await sides.obeyed(side, "replace", rnic=rnic) and await sides.until(
            sides.whole, WHOLE_WITHIN
        )

    def _target(self) -> tuple[Side, int]:
        return self._rng.choice(self._sides.both), self._rng.randrange(self._policy.rnics)

    async def _strike(self, kind: str, target: tuple[Side, int]) -> bool:
        """Inject a fault; return False if it could not strike."""
        sides = self._sides
        side, rnic = target
        seconds = round(0.05 * self._rng.random(), 4)
        struck, missed = sides.struck, self._result.missed
        if kind == "process-stop":
            await self._stop(side, 4 * seconds)
            return True
        # A slow process strikes late: without this wait two faults could coincide by accident.
        await sides.obeyed(side, "strike", kind=kind, rnic=rnic, seconds=seconds)
        if not await sides.until(
            lambda: sides.struck > struck or self._result.missed > missed, MEETS_WITHIN
        ):
            # The fault may still strike until it is disarmed.
            await sides.obeyed(side, "disarm")
            self._result.missed += sides.struck == struck
        return sides.struck > struck

    async def _stop(self, side: Side, seconds: float) -> None:
        """Stop a process, for less time than its peer needs to give up the links."""
        self._sides.on_struck(side, "process-stop", f"the {side.role}", side.links)
        side.process.send_signal(signal.SIGSTOP)
        try:
            await trio.sleep(seconds)
        finally:
            side.process.send_signal(signal.SIGCONT)

    def _is_to_be_disturbed(self) -> bool:
        """True if the share of failures during a failover is still below one in `Policy.during`."""
        during, result = self._policy.during, self._result
        return bool(during) and (result.during_failover + 1) * during <= result.injected + 1

    async def _disturb(self, target: tuple[Side, int] | None) -> None:
        """Strike in the middle of the failover, which lasts some tens of milliseconds."""
        sides = self._sides
        kinds = [kind for kind in self._policy.kinds if kind not in HARMLESS | NOT_DURING]
        before = self._result.during_failover
        sides.disturbing = True
        while self._result.during_failover == before and not sides.whole() and self._goes_on():
            await trio.sleep(0.01 * self._rng.random())
            # The fault cannot strike while there is no link, or no traffic on it.
            await self._strike(self._rng.choice(kinds), target or self._target())
        sides.disturbing = False
