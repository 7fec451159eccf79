"""Group advantages and whitening against verl's own functions, by options alone."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fastrl
from tests.helpers import same_bits

core_algos = pytest.importorskip(
    "verl.trainer.ppo.core_algos", reason="verl is not installed: requirements/peers-no-deps.txt"
)
verl_F = pytest.importorskip("verl.utils.torch_functional", reason="verl is not installed")

# The two stated differences are options: verl keeps the score of a group of one.
VERL_GRPO: dict[str, Any] = {"singleton": "raw"}


def rollout(num_prompts: int = 12, length: int = 23) -> tuple[Tensor, Tensor, np.ndarray[Any, Any]]:
    """Token rewards, response mask with holes, and uuid labels of ragged, shuffled groups, one of them of one sample."""
    sizes = [1, *(2 + i % 5 for i in range(num_prompts - 1))]
    labels = np.array([str(uuid.uuid4()) for _ in sizes], dtype=object).repeat(sizes)
    labels = labels[torch.randperm(len(labels)).numpy()]
    mask = (torch.rand(len(labels), length) < 0.7).long()
    mask[:, 0] = 1
    return torch.randn(len(labels), length) * mask, mask, labels


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("function", ["grpo", "grpo_vectorized"])
def test_grpo(impl: str, function: str, by_std: bool) -> None:
    estimator = getattr(core_algos, f"compute_{function}_outcome_advantage")
    rewards, mask, labels = rollout()
    expected, returns = estimator(rewards, mask, labels, norm_adv_by_std_in_grpo=by_std)
    scale = "std" if by_std else "none"
    got = fastrl.group_advantages(rewards, labels, mask=mask, scale=scale, impl=impl, **VERL_GRPO)
    close(got, expected)
    close(got, returns)
    scores = (rewards * mask).sum(1)
    by_score = fastrl.group_advantages(
        scores, labels, mask=mask, scale=scale, impl=impl, **VERL_GRPO
    )
    close(by_score, expected)


def test_grpo_differs_only_for_one_sample_and_for_equal_rewards(impl: str) -> None:
    rewards, mask, labels = rollout()
    expected, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, labels)
    got = fastrl.group_advantages(rewards, labels, mask=mask, impl=impl)
    alone = np.array([np.sum(labels == label) == 1 for label in labels])
    close(got[~alone], expected[~alone])
    assert (got[alone] == 0).all()
    close(expected[alone], (rewards[alone].sum(1, keepdim=True) / (1 + 1e-6)) * mask[alone])

    equal, ones = torch.full((7, 1), 0.1), torch.ones(7, 1)
    theirs, _ = core_algos.compute_grpo_outcome_advantage(equal, ones, np.zeros(7, dtype=int))
    assert theirs.abs().max() > 1e-3  # the rounding of the mean over the eps
    ours = fastrl.group_advantages(equal, [0] * 7, mask=ones, impl=impl)
    assert same_bits(ours, torch.zeros(7, 1))


def test_rloo(impl: str) -> None:
    rewards, mask, labels = rollout()
    options: dict[str, Any] = {
        "baseline": "leave_one_out",
        "scale": "none",
        "mask": mask,
        "impl": impl,
    }
    expected, _ = core_algos.compute_rloo_outcome_advantage(rewards, mask, labels)
    close(fastrl.group_advantages(rewards, labels, singleton="raw", **options), expected)
    # The vectorised form gives a group of one 0.
    expected, _ = core_algos.compute_rloo_vectorized_outcome_advantage(rewards, mask, labels)
    close(fastrl.group_advantages(rewards, labels, singleton="zero", **options), expected)


def test_opo_is_length_weighted(impl: str) -> None:
    rewards, mask, labels = rollout()
    expected, _ = core_algos.compute_opo_outcome_advantage(rewards, mask, labels)
    got = fastrl.group_advantages(
        rewards,
        labels,
        baseline="length_weighted",
        scale="none",
        singleton="raw",
        mask=mask,
        impl=impl,
    )
    close(got, expected)


def test_reinforce_plus_plus_baseline(impl: str) -> None:
    rewards, mask, labels = rollout()
    expected, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
        rewards, mask, labels
    )
    centred = fastrl.group_advantages(
        rewards, labels, scale="none", singleton="raw", mask=mask, impl=impl
    )
    close(fastrl.whiten(centred, mask, impl=impl), expected)


def test_gdpo(impl: str) -> None:
    """Each objective normalised in its group, the weighted sum whitened over the tokens."""
    _, mask, labels = rollout()
    mask[:] = 1
    num_samples, length = mask.shape
    objectives = torch.randn(num_samples, 2) * torch.tensor([1.0, 100.0])
    expected, _ = core_algos.compute_gdpo_outcome_advantage(
        torch.zeros(num_samples, length), mask, labels,
        config={"gdpo_reward_keys": ["format", "accuracy"], "gdpo_reward_weights": [0.5, 2.0]},
        non_tensor_batch={"format": objectives[:, 0].numpy(), "accuracy": objectives[:, 1].numpy()},
        batch={"prompts": torch.zeros(num_samples, 3), "attention_mask": torch.ones(num_samples, 3 + length, dtype=torch.int64)},
    )  # fmt: skip
    summed = fastrl.group_advantages(
        objectives, labels, weights=[0.5, 2.0], singleton="raw", mask=mask, impl=impl
    )
    close(fastrl.whiten(summed, mask, impl=impl), expected)


@pytest.mark.parametrize("shift_mean", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_masked_whiten(impl: str, shift_mean: bool, dtype: torch.dtype) -> None:
    """At valid elements; verl leaves whitened garbage at the masked ones for its callers to blank."""
    for shape, density in (((8, 40), 0.6), ((3, 700), 0.05), ((1, 30), 1.0)):
        x, mask = torch.randn(shape) * 5 + 3, (torch.rand(shape) < density).to(dtype)
        mask[0, :2] = True
        expected = verl_F.masked_whiten(x, mask, shift_mean=shift_mean)
        got = fastrl.whiten(x, mask, shift_mean=shift_mean, impl=impl)
        close(got, torch.where(mask != 0, expected, 0.0))
