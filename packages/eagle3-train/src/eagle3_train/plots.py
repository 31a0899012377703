"""Plots of a training run as SVG that takes its colours from the page it stands in."""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

# Written by matplotlib as they stand, then replaced by what the page defines for light and dark.
_INK, _GRID = "#0a0b0c", "#0d0e0f"
_VARIABLES = {_INK: "var(--ink)", _GRID: "var(--grid)"}
# Middle tones, legible on white and on near-black.
COLOURS = ("#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#06b6d4", "#ec4899", "#84cc16")
_POINTS = 600  # of a line; more cannot be seen and make a heavy page
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, in the page's font
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Plot:
    """A figure with its name in the page, a title and what it shows."""

    name: str  # [a-z-]+, unique in a page
    title: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Line:
    """y over x; `smooth` draws the running mean over it and fades the values themselves."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    smooth: bool = True
    marker: str = ""


@dataclass(frozen=True)
class Chart:
    """What a line chart needs beside its lines."""

    ylabel: str
    xlabel: str = "step"
    percent: bool = False
    from_zero: bool = False
    log: bool = False
    lines: list[Line] = field(default_factory=list)


def line_chart(name: str, title: str, caption: str, chart: Chart) -> Plot:
    """Lines over the optimiser steps."""
    with mpl.rc_context(_STYLE):
        figure, axes = _axes()
        for i, line in enumerate(chart.lines):
            _draw(axes, line, COLOURS[i % len(COLOURS)])
        axes.set_xlabel(chart.xlabel)
        axes.set_ylabel(chart.ylabel)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if chart.log:
            axes.set_yscale("log")
        elif chart.percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        else:
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
        if chart.from_zero:
            axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        if len(chart.lines) > 1:
            axes.legend(loc="best", ncols=2 if len(chart.lines) > 4 else 1)
        return Plot(name, title, caption, _svg(figure, name))


def bar_chart(
    name: str,
    title: str,
    caption: str,
    groups: Mapping[str, Sequence[float]],
    xlabel: str,
    ylabel: str,
) -> Plot:
    """Shares by position, one colour a group."""
    with mpl.rc_context(_STYLE):
        figure, axes = _axes()
        width = 0.8 / len(groups)
        for i, (label, values) in enumerate(groups.items()):
            at = np.arange(len(values)) + (i - (len(groups) - 1) / 2) * width
            bars = axes.bar(at, values, width * 0.92, label=label, color=COLOURS[i])
            axes.bar_label(bars, fmt=lambda value: f"{value:.0%}", fontsize=7.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        axes.grid(False, axis="x")
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        axes.legend(loc="upper right")
        return Plot(name, title, caption, _svg(figure, name))


def histogram(
    name: str, title: str, caption: str, counts: Sequence[int], edges: Sequence[float], xlabel: str
) -> Plot:
    """Counts between edges."""
    with mpl.rc_context(_STYLE):
        figure, axes = _axes()
        axes.bar(edges[:-1], counts, np.diff(edges) * 0.94, align="edge", color=COLOURS[0])
        axes.grid(False, axis="x")
        axes.set_xlabel(xlabel)
        axes.set_ylabel("samples")
        return Plot(name, title, caption, _svg(figure, name))


def over_steps(rows: Sequence[Row], key: str, label: str) -> Line:
    """One number a step; steps without it are left out."""
    found = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return Line(label, [x for x, _ in found], [y for _, y in found])


def per_position(rows: Sequence[Row], key: str) -> list[Line]:
    """A line for each entry of a list-valued metric, which may grow longer during the run."""
    found = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    lines = []
    for k in range(max((len(values) for _, values in found), default=0)):
        points = [(step, values[k]) for step, values in found if k < len(values)]
        lines.append(Line(f"k = {k}", [x for x, _ in points], [y for _, y in points]))
    return lines


def _axes() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.6, 3.0), layout="constrained")
    return figure, figure.subplots()


def _draw(axes: Axes, line: Line, colour: str) -> None:
    x, y = np.asarray(line.x, float), np.asarray(line.y, float)
    if line.marker or not line.smooth or len(x) < 2:
        axes.plot(x, y, color=colour, label=line.label, marker=line.marker or "o", markersize=4)
        return
    axes.plot(*_thin(x, y), color=colour, alpha=0.25, linewidth=0.9)
    axes.plot(*_thin(x, _running_mean(y)), color=colour, label=line.label)


def _running_mean(y: np.ndarray) -> np.ndarray:
    """Over a twentieth of the run before and behind each step, less at the ends."""
    half = max(1, len(y) // 40)
    total = np.concatenate([[0.0], y.cumsum()])
    at = np.arange(len(y))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(y))
    return (total[high] - total[low]) / (high - low)


def _thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most `_POINTS` points, each the mean of its neighbours."""
    if len(x) <= _POINTS:
        return x, y
    parts = np.array_split(np.arange(len(x)), _POINTS)
    return np.array([x[p].mean() for p in parts]), np.array([y[p].mean() for p in parts])


def _svg(figure: Figure, name: str) -> str:
    """The bare <svg> element: no prolog, no metadata, ids that are unique in the page."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text)  # HTML knows both
    text = text.replace("xlink:href=", "href=")
    text = re.sub(r' id="', f' id="{name}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    text = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'role="img"', text, count=1)
    return text.strip()
