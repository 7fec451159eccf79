"""Sums of several terms, with a calculator that adds two numbers: the smallest task of tool use.

The model has to call the tool once per sign, with the result of one call as input of the next, and to
repeat the last result as its answer. Two ways of speaking: `compact`, which a model of characters can
learn from random weights, and `tools`, the usual tool calls of chat models.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastrl.envs.env import Message, StepResult
from fastrl.envs.tasks import Question, position_match
from fastrl.envs.tools import ToolEnv

__all__ = ["Calculator"]


class Calculator(ToolEnv):
    """A sum such as 3+5+4 of `terms` numbers from 1 to `largest`; the sum is what must be answered.

    `style="compact"`: a message that holds a sum of two numbers ("03+5") is a call and is answered with
    the result in two digits; one that begins with "=" is the final answer ("=12"); anything else is
    answered with "?" and counts as an invalid call. With `strict` a call other than the one that is due
    ends the episode, which saves the turns after it. `style="tools"`: `calculate` as a tool.

    Reward parts: `solved`, 1 when the answer is right and every call that it needs was made; `answer`,
    the share of its digits that are right; `steps`, given at each turn, the share of characters (compact)
    that agree with the call that is due; `valid_calls`, the share of calls that could be run. All but
    the first are partial credit: from random weights no episode is right, and a group of zeros teaches
    nothing.

    `demonstrate` makes the calls that are due, but before each it gives up with probability `guesses` and
    answers with a number between the least and the largest sum. With the default most demonstrations are
    wrong, and the likeliest thing to do at every call is the wrong one: what they show is how to speak.

    >>> env = Calculator(terms=3)
    >>> env.reset({"terms": [3, 5, 4]})
    [{'role': 'user', 'content': '03+5+4:'}]
    >>> env.step({"role": "assistant", "content": "03+5"})
    StepResult(messages=[{'role': 'tool', 'content': '08;'}], reward_parts={'steps': 0.5}, done=False)
    >>> env.step({"role": "assistant", "content": "08+4"}).messages
    [{'role': 'tool', 'content': '12;'}]
    >>> env.step({"role": "assistant", "content": "=12"}).reward_parts
    {'solved': 1.0, 'answer': 1.0, 'valid_calls': 1.0}
    """

    def __init__(
        self,
        *,
        terms: int = 3,
        largest: int = 9,
        style: str = "compact",
        strict: bool = True,
        guesses: float = 0.6,
    ) -> None:
        if not (2 <= terms <= 9 and 1 <= largest <= 9 and style in ("compact", "tools")):
            raise ValueError(
                'calculator: terms must be 2 to 9, largest 1 to 9 and style "compact" or "tools", got '
                f"{terms}, {largest}, {style!r}"
            )
        self._num_terms, self._largest = terms, largest
        self._compact = style == "compact"
        self._strict, self._guesses = strict, guesses
        # As sums over turns, steps and answer are each at most 1.
        self.weights = {"solved": 1.0, "answer": 1.0, "steps": 1.0, "valid_calls": 0.0}
        super().__init__([self.calculate])

    def calculate(self, a: int, operator: str, b: int) -> int:
        """Compute a sum or a difference of two numbers.

        a: first number
        operator: "+" or "-"
        b: second number
        """
        if operator not in ("+", "-"):
            raise ValueError(f"operator must be + or -, got {operator!r}")
        result = a + b if operator == "+" else a - b
        # A call is one that is needed when its first number is where the sum stands.
        due = len(self._sums) - 1
        if due < len(self._terms) - 1 and (a, operator, b) == (
            self._sums[-1],
            "+",
            self._terms[due + 1],
        ):
            self._sums.append(result)
        return result

    def tasks(self, *, size: int, seed: int) -> Sequence[Mapping[str, Any]]:
        """Distinct sums, `size` of them or as many as there are."""
        rng = random.Random(f"calculator/{seed}")
        base = self._largest
        total = base**self._num_terms
        numbers = rng.sample(range(total), min(size, total))
        terms = [[n // base**i % base + 1 for i in range(self._num_terms)] for n in numbers]
        return [{"terms": t, "answer": f"{sum(t):02d}"} for t in terms]

    def reset(self, task: Mapping[str, Any]) -> list[Message]:
        """Begin with the sum of `task`."""
        self.begin()
        self._terms: list[int] = list(task["terms"])
        self._sums = [self._terms[0]]
        rest = "".join(f"+{t}" for t in self._terms[1:])
        if self._compact:
            return [{"role": "user", "content": f"{self._terms[0]:02d}{rest}:"}]
        text = (
            f"What is {self._terms[0]}{rest}? Use the tool for every step; answer with the number."
        )
        return [{"role": "user", "content": text}]

    def demonstrate(self, task: Mapping[str, Any], rng: random.Random) -> list[Message]:
        """The calls of `task` and its answer, or as many of the calls as come before a guess."""
        terms: list[int] = list(task["terms"])
        said, total = [], terms[0]
        for term in terms[1:]:
            if rng.random() < self._guesses:
                total = rng.randint(len(terms), len(terms) * self._largest)
                break
            said.append(self._call(total, term))
            total += term
        said.append(f"={total:02d}" if self._compact else str(total))
        return [{"role": "assistant", "content": text} for text in said]

    def _call(self, a: int, b: int) -> str:
        """The message that adds two numbers with the tool."""
        if self._compact:
            return f"{a:02d}+{b}"
        call = {"name": "calculate", "arguments": {"a": a, "operator": "+", "b": b}}
        return f"<tool_call>{json.dumps(call)}</tool_call>"

    def step(self, message: Message) -> StepResult:
        """Run the call of `message`, or score its answer."""
        return self._compact_step(message) if self._compact else super().step(message)

    def _compact_step(self, message: Message) -> StepResult:
        text = message["content"]
        # Each of the calls that are due is worth the same; a turn too many is worth nothing.
        made = len(self._sums) - 1
        num_due = self._num_terms - 1
        if text.startswith("="):
            parts = dict(self.finish(text[1:]))
            parts["valid_calls"] = self.num_valid / self.num_calls if self.num_calls else 0.0
            return StepResult([], parts, True)
        self.num_calls += 1
        match = re.fullmatch(r"(\d\d?)\+(\d)", text)
        credit = 0.0
        if made < num_due:
            due = Question(text="", answer=self._call(self._sums[-1], self._terms[made + 1]))
            credit = position_match(due, text) / num_due
        answer = "?;"
        if match:
            self.num_valid += 1
            answer = f"{self.calculate(int(match[1]), '+', int(match[2])):02d};"
        # Once per due call: a second try at the same call earns nothing more.
        parts = {"steps": credit} if self.num_calls == made + 1 else {}
        if self._strict and len(self._sums) - 1 == made:
            return StepResult([], {**parts, **self.cut()}, True)
        return StepResult([{"role": "tool", "content": answer}], parts, False)

    def finish(self, answer: str) -> Mapping[str, float | None]:
        """Compare the final answer with the sum."""
        numbers = re.findall(r"-?\d+", answer)
        given = numbers[-1] if numbers else ""
        total = sum(self._terms)
        complete = len(self._sums) == self._num_terms
        right = bool(given) and int(given) == total
        expected = Question(text="", answer=f"{total:02d}" if self._compact else str(total))
        # An answer before its calls was guessed.
        share = position_match(expected, given) if complete else 0.0
        return {"solved": float(right and complete), "answer": share}

    def cut(self) -> Mapping[str, float | None]:
        """The rewards of an episode that did not come to an answer."""
        share = self.num_valid / self.num_calls if self.num_calls else 0.0
        return {"solved": 0.0, "answer": 0.0, "valid_calls": share}
