"""Rollout of many episodes at once, turn by turn, over one generator.

All episodes that still go on are sampled side by side; their environments answer; those that ended
leave the batch. The tokens of an episode only ever grow (see chat.py), so ids and log-probabilities of
sampled tokens are those that are trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from fastrl.envs import Env, EnvTask, Message, StepResult, Trajectory, Turn, as_score
from fastrl.train.chat import Chat
from fastrl.train.config import Config
from fastrl.train.guard import call_all
from fastrl.train.metrics import Timer
from fastrl.train.models import Policy
from fastrl.train.rollout import Completion, Generator, older_step

__all__ = ["play"]


def play(
    config: Config,
    task: EnvTask,
    policy: Policy,
    generator: Generator,
    timer: Timer,
    asked: Sequence[tuple[str, int, Mapping[str, Any]]],
    *,
    samples: int,
    temperature: float,
    seed: int,
    step: int,
) -> list[Trajectory]:
    """`samples` episodes of each task in `asked`, which holds uid, place in the step, and the task.

    Episodes that the policies of [env] drop are left out. Raises RuntimeError when an environment
    failed and env.failed = "raise".
    """
    options = config.env
    episodes = [
        _Episode(uid, place * samples + k, entry, task)
        for uid, place, entry in asked
        for k in range(samples)
    ]
    with timer("score"):
        _in_env(config, episodes, lambda e: e.reset())
    chat = Chat(
        policy,
        use_template=config.task.chat,
        system=config.task.system,
        tools=getattr(episodes[0].env, "tools", ()) if episodes else (),
    )
    for episode in episodes:
        episode.begin(chat)
    for turn in range(options.max_turns):
        active = [e for e in episodes if e.status is None]
        for episode in active:
            # There must be room for a whole turn, or what is sampled would depend on the limit.
            if episode.num_tokens() + config.rollout.max_new_tokens > options.max_tokens:
                episode.status = "truncated"
        active = [e for e in active if e.status is None]
        if not active:
            break
        with timer("sample"):
            groups = generator.generate(
                [e.tokens() for e in active],
                samples=1,
                max_new_tokens=config.rollout.max_new_tokens,
                temperature=temperature,
                # Another stream for each turn, and in it a place for each episode.
                seed=seed + turn,
                places=[e.place for e in active],
            )
        for episode, (completion,) in zip(active, groups, strict=True):
            episode.speak(completion, policy)
        with timer("score"):
            _in_env(config, active, lambda e: e.answer())
        for episode in active:
            episode.hear(chat)
    for episode in episodes:
        episode.status = episode.status or "truncated"
    with timer("score"):
        _in_env(config, episodes, lambda e: e.end())
    kept = [e for e in episodes if _policy(config, e) != "drop"]
    return [e.trajectory(step, _policy(config, e)) for e in kept]


def _policy(config: Config, episode: _Episode) -> str:
    """What is done with the episode: keep, zero, mask or drop."""
    policies = {
        "finished": "keep",
        "truncated": config.env.truncated,
        "failed": config.env.failed,
    }
    return policies[episode.status or "finished"]


def _in_env(config: Config, episodes: Sequence[_Episode], call: Callable[[_Episode], None]) -> None:
    """Call the environment of each episode; those that raise or hang have failed."""
    results = call_all(
        [lambda e=e: call(e) for e in episodes],  # type: ignore[misc]
        seconds=config.env.step_seconds,
        workers=config.env.workers,
    )
    for episode, result in zip(episodes, results, strict=True):
        if isinstance(result, BaseException):
            episode.status = "failed"
            episode.error = f"{type(result).__name__}: {result}"
            if config.env.failed == "raise":
                raise RuntimeError(
                    f'env: the environment of task {episode.uid} failed: {episode.error}; env.failed = "mask" '
                    "leaves such episodes out of training instead"
                ) from result


class _Episode:
    """One episode while it is played."""

    def __init__(self, uid: str, place: int, entry: Mapping[str, Any], task: EnvTask) -> None:
        self.uid, self.place = uid, place
        self.status: Literal["finished", "truncated", "failed"] | None = None
        self.error = ""
        self._entry, self._task = entry, task
        self._messages: list[Message] = []
        self._texts: list[str] = []
        self._prompt: list[int] = []
        self._ids: list[int] = []
        self._mask: list[int] = []
        self._logprobs: list[float] | None = []
        self._version: int | None = None
        self._turns: list[Turn] = []
        self._result: StepResult | None = None
        self._parts: dict[str, float | None] = dict.fromkeys(task.weights)

    # --- calls into the environment, in a worker's thread

    def reset(self) -> None:
        self.env: Env = self._task.make()
        self._messages = list(self.env.reset(self._entry))

    def answer(self) -> None:
        result = StepResult(*self.env.step(self._messages[-1]))
        self._result = result._replace(reward_parts=self._scores(result.reward_parts))

    def end(self) -> None:
        if self.status == "truncated" and hasattr(self.env, "cut"):
            self._score(self._scores(self.env.cut()))
        if hasattr(self.env, "close"):
            self.env.close()

    def _scores(self, parts: Mapping[str, Any]) -> dict[str, float]:
        """The parts that were scored, as numbers; an error is the environment's."""
        if unknown := set(parts) - set(self._parts):
            raise ValueError(
                f"reward parts {sorted(unknown)} are not in the weights of the environment"
            )
        scores = {}
        for name, value in parts.items():
            try:
                number = as_score(value)
            except (TypeError, ValueError) as error:
                raise ValueError(f"reward part {name!r} is no score: {error}") from error
            if number is not None:
                scores[name] = number
        return scores

    # --- tokens

    def begin(self, chat: Chat) -> None:
        if self.status is None:
            text, self._prompt = chat.first(self._messages)
            self._texts = [text]

    def tokens(self) -> list[int]:
        return self._prompt + self._ids

    def num_tokens(self) -> int:
        return len(self._prompt) + len(self._ids)

    def speak(self, completion: Completion, policy: Policy) -> None:
        """Take one assistant turn."""
        text = policy.decode(completion.token_ids)
        start = len(self._ids)
        self._ids += completion.token_ids
        self._version = completion.version
        self._mask += [1] * len(completion.token_ids)
        if completion.logprobs is None:
            self._logprobs = None
        elif self._logprobs is not None:
            self._logprobs += completion.logprobs
        self._turns.append(Turn(start, len(self._ids)))
        self._messages.append({"role": "assistant", "content": text})
        self._texts.append(text)

    def hear(self, chat: Chat) -> None:
        """Take the answer of the environment to the last turn."""
        if self.status is not None or self._result is None:
            return
        messages, parts, done = self._result
        self._score(parts)
        if done:
            self.status = "finished"
            return
        self._messages += messages
        text, ids = chat.between(messages, self._ids[-1])
        self._texts.append(text)
        self._ids += ids
        self._mask += [0] * len(ids)
        if self._logprobs is not None:
            self._logprobs += [0.0] * len(ids)

    def _score(self, parts: Mapping[str, float | None]) -> None:
        """Add rewards to the last turn and to the episode."""
        scored = {n: v for n, v in parts.items() if v is not None}
        if not scored:
            return
        for name, value in scored.items():
            self._parts[name] = (self._parts[name] or 0.0) + value
        if self._turns:
            last = self._turns[-1]
            merged = {**last.reward_parts}
            for name, value in scored.items():
                merged[name] = (merged.get(name) or 0.0) + value
            self._turns[-1] = last._replace(reward_parts=merged, reward=self._task.total(merged))

    def trajectory(self, step: int, policy: str) -> Trajectory:
        """The record; `policy` says whether its tokens and its reward count."""
        counts = policy == "keep"
        trained = policy in ("keep", "zero")
        # What the environment said last is never answered, so no token of it is needed.
        size = self._turns[-1].end if self._turns else 0
        answer = self._entry.get("answer", "")
        return Trajectory(
            uid=self.uid,
            episode=f"{self.uid}/{self.place}",
            prompt=self._texts[0] if self._texts else "",
            completion="".join(self._texts[1:]),
            answer=answer if isinstance(answer, str) else "",
            question=str(self._messages[0]["content"]) if self._messages else "",
            prompt_ids=tuple(self._prompt),
            completion_ids=tuple(self._ids[:size]),
            mask=tuple(self._mask[:size]) if trained else (0,) * size,
            logprobs=tuple(self._logprobs[:size]) if self._logprobs else (),
            reward=self._task.total(self._parts) if counts else None,
            reward_parts=self._parts,
            finished=self.status == "finished",
            step=step,
            policy_step=older_step(self._version, step),
            turns=tuple(self._turns),
            messages=tuple(self._messages),
            status=self.status or "finished",
            error=self.error,
            info=dict(getattr(getattr(self, "env", None), "info", {})),
        )
