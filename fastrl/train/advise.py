"""Which algorithm to begin with: four questions, an answer with reasons and sources."""

from __future__ import annotations

from typing import Literal

__all__ = ["QUESTIONS", "advise"]

QUESTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "verifiable": ("Can a program tell whether an answer is right?", ("yes", "no")),
    "samples": ("Are samples cheap (seconds for thousands)?", ("cheap", "expensive")),
    "rewards": ("When do rewards come?", ("end", "turns")),
    "memory": ("Is there memory for a second model?", ("yes", "no")),
}
"""Each question by name, with the answers that it may have."""


def advise(
    *,
    verifiable: Literal["yes", "no"],
    samples: Literal["cheap", "expensive"],
    rewards: Literal["end", "turns"],
    memory: Literal["yes", "no"],
) -> str:
    """A proposal as commented TOML, to be used as the start of a configuration.

    >>> print(advise(verifiable="yes", samples="cheap", rewards="end", memory="no").splitlines()[0])
    algorithm = "grpo"
    """
    lines: list[str] = []
    # A critic pays when samples are few or credit within an episode matters, and costs its memory.
    critic = memory == "yes" and samples == "expensive"
    if critic:
        lines += [
            'algorithm = "ppo"',
            "# Samples are expensive: a critic learns from each of them, where a group needs eight of one",
            "# prompt (Schulman et al. 2017; VC-PPO and VAPO for long episodes).",
            "\n[rollout]\nsamples = 1\nprompts = 64",
            '\n[ppo]\ncritic = "separate"\nwarmup_steps = 5\n# A random critic misleads the policy first.',
        ]
    else:
        lines += [
            'algorithm = "grpo"',
            "# No critic: the mean of the group is the baseline (DeepSeekMath, Shao et al. 2024).",
            "\n[rollout]\nsamples = 8",
            '\n[grpo]\nscale = "none"',
            "# Dividing by the standard deviation amplifies groups that hardly differ (Dr. GRPO, Liu et al. 2025).",
        ]
        if rewards == "turns":
            lines += [
                'credit = "turn"',
                "# Rewards at turns: each is compared with the same turn of other episodes, not spread over all.",
            ]
    if verifiable == "yes":
        lines += [
            "\n[kl]\ncoef = 0.0",
            "# A verifier cannot be fooled by style, so no reference has to hold the policy (DAPO, Yu et al. 2025).",
            "\n[loss]\nclip_high = 0.28",
            "# Room for rare tokens to grow keeps the entropy up (DAPO's clip-higher).",
        ]
    else:
        lines += [
            "\n[kl]\ncoef = 0.02",
            "# A learnt reward can be gamed: stay near the start (Ziegler et al. 2019; Gao et al. 2022).",
        ]
    if verifiable == "yes" and samples == "cheap" and not critic:
        lines += [
            "\n[filter]\ngroups = true",
            "# Samples are cheap: go on until enough groups have variance (DAPO's dynamic sampling).",
        ]
    return "\n".join(lines)
