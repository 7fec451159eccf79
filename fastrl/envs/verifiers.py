"""Tasksets of `verifiers` 0.4 behind `Env`: tasks of one answer, scored by the rewards of the task."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from fastrl.envs.env import Message, StepResult

__all__ = ["Verifiers"]


class Verifiers:
    """A taskset of verifiers 0.4: its prompts, one answer each, its rewards with their weights.

    `name` is what verifiers calls the taskset's id, an installed package; `params` are fields of its
    configuration. Reward parts are the taskset's `@reward` methods and judges. In verifiers an agent
    holds the conversation inside a runtime and reaches the model through a server; here the trainer
    holds it, so tasks that need a runtime, tools or a user who answers are refused at start, with what
    it is that they need.
    """

    def __init__(self, *, name: str, **params: Any) -> None:
        try:
            import verifiers.v1 as vf
            from verifiers.v1.utils import loaders
        except ImportError as error:
            raise ValueError(
                f"env: verifiers:{name} needs the package verifiers, 0.4 or newer ({error}); "
                "pip install verifiers"
            ) from error
        config = loaders.taskset_config_type(name)(id=name, **params)
        self._taskset = loaders.load_taskset(config)
        self._type = self._taskset.task_type()
        probe = next(iter(self._taskset), None)
        if probe is None:
            raise ValueError(f"env: verifiers:{name} has no tasks with {params}")
        rewards = [*probe.hooks("reward")]
        judges = probe.plugged_judges()
        needs = {
            "a container": self._type.NEEDS_CONTAINER,
            "tools": bool(self._type.toolsets(config.task) or self._taskset.toolsets(config)),
            "setup in a runtime": self._type.setup is not vf.Task.setup,
            "finalize in a runtime": self._type.finalize is not vf.Task.finalize,
            "a runtime to score": any(map(_needs_runtime, [*rewards, *(j.score for j in judges)])),
            "a user who begins": probe.data.prompt is None,
        }
        if needed := [what for what, is_needed in needs.items() if is_needed]:
            raise ValueError(
                f"env: verifiers:{name} must have tasks of one answer, but they need "
                f"{', '.join(needed)}; write a class with the methods of Env around it"
            )
        self.weights: Mapping[str, float] = {
            **{fn.__name__: float(getattr(fn, "_vf_weight", 1.0)) for fn in rewards},
            **{judge.reward_name: float(judge.config.weight) for judge in judges},
        }
        if not self.weights:
            raise ValueError(f"env: verifiers:{name} has no reward; mark a method with @vf.reward")
        self._name = name

    def tasks(self, *, size: int, seed: int) -> Sequence[Mapping[str, Any]]:
        """`size` tasks, shuffled by `seed` where the taskset ends; an endless one gives its first."""
        taskset = self._taskset
        chosen = (taskset.shuffle(seed) if taskset.bounded else taskset).take(size)
        return [task.data.model_dump(mode="json") for task in chosen]

    def reset(self, task: Mapping[str, Any]) -> list[Message]:
        """The prompt of the task."""
        data = self._type.data_type().model_validate(task)
        self._task = self._type(data, self._taskset.config.task)
        prompt = data.prompt
        system = [] if data.system_prompt is None else [_message("system", data.system_prompt)]
        if isinstance(prompt, str):
            self._prompt = [*system, _message("user", prompt)]
        else:
            self._prompt = [*system, *(_message(m.role, m.content) for m in prompt)]
        return [dict(message) for message in self._prompt]

    def step(self, message: Message) -> StepResult:
        """Score the answer with the task's own rewards; the episode is over."""
        trace = self._trace(str(message["content"]))
        asyncio.run(self._task.score(trace))
        parts = {n: None if r is None else float(r.score) for n, r in trace.rewards.items()}
        if unknown := set(parts) - set(self.weights):
            raise ValueError(
                f"env: verifiers:{self._name} returned rewards {sorted(unknown)} that are no names of "
                "its reward methods, so their weights are not known; give each a method of its own"
            )
        return StepResult([], parts, True)

    def _trace(self, answer: str) -> Any:
        """The record that verifiers scores: the prompt, and the answer as the model's own message."""
        import verifiers.v1 as vf

        task = self._task
        trace = vf.Trace(
            task=vf.TraceTask(type=type(task).__name__, data=task.data),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
        )
        for place, said in enumerate(self._prompt):
            node = vf.MessageNode(message=said, parent=place - 1 if place else None)
            trace.nodes.append(node)
        own = vf.MessageNode(
            message=vf.AssistantMessage(content=answer), parent=len(self._prompt) - 1, sampled=True
        )
        trace.nodes.append(own)
        return trace


def _message(role: str, content: Any) -> Message:
    """A chat message; verifiers keeps pictures and the like in a list, which no prompt here can hold."""
    if not isinstance(content, str):
        raise ValueError(f"env: verifiers: a {role} message must be text, got {content!r}")
    return {"role": role, "content": content}


def _needs_runtime(function: Any) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty
