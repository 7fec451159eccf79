"""Faults that users reported of other trainers in memory, speed and precision; the thread is in the docstring."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import fastrl
from fastrl import surrogates as sur
from tests.helpers import leaf

NAN = float("nan")


def head(rows: int = 96, vocabulary: int = 4096) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return (
        torch.randn(rows, 8),
        torch.randn(vocabulary, 8),
        torch.randint(vocabulary, (rows,)),
    )


def test_logits_of_all_tokens_are_never_there() -> None:
    """verl #1212, TRL #2709, #3678, NeMo-RL #2833: float32 logits of the whole batch filled the memory."""
    hidden, weight, tokens = head()
    hidden.requires_grad_()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        fastrl.linear_token_logprobs(hidden, weight, tokens, chunk=8).logp.sum().backward()
    largest = max(event.self_cpu_memory_usage for event in prof.events())
    chunk, everything = 8 * 4096 * 4, 96 * 4096 * 4
    assert chunk <= largest < everything / 4


def test_chunks_change_nothing() -> None:
    """NeMo-RL #2833, TRL #7244: log-probabilities and loss from the hidden states are those of the logits."""
    hidden, weight, tokens = head()
    logits = hidden @ weight.T
    expected = fastrl.token_logprobs(logits, tokens).logp
    for chunk in (1, 7, 96):
        got = fastrl.linear_token_logprobs(hidden, weight, tokens, chunk=chunk).logp
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    advantages = torch.randn(4)
    old = expected.view(4, 24) + 0.1
    fused = fastrl.linear_policy_loss(
        hidden.view(4, 24, 8), weight, tokens.view(4, 24), old, advantages, chunk=7
    )
    composed = fastrl.policy_loss(expected.view(4, 24), old, advantages)
    torch.testing.assert_close(fused.loss, composed.loss, atol=1e-5, rtol=1e-5)


def test_undiscounted_advantages_are_sums() -> None:
    """NeMo-RL #4156: gamma = lambda = 1 is the sum of the rewards to come, less the value."""
    rewards, values = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0.5, 0.25, 8.0]])
    out = fastrl.gae(rewards, values, gamma=1.0, lam=1.0)
    assert out.returns.tolist() == [[7.0, 6.0, 4.0]]
    assert out.advantages.tolist() == [[6.5, 5.75, -4.0]]


def test_strides_are_honoured() -> None:
    """rl_games #358: a kernel read a transposed rollout as if it were contiguous."""
    rewards, values = torch.randn(5, 37), torch.randn(5, 37)
    expected = fastrl.gae(rewards, values, gamma=0.9, lam=0.8)
    wide = torch.full((37, 10), NAN)
    wide[:, ::2] = rewards.T
    got = fastrl.gae(wide[:, ::2], values.T.contiguous(), gamma=0.9, lam=0.8, time_dim=0)
    assert torch.equal(got.advantages.T, expected.advantages)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_summed_in_float32(dtype: torch.dtype) -> None:
    """TRL #4303, OpenRLHF #634, #1155: log-softmax in bfloat16 is off in the second digit."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(4, 5000)).to(dtype)
    tokens = torch.randint(5000, (4,))
    exact = logits.double().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    got = fastrl.token_logprobs(logits, tokens).logp
    assert got.dtype == torch.float32
    assert (got - exact).abs().max() < 1e-5
    torchs = logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    assert (torchs - exact).abs().max() > 1e-3


def test_rollout_mismatch_is_truncated_and_measured() -> None:
    """verl #2953: ratios 4, 1 and 0.5 of trainer to engine, bounded at 2; the third token is masked."""
    logp = torch.tensor([[0.8, 0.2, 0.1]]).log()
    rollout = torch.tensor([[0.2, 0.2, 0.2]]).log()
    out = sur.rollout_correction(logp, rollout, torch.tensor([[1, 1, 0]]), high=2.0)
    torch.testing.assert_close(out.weights, torch.tensor([[2.0, 1.0, 0.0]]))
    assert out.metrics["fraction_high"].item() == 0.5
    assert out.metrics["mean"].item() == pytest.approx(1.5)


def test_a_sequence_ratio_is_clamped_before_exp() -> None:
    """verl #2775, OpenRLHF #1293: exp of the mean log-ratio overflowed and its gradient was NaN."""
    logp = leaf(torch.tensor([[200.0, 150.0]]))
    out = fastrl.policy_loss(logp, torch.zeros(1, 2), torch.tensor([-1.0]), ratio="sequence")
    out.loss.backward()
    assert out.loss.isfinite()
    assert logp.grad is not None and logp.grad.isfinite().all()


def test_an_engine_without_a_log_probability_gives_ratio_one() -> None:
    """TRL #6789, #4159: vLLM returned NaN for a token."""
    logp, rollout = torch.tensor([[-1.0, -2.0]]), torch.tensor([[NAN, -2.0]])
    out = sur.rollout_correction(logp, rollout, missing_is_one=True, level="sequence")
    assert out.weights.tolist() == [[1.0, 1.0]]


def test_a_rejected_token_leaves_the_kl_too() -> None:
    """prime-rl #1030, #2458: the mask is returned, and the KL acts on kept tokens only."""
    logp = leaf(torch.tensor([[-1.0, -1.0]]))
    rollout = torch.tensor([[-1.5, -9.0]])
    keep = sur.rejection_mask(logp, rollout, high=4.0)
    assert keep.tolist() == [[True, False]]
    kl = sur.kl_penalty(logp, rollout, keep, estimator="k2")
    kl.sum().backward()
    assert kl.tolist() == [[0.125, 0.0]]
    assert logp.grad is not None and logp.grad.tolist() == [[0.5, 0.0]]
