"""Tasks, rewards, and the records of what was sampled."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastrl.envs import Question, Trajectory, load_task, read_trajectories, write_trajectories
from fastrl.envs.tasks import exact_match, last_number, position_match

HERE = "tests.train.rewards"


def test_held_out_questions_are_never_trained_on() -> None:
    task = load_task("count_up", held_out=20, size=100)
    held_out = {q.text for q in task.held_out}
    asked = {q.text for _, q in task.batch(0, 500)}
    assert len(held_out) == 20
    assert not held_out & asked
    assert len(asked) == 80


def test_the_stream_depends_on_seed_and_position_alone() -> None:
    task = load_task("count_up", held_out=20, size=100, seed=3)
    whole = task.batch(0, 200)
    # A part that crosses the end of a pass is the same part of the whole.
    assert task.batch(70, 30) == whole[70:100]
    assert [q.text for _, q in whole[:80]] != [q.text for _, q in whole[80:160]]
    assert (
        load_task("count_up", held_out=20, size=100, seed=3).batch(0, 9)[3][1].text
        == whole[3][1].text
    )
    assert load_task("count_up", held_out=20, size=100, seed=4).batch(0, 80) != whole[:80]


def test_counting_on() -> None:
    task = load_task("count_up", params={"length": 3}, held_out=0, size=100)
    answers = {q.text: q.answer for q in task.train}
    assert answers["37"] == "890"
    assert answers["09"] == "012"


@pytest.mark.parametrize(
    ("completion", "expected"),
    [("7", 1.0), (" 7\n", 1.0), ("4 + 3 = 7.", 1.0), ("7 or 8", 0.0), ("17", 0.0), ("", 0.0)],
)
def test_last_number(completion: str, expected: float) -> None:
    assert last_number(Question(text="4 + 3 =", answer="7"), completion) == expected


def test_last_number_reads_negative_numbers() -> None:
    question = Question(text="4 - 7 =", answer="-3")
    assert last_number(question, "it is -3") == 1.0
    assert last_number(question, "it is 3") == 0.0


def test_position_and_exact_match() -> None:
    question = Question(text="", answer="1234")
    assert position_match(question, "1294") == 0.75
    assert position_match(question, "12345678") == 0.5
    assert position_match(question, "") == 0.0
    assert exact_match(question, "1234 ") == 1.0
    assert exact_match(question, "123") == 0.0


def test_reasoning_gym_by_name() -> None:
    task = load_task(
        "reasoning_gym:chain_sum",
        params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        rewards=[("task", None, 1.0), ("fastrl.envs.tasks:last_number", "number", 0.5)],
        size=100,
        held_out=10,
    )
    question = task.held_out[0]
    parts = task.score(question, question.answer)
    assert parts == {"task": 1.0, "number": 1.0}
    assert task.total(parts) == 1.5
    assert task.score(question, "no idea")["number"] == 0.0
    again = load_task("reasoning_gym:chain_sum", params={"min_terms": 2}, size=50, held_out=5)
    assert {q.text for q in again.held_out}.isdisjoint(q.text for q in again.train)


def test_none_and_nan_are_not_scored_and_leave_the_sum() -> None:
    rewards = [
        ("task", None, 1.0),
        (f"{HERE}:none_for_short", None, 2.0),
        (f"{HERE}:nan_always", None, 4.0),
    ]
    task = load_task("count_up", rewards=rewards, held_out=1)
    question = Question(text="01", answer="23", score=lambda _: 0.5)
    parts = task.score(question, "23")
    assert parts == {"task": 0.5, "none_for_short": None, "nan_always": None}
    assert task.total(parts) == 0.5
    assert task.total(task.score(question, "2345")) == 2.5
    assert task.total(dict.fromkeys(parts)) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "count"}, "unknown source 'count'; expected one of count_up"),
        ({"source": "no.such.module:f"}, "cannot import the source"),
        ({"source": "count_up", "rewards": [("nothing", None, 1.0)]}, "unknown reward 'nothing'"),
        (
            {"source": "count_up", "rewards": [(f"{HERE}:nope", None, 1.0)]},
            "cannot import the reward",
        ),
        ({"source": "count_up", "rewards": [(f"{HERE}:SIGNAL_AT", None, 1.0)]}, "must be callable"),
        ({"source": "count_up", "held_out": 100}, "more than the 100 held out"),
        (
            {"source": "count_up", "rewards": [("task", None, 1.0), ("task", None, 1.0)]},
            "reward names must differ",
        ),
    ],
)
def test_refusals(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_task(**arguments)  # type: ignore[arg-type]


def test_a_source_without_score_needs_a_named_reward() -> None:
    task = load_task("count_up", held_out=1)
    with pytest.raises(ValueError, match="brings no score of its own"):
        task.score(Question(text="", answer=""), "")


def test_trajectories_survive_a_file(tmp_path: Path) -> None:
    records = [
        Trajectory(
            uid="7",
            prompt="4 + 3 =\n",
            completion='a "quoted" ünicode\u2028line \ud800',
            answer="7",
            prompt_ids=(1, 2),
            completion_ids=(3, 4),
            mask=(1, 0),
            logprobs=(-0.1, -1e-30),
            reward=0.5,
            reward_parts={"a": 0.5, "b": None},
            finished=False,
            step=3,
        ),
        Trajectory(uid="8", prompt="", completion="", answer="", reward=None),
    ]
    path = tmp_path / "t.jsonl"
    write_trajectories(path, records[:1])
    write_trajectories(path, records[1:])
    assert list(read_trajectories(path)) == records
    assert len(path.read_text(encoding="utf-8").split("\n")) == 3


def test_a_nan_reward_is_written_as_null() -> None:
    record = Trajectory(uid="", prompt="", completion="", answer="", reward=float("nan"))
    assert Trajectory.from_json(record.to_json()).reward is None


def test_bad_records_are_refused() -> None:
    with pytest.raises(ValueError, match="one entry per completion token = 1"):
        Trajectory(uid="", prompt="", completion="", answer="", completion_ids=(1,), mask=(1, 1))
    with pytest.raises(ValueError, match="expected an object"):
        Trajectory.from_json("[1]")
    line = Trajectory(uid="", prompt="", completion="", answer="").to_json()
    with pytest.raises(ValueError, match="unknown fields"):
        Trajectory.from_json(line.replace('"uid"', '"extra": 1, "uid"'))
