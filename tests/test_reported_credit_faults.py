"""Faults that users reported of other trainers in turns, groups, scales and gradients; the thread is in the docstring."""

from __future__ import annotations

import pytest
import torch

import fastrl
from fastrl import advantages as est
from fastrl import surrogates as sur
from tests.helpers import leaf

NAN, INF = float("nan"), float("inf")


def test_a_turn_has_one_advantage() -> None:
    """verl #7244, AReaL #1600: rewards 1 and 2 of two turns around an observation, gamma = lambda = 0.5."""
    out = est.turn_gae(
        torch.tensor([[0.0, 1.0, 0.0, 2.0]]), torch.zeros(1, 4), torch.tensor([[0, 0, 9, 1]]),
        torch.tensor([[1, 1, 0, 1]]), gamma=0.5, lam=0.5,
    )  # fmt: skip
    torch.testing.assert_close(out.advantages, torch.tensor([[1.5, 1.5, 0.0, 2.0]]))


def test_actor_and_critic_have_a_lambda_each() -> None:
    """verl #479: one pass, lambda 0 for the advantages and 1 for the returns; AReaL #1600: a lambda per sample."""
    rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]])
    out = fastrl.gae(rewards, values, gamma=1.0, lam=0.0, returns_lam=1.0)
    assert out.advantages.tolist() == [[-0.25, 0.75]]
    assert out.returns.tolist() == [[1.0, 1.0]]
    both = fastrl.gae(
        rewards.repeat(2, 1), values.repeat(2, 1), gamma=1.0, lam=torch.tensor([0.0, 1.0])
    )
    assert both.advantages.tolist() == [[-0.25, 0.75], [0.5, 0.75]]


def test_terminal_reward_behind_tool_tokens() -> None:
    """miles #1827: one decay for each trainable step, whatever lies between; a row without a token is 0."""
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0]])
    out = fastrl.gae(rewards, torch.zeros(2, 4), mask, gamma=0.5, lam=1.0)
    assert out.advantages.tolist() == [[0.5, 0.0, 0.0, 1.0], [0.0] * 4]


def test_each_step_has_its_own_mask() -> None:
    """SkyRL #1507: advantages masked for the last step of an episode were copied to the others."""
    got = fastrl.group_advantages(
        torch.tensor([1.0, 0.0]), ["a", "a"], scale="none", mask=torch.tensor([[1, 0], [0, 1]])
    )
    assert got.tolist() == [[0.5, 0.0], [0.0, -0.5]]


def test_tool_tokens_count_nowhere() -> None:
    """TRL #4975, #5144, Search-R1 #39: one mask for loss, KL, lengths and the sequence ratio."""
    completion, tools = torch.tensor([[1, 1, 1, 0]]), torch.tensor([[1, 0, 1, 1]])
    logp = leaf(torch.tensor([[-1.0, 50.0, -1.0, NAN]]))
    old, ref = torch.full((1, 4), -1.0), torch.full((1, 4), -1.0)
    out = fastrl.policy_loss(
        *(logp, old, torch.ones(1), completion * tools), ratio="sequence", ref_logp=ref, kl="k3", kl_coef=1.0
    )  # fmt: skip
    out.loss.backward()
    assert out.loss.item() == -1
    assert float(out.named()["tokens"]) == 2
    assert logp.grad is not None and logp.grad[0, 1] == logp.grad[0, 3] == 0


def test_an_episode_counts_once_in_its_group() -> None:
    """agent-lightning #489: an episode of three rows weighed three times in the baseline."""
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0])
    first, source = est.once_per_episode([0, 0, 0, 0], [7, 7, 7, 8], torch.device("cpu"))
    got = fastrl.group_advantages(rewards, [0] * 4, scale="none", valid=first)[source]
    assert got.tolist() == [0.5, 0.5, 0.5, -0.5]


def test_invalid_samples_join_no_statistics() -> None:
    """AReaL #1351, #1454, OpenRLHF #1239: a sample without end or without tokens shifted its group."""
    rewards, valid = torch.tensor([1.0, 0.0, 99.0]), torch.tensor([True, True, False])
    got = fastrl.group_advantages(rewards, [0, 0, 0], scale="none", valid=valid)
    assert got.tolist() == [0.5, -0.5, 0.0]


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_no_division_by_nothing(baseline: str) -> None:
    """NeMo-RL #1518, DeepAnalyze #116: 1 0 0 0 gave 1e6, and a group of one NaN."""
    got = fastrl.group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), [0] * 4, baseline=baseline)
    assert got.abs().max() < 3
    assert fastrl.group_advantages(torch.tensor([0.3]), [0], baseline=baseline).item() == 0


def test_one_reward_of_several_is_missing() -> None:
    """ms-swift #8123: a NaN of one objective made all advantages NaN."""
    rewards = torch.tensor([[1.0, NAN], [0.0, 1.0], [0.5, 0.0]])
    got = est.gdpo_advantages(rewards, [0, 0, 0], [1.0, 1.0])
    assert got.isfinite().all() and got[0] > 0


def test_long_responses_weigh_no_more() -> None:
    """verl #6497: whitening over tokens let the length of a response decide."""
    rewards = torch.tensor([[1.0], [0.0], [1.0], [0.0]])
    mask = torch.tensor([[1] * 8, [1] + [0] * 7, [1] * 8, [1] + [0] * 7])
    groups = [0, 0, 1, 1]
    by_response = est.gdpo_advantages(rewards, groups, [1.0], mask=mask, over="responses")
    by_token = est.gdpo_advantages(rewards, groups, [1.0], mask=mask, over="tokens")
    assert by_response[0, 0] == -by_response[1, 0]
    assert by_token[0, 0] != -by_token[1, 0]


def test_whitening_knows_only_valid_tokens() -> None:
    """SkyRL #1305: the mean of the padding was subtracted; slime #1369: without shift the mean stays."""
    x, mask = torch.tensor([1.0, 3.0, 100.0]), torch.tensor([1, 1, 0])
    half = 0.5**0.5
    torch.testing.assert_close(fastrl.whiten(x, mask), torch.tensor([-half, half, 0.0]))
    kept = fastrl.whiten(x, mask, shift_mean=False)
    torch.testing.assert_close(kept, torch.tensor([2 - half, 2 + half, 0.0]))


def test_a_filtered_infinite_weight_is_zero() -> None:
    """OpenRLHF #1314, prime-rl #2084: IcePop multiplied an infinite ratio by 0."""
    out = sur.rollout_correction(
        torch.tensor([[0.0, 0.0]]), torch.tensor([[-500.0, 0.0]]), high=2.0, beyond="zero", log_clamp=None
    )  # fmt: skip
    assert out.raw[0, 0] == INF
    assert out.weights.tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("agg", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_a_batch_without_a_token_is_zero_with_a_graph(agg: str) -> None:
    """Automodel #3796, unsloth-zoo #1286, NeMo-RL #230: a zero normaliser was NaN, in the metrics too."""
    logp = leaf(torch.randn(2, 3))
    out = fastrl.policy_loss(logp, torch.randn(2, 3), torch.ones(2), torch.zeros(2, 3), agg=agg)
    out.loss.backward()
    assert out.loss.item() == 0
    assert logp.grad is not None and not logp.grad.any()
    assert float(out.named()["tokens"]) == 0


def test_kl_gradient_points_to_the_reference() -> None:
    """TRL #3025, #4637, OpenRLHF #1309, NeMo-RL #2506: d k1 = 1 whatever the distance; d k2 = logp - ref."""
    logp, ref = leaf(torch.tensor([-1.0, -3.0])), torch.tensor([-2.0, -2.0])
    value = sur.kl_penalty(logp, ref, estimator="k1", gradient="k2")
    value.sum().backward()
    assert value.tolist() == [1.0, -1.0]
    assert logp.grad is not None and logp.grad.tolist() == [1.0, -1.0]
    scored = leaf(torch.tensor([-1.0]))
    sur.kl_penalty(scored, torch.tensor([-2.0]), estimator="k1", gradient="score").sum().backward()
    assert scored.grad is not None and scored.grad.item() == 2.0  # 1 of k1, 1 of k1 times d logp


@pytest.mark.parametrize("agg", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_any_split_has_the_same_gradient(agg: str) -> None:
    """verl #5366, #7321, open-instruct #1161, ms-swift #10116, Liger #1082: global counts, divided once."""
    torch.manual_seed(0)
    logp, old, advantages = torch.randn(6, 5), torch.randn(6, 5), torch.randn(6)
    mask = torch.rand(6, 5) < 0.6
    mask[:, 0] = True
    count = mask.sum() if agg == "token_mean" else 6
    gradients = []
    for size in (6, 2, 1):
        rows = leaf(logp)
        for part in torch.arange(6).split(size):
            out = fastrl.policy_loss(
                *(rows[part], old[part], advantages[part], mask[part]), agg=agg, denom=count
            )
            out.loss.backward()
        gradients.append(rows.grad)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])
