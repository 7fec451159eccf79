"""OpenRLHF 0.11.2 on fastrl: policy and value loss, KL, log-probabilities, group baselines, GAE and reward-to-go.

``install()`` at any time: names that OpenRLHF's modules took from one another are replaced in each that is loaded.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from fastrl.integrations import _patch
from fastrl.presets import openrlhf as preset

PACKAGE = "openrlhf"
TESTED = ("0.11.2",)


def install() -> None:
    """Lead OpenRLHF's losses and KL to fastrl. Calling it again changes nothing."""
    _patch.check_version(PACKAGE, TESTED)
    loss: Any = importlib.import_module("openrlhf.models.loss")
    utils: Any = importlib.import_module("openrlhf.models.utils")
    functions = ("compute_approx_kl", "log_probs_from_logits", "compute_entropy")
    for owner, names in ((loss, ("PolicyLoss", "ValueLoss")), (utils, functions)):
        for name in names:
            _patch.replace_everywhere(PACKAGE, name, getattr(owner, name), getattr(preset, name))


def install_experience_maker(maker: Any) -> None:
    """Lead group baselines, GAE, reward-to-go and normalisation of an experience maker class to fastrl."""
    original = maker.compute_advantages_and_returns
    if original.__module__ != __name__:
        theirs = inspect.unwrap(original).__globals__

        def compute(self: Any, experiences: list[Any]) -> list[Any]:
            return _compute_advantages_and_returns(self, experiences, theirs)

        _patch.replace(PACKAGE, maker, "compute_advantages_and_returns", compute)
    _patch.replace(PACKAGE, maker, "get_advantages_and_returns", _advantages)
    _patch.replace(PACKAGE, maker, "get_cumulative_returns", _returns)


def uninstall() -> None:
    """Put OpenRLHF's own back."""
    _patch.restore(PACKAGE)


@torch.no_grad()
def _compute_advantages_and_returns(self: Any, experiences: list[Any], theirs: Any) -> list[Any]:
    """OpenRLHF's steps with its own length penalties and reward shaping; the statistics are fastrl's."""
    args = self.strategy.args
    estimator, samples = self.advantage_estimator, args.rollout.n_samples_per_prompt
    for experience in experiences:
        dtype = torch.promote_types(experience.rewards.dtype, torch.float32)
        experience.rewards = experience.rewards.to(dtype)
    theirs["apply_length_penalties"](experiences, args)
    sizes = [len(experience.index) for experience in experiences]
    groups = torch.tensor([i for experience in experiences for i in experience.index]) // samples
    rewards = torch.cat([experience.rewards for experience in experiences])
    groups = groups.to(rewards.device)
    if samples > 1:
        # The rows of a group side by side, in whatever order: a standard deviation does not ask.
        order = groups.argsort()
        spread = torch.empty_like(rewards)
        spread[order] = rewards[order].view(-1, samples).std(-1).repeat_interleave(samples)
        for experience, part in zip(experiences, spread.split(sizes)):
            experience.info["group_reward_std"] = part
    shaped = preset.baseline_rewards(rewards, groups, estimator).split(sizes)
    if estimator not in ("gae", "reinforce") and args.algo.advantage.gamma != 1.0:
        theirs["logger"].warning(f"gamma is set to 1.0 for {estimator}")
        args.algo.advantage.gamma = 1.0
    for experience, reward in zip(experiences, shaped):
        per_token = theirs["compute_reward"](
            *(reward, self.kl_ctl.value, experience.kl),
            action_mask=experience.action_mask,
            reward_clip_range=args.reward.clip_range,
        )
        if estimator == "gae":
            experience.advantages, experience.returns = self.get_advantages_and_returns(
                *(experience.values, per_token, experience.action_mask),
                *(args.algo.advantage.gamma, args.algo.advantage.lambd),
            )
        else:
            experience.returns = self.get_cumulative_returns(
                per_token, experience.action_mask, args.algo.advantage.gamma
            )
            experience.advantages = experience.returns.clone()
        experience.info["return"] = per_token.sum(dim=-1)
        experience.kl = None
    if estimator in ("gae", "reinforce", "reinforce_baseline"):
        normalized = preset.normalize_advantages(
            [experience.advantages for experience in experiences],
            [experience.action_mask for experience in experiences],
            args.algo.advantage.no_std_norm,
        )
        for experience, advantages in zip(experiences, normalized):
            experience.advantages = advantages
    return experiences


def _advantages(
    self: Any, values: Tensor, rewards: Tensor, action_mask: Tensor, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    return preset.get_advantages_and_returns(values, rewards, action_mask, gamma, lambd)


def _returns(self: Any, rewards: Tensor, action_mask: Tensor, gamma: float) -> Tensor:
    return preset.get_cumulative_returns(rewards, action_mask, gamma)
