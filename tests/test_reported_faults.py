"""Faults that users reported of other trainers, each a small case of our own; the thread is in the docstring."""

from __future__ import annotations

import torch

import fastrl
from fastrl import advantages as est
from fastrl import surrogates as sur
from tests.helpers import leaf

NAN, INF = float("nan"), float("inf")


def test_observation_tokens_are_no_steps() -> None:
    """verl #2337: credit leaked through tool tokens."""
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.2, 5.0, 0.4]])
    out = fastrl.gae(rewards, values, torch.tensor([[1, 0, 1]]), gamma=1.0, lam=0.0)
    torch.testing.assert_close(out.advantages, torch.tensor([[0.2, 0.0, 0.6]]))


def test_values_of_padding_do_not_bootstrap() -> None:
    """verl #50, ROLL #447."""
    mask = torch.tensor([[1, 1, 0]])
    out = fastrl.gae(
        torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[0.0, 0.0, 9.0]]), mask, gamma=1.0, lam=1.0
    )
    torch.testing.assert_close(out.advantages, torch.tensor([[1.0, 1.0, 0.0]]))


def test_reward_passes_over_observations() -> None:
    """verl #7278, #7280: the return was reset to 0 at observation tokens."""
    out = est.reinforce_plus_plus(
        torch.tensor([[0.0, 0.0, 0.0, 2.0]]), torch.tensor([[1, 0, 0, 1]])
    )
    assert out.returns.tolist() == [[2.0, 0.0, 0.0, 2.0]]


def test_kl_at_masked_tokens_stays_out_of_returns() -> None:
    """slime #1370: mask 1 0 0 1, a penalty of 1 at each token, gamma 0.9: -1 - 0.9, one discount per step."""
    returns = fastrl.discounted_returns(-torch.ones(1, 4), torch.tensor([[1, 0, 0, 1]]), gamma=0.9)
    torch.testing.assert_close(returns, torch.tensor([[-1.9, 0.0, 0.0, -1.0]]))


def test_equal_rewards_in_uneven_groups_are_zero() -> None:
    """slime #1414: a group of three equal rewards got -1.09 because a reshape mixed it with the next."""
    rewards = torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0])
    got = fastrl.group_advantages(rewards, ["a", "a", "a", "b", "b"])
    assert torch.equal(got[:3], torch.zeros(3))


def test_one_sample_without_others_is_zero() -> None:
    """AReaL #1705, verl #7581: the leave-one-out advantage of a single sample was its raw reward."""
    got = fastrl.group_advantages(torch.tensor([0.7]), [3], baseline="leave_one_out", scale="none")
    assert got.item() == 0


def test_labels_are_not_numbers() -> None:
    """verl #7150: negative labels crashed, sparse ones asked for huge buffers, "007" and "7" were one group."""
    assert fastrl.group_ids([-5, 10**12, -5]).tolist() == [0, 1, 0]
    assert fastrl.group_ids(["007", "7"]).tolist() == [0, 1]


def test_variance_is_centred() -> None:
    """NeMo-RL #4158: E[x^2] - E[x]^2 of constants left a standard deviation of 5e-4 and advantages of -2000."""
    rewards = torch.tensor([0.95] * 8)
    assert torch.count_nonzero(fastrl.group_advantages(rewards, [0] * 8)) == 0
    noisy = torch.tensor([1000.0, 1000.01])
    torch.testing.assert_close(
        fastrl.group_advantages(noisy, [0, 0]),
        torch.tensor([-(0.5**0.5), 0.5**0.5]),
        atol=2e-3,
        rtol=0,
    )


def test_a_sample_without_score_does_not_poison_its_group() -> None:
    """TRL #5902."""
    got = fastrl.group_advantages(torch.tensor([1.0, NAN, 0.0]), [0, 0, 0])
    torch.testing.assert_close(got, torch.tensor([0.5**0.5, 0.0, -(0.5**0.5)]), atol=2e-6, rtol=0)


def test_whitening_fewer_than_two_tokens() -> None:
    """ROLL #475: it crashed or gave NaN."""
    assert fastrl.whiten(torch.tensor([3.0, 9.0]), torch.tensor([1, 0])).tolist() == [0.0, 0.0]
    assert fastrl.whiten(torch.tensor([3.0]), torch.tensor([0])).tolist() == [0.0]


def test_nan_of_a_masked_token_reaches_neither_loss_nor_metrics() -> None:
    """verl #6349, OpenRLHF #1240, SkyRL #1633."""
    logp, old = leaf(torch.zeros(1, 2)), torch.tensor([[0.0, NAN]])
    out = fastrl.policy_loss(
        *(logp, old, torch.ones(1), torch.tensor([[1, 0]])),
        ref_logp=old,
        kl="k3",
        kl_coef=0.1,
        agg="seq_mean_token_mean",
    )
    out.loss.backward()
    assert out.loss.item() == -1
    assert out.metrics.isfinite().all()
    assert logp.grad is not None and logp.grad.tolist() == [[-1.0, 0.0]]


def test_a_far_token_does_not_overflow() -> None:
    """slime #2198, prime-rl #2972, TRL #3015: exp of a large log-ratio was infinite, and 0 times it NaN."""
    logp = leaf(torch.tensor([[-1.0, -1.0]]))
    out = fastrl.policy_loss(
        *(logp, torch.tensor([[-200.0, -1.0]]), torch.ones(1)),
        ref_logp=torch.tensor([[-1.0, 150.0]]),
        kl="k3",
        kl_coef=0.1,
    )
    out.loss.backward()
    assert out.loss.isfinite()
    assert logp.grad is not None and logp.grad.isfinite().all()


def test_micro_batches_add_up() -> None:
    """verl #5641, TRL #6024, SkyRL #925: 100 tokens at 0.5 and 900 at 0.3 are 0.32 in the mean, not 0.4."""
    logp = torch.cat([torch.full((1, 1000), -0.5), torch.full((1, 1000), -0.3)])
    mask = torch.stack([torch.arange(1000) < 100, torch.arange(1000) < 900])
    parts = [
        fastrl.policy_loss(logp[i : i + 1], logp[i : i + 1], torch.ones(1), mask[i : i + 1], surrogate="reinforce", denom=1000).loss
        for i in (0, 1)
    ]  # fmt: skip
    torch.testing.assert_close(parts[0] + parts[1], torch.tensor(0.32))


def test_sequence_mean_leaves_out_padding() -> None:
    """AReaL #1346: masked values changed the sequence ratio."""
    logp, mask = torch.tensor([[0.1, 0.3, 77.0]]), torch.tensor([[1, 1, 0]])
    out = fastrl.policy_loss(logp, torch.zeros(1, 3), torch.ones(1), mask, ratio="sequence")
    torch.testing.assert_close(out.loss, -torch.tensor(0.2).exp().clamp(max=1.2))


def test_rejected_tokens_keep_the_divisor() -> None:
    """verl rollout_rs, AReaL: dropping half of the tokens halves the loss and does not double the rest."""
    logp, mask = torch.full((1, 4), -1.0), torch.ones(1, 4)
    keep = sur.rejection_mask(logp, torch.tensor([[-1.0, -1.0, 3.0, 3.0]]), mask, high=2.0)
    assert keep.tolist() == [[True, True, False, False]]
    out = fastrl.policy_loss(logp, logp, torch.ones(1), keep, denom=4)
    assert out.loss.item() == -0.5


def test_on_policy_ratio_is_one() -> None:
    """verl #2088: reuse the detached log-probability."""
    logp = leaf(-torch.rand(2, 5) * 30)
    out = fastrl.policy_loss(logp, logp.detach(), torch.ones(2))
    assert float(out.named()["ratio_min"]) == float(out.named()["ratio_max"]) == 1


def test_an_infinite_score_shows_only_in_its_group() -> None:
    """A reward function that returned infinity."""
    got = fastrl.group_advantages(torch.tensor([INF, 0.0, 1.0, 0.0]), [0, 0, 1, 1])
    assert not got[:2].isfinite().all()
    torch.testing.assert_close(got[2:], torch.tensor([0.5**0.5, -(0.5**0.5)]), atol=2e-6, rtol=0)
