"""Environments of other packages behind `Env`: reasoning-gym, Gymnasium and TextArena.

Any class with the methods of `Env` needs no adapter. That of verifiers is in `verifiers.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastrl.envs.env import Message, StepResult

__all__ = ["Gymnasium", "ReasoningGym", "TextArena"]


class ReasoningGym:
    """A dataset of reasoning-gym as an environment of one turn; reward part `score`."""

    weights: Mapping[str, float] = {"score": 1.0}

    def __init__(self, *, name: str, **params: Any) -> None:
        try:
            import reasoning_gym
        except ImportError as error:
            raise ValueError(
                f"env: reasoning_gym:{name} needs the package reasoning-gym; pip install reasoning-gym"
            ) from error
        self._create = lambda size, seed: reasoning_gym.create_dataset(
            name, size=size, seed=seed, **params
        )
        self._score = self._create(1, 0).score_answer

    def tasks(self, *, size: int, seed: int) -> Sequence[Mapping[str, Any]]:
        """`size` entries of the dataset."""
        data = self._create(size, seed)
        return [data[i] for i in range(size)]

    def reset(self, task: Mapping[str, Any]) -> list[Message]:
        """Ask the question of the entry."""
        self._entry = dict(task)
        return [{"role": "user", "content": task["question"]}]

    def step(self, message: Message) -> StepResult:
        """Score the answer with the dataset's own score."""
        score = float(self._score(answer=message["content"], entry=self._entry))
        return StepResult([], {"score": score}, True)


class Gymnasium:
    """A Gymnasium environment with discrete actions; observations are shown as text.

    An action is the last whole number in the message. A message without a valid one is answered with
    the valid range; the environment does not move. Reward part `reward`, given at each turn.
    """

    weights: Mapping[str, float] = {"reward": 1.0}

    def __init__(self, *, name: str, about: str = "", **params: Any) -> None:
        try:
            import gymnasium
        except ImportError as error:
            raise ValueError(
                f"env: gymnasium:{name} needs the package gymnasium; pip install gymnasium"
            ) from error
        self._env = gymnasium.make(name, **params)
        space = self._env.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ValueError(
                f"env: gymnasium:{name} must have discrete actions, got {space}; wrap it in a class of "
                "your own with the methods of Env"
            )
        self._first, self._last = int(space.start), int(space.start + space.n) - 1
        self._about = f"{about}\n" if about else ""

    def tasks(self, *, size: int, seed: int) -> Sequence[Mapping[str, Any]]:
        """`size` seeds of the environment."""
        return [{"seed": seed * 1_000_003 + i} for i in range(size)]

    def reset(self, task: Mapping[str, Any]) -> list[Message]:
        """Show the first observation."""
        observation, _ = self._env.reset(seed=int(task["seed"]))
        ask = f"Answer with a number from {self._first} to {self._last}."
        return [{"role": "user", "content": f"{self._about}{observation}\n{ask}"}]

    def step(self, message: Message) -> StepResult:
        """Take the action in `message`."""
        numbers = [int(n) for n in re.findall(r"-?\d+", message["content"])]
        if not numbers or not self._first <= numbers[-1] <= self._last:
            ask = f"Answer with a number from {self._first} to {self._last}."
            return StepResult([{"role": "user", "content": ask}], {}, False)
        observation, reward, ended, cut, _ = self._env.step(numbers[-1])
        over = bool(ended or cut)
        messages = [] if over else [{"role": "user", "content": str(observation)}]
        return StepResult(messages, {"reward": float(reward)}, over)

    def close(self) -> None:
        """Free what the environment holds."""
        self._env.close()


class TextArena:
    """A TextArena game for one player; reward part `reward`, given at the end."""

    weights: Mapping[str, float] = {"reward": 1.0}

    def __init__(self, *, name: str, **params: Any) -> None:
        try:
            import textarena
        except ImportError as error:
            raise ValueError(
                f"env: textarena:{name} needs the package textarena; pip install textarena"
            ) from error
        self._env = textarena.make(name, **params)

    def tasks(self, *, size: int, seed: int) -> Sequence[Mapping[str, Any]]:
        """`size` seeds of the game."""
        return [{"seed": seed * 1_000_003 + i} for i in range(size)]

    def reset(self, task: Mapping[str, Any]) -> list[Message]:
        """Show the rules."""
        self._env.reset(num_players=1, seed=int(task["seed"]))
        return [self._observation()]

    def step(self, message: Message) -> StepResult:
        """Play the move in `message`."""
        done, _ = self._env.step(action=message["content"])
        if done:
            rewards, _ = self._env.close()
            return StepResult([], {"reward": float(rewards[0])}, True)
        return StepResult([self._observation()], {}, False)

    def _observation(self) -> Message:
        """What the player has not seen yet, without the echo of its own moves."""
        _, observation = self._env.get_observation()
        if isinstance(observation, str):
            return {"role": "user", "content": observation}
        lines = [str(entry[1]) for entry in observation if entry[0] != 0]
        return {"role": "user", "content": "\n".join(lines)}
