"""The report on synthetic runs: whole, partial, broken and hostile ones."""

from __future__ import annotations

import base64
import html
import json
import math
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fastrl.envs import Trajectory, Turn, write_trajectories
from fastrl.train.config import Config, dumps
from fastrl.train.metrics import METRICS, check_names
from fastrl.train.report import write_report
from fastrl.train.report_data import read_run, time_split
from fastrl.train.report_html import page

PNG = b"\x89PNG\r\n\x1a\n"


def step_record(step: int, *, algorithm: str = "grpo") -> dict[str, float]:
    """One line of metrics.jsonl as a run that goes well would write it."""
    progress = 1 - math.exp(-step / 8)
    noise = math.sin(12.9898 * step) * 43758.5453 % 1 - 0.5
    record = {
        "step": step,
        "reward/mean": 0.15 + 0.6 * progress + 0.05 * noise,
        "reward/std": 0.3 - 0.1 * progress,
        "reward/part/task": 0.15 + 0.6 * progress,
        "reward/correct": 0.1 + 0.6 * progress,
        "reward/unscored": 0.0,
        "group/zero_variance": 0.3 * progress,
        "completion/length_mean": 9 - 4 * progress + noise,
        "completion/length_max": 12,
        "completion/finished": 0.5 + 0.4 * progress,
        "policy/loss": 0.01 * noise,
        "policy/entropy": 2.2 - 1.8 * progress,
        "policy/clip_fraction": 0.02 + 0.01 * noise,
        "policy/clip_fraction_high": 0.012 + 0.005 * noise,
        "policy/clip_fraction_low": 0.008,
        "policy/approx_kl": 0.004 + 0.002 * noise,
        "kl/ref": 0.08 * progress,
        "optim/grad_norm": 1.5 + noise,
        "throughput/tokens_per_second": 120.0,
        "time/sample": 2.1 + 0.3 * noise,
        "time/score": 0.01,
        "time/forward_backward": 3.0 + 0.5 * noise,
        "time/optimizer": 0.4,
        "time/fastrl": 0.06,
        "time/other": 0.05,
        "time/step": 5.62 + 0.8 * noise,
    }
    if algorithm == "ppo":
        record["value/explained_variance"] = 0.7 * progress - 0.1
    return record


def write_run(
    folder: Path, records: list[dict[str, float]], evaluations: list[dict[str, float]] = ()
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(dumps(Config(steps=max(len(records), 1))))
    for name, rows in (("metrics", records), ("eval", evaluations)):
        lines = (json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def evaluation(step: int, accuracy: float) -> dict[str, float]:
    return {"step": step, "accuracy": accuracy, "reward": accuracy, "questions": 48, "seconds": 2.0}


def trajectory(completion: str, **fields: Any) -> Trajectory:
    fields = {"uid": "0", "prompt": "4 + 3 =", "answer": "7", "reward": 0.25, "step": 1, **fields}
    return Trajectory(completion=completion, **fields)


class Page(HTMLParser):
    """Tags with their attributes, and the text between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, Mapping[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "img", "source"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read_page(path: Path) -> Page:
    parsed = Page(path.read_text(encoding="utf-8"))
    assert parsed.open == [], "every tag is closed"
    return parsed


def text_of(run: Path) -> str:
    """Text of the page without its curves, which are what takes time."""
    return Page(page(read_run(run), [])).text


def test_names_of_the_synthetic_run_are_real_metrics():
    check_names(step_record(1, algorithm="ppo"))


def test_whole_run_has_every_curve_as_png_and_in_one_page(tmp_path):
    run = write_run(
        tmp_path / "run",
        [step_record(i, algorithm="ppo") for i in range(1, 13)],
        [evaluation(0, 0.25), evaluation(12, 0.75)],
    )
    index = write_report(run)
    assert index == run / "report" / "index.html"
    names = {p.stem for p in index.parent.glob("*.png")}
    assert names == {
        "reward",
        "eval",
        "kl",
        "clip_fraction",
        "entropy",
        "lengths",
        "explained_variance",
        "time",
    }
    parsed = read_page(index)
    images = [attributes["src"] for tag, attributes in parsed.tags if tag == "img"]
    inlined = [base64.b64decode(src.removeprefix("data:image/png;base64,")) for src in images]
    assert all(image.startswith(PNG) for image in inlined)
    assert sorted(inlined) == sorted(p.read_bytes() for p in index.parent.glob("*.png"))
    assert "25.0%75.0%75.0% step 12" in parsed.text, "first, last and best held-out accuracy"
    assert "Held-out accuracy 25% to 75%." in parsed.text


def test_page_needs_nothing_else(tmp_path):
    run = write_run(tmp_path, [step_record(1)], [evaluation(0, 0.5)])
    text = write_report(run).read_text(encoding="utf-8")
    assert not re.search(r"https?:|<script|<link|@import|url\(", text, re.IGNORECASE)
    for tag, attributes in Page(text).tags:
        for name in ("src", "srcset", "href"):
            assert attributes.get(name, "data:").startswith("data:"), tag
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_every_logged_metric_is_defined_as_in_metrics(tmp_path):
    run = write_run(tmp_path, [step_record(1)])
    text = text_of(run)
    formulas = {m.name: m.formula for m in METRICS}
    for name in step_record(1):
        formula = formulas.get(name, formulas["reward/part/"])
        assert name + formula in text
    assert formulas["value/loss"] not in text, "not logged, so not explained"


@pytest.mark.parametrize("records", [1, 2, 300])
def test_any_number_of_steps(tmp_path, records):
    run = write_run(tmp_path, [step_record(i) for i in range(1, records + 1)])
    assert f"{records} of {records} steps" in read_page(write_report(run)).text


def test_missing_metrics_leave_their_curve_out(tmp_path):
    keep = {"step", "reward/mean", "policy/entropy"}
    records = [{k: v for k, v in step_record(i).items() if k in keep} for i in (1, 2)]
    index = write_report(write_run(tmp_path, records))
    assert {p.stem for p in index.parent.glob("*.png")} == {"reward", "entropy"}


def test_undefined_figures_are_gaps(tmp_path):
    records = [step_record(i) for i in range(1, 5)]
    records[1]["reward/mean"] = None
    records[2]["kl/ref"] = None
    run = write_run(tmp_path, records)
    assert read_run(run).series("reward/mean").steps == [1, 3, 4]
    write_report(run)


def test_constant_and_zero_figures(tmp_path):
    zeros = [{**dict.fromkeys(step_record(1), 0), "step": i} for i in (1, 2, 3)]
    read_page(write_report(write_run(tmp_path, zeros, [evaluation(0, 0.0), evaluation(3, 0.0)])))


def test_evaluation_alone_is_a_run(tmp_path):
    text = text_of(write_run(tmp_path, [], [evaluation(0, 0.5)]))
    assert "No step has finished yet." in text


@pytest.mark.parametrize(
    "tail", [b'{"step": 3, "reward/me', b'{"step": 3, "x": "\xc3', b"[1]\n", b'{"step": null}\n']
)
def test_cut_off_last_line_is_reported_and_left_out(tmp_path, tail):
    run = write_run(tmp_path, [step_record(1), step_record(2)])
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(tail)
    assert [r["step"] for r in read_run(run).metrics] == [1, 2]
    text = text_of(run)
    assert "metrics.jsonl: " in text
    assert "left out" in text


def test_many_bad_lines_are_counted(tmp_path):
    run = write_run(tmp_path, [step_record(1)])
    (run / "samples.jsonl").write_text("bad\n" * 7)
    assert (
        "samples.jsonl: unreadable lines [1, 2, 3, 4, 5] and 2 more; left out."
        in read_run(run).notes
    )


def test_of_a_step_run_twice_the_later_counts(tmp_path):
    run = write_run(
        tmp_path, [step_record(2), step_record(1), {**step_record(2), "policy/loss": 9.0}]
    )
    assert read_run(run).series("policy/loss").values[1] == 9.0


def test_config_that_cannot_be_read_is_shown_with_a_note(tmp_path):
    run = write_run(tmp_path, [step_record(1)])
    (run / "config.toml").write_text('algorthm = "grpo" # <b>')
    text = text_of(run)
    assert "unknown key algorthm; did you mean algorithm?" in text
    assert 'algorthm = "grpo" # <b>' in text
    (run / "config.toml").unlink()
    assert "config.toml: missing." in text_of(run)


HOSTILE = (
    "<script>alert(1)</script>",
    "</pre></td></table><img src=x onerror=alert(1)>",
    "&lt;b&gt; &amp;",
    "nul \x00 bell \x07 escape \x1b[31m c1 \x9b",
    "lone surrogate \ud800",
    "right-to-left \u202e override",
    "\"quotes\" 'both'",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_the_model_stays_text(tmp_path, text):
    run = write_run(tmp_path, [step_record(1)])
    # As JSON would hold it: write_trajectories cannot write a lone surrogate, another writer could.
    record = json.loads(trajectory("x").to_json())
    record |= {
        "completion": text,
        "prompt": text,
        "answer": text,
        "reward_parts": {text: 1.0, "b": None},
    }
    for name in ("samples", "eval_samples"):
        (run / f"{name}.jsonl").write_text(json.dumps(record) + "\n")
    raw = page(read_run(run), [])
    parsed = Page(raw)
    assert parsed.open == [], "every tag is closed"
    assert "script" not in [tag for tag, _ in parsed.tags]
    assert not any(name.startswith("on") for _, attributes in parsed.tags for name in attributes)
    raw.encode("utf-8")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", raw)
    shown = text.replace("\ud800", "\\ud800")
    for byte in (0, 7, 0x1B, 0x9B):
        shown = shown.replace(chr(byte), f"\\x{byte:02x}")
    assert shown in parsed.text
    assert html.escape(shown) in raw


def test_samples_of_first_and_last_step_with_reward_parts(tmp_path):
    run = write_run(tmp_path, [step_record(1), step_record(9)])
    write_trajectories(
        run / "samples.jsonl",
        [
            trajectory("early", reward_parts={"task": 0.2, "format": None}),
            trajectory("middle", step=5),
            trajectory("late", step=9, reward=None, finished=False),
        ],
    )
    text = text_of(run)
    assert "earlyreward 0.250 (task 0.200, format -)" in text
    assert "latenot scored, cut off" in text
    assert "middle" not in text


def test_held_out_questions_side_by_side(tmp_path):
    run = write_run(tmp_path, [step_record(1)])
    write_trajectories(
        run / "eval_samples.jsonl",
        [
            trajectory("seven and more", step=0, uid="3"),
            trajectory("lost", step=0, uid="4"),
            trajectory("7", step=1, uid="3", reward=1.0),
        ],
    )
    text = text_of(run)
    assert "4 + 3 =7seven and morereward 0.2507reward 1.000" in text
    assert "lost" not in text


def episode(said: str, heard: str, **fields: Any) -> Trajectory:
    """Two turns of two tokens with one of a tool between them."""
    messages = tuple(
        {"role": role, "content": content}
        for role, content in (("user", "3+5:"), ("assistant", said), ("tool", heard), ("assistant", "=08"))
    )  # fmt: skip
    turns = (Turn(0, 2, {"steps": 0.5}, 0.5), Turn(3, 5))
    return trajectory(said, messages=messages, turns=turns, completion_ids=(1,) * 5,
                      mask=(1, 1, 0, 1, 1), **fields)  # fmt: skip


def test_episodes_turn_by_turn(tmp_path):
    run = write_run(tmp_path, [step_record(1)])
    write_trajectories(
        run / "samples.jsonl",
        [
            episode("middling", "a", reward=0.5),
            episode("good", "08;", reward=1.0),
            episode("bad", "?;", reward=0.0),
            episode("broken", "", reward=None, status="failed", error="OSError: gone"),
        ],
    )
    text = text_of(run)
    shown = text[text.index("Episodes") : text.index("metrics and their definitions")]
    assert "best: step 1, task 0, finished, reward 1.000" in shown
    assert (
        "user, not trained on3+5:assistant, tokens 0 to 1, 2 trained on; steps 0.500good" in shown
    )
    assert "tool, not trained on08;assistant, tokens 3 to 4, 2 trained on=08" in shown
    assert "worst: step 1, task 0, finished, reward 0.000" in shown
    assert "failed: step 1, task 0, failed, not scored, OSError: gone" in shown
    assert "middling" not in shown


@pytest.mark.parametrize("text", [t for t in HOSTILE if "surrogate" not in t])
def test_text_in_episodes_stays_text(tmp_path, text):
    run = write_run(tmp_path, [step_record(1)])
    record = episode(text, text, error=text, status="failed")
    write_trajectories(run / "samples.jsonl", [record])
    raw = page(read_run(run), [])
    parsed = Page(raw)
    assert parsed.open == []
    assert not {"script", "img"} & {tag for tag, _ in parsed.tags}
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", raw)
    # The completion itself, the error, the turn, and the tool's output.
    assert raw.count(html.escape(text.replace("\x00", "\\x00").replace("\x07", "\\x07")
                                 .replace("\x1b", "\\x1b").replace("\x9b", "\\x9b"))) >= 4  # fmt: skip


def test_long_completions_are_cut(tmp_path):
    run = write_run(tmp_path, [step_record(1)])
    write_trajectories(run / "samples.jsonl", [trajectory("y" * 100_000)])
    assert "98500 characters more" in text_of(run)


def test_report_is_deterministic_and_replaces_the_old_one(tmp_path):
    run = write_run(tmp_path, [step_record(i) for i in (1, 2)], [evaluation(0, 0.5)])
    first = {p.name: p.read_bytes() for p in write_report(run).parent.iterdir()}
    assert {p.name: p.read_bytes() for p in write_report(run).parent.iterdir()} == first
    (run / "eval.jsonl").unlink()
    assert {p.name for p in write_report(run).parent.iterdir()} == set(first) - {"eval.png"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: None, "which does not exist"),
        (lambda p: p.write_text("x"), "a file"),
        (lambda p: p.mkdir(), "no run"),
        (lambda p: write_run(p, []), "a run that finished none"),
    ],
)
def test_a_folder_that_is_not_a_run_is_an_error(tmp_path, make, message):
    make(tmp_path / "x")
    with pytest.raises(ValueError, match=r"report: .* got .*" + message):
        write_report(tmp_path / "x")
    assert not (tmp_path / "x" / "report").exists()


def test_time_split_adds_up_to_the_step():
    record = step_record(3)
    record["time/other"] = record["time/step"] - sum(
        record[f"time/{n}"] for n in ("sample", "score", "forward_backward", "optimizer", "fastrl")
    )
    assert math.isclose(sum(time_split([record]).values()), record["time/step"])
