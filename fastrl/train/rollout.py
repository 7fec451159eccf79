"""Sampling: one protocol, and its implementation on a model in this process (others: engines.py).

A `Generator` turns prompts into completions. The implementation here runs the `transformers` model
itself: each prompt once, its keys and values shared by all of its samples, finished samples taken out
of the batch on the way. Draws depend on the seed, the prompt's place and the sample alone, not on how
many sequences are computed side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fastrl.train import checkpoint
from fastrl.train.config import ModelConfig
from fastrl.train.models import Policy, autocast, keys_and_values

__all__ = ["Completion", "Engine", "Generator", "TransformersGenerator", "older_step"]


class Completion(NamedTuple):
    """Sampled tokens; with the end-of-sequence token at the end when `finished`."""

    token_ids: list[int]
    finished: bool
    logprobs: list[float] | None = None
    """Of each token when it was sampled, at the temperature of sampling; None when not known."""
    version: int | None = None
    """Training steps behind the weights that sampled it; None when nobody counted."""


def older_step(version: int | None, step: int) -> int | None:
    """`Trajectory.policy_step` of what weights of `version` sampled for training step `step`.

    >>> older_step(3, 4), older_step(1, 4), older_step(None, 4)
    (None, 2, None)
    """
    return version + 1 if version is not None and version + 1 < step else None


class Generator(Protocol):
    """Anything that samples completions of prompts."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        samples: int,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        places: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """`samples` completions of each prompt; temperature 0 takes the likeliest token.

        Prompt i draws as the one in place `places[i]` of a longer list would (its own place by default),
        so that what a prompt gets does not depend on which others are asked beside it.
        The distribution is softmax(logits / temperature) over the whole vocabulary: no top-k, top-p or
        penalties, because the log-probabilities trained on would then be of another distribution.
        """
        ...


class Engine(Generator, Protocol):
    """A generator that is told when there are new weights."""

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Sample from `weights`, those of `checkpoint.weights` after `version` steps, from now on."""
        ...

    def close(self) -> None:
        """The run is over: no longer wait for what is not there."""
        ...


class TransformersGenerator:
    """Samples from a `Policy` in this process.

    With `is_copy` the policy is the generator's own, and `update` copies weights into it; otherwise it
    is the one in training, whose weights are always the newest.
    """

    def __init__(
        self, policy: Policy, config: ModelConfig, *, batch_size: int, is_copy: bool = False
    ) -> None:
        self._policy = policy
        self._config = config
        self._batch_size = batch_size
        self._is_copy = is_copy
        self._version: int | None = None

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """See `Engine.update`."""
        self._version = version
        if self._is_copy:
            checkpoint.load_weights(self._policy.model, weights)

    def close(self) -> None:
        """See `Engine.close`. Nothing is waited for here."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        samples: int,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        places: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """See `Generator.generate`."""
        places = range(len(prompts)) if places is None else places
        source = torch.Generator().manual_seed(seed)
        size = max(places, default=-1) + 1
        draws = torch.rand(size, samples, max_new_tokens, generator=source)[list(places)]
        per_part = max(self._batch_size // samples, 1)
        result: list[list[Completion]] = []
        for start in range(0, len(prompts), per_part):
            part = slice(start, start + per_part)
            with torch.no_grad(), autocast(self._config, self._policy.device):
                own = prompts[part], draws[part].flatten(0, 1)
                rows, logprobs = self._policy(partial(self._sample, *own, temperature))
            completions = list(map(self._completion, rows.tolist(), logprobs.tolist()))
            result += [completions[i : i + samples] for i in range(0, len(completions), samples)]
        return result

    def _completion(self, row: list[int], logprobs: list[float]) -> Completion:
        for i, token in enumerate(row):
            if token in self._policy.eos_ids:
                return Completion(row[: i + 1], True, logprobs[: i + 1], self._version)
        return Completion(row, False, logprobs, self._version)

    def _sample(
        self, prompts: Sequence[Sequence[int]], draws: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities [rows, T] for the uniform draws [rows, T].

        After an end of sequence they mean nothing.
        """
        policy, device = self._policy, self._policy.device
        num_rows, num_steps = draws.shape
        draws = draws.to(device)
        # Episodes of one task, and early turns, often have the same history: it is computed once.
        distinct = {tuple(prompt): 0 for prompt in prompts}
        distinct = {prompt: i for i, prompt in enumerate(distinct)}
        row_prompts = [distinct[tuple(p)] for p in prompts for _ in range(num_rows // len(prompts))]
        prompt_of = torch.tensor(row_prompts, device=device)
        prompts = list(distinct)
        width = max(len(p) for p in prompts)
        ids = torch.full((len(prompts), width), policy.pad_id)
        mask = torch.zeros(len(prompts), width + num_steps, dtype=torch.int64)
        for i, prompt in enumerate(prompts):
            ids[i, width - len(prompt) :] = torch.tensor(prompt)
            mask[i, width - len(prompt) :] = 1
        mask = mask.to(device)
        positions = (mask[:, :width].cumsum(1) - 1).clamp_min(0)
        out = policy.trunk(
            input_ids=ids.to(device),
            attention_mask=mask[:, :width],
            position_ids=positions,
            use_cache=True,
        )
        cache = keys_and_values(out)
        next(iter(cache.values())).batch_select_indices(prompt_of)
        mask, position = mask[prompt_of], positions[prompt_of, -1]
        hidden = out.last_hidden_state[prompt_of, -1]

        tokens = torch.full((num_rows, num_steps), policy.eos_ids[0], device=device)
        logprobs = torch.zeros(num_rows, num_steps, device=device)
        ends = torch.tensor(policy.eos_ids, device=device)
        alive = torch.arange(num_rows, device=device)
        for step in range(num_steps):
            token, logprob = _draw(policy.logits(hidden), draws[alive, step], temperature)
            tokens[alive, step], logprobs[alive, step] = token, logprob
            # Finished rows leave the batch; copying the cache for them costs less than running them.
            keep = (~torch.isin(token, ends)).nonzero().squeeze(1)
            if step + 1 == num_steps or keep.numel() == 0:
                break
            if keep.numel() < alive.numel():
                next(iter(cache.values())).batch_select_indices(keep)
                alive, token = alive[keep], token[keep]
                mask, position = mask[keep], position[keep]
            position = position + 1
            out = policy.trunk(
                input_ids=token[:, None],
                attention_mask=mask[:, : width + step + 1],
                position_ids=position[:, None],
                use_cache=True,
                **cache,
            )
            cache = keys_and_values(out)
            hidden = out.last_hidden_state[:, -1]
        return tokens, logprobs


def _draw(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The token of each row [R] whose stretch of the cumulative distribution holds the draw [R].

    With it goes its log-probability, which at temperature 0 is 0: the choice is certain.
    """
    if temperature == 0:
        token = logits.argmax(-1)
        return token, torch.zeros_like(token, dtype=torch.float32)
    # float64, because the tail of a large vocabulary is below the rounding of a float32 sum.
    probabilities = (logits.double() / temperature).softmax(-1)
    cumulative = probabilities.cumsum(-1)
    target = uniform.double()[:, None] * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    token = token.clamp_max(logits.shape[-1] - 1)
    return token, probabilities.gather(1, token[:, None]).squeeze(1).log().float()
