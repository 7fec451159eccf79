"""Guess a secret number; the environment answers "higher" or "lower".

The smallest task where credit over turns matters: bisection finds one of 16 numbers within five turns,
and which of the guesses was good is visible in their order, not in the score of the whole episode.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from fastrl.envs.env import Message, StepResult

__all__ = ["GuessNumber"]

_DIGITS = "0123456789abcdefghijklmnopqrstuv"


class GuessNumber:
    """A secret among `numbers`, at most `turns` guesses.

    A number is one character ("0" to "9", then "a" to "v"), so a guess is one token for a tokenizer of
    characters. The answer to a guess is ">" when the secret is higher, "<" when it is lower, and "?"
    when the guess was no number in range. An episode ends with the secret or with the last turn.

    Reward parts: `score` is `solved x (1 - turns used / (2 turns))`, given at the last turn; `solved` is
    1 or 0. With `process=True` each guess also earns `narrowed`: the share of the remaining secrets that
    it ruled out.

    >>> env = GuessNumber(numbers=8, turns=3)
    >>> env.reset({"secret": 5})
    [{'role': 'user', 'content': '?'}]
    >>> env.step({"role": "assistant", "content": "3"})
    StepResult(messages=[{'role': 'user', 'content': '>'}], reward_parts={}, done=False)
    >>> env.step({"role": "assistant", "content": "5"}).reward_parts
    {'solved': 1.0, 'score': 0.6666666666666667}
    """

    def __init__(self, *, numbers: int = 16, turns: int = 5, process: bool = False) -> None:
        if not 2 <= numbers <= len(_DIGITS) or turns < 1:
            raise ValueError(
                f"guess_number: numbers must be 2 to {len(_DIGITS)} and turns at least 1, got "
                f"{numbers} and {turns}"
            )
        self._digits = _DIGITS[:numbers]
        self._turns = turns
        self._process = process
        self.weights = {"solved": 0.0, "score": 1.0, **({"narrowed": 0.2} if process else {})}

    def tasks(self, *, size: int, seed: int) -> Sequence[Mapping[str, Any]]:
        """Every secret once, whatever `size`, in an order that depends on `seed`."""
        secrets = list(range(len(self._digits)))
        random.Random(f"guess_number/{seed}").shuffle(secrets)
        return [{"secret": secret, "answer": self._digits[secret]} for secret in secrets]

    def reset(self, task: Mapping[str, Any]) -> list[Message]:
        """Begin with the secret of `task`."""
        self._secret = int(task["secret"])
        self._used = 0
        self._low, self._high = 0, len(self._digits) - 1
        return [{"role": "user", "content": "?"}]

    def step(self, message: Message) -> StepResult:
        """Compare the guess with the secret."""
        self._used += 1
        text = message["content"]
        guess = self._digits.find(text) if len(text) == 1 else -1
        solved = guess == self._secret
        parts: dict[str, float | None] = {}
        before = self._high - self._low + 1
        answer = "?"
        if guess >= 0 and not solved:
            answer = ">" if self._secret > guess else "<"
            if self._secret > guess:
                self._low = max(self._low, guess + 1)
            else:
                self._high = min(self._high, guess - 1)
        if self._process:
            left = 1 if solved else self._high - self._low + 1
            parts["narrowed"] = 1 - left / before if before > 1 else float(solved)
        if solved or self._used == self._turns:
            parts["solved"] = float(solved)
            parts["score"] = float(solved) * (1 - self._used / (2 * self._turns))
            return StepResult([], parts, True)
        return StepResult([{"role": "user", "content": answer}], parts, False)
