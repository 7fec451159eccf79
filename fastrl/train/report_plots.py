"""The figures of a report, each one PNG: drawn narrow, so that they can be read on a telephone.

A figure exists when the run has the numbers for it. Every figure is drawn twice, on a light and on a
dark ground; the light one is also written as a file.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from fastrl.train.report_data import TIME_PARTS, Run, Series, time_split

__all__ = ["DARK", "LIGHT", "MARKED_STEPS", "Plot", "Theme", "draw_plots", "plot_names"]

MARKED_STEPS = 40
"""Up to this many steps every step is a marked point or a bar; beyond, means are drawn too."""


class Theme(NamedTuple):
    """Colours of one ground. The four line colours differ for the colour-blind too."""

    ground: str
    ink: str
    grid: str
    lines: tuple[str, str, str, str]


LIGHT = Theme("#ffffff", "#24292f", "#d9dee3", ("#0072b2", "#d55e00", "#009e73", "#9aa2ab"))
DARK = Theme("#161b22", "#e6edf3", "#343b44", ("#58b4f0", "#ff8f5e", "#3cc9a0", "#77818c"))


class Plot(NamedTuple):
    """One figure of the report."""

    name: str
    title: str
    caption: str
    """What the lines mean."""
    light: bytes
    """PNG on a light ground."""
    dark: bytes


Draw = Callable[[Any, Run, Theme], None]


class _Recipe(NamedTuple):
    name: str
    title: str
    caption: str
    needs: tuple[str, ...]
    """Drawn when the run has at least one of these."""
    draw: Draw


def draw_plots(run: Run) -> list[Plot]:
    """The figures that `run` has numbers for, in the order of the report."""
    return [
        Plot(r.name, r.title, r.caption, _png(r, run, LIGHT), _png(r, run, DARK))
        for r in _RECIPES
        if any(run.series(name).steps for name in r.needs)
    ]


def plot_names() -> tuple[str, ...]:
    """Names of all figures that a report may have."""
    return tuple(recipe.name for recipe in _RECIPES)


def _png(recipe: _Recipe, run: Run, theme: Theme) -> bytes:
    figure = Figure(figsize=(4.8, 3.2), dpi=200, facecolor=theme.ground, layout="constrained")
    axes = figure.add_subplot()
    axes.set_facecolor(theme.ground)
    axes.set_xlabel("step", color=theme.ink, fontsize=10)
    axes.tick_params(colors=theme.ink, labelsize=10, length=0)
    axes.grid(axis="y", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.grid)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    recipe.draw(axes, run, theme)
    first, last = axes.dataLim.intervalx
    if last - first < 1:
        axes.set_xlim(first - 1, last + 1)
    axes.yaxis.label.set(color=theme.ink, fontsize=10)
    axes.set_title(
        recipe.title,
        loc="left",
        pad=6 + _legend(axes, theme),
        color=theme.ink,
        fontsize=12,
        fontweight="bold",
    )
    buffer = io.BytesIO()
    # Without the version of matplotlib in it, the same run gives the same file.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _legend(axes: Any, theme: Theme) -> int:
    """Points of height that the legend takes above the axes, where it hides no data.

    A single line needs none.
    """
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) < 2:
        return 0
    axes.legend(
        handles,
        labels,
        loc="lower left",
        bbox_to_anchor=(-0.02, 0.99),
        ncols=3 if len(handles) < 4 else 2,
        frameon=False,
        fontsize=9.5,
        labelcolor=theme.ink,
        handlelength=1.2,
        columnspacing=1.2,
        borderaxespad=0.1,
    )
    return 18 if len(handles) < 4 else 32


def _line(
    axes: Any, series: Series, color: str, label: str, *, style: str = "-", smooth: bool = False
) -> None:
    """A line with its points marked; with many steps, the points faint under their running mean."""
    if not series.steps:
        return
    few = len(series.steps) <= MARKED_STEPS
    options = {"color": color, "linewidth": 1.8, "linestyle": style}
    if few or not smooth:
        marker = "o" if few else None
        axes.plot(*series, label=label, marker=marker, markersize=4, **options)
        return
    axes.plot(*series, color=color, alpha=0.3, linewidth=0.8)
    width = max(len(series.steps) // 40, 2)
    axes.plot(series.steps, _running_mean(series.values, width), label=label, **options)


def _running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and `width` neighbours on each side, fewer near the ends.

    The window stays symmetric there, so that a rising curve is not lifted at its start.
    """
    result = []
    for i in range(len(values)):
        reach = min(width, i, len(values) - 1 - i)
        window = values[i - reach : i + reach + 1]
        result.append(sum(window) / len(window))
    return result


def _from_zero(axes: Any, least: float) -> None:
    """A y axis from 0, at least to `least`, so that noise around zero does not fill the figure."""
    top = max(1.05 * axes.dataLim.y1, least)
    # A hair below 0, or a line at 0 would be half hidden.
    axes.set_ylim(-0.02 * top, top)


def _reward(axes: Any, run: Run, theme: Theme) -> None:
    mean, spread = run.series("reward/mean"), dict(zip(*run.series("reward/std"), strict=True))
    low = [m - spread.get(s, 0.0) for s, m in zip(*mean, strict=True)]
    high = [m + spread.get(s, 0.0) for s, m in zip(*mean, strict=True)]
    if spread and len(mean.steps) > 1:
        color = theme.lines[0]
        axes.fill_between(
            mean.steps, low, high, color=color, alpha=0.15, linewidth=0, label="± 1 std"
        )
    elif spread:
        axes.errorbar(
            mean.steps, mean.values, yerr=list(spread.values())[:1], color=theme.lines[0], capsize=4
        )
    _line(axes, mean, theme.lines[0], "mean", smooth=True)
    correct = run.series("reward/correct")
    # With rewards of almost only 0 and 1, the share of correct answers is the mean once more.
    apart = [abs(a - b) for a, b in zip(correct.values, mean.values, strict=False)]
    if correct.steps != mean.steps or max(apart, default=0.0) > 0.05:
        _line(axes, correct, theme.lines[2], "share correct", smooth=True)
    axes.set_ylabel("reward")


def _evaluation(axes: Any, run: Run, theme: Theme) -> None:
    accuracy = run.series("eval/accuracy")
    questions = dict(zip(*run.series("eval/questions"), strict=True))
    errors = [
        math.sqrt(max(p * (1 - p), 0.0) / max(questions.get(s, 0.0), 1.0)) if s in questions else 0
        for s, p in zip(*accuracy, strict=True)
    ]
    color = theme.lines[0]
    axes.errorbar(*accuracy, yerr=errors, color=color, linewidth=0, elinewidth=1.2, capsize=3)
    _line(axes, accuracy, color, "accuracy")
    # The first and last value in figures, on the side of the line where it leaves room.
    rises = accuracy.values[-1] >= accuracy.values[0]
    for i in sorted({0, len(accuracy.steps) - 1}):
        above = rises == (i > 0)
        axes.annotate(
            f"{accuracy.values[i]:.0%}",
            (accuracy.steps[i], accuracy.values[i]),
            xytext=(9 if i == 0 else -9, 7 if above else -7),
            textcoords="offset points",
            ha="left" if i == 0 else "right",
            va="bottom" if above else "top",
            color=theme.ink,
            fontsize=10,
            fontweight="bold",
        )
    axes.set_ylim(0, 1.08)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.set_ylabel("held-out questions correct")


def _kl(axes: Any, run: Run, theme: Theme) -> None:
    reference, rollout = run.series("kl/ref"), run.series("policy/approx_kl")
    _line(axes, reference, theme.lines[0], "to the reference", smooth=True)
    _line(axes, rollout, theme.lines[1], "to the rollout", smooth=True)
    _from_zero(axes, 1e-3)
    alone = "" if reference.steps else ", to the rollout"
    axes.set_ylabel(f"nats per token{alone}")


def _clip(axes: Any, run: Run, theme: Theme) -> None:
    names = ("policy/clip_fraction", "policy/clip_fraction_high", "policy/clip_fraction_low")
    labels = ("clipped", "above", "below")
    for name, label, color, style in zip(
        names, labels, theme.lines, ("-", "--", ":"), strict=False
    ):
        _line(axes, run.series(name), color, label, style=style, smooth=True)
    _from_zero(axes, 0.01)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.3g}%"))
    axes.set_ylabel("share of tokens")


def _entropy(axes: Any, run: Run, theme: Theme) -> None:
    _line(axes, run.series("policy/entropy"), theme.lines[0], "entropy", smooth=True)
    _from_zero(axes, 0.1)
    axes.set_ylabel("nats per token")


def _lengths(axes: Any, run: Run, theme: Theme) -> None:
    _line(axes, run.series("completion/length_mean"), theme.lines[0], "mean", smooth=True)
    longest = run.series("completion/length_max")
    _line(axes, longest, theme.lines[1], "longest", style="--", smooth=True)
    _from_zero(axes, 1.0)
    axes.set_ylabel("tokens")


def _explained(axes: Any, run: Run, theme: Theme) -> None:
    series = run.series("value/explained_variance")
    _line(axes, series, theme.lines[0], "explained variance", smooth=True)
    # An untrained critic can be arbitrarily bad; below -1 the figure would show nothing else.
    axes.set_ylim(max(min(axes.get_ylim()[0], -0.1), -1.0), 1.05)
    axes.set_ylabel("share of variance")


def _time(axes: Any, run: Run, theme: Theme) -> None:
    # At most MARKED_STEPS bars: with more steps each bar is the mean of several.
    width = -(-len(run.metrics) // MARKED_STEPS)
    chunks = [run.metrics[i : i + width] for i in range(0, len(run.metrics), width)]
    places = [sum(int(r["step"]) for r in chunk) / len(chunk) for chunk in chunks]
    total = sum(time_split(run.metrics).values()) or 1.0
    floor = [0.0] * len(chunks)
    for part, color in zip(TIME_PARTS, theme.lines, strict=True):
        seconds = [time_split(chunk)[part] / len(chunk) for chunk in chunks]
        share = time_split(run.metrics)[part] / total
        label = f"{part} {_share(share)}"
        axes.bar(places, seconds, bottom=floor, color=color, width=0.8 * width, label=label)
        floor = [a + b for a, b in zip(floor, seconds, strict=True)]
    # One long stall of the machine must not flatten all other steps.
    usual = sorted(floor)[len(floor) // 2]
    axes.set_ylim(0, min(1.05 * max(floor), 4 * usual) or 1.0)
    axes.set_ylabel("seconds per step")


def _share(value: float) -> str:
    """A share in percent, with a decimal where it is small."""
    return f"{value:.0%}" if value >= 0.1 or value == 0 else f"{value:.1%}"


_RECIPES: tuple[_Recipe, ...] = (
    _Recipe(
        "reward",
        "Reward",
        "Mean over the completions of a step; the band is one standard deviation over them.",
        ("reward/mean",),
        _reward,
    ),
    _Recipe(
        "eval",
        "Held-out accuracy",
        "Questions never trained on; bars are one binomial standard error.",
        ("eval/accuracy",),
        _evaluation,
    ),
    _Recipe(
        "kl",
        "KL divergence",
        "Of the policy to the frozen reference, and to the policy that sampled the rollout. The "
        "second is 0 when a rollout is used for a single update.",
        ("kl/ref", "policy/approx_kl"),
        _kl,
    ),
    _Recipe(
        "clip_fraction",
        "Clip fraction",
        "Tokens whose clipped term is the larger loss, and tokens outside the clip range on either "
        "side. 0 when a rollout is used for a single update.",
        ("policy/clip_fraction",),
        _clip,
    ),
    _Recipe(
        "entropy",
        "Entropy",
        "Of the policy over the vocabulary, mean over tokens.",
        ("policy/entropy",),
        _entropy,
    ),
    _Recipe(
        "lengths",
        "Completion length",
        "Tokens sampled, the end-of-sequence token included.",
        ("completion/length_mean",),
        _lengths,
    ),
    _Recipe(
        "explained_variance",
        "Critic",
        "1 - Var(return - value) / Var(return): 1 is a perfect critic, 0 one that knows the mean.",
        ("value/explained_variance",),
        _explained,
    ),
    _Recipe(
        "time",
        "Time per step",
        "Where the seconds go; percentages are shares of the whole run. The backward of fastrl ops "
        "is part of the backward pass.",
        ("time/step", "time/sample"),
        _time,
    ),
)
