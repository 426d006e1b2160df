"""Plots for the pages, with matplotlib (`pip install trio-smc[bench]`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.report import Comparison

__all__ = ["curves", "programs", "ranges", "ratios"]

# The same numbers give the same file.
_NARROW: Final = 4.8
"""The width in inches of a plot whose text is readable on a telephone: at 358 pixels, which is the
width of a page's column there, the letters of 10 points are 10 pixels high."""
_LINE: Any = {"color": "black", "linewidth": 0.8, "gid": "base"}
"""The line at 1, where a transport is as good as the base."""
_SETTINGS: Any = {"svg.hashsalt": "trio_smc", "svg.fonttype": "none", "font.size": 10}


def _figure(
    width: float, height: float, rows: int, columns: int, *, share: bool = False
) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update(_SETTINGS)
    from matplotlib import pyplot as plt

    # There are eleven transports.
    colours = [*mpl.color_sequences["tab10"], "black"]
    mpl.rcParams["axes.prop_cycle"] = mpl.rcsetup.cycler(color=colours)

    return plt.subplots(
        rows, columns, figsize=(width, height), squeeze=False, sharey=share, layout="constrained"
    )


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=metadata, dpi=150)


def _bars(
    axis: Any, places: list[float], each: Sequence[Sequence[float]], thickness: float, label: str
) -> None:
    """Bars from 1 to the median of each, with the range of its values."""
    middle = [median(values) for values in each]
    axis.barh(
        places,
        [ratio - 1 for ratio in middle],
        thickness,
        left=1,
        label=label,
        xerr=[
            [m - min(v) for m, v in zip(middle, each, strict=True)],
            [max(v) - m for m, v in zip(middle, each, strict=True)],
        ],
        error_kw={"linewidth": 0.7},
    )


def ratios(path: Path, comparisons: Sequence[Comparison]) -> None:
    """Draw how many times better than the base each transport is, with the range of the runs."""
    metrics = comparisons[0].metrics
    # As wide as a page, so that its letters are as large as the page's.
    width, height = 3 + 3.8 * len(comparisons), 1 + 0.85 * len(metrics)
    figure, axes = _figure(width, height, 1, len(comparisons), share=True)
    for comparison, axis in zip(comparisons, axes[0], strict=True):
        names = list(dict.fromkeys(n for m in metrics for n in comparison.transports(m)))
        thickness = 0.85 / len(names)
        for row, name in enumerate(names):
            with_it = [m for m in metrics if name in comparison.transports(m)]
            each = [comparison.ratios(metric, name) for metric in with_it]
            places = [metrics.index(metric) + (row + 0.5) * thickness for metric in with_it]
            _bars(axis, places, each, thickness, name)
        axis.axvline(1, **_LINE)
        axis.set_xscale("log")
        axis.set_xticks([0.1, 0.2, 0.5, 1, 2, 5, 10])
        axis.set_xticklabels(["0.1", "0.2", "0.5", "1", "2", "5", "10"])
        axis.set_yticks([place + 0.42 for place in range(len(metrics))])
        axis.set_yticklabels([metric.name for metric in metrics])
        axis.set_ylim(len(metrics) + 1.9, -0.3)  # room for the legend below
        pinned = "on a core each" if comparison.about["pinned"] else "where the scheduler puts them"
        axis.set_title(f"times better than {comparison.base}\nboth processes {pinned}")
        axis.legend(loc="lower right", fontsize=7)
    _save(figure, path)


def programs(path: Path, comparisons: Sequence[Comparison]) -> None:
    """Draw for each unmodified program how many times better it is than over the base.

    The metrics come in pairs: what a user sees, and the processor time of both ends.
    """
    seen, used = comparisons[0].metrics[::2], comparisons[0].metrics[1::2]
    figure, axes = _figure(7, 1.3 + 0.36 * len(seen), 1, len(comparisons), share=True)
    for comparison, axis in zip(comparisons, axes[0], strict=True):
        name, *others = comparison.transports(seen[0])
        bars = [(name, "time or rate", seen), (name, "processor time of both ends", used)]
        bars += [(other, "time or rate, compiled", seen) for other in others]
        thickness = 0.8 / len(bars)
        for row, (name, label, metrics) in enumerate(bars):
            each = [comparison.ratios(metric, name) for metric in metrics]
            places = [place + (row + 0.5) * thickness for place in range(len(metrics))]
            _bars(axis, places, each, thickness, label)
        axis.axvline(1, **_LINE)
        _scale(axis)
        axis.set_yticks([place + 0.4 for place in range(len(seen))])
        axis.set_yticklabels([metric.name for metric in seen])
        axis.set_ylim(len(seen), -0.3)
        pinned = "on a core each" if comparison.about["pinned"] else "where the scheduler puts them"
        axis.set_title(f"{bars[0][0]}, times better than {comparison.base}\nprocesses {pinned}")
        axis.legend(loc="lower right", fontsize=7)
    _save(figure, path)


def _scale(axis: Any) -> None:
    """Give the axis of ratios a logarithmic scale."""
    axis.set_xscale("log")
    axis.set_xticks([0.25, 0.5, 1, 2, 4, 8])
    axis.set_xticklabels(["¼", "½", "1", "2", "4", "8"])
    axis.minorticks_off()


def ranges(
    path: Path,
    title: str,
    names: Sequence[str],
    bars: Mapping[str, Mapping[str, Sequence[float]]],
) -> None:
    """Draw ratios with their ranges: a bar for each label of ``bars`` beside each name.

    Args:
      bars: for each label the median, the least and the most of some names.
    """
    names = [name for name in names if any(name in values for values in bars.values())]
    group = 0.24 + max(0.18, 0.09 * len(bars))
    height = 1.3 + group * len(names) + 0.2 * len(bars)
    figure, axes = _figure(_NARROW, height, 1, 1)
    axis = axes[0][0]
    # The name of a group of bars is above them: a column of names would leave no room for bars.
    top = 0.24 / group
    thickness = 0.9 * (1 - top) / max(1, len(bars))
    for row, (label, values) in enumerate(bars.items()):
        known = [name for name in names if name in values]
        places = [names.index(name) + top + (row + 0.5) * thickness for name in known]
        _bars(axis, places, [values[name] for name in known], thickness, label)
    # The line of the base is beside the bars only, so that no name crosses it.
    starts = [place + top for place in range(len(names))]
    axis.vlines([1] * len(names), starts, [start + 1 - top for start in starts], **_LINE)
    _scale(axis)
    for place, name in enumerate(names):
        axis.text(
            0.01,
            place + 0.75 * top,
            name,
            transform=axis.get_yaxis_transform(),
            va="baseline",
        )
    axis.set_yticks([])
    axis.set_ylim(len(names), -0.1)
    axis.set_xlabel("times better than TCP (logarithmic scale)")
    axis.set_title(title)
    figure.legend(loc="outside lower left", ncols=1)
    _save(figure, path)


def curves(
    path: Path,
    title: str,
    across: str,
    places: Sequence[float],
    lines: Mapping[str, Sequence[float]],
) -> None:
    """Draw one small picture for each line, from 0 upwards, at most two beside each other.

    Args:
      title: of the whole plot.
      across: what the horizontal axes count, with its unit.
      places: the numbers on these axes.
      lines: for each title, with the unit of its vertical axis, a value for each place.
    """
    columns = min(2, len(lines))
    rows = -(-len(lines) // columns)
    width = _NARROW if columns == 2 else 0.65 * _NARROW
    figure, axes = _figure(width, 0.5 + 2.2 * rows, rows, columns)
    for axis in axes.flat[len(lines) :]:
        axis.set_axis_off()
    for axis, (name, values) in zip(axes.flat, lines.items(), strict=False):
        axis.plot(places, values, marker="o")
        axis.set_xscale("log")
        axis.set_ylim(0, 1.15 * max(values))
        axis.set_xticks(list(places))
        axis.set_xticklabels([_short(place) for place in places])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.set_xlabel(across)
        axis.set_title(name, fontsize=10)
        axis.grid(visible=True, linewidth=0.3)
    figure.suptitle(title)
    _save(figure, path)


def _short(number: float) -> str:
    for unit, size in (("Mi", 1 << 20), ("Ki", 1 << 10)):
        if number >= size and number % size == 0:
            return f"{number / size:g} {unit}"
    return f"{number:,g}"
