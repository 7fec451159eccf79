"""One rollout as tensors, cut into mini-batches (one optimiser step) and micro-batches (one forward).

Sizes: B completions of at most C tokens; U prompts of at most P tokens; N trained tokens of a
micro-batch. Losses are computed on packed tokens [N] with `cu_seqlens`; every micro-batch divides by
the counts of its whole mini-batch, so how a mini-batch is cut changes no gradient beyond rounding.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import fastrl
from fastrl.envs import Trajectory, Turn
from fastrl.train.config import Config
from fastrl.train.models import Inputs
from fastrl.train.seeding import derived_seed
from fastrl.train.world import ALONE, World

__all__ = [
    "Batch",
    "MicroBatch",
    "MiniBatch",
    "fill",
    "make_batch",
    "plan_updates",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The completions of one rollout. Left-padded prompts, right-padded completions, on the CPU."""

    prompt_ids: Tensor  # int64 [U, P], distinct prompts
    prompt_mask: Tensor  # bool [U, P]
    prompt_of: Tensor  # int64 [B], which prompt a completion continues
    groups: Tensor  # int64 [B], dense numbers of the uids
    episodes: Tensor  # int64 [B], dense numbers of the episodes
    completion_ids: Tensor  # int64 [B, C]
    completion_mask: Tensor  # bool [B, C], tokens that exist
    mask: Tensor  # bool [B, C], tokens trained on
    rewards: Tensor  # float64 [B, K], NaN where not scored
    totals: Tensor  # float64 [B], NaN where nothing was scored
    token_rewards: Tensor  # float64 [B, C], the reward of a turn at its last token, 0 elsewhere
    turn_of: Tensor  # int64 [B, C], number of the turn at its tokens, 0 elsewhere
    turn_ends: Tensor  # bool [B, C], last tokens of turns
    turn_scored: Tensor  # bool [B, C], last tokens of turns that a reward scored
    sampled_logp: Tensor | None  # float32 [B, C] under the sampler; None when it does not know them
    weights: tuple[float, ...] = ()  # of the K rewards


class MicroBatch(NamedTuple):
    """The tokens of one forward and backward pass."""

    inputs: Inputs
    tokens: Tensor  # int64 [N], the trained tokens
    hidden_index: (
        Tensor  # int64 [N], their places in the flattened hidden states of this micro-batch
    )
    batch_index: Tensor  # int64 [N], their places in a flattened [B, C] tensor of the batch
    cu_seqlens: Tensor  # int64 [rows + 1]


class MiniBatch(NamedTuple):
    """What one optimiser step trains on: micro-batches of this rank, and counts over all ranks."""

    micro_batches: list[MicroBatch]
    num_tokens: int
    num_sequences: int

    def denominator(self, agg: str, max_new_tokens: int) -> float | None:
        """The `denom` with which the losses of all micro-batches add up to that of the mini-batch."""
        if agg == "token_sum":
            return None
        if agg == "token_mean":
            return max(self.num_tokens, 1)
        # A constant length in place of the longest of the batch, so a batch's width has no influence.
        scale = max_new_tokens if agg == "seq_mean_token_sum_norm" else 1
        return max(self.num_sequences, 1) * scale


def make_batch(
    trajectories: Sequence[Trajectory],
    reward_names: Sequence[str],
    weights: Sequence[float] | None = None,
) -> Batch:
    """The tensors of `trajectories`; completions with one uid form one group.

    A completion that no reward scored keeps its place, but none of its tokens is trained on; unless it
    was cut or failed and its mask says otherwise: then its tokens have advantage 0.
    """
    nan = math.nan
    prompts = {t.prompt_ids: 0 for t in trajectories}
    prompts = {prompt: i for i, prompt in enumerate(prompts)}
    prompt_ids, prompt_mask = _padded(list(prompts), left=True)
    completion_ids, completion_mask = _padded([t.completion_ids for t in trajectories])
    trained, _ = _padded([t.mask for t in trajectories], width=completion_ids.shape[1])
    totals = torch.tensor(
        [nan if t.reward is None else t.reward for t in trajectories], dtype=torch.float64
    )
    parts = [[t.reward_parts[name] for name in reward_names] for t in trajectories]
    rewards = torch.tensor(
        [[nan if v is None else v for v in row] for row in parts], dtype=torch.float64
    ).view(len(trajectories), len(reward_names))
    zeroed = torch.tensor([t.status != "finished" for t in trajectories], dtype=torch.bool)
    # A row that no longer counts as a whole must not count as one of several objectives either.
    rewards[zeroed & totals.isnan()] = nan
    token_rewards, turn_of, turn_ends, turn_scored = _turns(trajectories, completion_mask)
    logps = None
    if all(t.logprobs or not t.completion_ids for t in trajectories):
        logps = torch.zeros(completion_ids.shape)
        for i, t in enumerate(trajectories):
            logps[i, : len(t.logprobs)] = torch.tensor(t.logprobs)
    return Batch(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        prompt_of=torch.tensor([prompts[t.prompt_ids] for t in trajectories], dtype=torch.int64),
        groups=fastrl.group_ids([t.uid for t in trajectories]),
        episodes=fastrl.group_ids([t.episode or f"row {i}" for i, t in enumerate(trajectories)]),
        completion_ids=completion_ids,
        completion_mask=completion_mask,
        mask=completion_mask & (trained != 0) & (~totals.isnan() | zeroed)[:, None],
        rewards=rewards,
        totals=totals,
        token_rewards=token_rewards,
        turn_of=turn_of,
        turn_ends=turn_ends,
        turn_scored=turn_scored,
        sampled_logp=logps,
        weights=tuple(weights or (1.0,) * len(reward_names)),
    )


def _turns(
    trajectories: Sequence[Trajectory], completion_mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`token_rewards`, `turn_of`, `turn_ends` and `turn_scored` of a batch."""
    rewards = torch.zeros(completion_mask.shape, dtype=torch.float64)
    turn_of = torch.zeros(completion_mask.shape, dtype=torch.int64)
    ends, scored = (torch.zeros_like(completion_mask) for _ in range(2))
    for i, t in enumerate(trajectories):
        whole = Turn(0, len(t.completion_ids), reward=t.reward)
        for number, turn in enumerate(t.turns or (whole,)):
            if turn.end == turn.start:
                continue
            turn_of[i, turn.start : turn.end] = number
            ends[i, turn.end - 1] = True
            if turn.reward is not None and t.reward is not None:
                rewards[i, turn.end - 1] = turn.reward
                scored[i, turn.end - 1] = True
    return rewards, turn_of, ends, scored


def _padded(
    rows: Sequence[Sequence[int]], *, left: bool = False, width: int | None = None
) -> tuple[Tensor, Tensor]:
    width = max((len(row) for row in rows), default=0) if width is None else width
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, place] = torch.tensor(row, dtype=torch.int64)
        mask[i, place] = True
    return ids, mask


def plan_updates(
    batch: Batch,
    config: Config,
    *,
    step: int,
    epoch: int,
    device: torch.device,
    world: World = ALONE,
) -> list[MiniBatch]:
    """The mini-batches of one pass, in order. Groups are shuffled by seed, step and epoch.

    All ranks get the same number of micro-batches, some perhaps without a trained token: with sharded
    weights a forward pass is something that all ranks do together.
    """
    shuffle = torch.Generator().manual_seed(derived_seed(config.seed, "shuffle", step, epoch))
    num_groups = int(batch.groups.max()) + 1 if len(batch.groups) else 0
    order = torch.randperm(num_groups, generator=shuffle)
    # Rows without a trained token would only cost time.
    is_trained = batch.mask.any(1)
    mini_batches = []
    for groups in order.tensor_split(config.optim.mini_batches):
        rows = (torch.isin(batch.groups, groups) & is_trained).nonzero().squeeze(1)
        parts = _split(batch, rows.tolist(), config, world.size)
        own = world.deal([int(batch.completion_mask[part].sum()) for part in parts])
        micro_batches = [_micro_batch(batch, torch.tensor(parts[i]), device, world) for i in own]
        while len(micro_batches) * world.size < len(parts):
            micro_batches.append(_without_tokens(batch, device, world))
        mini_batches.append(
            MiniBatch(
                micro_batches,
                num_tokens=int(batch.mask[rows].sum()),
                num_sequences=len(rows),
            )
        )
    return mini_batches


def _split(batch: Batch, rows: list[int], config: Config, num_ranks: int) -> list[list[int]]:
    """`rows` sorted by length and cut so that each part has at most `optim.micro_batch_tokens` padded tokens.

    A part has one row or more, even when that row alone is over the budget. With `share_prompts` the
    rows of a prompt stay side by side, because a prompt is computed once per part it appears in. For
    several ranks the budget is lowered as far as it makes no more parts for each rank.
    """
    budget, share_prompts = config.optim.micro_batch_tokens, config.model.share_prompts
    prompt_length = batch.prompt_mask.sum(1)[batch.prompt_of].tolist()
    length = batch.completion_mask.sum(1).tolist()
    prompt = batch.prompt_of.tolist()
    if share_prompts:
        rows = sorted(rows, key=lambda r: (prompt_length[r], prompt[r], length[r]))
    else:
        rows = sorted(rows, key=lambda r: (prompt_length[r] + length[r], r))

    def cut(budget: int) -> list[list[int]]:
        parts: list[list[int]] = []
        num_prompts = width = longest = 0  # of the last part
        for row in rows:
            if parts:
                num_prompts += not share_prompts or prompt[parts[-1][-1]] != prompt[row]
                width, longest = max(width, prompt_length[row]), max(longest, length[row])
                if num_prompts * width + (len(parts[-1]) + 1) * longest <= budget:
                    parts[-1].append(row)
                    continue
            parts.append([row])
            num_prompts, width, longest = 1, prompt_length[row], length[row]
        return parts

    parts = cut(budget)
    if num_ranks > 1 and parts:
        turns = -(-len(parts) // num_ranks) * num_ranks
        budgets = range(1, budget + 1)
        lowest = bisect.bisect_left(budgets, True, key=lambda b: len(cut(b)) <= turns)
        parts = cut(budgets[lowest])
    return parts


def _micro_batch(batch: Batch, rows: Tensor, device: torch.device, world: World) -> MicroBatch:
    prompts, prompt_of = torch.unique(batch.prompt_of[rows], return_inverse=True)
    prompt_mask = batch.prompt_mask[prompts]
    first = batch.prompt_mask.shape[1] - int(prompt_mask.sum(1).max())
    completion_mask = batch.completion_mask[rows]
    width = int(completion_mask.sum(1).max())
    if world.size > 1:
        # With one column the trunk is called once and not twice; all ranks must do the same.
        width = min(max(width, 2), completion_mask.shape[1])
    mask = batch.mask[rows, :width]
    row, column = mask.nonzero(as_tuple=True)
    tensors = (
        batch.prompt_ids[prompts, first:],
        prompt_mask[:, first:],
        prompt_of,
        batch.completion_ids[rows, :width],
        completion_mask[:, :width],
        batch.completion_ids[rows][row, column],
        row * width + column,
        rows[row] * batch.mask.shape[1] + column,
        torch.cat([torch.zeros(1, dtype=torch.int64), mask.sum(1).cumsum(0)]),
    )
    moved = [t.to(device, non_blocking=True) for t in tensors]
    return MicroBatch(Inputs(*moved[:5]), *moved[5:])


def _without_tokens(batch: Batch, device: torch.device, world: World) -> MicroBatch:
    """A micro-batch that passes through the same layers as any other and adds nothing to the loss."""
    prompt = int(batch.prompt_mask.sum(1).argmin())
    row = int((batch.prompt_of == prompt).nonzero()[0])
    some = _micro_batch(batch, torch.tensor([row]), device, world)
    width = min(some.inputs.completion_ids.shape[1], 2)
    inputs = some.inputs._replace(
        completion_ids=some.inputs.completion_ids[:, :width],
        completion_mask=some.inputs.completion_mask[:, :width],
    )
    none = some.tokens[:0]
    return MicroBatch(inputs, none, none, none, torch.zeros_like(some.cu_seqlens))


def fill(
    batch: Batch,
    plan: Sequence[MiniBatch],
    compute: Callable[[MicroBatch], Sequence[Tensor]],
    world: World = ALONE,
) -> list[Tensor]:
    """What `compute` returns for each micro-batch of `plan`, [N] each, put together as [B, C].

    Positions that are not trained on hold 0. Every rank gets what all of them computed.
    """
    results: list[Tensor] = []
    for micro in (m for mini in plan for m in mini.micro_batches):
        values = compute(micro)
        if not results:
            results = [v.new_zeros(batch.mask.numel()) for v in values]
        for result, value in zip(results, values, strict=True):
            result.index_copy_(0, micro.batch_index, value)
    # A place is filled by one rank and 0 on the others, so the sum is exact.
    return [world.sum_(result).view(batch.mask.shape) for result in results]
