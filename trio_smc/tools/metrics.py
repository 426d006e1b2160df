"""Metrics for Prometheus (extra ``[metrics]``): a collector of the statistics of stacks.

::

    from prometheus_client import REGISTRY, start_http_server
    from trio_smc.tools.metrics import SmcCollector

    REGISTRY.register(SmcCollector())      # anywhere, before or after stacks are opened
    start_http_server(9100)

A scrape is one request of the Prometheus server.  It reads counters that stacks maintain in any
case, so metrics add no work to the data path.  A scrape runs in a thread of its own, but only the
thread of a Trio run may read the stacks of the run.  So the scrape lets that thread read the
counters, and waits for the result until a deadline.
"""

from __future__ import annotations

import logging
import platform
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Final, TypeAlias

import trio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import trio_smc
from trio_smc import Stack, StackStatistics
from trio_smc.tools.metric_help import GAUGES, HELP, PREFIX

__all__ = ["SmcCollector"]

LOGGER = logging.getLogger("trio_smc.metrics")

_BREAKDOWNS: Final = ("agreed", "fallbacks")


@dataclass(slots=True)
class _Sums:
    """Sums over stacks.  The keys of each counter are the values of the metric's labels."""

    stacks: int = 0
    statistics: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[tuple[str, ...]] = field(default_factory=Counter)
    agreed: Counter[tuple[str, ...]] = field(default_factory=Counter)
    connections: Counter[tuple[str, ...]] = field(default_factory=Counter)
    link_groups: Counter[tuple[str, ...]] = field(default_factory=Counter)
    links: Counter[tuple[str, ...]] = field(default_factory=Counter)
    elements: Counter[tuple[str, ...]] = field(default_factory=Counter)
    ports: Counter[tuple[str, ...]] = field(default_factory=Counter)

    def add(self, stack: Stack) -> None:
        """Add one stack.  Call this only in the thread of the stack's Trio run."""
        statistics = stack.statistics()
        self.stacks += 1
        for each in fields(StackStatistics):
            if each.name not in _BREAKDOWNS:
                self.statistics[each.name] += getattr(statistics, each.name)
        for (origin, reason), count in statistics.fallbacks.items():
            self.fallbacks[origin.value, reason.value] += count
        for (version, release, ueid, direct), count in statistics.agreed.items():
            route = "direct" if direct else "gateway"
            self.agreed[str(version), str(release), ueid or "", route] += count
        for connection in stack.connections:
            self.connections[(connection.mode.value,)] += 1
        for group in stack.link_groups:
            self.link_groups[group.role, str(group.kind)] += 1
            for link in group.links:
                self.links[link.rnic.name, link.state] += 1
            for rmb in group.rmbs:
                self.elements[str(rmb.element_size), "in use"] += rmb.in_use
                self.elements[str(rmb.element_size), "free"] += rmb.elements - rmb.in_use
        for rnic in stack.rnics:
            self.ports[rnic.name, rnic.kind] = int(rnic.port_active)


class SmcCollector(Collector):
    """Collects the metrics of one stack, or the sums over all stacks of this process.

    Args:
      stack: the stack; None: all stacks that are open at the time of a scrape.
      patience: seconds in which all Trio runs together must answer a scrape.  A stack that does not
        answer in time is omitted, and counted in ``trio_smc_scrape_failures_total``.
    """

    def __init__(self, stack: Stack | None = None, *, patience: float = 2.0) -> None:
        self._stack = stack
        self._patience = patience
        self._failures = 0

    def describe(self) -> list[Metric]:
        """No metrics.  Without this method the registry would scrape to find the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics with their current values."""
        sums = _Sums()
        deadline = time.monotonic() + self._patience
        # Request the counters of all stacks before waiting for the first, so that the Trio runs
        # answer at the same time.
        stacks = trio_smc.stacks() if self._stack is None else (self._stack,)
        for answer in [self._request(stack) for stack in stacks]:
            self._add(sums, answer, deadline)
        yield _labelled(
            "build_info", ("python", "version"),
            Counter({(platform.python_version(), trio_smc.__version__): 1}),
        )  # fmt: skip
        yield GaugeMetricFamily(PREFIX + "stacks", HELP["stacks"], value=sums.stacks)
        for name, value in sorted(sums.statistics.items()):
            kind = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            yield kind(PREFIX + name, HELP[name], value=value)
        yield CounterMetricFamily(
            PREFIX + "scrape_failures", HELP["scrape_failures"], self._failures
        )
        yield _labelled("fallbacks", ("origin", "reason"), sums.fallbacks, CounterMetricFamily)
        yield _labelled(
            "connections_agreed", ("version", "release", "ueid", "route"), sums.agreed,
            CounterMetricFamily,
        )  # fmt: skip
        yield _labelled("connections_now", ("mode",), sums.connections)
        yield _labelled("link_groups_now", ("role", "kind"), sums.link_groups)
        yield _labelled("links_now", ("rnic", "state"), sums.links)
        yield _labelled("rmb_elements", ("bytes", "state"), sums.elements)
        yield _labelled("rnic_port_active", ("rnic", "kind"), sums.ports)

    def _request(self, stack: Stack) -> _Answers | Exception:
        try:
            return _call_in_trio(stack, partial(_sums_of, stack))
        except Exception as error:
            return error

    def _add(self, sums: _Sums, answer: _Answers | Exception, deadline: float) -> None:
        try:
            if isinstance(answer, Exception):
                raise answer
            taken, error = answer.get(timeout=max(0.0, deadline - time.monotonic()))
            if error is not None:
                raise error
        except Exception as error:
            self._failures += 1
            LOGGER.info("a stack could not be read: %s", str(error) or type(error).__name__)
            return
        assert taken is not None
        for each in fields(_Sums):
            if each.name == "stacks":
                sums.stacks += taken.stacks
            else:
                getattr(sums, each.name).update(getattr(taken, each.name))


def _sums_of(stack: Stack) -> _Sums:
    sums = _Sums()
    sums.add(stack)
    return sums


_Answers: TypeAlias = "queue.SimpleQueue[tuple[_Sums | None, Exception | None]]"
"""One item: the counters of a stack, or the exception that prevented reading them."""


def _call_in_trio(stack: Stack, function: Callable[[], _Sums]) -> _Answers:
    """Call ``function`` in the thread of the stack's Trio run.  The queue receives the result.

    Raises:
      trio.RunFinishedError: the Trio run has ended.
    """
    token = stack.trio_token
    try:
        here = trio.lowlevel.current_trio_token() is token
    except RuntimeError:
        here = False
    answers: _Answers = queue.SimpleQueue()

    def answer() -> None:
        try:
            answers.put((function(), None))
        except Exception as error:
            answers.put((None, error))

    if here:
        answer()
    else:
        token.run_sync_soon(answer)
    return answers


def _labelled(
    name: str, labels: tuple[str, ...], values: Counter[tuple[str, ...]],
    kind: type[CounterMetricFamily | GaugeMetricFamily] = GaugeMetricFamily,
) -> Metric:  # fmt: skip
    family = kind(PREFIX + name, HELP[name], labels=labels)
    for each, value in sorted(values.items()):
        family.add_metric(each, value)
    return family
