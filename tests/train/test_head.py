"""The head of the policy: from hidden states to the loss with and without all logits, caps and scales of the logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fastrl.train.batch import make_batch, plan_updates
from fastrl.train.collect import collect, make_task
from fastrl.train.config import Config
from fastrl.train.grpo import GRPO
from fastrl.train.metrics import StepMetrics, Timer
from fastrl.train.models import Policy, load_policy
from fastrl.train.ppo import PPO
from fastrl.train.rollout import TransformersGenerator

CPU = torch.device("cpu")


def _one_update(config: Config, policy: Policy) -> tuple[dict[str, float], Tensor]:
    """Metrics and the gradient of one rollout; nothing is stepped."""
    generator = TransformersGenerator(policy, config.model, batch_size=64)
    records = collect(config, make_task(config), policy, generator, Timer(), step=0)
    batch = make_batch(records, ["task"])
    plan = plan_updates(batch, config, step=0, epoch=0, device=CPU)
    algorithm = {"grpo": GRPO, "ppo": PPO}[config.algorithm](config, policy, Timer())
    targets, metrics = algorithm.targets(batch, plan), StepMetrics()
    policy.zero_grad()
    for mini in plan:
        for micro in mini.micro_batches:
            algorithm.loss(micro, mini, targets, metrics).backward()
    gradients = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
    return metrics.result(), torch.cat(gradients)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(
    ("algorithm", "ratio"), [("grpo", "token"), ("grpo", "sequence"), ("ppo", "token")]
)
def test_the_fused_head_trains_like_the_eager_one(
    small: Callable[..., Config], algorithm: str, ratio: str, softcap: float | None
) -> None:
    results = []
    for head in ("fused", "eager"):
        config = small(
            algorithm,
            f"model.head={head}",
            f"loss.ratio={ratio}",
            "loss.entropy_coef=0.01",
            "kl.coef=0.1",
            "ppo.warmup_steps=0",
            "rollout.temperature=0.8",
        )
        policy = load_policy(config.model, seed=0, device=CPU)
        policy.softcap, policy.logit_scale = softcap, 1.5
        results.append(_one_update(config, policy))
    (fused, fused_gradient), (eager, eager_gradient) = results
    assert fused.keys() == eager.keys()
    for name, value in fused.items():
        assert value == pytest.approx(eager[name], rel=1e-4, abs=1e-5), name
    largest = float(eager_gradient.abs().max())
    torch.testing.assert_close(fused_gradient, eager_gradient, rtol=0, atol=1e-4 * largest)


def test_caps_and_scales_are_those_of_the_model(small: Callable[..., Config]) -> None:
    """The names that Gemma, Cohere and Granite give them."""
    model = load_policy(small("grpo").model, seed=0, device=CPU)
    model.model.config.final_logit_softcapping = 2.0
    model.model.config.logit_scale = 0.5
    model.model.config.logits_scaling = 4.0
    policy = Policy(model.model, model.tokenizer)
    assert policy.softcap == 2.0 and policy.logit_scale == 0.125
    hidden = torch.randn(3, policy.hidden_size)
    expected = 2 * torch.tanh(policy.head(hidden) * 0.125 / 2)
    torch.testing.assert_close(policy.logits(hidden), expected)


def test_a_head_that_is_no_linear_layer_is_refused_by_name(small: Callable[..., Config]) -> None:
    policy = load_policy(small("grpo").model, seed=0, device=CPU)
    policy.model.set_output_embeddings(nn.Sequential(nn.Identity()))
    with pytest.raises(ValueError, match=r'model: the head is a Sequential.*model.head = "eager"'):
        policy.head_options()
