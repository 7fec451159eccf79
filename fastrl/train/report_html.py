"""The page of a report: one HTML file that needs nothing else, on paper or telephone, light or dark.

Everything that comes from a run (completions above all) is text written by a model, so it goes through
`_text` alone, and a content security policy forbids scripts and outside resources besides.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from fastrl.envs import Trajectory
from fastrl.train.metrics import METRICS, Metric
from fastrl.train.report_data import Run, time_split
from fastrl.train.report_episodes import episodes
from fastrl.train.report_plots import DARK, LIGHT, MARKED_STEPS, Plot

__all__ = ["page"]

_SAMPLES = 4
_SAMPLE_CHARACTERS = 1500


class _Row(NamedTuple):
    """One line of the summary; `best` is max, min, or None where neither end is better."""

    name: str
    label: str
    best: Callable[[Sequence[float]], float] | None
    form: str


_SUMMARY: tuple[_Row, ...] = (
    _Row("eval/accuracy", "held-out accuracy", max, ".1%"),
    _Row("eval/reward", "held-out reward", max, ".3f"),
    _Row("reward/mean", "reward", max, ".3f"),
    _Row("reward/correct", "correct completions", max, ".1%"),
    _Row("group/zero_variance", "groups without variance", None, ".1%"),
    _Row("kl/ref", "KL to the reference, nats", None, ".4f"),
    _Row("policy/approx_kl", "KL to the rollout, nats", None, ".4f"),
    _Row("policy/clip_fraction", "clip fraction", None, ".2%"),
    _Row("policy/entropy", "entropy, nats", None, ".3f"),
    _Row("value/explained_variance", "explained variance", max, ".3f"),
    _Row("completion/length_mean", "completion length, tokens", None, ".1f"),
    _Row("optim/grad_norm", "gradient norm", None, ".3g"),
    _Row("time/step", "seconds per step", min, ".3g"),
    _Row("throughput/tokens_per_second", "tokens per second", max, ".0f"),
)


def page(run: Run, plots: Sequence[Plot]) -> str:
    """The whole page."""
    name = run.path.resolve().name
    parts = [
        f"<h1>{_text(name)}</h1>",
        f"<p class=lead>{_text(_lead(run))}</p>",
        _notes(run.notes),
        f"<section><h2>Summary</h2>{_summary(run)}</section>",
        f"<section><h2>Curves</h2>{_curves(run, plots)}</section>",
        _held_out(run.eval_samples),
        _completions(run.samples),
        episodes((*run.eval_samples, *run.samples), _text),
        f"<section><h2>Metrics</h2>{_definitions(run)}</section>",
        _config(run.config_text),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">\n"
        f"<title>{_text(name)} - fastrl report</title>\n<style>{_STYLE}</style></head>\n"
        "<body><main>\n" + "\n".join(filter(None, parts)) + "\n</main></body></html>\n"
    )


def _text(value: str) -> str:
    """`value` as HTML text: markup escaped, control characters and lone surrogates made visible."""
    shown = "".join(
        c if c in "\n\t" or (ord(c) >= 32 and not 0x7F <= ord(c) < 0xA0) else f"\\x{ord(c):02x}"
        for c in value
    )
    return html.escape(shown.encode("utf-8", "backslashreplace").decode("utf-8"))


def _lead(run: Run) -> str:
    """What was run and what came of it, in one or two sentences."""
    sentences = []
    if run.config is not None:
        c = run.config
        sentences.append(
            f"{c.algorithm.upper()} on {c.model.source}, task {c.task.source}: "
            f"{c.rollout.prompts} prompts x {c.rollout.samples} completions a step."
        )
    if run.metrics:
        seconds = sum(time_split(run.metrics).values())
        planned = f" of {run.config.steps}" if run.config is not None else ""
        sentences.append(f"{int(run.metrics[-1]['step'])}{planned} steps, {_duration(seconds)}.")
    for name, label, form in (
        ("reward/mean", "Reward", ".3f"),
        ("eval/accuracy", "Held-out accuracy", ".0%"),
    ):
        values = run.series(name).values
        if len(values) > 1:
            sentences.append(f"{label} {values[0]:{form}} to {values[-1]:{form}}.")
    return " ".join(sentences)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = seconds / 60
    return f"{minutes:.1f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{_text(note)}</li>" for note in notes)
    return f"<section class=notes><h2>Notes on the files</h2><ul>{items}</ul></section>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str) -> str:
    """A table of cells that are HTML already; it scrolls by itself on a narrow screen."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{c}</td>' for c in row)}</tr>" for row in rows)
    return (
        f"<div class=scroll><table class={kind}><thead><tr>{top}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _summary(run: Run) -> str:
    rows = []
    for row in _SUMMARY:
        steps, values = run.series(row.name)
        if not values:
            continue
        if row.best is None:
            best = f"{min(values):{row.form}} to {max(values):{row.form}}"
        else:
            value = row.best(values)
            best = f"{value:{row.form}} <small>step {steps[values.index(value)]}</small>"
        rows.append(
            (row.label, f"{values[0]:{row.form}}", f"{values[-1]:{row.form}}", best),
        )
    return _table(("", "first", "last", "best or range"), rows, "figures")


def _curves(run: Run, plots: Sequence[Plot]) -> str:
    faint = "<p>Faint lines are single steps, bold ones their running mean.</p>"
    return (
        faint if len(run.metrics) > MARKED_STEPS else ""
    ) + f"<div class=plots>{''.join(map(_plot, plots))}</div>"


def _plot(plot: Plot) -> str:
    light, dark = (base64.b64encode(image).decode() for image in (plot.light, plot.dark))
    alt = _text(f"{plot.title}. {plot.caption}")
    return (
        "<figure><picture>"
        f'<source media="(prefers-color-scheme: dark)" srcset="data:image/png;base64,{dark}">'
        f'<img alt="{alt}" width=960 height=640 src="data:image/png;base64,{light}">'
        f"</picture><figcaption>{_text(plot.caption)}</figcaption></figure>"
    )


def _held_out(samples: Sequence[Trajectory]) -> str:
    """The same held-out questions at the first and the last evaluation."""
    if not samples:
        return ""
    first, last = samples[0].step, samples[-1].step
    before = {t.uid: t for t in samples if t.step == first}
    after = {t.uid: t for t in samples if t.step == last}
    shown = [uid for uid in after if uid in before][: 2 * _SAMPLES]
    rows = [
        (_pre(before[u].prompt), _text(before[u].answer), _scored(before[u]), _scored(after[u]))
        for u in shown
    ]
    head = ("question", "answer", f"step {first}", f"step {last}")
    return f"<section><h2>Held-out questions</h2>{_table(head, rows, 'texts')}</section>"


def _completions(samples: Sequence[Trajectory]) -> str:
    """Completions of training questions from the first and the last recorded step."""
    if not samples:
        return ""
    steps = sorted({samples[0].step, samples[-1].step})
    chosen = [t for step in steps for t in [t for t in samples if t.step == step][:_SAMPLES]]
    rows = [(str(t.step), _pre(t.prompt), _text(t.answer), _scored(t)) for t in chosen]
    table = _table(("step", "prompt", "answer", "completion"), rows, "texts")
    return f"<section><h2>Sampled completions</h2>{table}</section>"


def _scored(record: Trajectory) -> str:
    reward = "not scored" if record.reward is None else f"reward {record.reward:.3f}"
    parts = [
        f"{k} {'-' if v is None else format(v, '.3f')}" for k, v in record.reward_parts.items()
    ]
    details = f" ({', '.join(parts)})" if len(parts) > 1 else ""
    end = "" if record.finished else ", cut off"
    return f"{_pre(record.completion)}<small>{_text(reward + details + end)}</small>"


def _pre(text: str) -> str:
    omitted = len(text) - _SAMPLE_CHARACTERS
    more = f"<small>{omitted} characters more</small>" if omitted > 0 else ""
    return f"<pre>{_text(text[:_SAMPLE_CHARACTERS])}</pre>{more}"


def _definitions(run: Run) -> str:
    """Each metric logged, as fastrl.train.metrics defines it."""
    rows = []
    for name in run.names():
        metric = _definition(name)
        values = run.series(name).values
        last = f"{values[-1]:.4g}" if values else "-"
        formula, unit = (metric.formula, metric.unit) if metric else ("not defined here", "-")
        rows.append((f"<code>{_text(name)}</code>", _text(formula), _text(unit), last))
    table = _table(("name", "definition", "unit", "last"), rows, "texts")
    return f"<details><summary>{len(rows)} metrics and their definitions</summary>{table}</details>"


def _definition(name: str) -> Metric | None:
    for metric in METRICS:
        if name == metric.name or (metric.name.endswith("/") and name.startswith(metric.name)):
            return metric
    return None


def _config(text: str) -> str:
    if not text:
        return ""
    body = f"<details><summary>config.toml</summary><pre>{_text(text)}</pre></details>"
    return f"<section><h2>Configuration</h2>{body}</section>"


_STYLE = f"""
:root {{ --ground: #f3f5f7; --card: {LIGHT.ground}; --ink: {LIGHT.ink}; --line: {LIGHT.grid};
  --faint: #57606a; --code: #eef1f4; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ground: #0d1117; --card: {DARK.ground};
  --ink: {DARK.ink}; --line: {DARK.grid}; --faint: #9aa4af; --code: #0d1117; }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }}
main {{ max-width: 1060px; margin: 0 auto; padding: 16px; }}
h1 {{ font-size: 1.6rem; margin: 8px 0 0; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.1rem; margin: 0 0 8px; }}
.lead {{ color: var(--faint); margin: 4px 0 16px; overflow-wrap: anywhere; }}
section {{ background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 16px; margin: 0 0 16px; }}
.notes {{ border-left: 4px solid #d55e00; }}
.notes ul {{ margin: 0; padding-left: 20px; }}
.plots {{ display: grid; gap: 24px 16px;
  grid-template-columns: repeat(auto-fit, minmax(min(320px, 100%), 1fr)); }}
figure {{ margin: 0; max-width: 520px; }}
img {{ display: block; width: 100%; height: auto; }}
figcaption, small {{ color: var(--faint); font-size: 0.85rem; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; vertical-align: top; padding: 6px 10px 6px 0;
  border-bottom: 1px solid var(--line); }}
th {{ color: var(--faint); font-weight: 600; font-size: 0.85rem; }}
.figures th:not(:first-child), .figures td:not(:first-child) {{ text-align: right;
  white-space: nowrap; font-variant-numeric: tabular-nums; }}
.texts td {{ min-width: 70px; }}
pre {{ margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate;
  background: var(--code); border-radius: 4px; padding: 6px 8px; min-width: 140px;
  font: 0.85rem/1.45 ui-monospace, monospace; }}
code {{ font: 0.85rem ui-monospace, monospace; }}
.said {{ border-left: 3px solid #0072b2; padding-left: 10px; margin: 8px 0; }}
.heard {{ border-left: 3px solid var(--line); padding-left: 10px; margin: 8px 0; }}
summary {{ cursor: pointer; }}
summary + * {{ margin-top: 8px; }}
"""
