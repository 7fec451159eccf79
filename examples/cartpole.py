"""PPO of stable-baselines3 on CartPole with advantages by fastrl: ``python -m examples.cartpole``.

Classic RL: a rollout buffer ``[T, N]``, time first, episodes that end anywhere in it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import stable_baselines3
import torch


class Result(NamedTuple):
    """Mean episode length after the first rollout and at the end, and the parameters of the policy."""

    before: float
    after: float
    parameters: torch.Tensor


def learn(steps: int = 8192, seed: int = 1) -> Result:
    """Train PPO on CartPole-v1 in this process, with whatever its rollout buffer leads to."""
    model = stable_baselines3.PPO("MlpPolicy", "CartPole-v1", n_steps=512, seed=seed, device="cpu")

    def mean_length() -> float:
        return float(np.mean([episode["l"] for episode in model.ep_info_buffer]))

    model.learn(512)
    before = mean_length()
    model.learn(steps, reset_num_timesteps=False)
    parameters = torch.cat([p.detach().flatten() for p in model.policy.parameters()])
    return Result(before, mean_length(), parameters)


def main() -> None:
    from fastrl.integrations import report
    from fastrl.integrations import stable_baselines3 as integration

    integration.install()
    print("\n".join(report()))
    result = learn()
    print(
        f"mean episode length: {result.before:.0f} after 512 steps, {result.after:.0f} at the end"
    )


if __name__ == "__main__":
    main()
