"""A comparison as a picture: what a request costs over the length of its prompt."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sluice.deploy.compare.measures import Measure
from sluice.deploy.compare.result import Comparison
from sluice.protocol.messages import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS: tuple[tuple[str, Callable[[Measure], float]], ...] = (
    ("Time to first token, ms", lambda m: m.ttft_s * 1e3),
    ("Time per output token, ms", lambda m: m.tpot_s * 1e3),
    ("Cache of a request, kB", lambda m: m.cache_bytes / 1e3),
    ("Sent from prefill to decode, kB", lambda m: m.transfer_bytes / 1e3),
)
COLOURS = ("#0072b2", "#d55e00")  # told apart by colour-blind readers too
MARKERS = ("o", "s")


def check_installed() -> None:
    """Raises ConfigError if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "the plot needs matplotlib, which is not installed; `pip install '.[plot]'` in "
            "Sluice's folder, or leave the plot out with --no-plot"
        )


def plot(path: Path, comparison: Comparison, caption: str) -> None:
    """Write a PNG with a panel for each cost: every request as a point, medians as lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7.2), layout="constrained")
    axes = figure.subplots(2, 2).flat
    for axis, (title, value) in zip(axes, PANELS, strict=True):
        _panel(axis, comparison, title, value)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False, fontsize=12)
    figure.supxlabel(caption, fontsize=8, color="#555555")
    figure.savefig(path, dpi=150)


def _panel(
    axis: Axes, comparison: Comparison, title: str, value: Callable[[Measure], float]
) -> None:
    from matplotlib.ticker import LogLocator

    groups = [pairs for _, pairs in comparison.by_length()]
    lengths = [round(np.median([pair.a.num_prompt_tokens for pair in pairs])) for pairs in groups]
    for index, name in enumerate(comparison.names):
        colour, marker = COLOURS[index], MARKERS[index]
        measures = [(pair.a, pair.b)[index] for pair in comparison.pairs]
        places = [measure.num_prompt_tokens for measure in measures]
        points = [value(measure) for measure in measures]
        axis.scatter(places, points, s=12, alpha=0.35, linewidths=0, color=colour, marker=marker)
        medians = [np.median([value((p.a, p.b)[index]) for p in pairs]) for pairs in groups]
        axis.plot(lengths, medians, label=name, markersize=5, color=colour, marker=marker)
    axis.set_title(title, loc="left", fontsize=11)
    axis.set_xlabel("tokens of the prompt", fontsize=9)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:,g}")
    axis.minorticks_off()
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
