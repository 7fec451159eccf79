"""Sampling: what is recorded is what was sampled, and the first update is exactly on policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastrl.train.batch import make_batch, plan_updates
from fastrl.train.collect import collect, evaluate, make_task
from fastrl.train.config import Config, ModelConfig
from fastrl.train.forward import policy_outputs
from fastrl.train.grpo import GRPO
from fastrl.train.metrics import StepMetrics, Timer
from fastrl.train.models import Inputs, Policy, completion_hidden, load_policy
from fastrl.train.ppo import PPO
from fastrl.train.rollout import TransformersGenerator, _draw

CPU = torch.device("cpu")


def spread(policy: Policy, factor: float = 20.0) -> Policy:
    """The same policy with logits far from uniform, so that mistakes show in the log-probabilities."""
    with torch.no_grad():
        policy.head.weight.mul_(factor)  # type: ignore[operator, union-attr]
    return policy


@pytest.fixture
def policy() -> Policy:
    return spread(load_policy(ModelConfig(hidden_size=32), seed=0, device=CPU))


PROMPTS = [[3, 4], [5], [6, 7, 8, 9], [3, 4]]


def generate(policy: Policy, batch_size: int = 256, **options: Any) -> list[list[Any]]:
    generator = TransformersGenerator(policy, ModelConfig(), batch_size=batch_size)
    values: dict[str, Any] = {"samples": 5, "max_new_tokens": 7, "temperature": 1.0, "seed": 3}
    return generator.generate(PROMPTS, **{**values, **options})


def tokens(groups: list[list[Any]]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in group] for group in groups]


def test_seed_decides_and_the_batch_size_does_not(policy: Policy) -> None:
    groups = generate(policy)
    assert [len(g) for g in groups] == [5, 5, 5, 5]
    assert groups == generate(policy)
    assert tokens(groups) == tokens(generate(policy, batch_size=5))
    assert tokens(groups) == tokens(generate(policy, batch_size=1))
    assert tokens(groups) != tokens(generate(policy, seed=4))
    # Two groups of one prompt are two draws.
    assert groups[0] != groups[3]


def test_a_prompt_draws_by_its_place(policy: Policy) -> None:
    whole = tokens(generate(policy))
    generator = TransformersGenerator(policy, ModelConfig(), batch_size=256)
    some = generator.generate(
        [PROMPTS[3], PROMPTS[1]],
        samples=5,
        max_new_tokens=7,
        temperature=1.0,
        seed=3,
        places=[3, 1],
    )
    assert tokens(some) == [whole[3], whole[1]]


def test_completions_end_at_the_first_end_of_sequence(policy: Policy) -> None:
    lengths = set()
    for completion in (c for group in generate(policy, samples=40) for c in group):
        ends = [i for i, token in enumerate(completion.token_ids) if token in policy.eos_ids]
        assert ends == ([len(completion.token_ids) - 1] if completion.finished else [])
        assert completion.finished or len(completion.token_ids) == 7
        lengths.add(len(completion.token_ids))
    assert len(lengths) > 3


def test_greedy_agrees_with_transformers(policy: Policy) -> None:
    for prompt, group in zip(PROMPTS, generate(policy, samples=1, temperature=0.0), strict=True):
        expected = policy.model.generate(
            torch.tensor([prompt]), max_new_tokens=7, do_sample=False, pad_token_id=0
        )
        assert group[0].token_ids == expected[0, len(prompt) :].tolist()


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    logits = torch.tensor([0.0, 1.0, -torch.inf, 2.0]).expand(20_000, 4)
    uniform = torch.rand(20_000, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = _draw(logits, uniform, 0.5)
    expected = (logits[0] / 0.5).log_softmax(0)[tokens]
    torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=1e-6)
    shares = torch.bincount(tokens, minlength=4) / 20_000
    torch.testing.assert_close(shares, (logits[0] / 0.5).softmax(0), rtol=0, atol=0.01)
    assert shares[2] == 0
    edges, _ = _draw(logits[:2], torch.tensor([0.0, 1 - 2**-24]), 1.0)
    assert edges.tolist() == [0, 3]


@pytest.mark.parametrize("share_prompts", [True, False])
def test_logprobs_are_those_of_each_sequence_alone(
    policy: Policy, small: Callable[..., Config], share_prompts: bool
) -> None:
    config = small(
        "grpo",
        f"model.share_prompts={str(share_prompts).lower()}",
        "rollout.temperature=0.7",
        "model.alphabet=0123456789+-=> ",
        "rollout.max_new_tokens=6",
    )
    generator = TransformersGenerator(policy, config.model, batch_size=64)
    records = collect(config, make_task(config), policy, generator, Timer(), step=0)
    batch = make_batch(records, ["task"])
    plan = plan_updates(batch, config, step=0, epoch=0, device=CPU)
    targets = GRPO(config, policy, Timer()).targets(batch, plan)
    assert len({len(r.completion_ids) for r in records}) > 1
    for row, record in enumerate(records):
        ids = torch.tensor([record.prompt_ids + record.completion_ids])
        with torch.no_grad():
            logits = policy.model(ids).logits[0, len(record.prompt_ids) - 1 : -1].double()
        expected = (logits / 0.7).log_softmax(-1).gather(1, ids[0, len(record.prompt_ids) :, None])
        got = targets.old_logp[row, : len(record.completion_ids)]
        torch.testing.assert_close(got, expected.squeeze(1).float(), rtol=1e-4, atol=1e-4)
        assert batch.completion_ids[row, : len(record.completion_ids)].tolist() == list(
            record.completion_ids
        )


def test_sharing_prompts_changes_no_gradient(policy: Policy) -> None:
    policy = policy.double()
    inputs = Inputs(
        prompt_ids=torch.tensor([[0, 0, 5], [6, 7, 8]]),
        prompt_mask=torch.tensor([[False, False, True], [True] * 3]),
        prompt_of=torch.tensor([1, 0, 1]),
        completion_ids=torch.tensor([[3, 4, 5], [6, 0, 0], [7, 8, 0]]),
        completion_mask=torch.tensor([[True] * 3, [True, False, False], [True, True, False]]),
    )
    results = []
    for share_prompts in (True, False):
        policy.zero_grad()
        hidden = completion_hidden(policy.trunk, inputs, share_prompts=share_prompts)
        hidden = hidden[inputs.completion_mask]
        hidden.sin().sum().backward()
        gradients = [p.grad.flatten() for p in policy.trunk.parameters() if p.grad is not None]
        results.append((hidden.detach(), torch.cat(gradients)))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-5)
    # The norms of Llama compute in float32, so rounding is relative to the largest gradient.
    largest = float(results[0][1].abs().max())
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("autocast", ["none", "bfloat16"])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("tokens", [30, 10_000])
def test_the_first_update_is_exactly_on_policy(
    small: Callable[..., Config], algorithm: str, autocast: str, tokens: int
) -> None:
    config = small(
        algorithm,
        f"model.autocast={autocast}",
        f"optim.micro_batch_tokens={tokens}",
        "rollout.temperature=0.8",
    )
    policy = spread(load_policy(config.model, seed=0, device=CPU))
    generator = TransformersGenerator(policy, config.model, batch_size=64)
    task = make_task(config)
    records = collect(config, task, policy, generator, Timer(), step=0)
    batch = make_batch(records, ["task"])
    plan = plan_updates(batch, config, step=0, epoch=0, device=CPU)
    instance = {"grpo": GRPO, "ppo": PPO}[algorithm](config, policy, Timer())
    targets = instance.targets(batch, plan)
    metrics = StepMetrics()
    for mini in plan:
        for micro in mini.micro_batches:
            instance.loss(micro, mini, targets, metrics).backward()
    figures = metrics.result()
    assert figures["policy/ratio_min"] == figures["policy/ratio_max"] == 1.0
    assert figures["policy/approx_kl"] == 0.0
    again = policy_outputs(policy, plan[0].micro_batches[0], config, Timer()).logp
    assert torch.equal(again, targets.old_logp.flatten()[plan[0].micro_batches[0].batch_index])


def test_evaluation_is_repeatable_and_leaves_the_random_state(small: Callable[..., Config]) -> None:
    config = small("grpo", "eval.greedy=false")
    policy = load_policy(config.model, seed=0, device=CPU)
    generator = TransformersGenerator(policy, config.model, batch_size=64)
    before = torch.get_rng_state()
    first, second = (
        evaluate(config, make_task(config), policy, generator, step=0).trajectories
        for _ in range(2)
    )
    assert first == second
    assert torch.equal(before, torch.get_rng_state())


def test_unknown_characters_are_refused(policy: Policy) -> None:
    assert policy.encode("12+3") == [3, 4, 12, 5]
    assert policy.decode([3, 4, 0]) == "12"
    with pytest.raises(ValueError, match=r"model\.alphabet"):
        policy.encode("x")
