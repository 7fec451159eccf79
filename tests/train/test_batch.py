"""Batches: grouping, padding, and that cutting a mini-batch changes neither loss nor step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fastrl.envs import Trajectory
from fastrl.train import config as configs
from fastrl.train.batch import Batch, make_batch, plan_updates
from fastrl.train.config import Config
from fastrl.train.grpo import GRPO
from fastrl.train.metrics import StepMetrics, Timer
from fastrl.train.models import load_policy
from fastrl.train.ppo import PPO

CPU = torch.device("cpu")


def trajectory(uid: str, prompt: list[int], completion: list[int], **values: Any) -> Trajectory:
    reward = values.pop("reward", 1.0)
    values.setdefault("mask", (1,) * len(completion))
    return Trajectory(
        uid=uid,
        prompt="",
        completion="",
        answer="",
        prompt_ids=tuple(prompt),
        completion_ids=tuple(completion),
        reward=reward,
        reward_parts={"task": reward},
        **values,
    )


def ragged(num_prompts: int = 5, samples: int = 3) -> list[Trajectory]:
    """Completions of different lengths and rewards, prompts of different lengths, one hole."""
    rng = torch.Generator().manual_seed(1)
    records = []
    for p in range(num_prompts):
        prompt = torch.randint(2, 12, (1 + p % 3,), generator=rng).tolist()
        for s in range(samples):
            tokens = torch.randint(2, 12, (1 + (p + 2 * s) % 5,), generator=rng).tolist()
            mask = [1] * len(tokens)
            if len(tokens) > 3:
                mask[1] = 0
            reward = float(torch.rand((), generator=rng))
            records.append(trajectory(f"q{p}", prompt, tokens, mask=tuple(mask), reward=reward))
    return records


def test_layout_of_a_batch() -> None:
    batch = make_batch(
        [
            trajectory("b", [1, 2, 3], [4, 5]),
            trajectory("a", [6], [7, 8, 9], mask=(1, 0, 1)),
            trajectory("b", [1, 2, 3], [4], reward=None),
        ],
        ["task"],
    )
    assert batch.groups.tolist() == [0, 1, 0]
    assert batch.prompt_ids.tolist() == [[1, 2, 3], [0, 0, 6]]
    assert batch.prompt_mask.tolist() == [[True] * 3, [False, False, True]]
    assert batch.completion_ids.tolist() == [[4, 5, 0], [7, 8, 9], [4, 0, 0]]
    assert batch.mask.tolist() == [[True, True, False], [True, False, True], [False] * 3]
    assert batch.totals.tolist()[:2] == [1.0, 1.0]
    assert math.isnan(batch.totals[2])


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("budget", [1, 12, 40, 10_000])
def test_every_trained_token_is_planned_once(budget: int, share_prompts: bool) -> None:
    batch = make_batch([*ragged(), trajectory("q9", [3], [4, 5], reward=None)], ["task"])
    config = configs.parse(
        {
            "optim": {"mini_batches": 3, "micro_batch_tokens": budget},
            "model": {"share_prompts": share_prompts},
        }
    )
    plan = plan_updates(batch, config, step=0, epoch=0, device=CPU)
    assert len(plan) == 3
    assert sum(mini.num_tokens for mini in plan) == int(batch.mask.sum())
    # The unscored completion belongs to no mini-batch.
    assert sum(mini.num_sequences for mini in plan) == 15
    seen = torch.cat([m.batch_index for mini in plan for m in mini.micro_batches])
    assert sorted(seen.tolist()) == batch.mask.flatten().nonzero().squeeze(1).tolist()
    for micro in (m for mini in plan for m in mini.micro_batches):
        assert torch.equal(micro.tokens, batch.completion_ids.flatten()[micro.batch_index])
        flat = micro.inputs.completion_ids.flatten()[micro.hidden_index]
        assert torch.equal(flat, micro.tokens)
        assert micro.cu_seqlens[-1] == len(micro.tokens)
        rows = len(micro.inputs.prompt_ids) if share_prompts else len(micro.inputs.prompt_of)
        cost = rows * micro.inputs.prompt_ids.shape[1] + micro.inputs.completion_ids.numel()
        assert cost <= budget or len(micro.inputs.prompt_of) == 1


def test_groups_are_not_split_and_epochs_differ() -> None:
    batch = make_batch(ragged(num_prompts=8), ["task"])
    config = configs.parse({"optim": {"mini_batches": 4}})

    def groups(step: int, epoch: int) -> list[list[int]]:
        plan = plan_updates(batch, config, step=step, epoch=epoch, device=CPU)
        width = batch.mask.shape[1]
        return [
            sorted(
                {
                    int(batch.groups[i // width])
                    for m in mini.micro_batches
                    for i in m.batch_index.tolist()
                }
            )
            for mini in plan
        ]

    assert sorted(g for mini in groups(0, 0) for g in mini) == list(range(8))
    assert groups(0, 0) == groups(0, 0)
    assert groups(0, 0) != groups(0, 1)
    assert groups(0, 0) != groups(1, 0)


def updated(config: Config, batch: Batch, budget: int) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Loss, gradient and parameters of one optimiser step with micro-batches of `budget` tokens."""
    policy = load_policy(config.model, seed=0, device=CPU).double()
    algorithm = {"grpo": GRPO, "ppo": PPO}[config.algorithm](config, policy, Timer())
    if isinstance(algorithm, PPO):
        algorithm.critic.double()
    # A head of zeros would leave the critic's trunk without a gradient.
    for module in algorithm.modules().values():
        torch.manual_seed(1)
        for parameter in module.parameters():
            if not parameter.any():
                torch.nn.init.normal_(parameter, std=0.1)
    rng = torch.Generator().manual_seed(2)
    noise = 0.3 * torch.randn(batch.mask.shape, generator=rng).double()
    config_of_plan = configs.parse({"optim": {"micro_batch_tokens": budget}})
    (plan,) = plan_updates(batch, config_of_plan, step=0, epoch=0, device=CPU)
    targets = algorithm.targets(batch, [plan])
    # Off policy, so that clipping is part of what is compared.
    targets = targets._replace(old_logp=targets.old_logp + noise)
    parameters = [p for g in algorithm.parameter_groups() for p in g["params"]]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    metrics = StepMetrics()
    total = 0.0
    for micro in plan.micro_batches:
        loss = algorithm.loss(micro, plan, targets, metrics)
        loss.backward()
        total += float(loss.detach())
    gradient = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    optimizer.step()
    return total, gradient, torch.cat([p.detach().flatten() for p in parameters])


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize(
    "agg", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm", "token_sum"]
)
def test_micro_batches_give_the_step_of_one_batch(algorithm: str, agg: str) -> None:
    config = configs.parse(
        {
            "algorithm": algorithm,
            "loss": {"agg": agg, "entropy_coef": 0.01},
            "kl": {"coef": 0.1},
            "model": {"hidden_size": 16},
            "ppo": {"critic": "separate"},
        }
    )
    batch = make_batch(ragged(), ["task"])
    one = updated(config, batch, budget=100_000)
    many = updated(config, batch, budget=14)
    assert one[0] == pytest.approx(many[0], rel=1e-6)
    # The norms of Llama compute in float32, so rounding is relative to the largest gradient.
    largest = float(one[1].abs().max())
    torch.testing.assert_close(one[1], many[1], rtol=0, atol=1e-5 * largest)
    torch.testing.assert_close(one[2], many[2], rtol=0, atol=1e-6 * largest)
    assert largest > 1e-3


def test_denominators_are_those_of_the_mini_batch() -> None:
    batch = make_batch(ragged(), ["task"])
    (mini,) = plan_updates(batch, configs.parse({}), step=0, epoch=0, device=CPU)
    assert mini.denominator("token_mean", 9) == int(batch.mask.sum())
    assert mini.denominator("seq_mean_token_sum", 9) == 15
    assert mini.denominator("seq_mean_token_sum_norm", 9) == 15 * 9
    assert mini.denominator("token_sum", 9) is None
