"""Seconds and peak bytes of an update of the demo's sizes, with all logits and without them.

The update is that of `benchmarks/trainer_step.py`, on random weights in the shapes of SmolLM2-135M.
"""

from __future__ import annotations

from benchmarks.trainer_step import SIZES, Size, Update
from fastrl.train.config import RolloutConfig

PROMPT_TOKENS = 16


def table(rollout: RolloutConfig, scale: str = "full") -> str:
    """One line per value of model.head.

    A small update goes first, so that neither pays for what happens once.
    """
    size = SIZES[scale]
    if scale == "full":
        width, classes = size.width, size.classes
        tokens = rollout.max_new_tokens
        size = Size(rollout.prompts, rollout.samples, PROMPT_TOKENS, tokens, 30, width, classes)
        Update(SIZES["tiny"]).run("eager")
    update = Update(size)
    lines = [
        f"{'model.head':<14}{'old logp s':>12}{'loss s':>10}{'backward s':>12}{'all s':>10}{'peak MB':>10}"
    ]
    for head, label in (("eager", "eager, before"), ("fused", "fused, after")):
        p = update.phases(head)
        lines.append(
            f"{label:<14}{p.old_logp:>12.2f}{p.loss:>10.2f}{p.backward:>12.2f}{p.total:>10.2f}"
            f"{p.peak_bytes / 1e6:>10.0f}"
        )
    return "\n".join(lines)
