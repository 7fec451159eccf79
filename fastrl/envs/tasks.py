"""Tasks: a list of questions, split into training and held-out, and the rewards that score answers.

A source is a function that returns questions: a built-in one, a reasoning-gym dataset, or any Python
function by import path. A reward is a function of a question and a completion; it returns a number,
or None (or NaN) when it cannot judge this answer, which is then left out rather than counted as zero.
"""

from __future__ import annotations

import importlib
import math
import random
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar, cast

__all__ = [
    "Question",
    "Reward",
    "RewardError",
    "RewardFunction",
    "Source",
    "Task",
    "as_score",
    "count_up",
    "exact_match",
    "last_number",
    "load_task",
    "position_match",
    "stream",
]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One question, its answer, and how its source scores a completion."""

    text: str
    """The question as the source words it."""
    answer: str
    """The expected answer."""
    score: Callable[[str], float | None] | None = None
    """The source's own score of a completion, if it has one."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the source knows about this question."""


RewardFunction: TypeAlias = Callable[[Question, str], float | None]
Source: TypeAlias = Callable[..., Sequence[Question]]


class RewardError(ValueError):
    """A reward function raised, took too long, or returned what is no score."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """A reward function with its name and weight."""

    name: str
    function: RewardFunction
    weight: float = 1.0

    def score(self, question: Question, completion: str) -> float | None:
        """What the function returns, None when not scored; RewardError when it fails."""
        try:
            value = self.function(question, completion)
        except (Exception, SystemExit) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            what = f"raised {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
            raise self.failure(question, what) from error
        try:
            return as_score(value)
        except (TypeError, ValueError) as error:
            raise self.failure(question, f"returned no score: {error}") from error

    def failure(self, question: Question, what: str) -> RewardError:
        """The error that says what the function did, and at which question."""
        return RewardError(
            f"task: reward {self.name!r} {what}; the question was {question.text!r:.80}"
        )


def as_score(value: object) -> float | None:
    """`value` as a float; None, which means not scored, for None and NaN.

    Raises TypeError or ValueError for anything but a finite number or None. Tensors and arrays of one
    element are numbers; a string that reads like one is not.

    >>> as_score(True), as_score(float("nan"))
    (1.0, None)
    """
    if value is None:
        return None
    try:
        if isinstance(value, (str, bytes, bytearray)):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
        if math.isinf(number):
            raise ValueError
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        kind = TypeError if isinstance(error, (TypeError, RuntimeError)) else ValueError
        raise kind(
            f"it must be a finite number, or None when the answer cannot be judged, got {value!r:.80} "
            f"({type(value).__name__})"
        ) from None
    return None if math.isnan(number) else number


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Training questions, held-out questions, and rewards."""

    train: tuple[Question, ...]
    held_out: tuple[Question, ...]
    rewards: tuple[Reward, ...]
    seed: int = 0

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each reward by name."""
        return {reward.name: reward.weight for reward in self.rewards}

    def batch(self, position: int, size: int) -> list[tuple[int, Question]]:
        """Training questions number `position` to `position + size` of an endless shuffled stream."""
        return stream(self.train, position, size, self.seed)

    def score(self, question: Question, completion: str) -> dict[str, float | None]:
        """Each reward of one completion by name; None where it was not scored. Raises RewardError."""
        return {reward.name: reward.score(question, completion) for reward in self.rewards}

    def total(self, parts: Mapping[str, float | None]) -> float | None:
        """The weighted sum of the rewards that were scored; None when none was."""
        scored = [(r.weight, parts[r.name]) for r in self.rewards if parts[r.name] is not None]
        return sum(w * cast(float, v) for w, v in scored) if scored else None


def stream(items: Sequence[T], position: int, size: int, seed: int) -> list[tuple[int, T]]:
    """Entries number `position` to `position + size` of an endless shuffled stream over `items`.

    Each pass over the items has its own order, which depends on the seed and the pass alone, so a
    position is all that a resumed run needs to know.
    """
    result: list[tuple[int, T]] = []
    order: list[int] = []
    for i in range(position, position + size):
        epoch, offset = divmod(i, len(items))
        if not order or offset == 0:
            order = list(range(len(items)))
            random.Random(f"{seed}/{epoch}").shuffle(order)
        result.append((i, items[order[offset]]))
    return result


def load_task(
    source: str,
    *,
    params: Mapping[str, Any] | None = None,
    rewards: Sequence[tuple[str, str | None, float]] = (("task", None, 1.0),),
    size: int = 1024,
    held_out: int = 32,
    seed: int = 0,
) -> Task:
    """The task named `source`, with `held_out` distinct questions that training never sees.

    `rewards` are triples (function, name or None, weight), where the function is "task" or an
    import path "package.module:function". Questions whose text is held out are removed from the
    training set; so are repetitions.

    Raises ValueError for an unknown source or reward, and when too few distinct questions exist.

    >>> task = load_task("count_up", held_out=2)
    >>> task.score(task.train[0], task.train[0].answer)
    {'task': 1.0}
    """
    make = _source(source)
    drawn = make(size=size + held_out, seed=seed, **dict(params or {}))
    distinct = list({question.text: question for question in drawn}.values())
    # A shuffle, because sources may list their questions in order of difficulty.
    random.Random(f"{seed}/split").shuffle(distinct)
    if len(distinct) <= held_out:
        raise ValueError(
            f"task: {source} gave {len(distinct)} distinct questions, which must be more than the "
            f"{held_out} held out; raise task.size or lower eval.size"
        )
    functions = []
    for function, name, weight in rewards:
        label = name or function.rpartition(":")[2]
        functions.append(Reward(name=label, function=_reward(function), weight=weight))
    if len({r.name for r in functions}) != len(functions):
        raise ValueError(
            f"task: reward names must differ, got {[r.name for r in functions]}; set their name"
        )
    return Task(
        train=tuple(distinct[held_out:]),
        held_out=tuple(distinct[:held_out]),
        rewards=tuple(functions),
        seed=seed,
    )


def _source(name: str) -> Source:
    if name in _SOURCES:
        return _SOURCES[name]
    kind, _, rest = name.partition(":")
    if kind == "reasoning_gym" and rest:
        return lambda *, size, seed, **params: _reasoning_gym(rest, size, seed, params)
    if rest:
        return cast(Source, _imported(name, "source"))
    raise ValueError(
        f"task: unknown source {name!r}; expected one of {', '.join(_SOURCES)}, "
        '"reasoning_gym:NAME", or "package.module:function"'
    )


def _reward(name: str) -> RewardFunction:
    if name == "task":
        return task_score
    if ":" in name:
        return cast(RewardFunction, _imported(name, "reward"))
    raise ValueError(f'task: unknown reward {name!r}; expected "task" or "package.module:function"')


def _imported(path: str, what: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"task: cannot import the {what} {path!r}: {error}") from error
    if not callable(function):
        raise ValueError(f"task: the {what} {path!r} must be callable, got {type(function)}")
    return cast(Callable[..., Any], function)


# --- rewards -----------------------------------------------------------------------------------


def task_score(question: Question, completion: str) -> float | None:
    """The score of the question's own source. Raises ValueError when the source has none."""
    if question.score is None:
        raise ValueError(
            'task: the source brings no score of its own, so the reward "task" cannot be used; '
            "name a reward function by import path in task.rewards"
        )
    return question.score(completion)


def exact_match(question: Question, completion: str) -> float:
    """1 when the completion is the answer but for outer white space, else 0."""
    return float(completion.strip() == question.answer.strip())


def position_match(question: Question, completion: str) -> float:
    """Share of positions where completion and answer agree, over the longer of the two.

    >>> position_match(Question(text="3", answer="456"), "45")
    0.6666666666666666
    """
    longest = max(len(completion), len(question.answer), 1)
    return sum(a == b for a, b in zip(completion, question.answer, strict=False)) / longest


def last_number(question: Question, completion: str) -> float:
    """1 when the last number of the completion is the answer, else 0.

    >>> last_number(Question(text="4 + 3 =", answer="7"), "4 + 3 = 7.")
    1.0
    """
    numbers = re.findall(r"-?\d+", completion)
    return float(bool(numbers) and numbers[-1] == question.answer.strip())


# --- sources -----------------------------------------------------------------------------------


def count_up(*, size: int, seed: int, length: int = 4) -> list[Question]:
    """Count on from a number for `length` digits, modulo ten: "37" is answered by "8901"."""
    rng = random.Random(f"count_up/{seed}")
    questions = []
    for start in rng.sample(range(100), min(size, 100)):
        answer = "".join(str((start + i) % 10) for i in range(1, length + 1))
        questions.append(_scored_by_position(f"{start:02d}", answer))
    return questions


def _scored_by_position(text: str, answer: str) -> Question:
    bare = Question(text=text, answer=answer)
    return Question(
        text=text, answer=answer, score=lambda completion: position_match(bare, completion)
    )


def _reasoning_gym(name: str, size: int, seed: int, params: Mapping[str, Any]) -> list[Question]:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError(
            f"task: reasoning_gym:{name} needs the package reasoning-gym; pip install reasoning-gym"
        ) from error
    # reasoning-gym draws each item from its own seed, so the same size and seed give the same list.
    data = reasoning_gym.create_dataset(name, size=size, seed=seed, **params)

    def question(entry: dict[str, Any]) -> Question:
        return Question(
            text=entry["question"],
            answer=str(entry["answer"]),
            score=lambda completion: float(data.score_answer(answer=completion, entry=entry)),
            data=entry["metadata"],
        )

    return [question(data[i]) for i in range(size)]


_SOURCES: dict[str, Source] = {"count_up": count_up}
