"""Estimators composed of ops: numbers worked out by hand, plain loops as oracles, NaN at masked positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastrl
from fastrl import advantages as est

NAN = float("nan")


def close(got: Tensor, expected: Tensor | list[Any]) -> None:
    torch.testing.assert_close(
        got, torch.as_tensor(expected, dtype=got.dtype), atol=2e-5, rtol=2e-5
    )


def test_pass_at_k_by_hand() -> None:
    """Leads of 2 over 1, none in a tie, none alone; NaN is not a competitor."""
    rewards = torch.tensor([2.0, 1.0, 3.0, 3.0, 5.0, 4.0, NAN])
    groups = ["a", "a", "b", "b", "c", "d", "d"]
    close(est.pass_at_k_advantages(rewards, groups, scale="none"), [1, 0, 0, 0, 0, 0, 0])
    std = 0.5**0.5
    close(est.pass_at_k_advantages(rewards, groups), [1 / std, 0, 0, 0, 0, 0, 0])
    with pytest.raises(ValueError, match="two scored members"):
        est.pass_at_k_advantages(rewards, groups, singleton="error")


def test_gpg_by_hand() -> None:
    """Two of four scores are not 0: alpha is 2."""
    got = est.gpg_advantages(torch.tensor([4.0, 0.0, 1.0, 0.0]), [0, 0, 1, 1])
    close(got, [4, -4, 1, -1])
    close(est.gpg_advantages(torch.zeros(2), [0, 0]), [0, 0])


def test_gdpo_over_responses_ignores_length() -> None:
    """verl #6497: over tokens a long response moves the mean, over responses it does not."""
    rewards = torch.tensor([[1.0], [0.0], [1.0], [0.0]])
    mask = torch.ones(4, 8)
    mask[1, 1:] = 0
    by_response = est.gdpo_advantages(rewards, [0, 0, 1, 1], [1.0], mask=mask)
    close(by_response[:, 0], [0.75**0.5, -(0.75**0.5), 0.75**0.5, -(0.75**0.5)])
    by_token = est.gdpo_advantages(rewards, [0, 0, 1, 1], [1.0], mask=mask, over="tokens")
    assert by_token[0, 0] < by_response[0, 0]


def test_gdpo_with_missing_scores() -> None:
    """ms-swift #8123: one missing reward must not reach the others."""
    rewards = torch.tensor([[1.0, NAN], [0.0, 1.0], [1.0, 0.0], [NAN, NAN]])
    got = est.gdpo_advantages(rewards, [0, 0, 0, 0], [1.0, 1.0], over="none")
    half = (1 / 3) ** 0.5
    close(got, [half, -2 * half + 0.5**0.5, half - 0.5**0.5, 0])
    assert est.gdpo_advantages(rewards, [0, 0, 0, 0], [1.0, 1.0])[3] == 0


def test_gigpo_counts_an_episode_once() -> None:
    """agent-lightning #489: an episode of three steps weighs as much as one of a single step."""
    reward = torch.tensor([1.0, 1.0, 1.0, 0.0])
    got = est.gigpo_advantages(
        *(reward, torch.zeros(4), [0] * 4, [7, 7, 7, 8], list("stuv")),
        step_weight=1.0,
        scale="none",
    )
    close(got, [0.5, 0.5, 0.5, -0.5])


def test_turn_gae_is_gae_over_turns() -> None:
    """Random turns with holes: the same numbers as GAE over one row of turns."""
    for _ in range(20):
        length = 17
        mask = torch.rand(1, length) < 0.7
        turns = (torch.rand(1, length) < 0.3).cumsum(1)
        rewards, values = torch.randn(2, 1, length)
        steps = [i for i in range(length) if mask[0, i]]
        runs: list[list[int]] = []
        for i in steps:
            if runs and turns[0, runs[-1][-1]] == turns[0, i]:
                runs[-1].append(i)
            else:
                runs.append([i])
        if not runs:
            continue
        r = torch.stack([rewards[0, run].sum() for run in runs]).unsqueeze(0)
        v = torch.stack([values[0, run[0]] for run in runs]).unsqueeze(0)
        bootstrap = torch.randn(1)
        expected = fastrl.gae(r, v, gamma=0.9, lam=0.8, bootstrap=bootstrap)
        dirty = torch.where(mask, values, NAN)
        got = est.turn_gae(rewards, dirty, turns, mask, gamma=0.9, lam=0.8, bootstrap=bootstrap)
        for k, run in enumerate(runs):
            for i in run:
                close(got.advantages[0, i], expected.advantages[0, k])
                close(got.returns[0, i], expected.returns[0, k])
        assert torch.count_nonzero(got.advantages[~mask]) == 0


def test_turn_groups_by_hand() -> None:
    """Turn sums 2, 0 and 1, 1; compared in the group the mean is 1."""
    rewards = torch.tensor([[1.0, 1.0, 0.0, 9.0], [0.5, 0.5, 1.0, 0.0]])
    turns = torch.tensor([[0, 0, 1, 1], [4, 4, 5, 5]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    got = est.turn_group_advantages(rewards, ["q", "q"], turns, mask, scale="none")
    close(got, [[1, 1, -1, 0], [0, 0, 0, 0]])
    got = est.turn_group_advantages(rewards, ["q", "q"], turns, mask, scale="none", compare="turn")
    close(got, [[0.5, 0.5, -0.5, 0], [-0.5, -0.5, 0.5, 0.5]])


def test_process_rewards_by_hand() -> None:
    """Steps 1, 0 | 0, 1 have mean 0.5 and std 0.5774; the first token gets the sum of both steps."""
    steps = torch.tensor([[NAN, 1.0, 0.0, NAN], [0.0, NAN, 1.0, NAN]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 0]])
    x = 0.5 / (1 / 3) ** 0.5
    got = est.process_reward_advantages(steps, [0, 0], mask)
    close(got, [[0, 0, -x, 0], [0, 0, x, 0]])


def loop_vtrace(
    r: Tensor,
    v: Tensor,
    lr: Tensor,
    gamma: float,
    lam: float,
    rho_max: float,
    c_max: float,
    last: float,
) -> tuple[list[float], list[float]]:
    targets, advantages = [], []
    next_target, next_value = last, last
    for t in reversed(range(len(r))):
        ratio = float(lr[t].exp())
        rho, c = min(ratio, rho_max), lam * min(ratio, c_max)
        advantages.append(rho * (float(r[t]) + gamma * next_target - float(v[t])))
        delta = rho * (float(r[t]) + gamma * next_value - float(v[t]))
        next_target = float(v[t]) + delta + gamma * c * (next_target - next_value)
        next_value = float(v[t])
        targets.append(next_target)
    return advantages[::-1], targets[::-1]


def test_vtrace_against_a_loop() -> None:
    r, v, lr = torch.randn(3, 1, 21).double()
    mask = torch.rand(1, 21) < 0.6
    dirty = torch.where(mask, v, NAN)
    got = est.vtrace(
        r,
        dirty,
        lr,
        mask,
        gamma=0.9,
        lam=0.95,
        rho_clip=1.2,
        c_clip=0.8,
        bootstrap=torch.tensor([0.3]).double(),
    )
    keep = mask[0]
    expected = loop_vtrace(r[0][keep], v[0][keep], lr[0][keep], 0.9, 0.95, 1.2, 0.8, 0.3)
    torch.testing.assert_close(
        got.advantages[0][keep], torch.tensor(expected[0]).double(), atol=1e-6, rtol=1e-6
    )
    torch.testing.assert_close(
        got.targets[0][keep], torch.tensor(expected[1]).double(), atol=1e-6, rtol=1e-6
    )
    assert torch.count_nonzero(got.targets[~mask]) == 0


def test_vtrace_on_policy_is_gae() -> None:
    r, v = torch.randn(2, 3, 30)
    mask = torch.rand(3, 30) < 0.7
    got = est.vtrace(r, v, torch.zeros(3, 30), mask, gamma=0.95, lam=0.9)
    close(got.targets, fastrl.gae(r, v, mask, gamma=0.95, lam=0.9).returns)


def test_lambdas_by_hand() -> None:
    mask = torch.tensor([[1] * 10, [1] * 2 + [0] * 8, [0] * 10])
    close(est.length_adaptive_lam(mask, alpha=0.2), [0.5, 0, 0])
    close(est.relative_position_lam(mask, decay=0.5), [0.5 ** (1 / 9), 0.5, 0.5])
    lam = est.length_adaptive_lam(mask, alpha=0.2)
    assert (
        fastrl.gae(
            torch.ones(3, 10), torch.zeros(3, 10), mask, gamma=1.0, lam=lam, returns_lam=1.0
        ).returns[0, 0]
        == 10
    )


MASKED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "reinforce_plus_plus": lambda x, m: est.reinforce_plus_plus(x, m, gamma=0.9),
    "remax": lambda x, m: est.remax(x, torch.ones(4), m),
    "optimal_token_baseline": lambda x, m: est.optimal_token_baseline(x, [0, 0, 1, 1], x, x, m),
    "optimal_token_baseline_compact": lambda x, m: est.optimal_token_baseline(
        x, [0, 0, 1, 1], x, x, m, compact=True
    ),
    "turn_gae": lambda x, m: est.turn_gae(
        x, x, torch.arange(9).expand(4, 9) // 3, m, gamma=0.9, lam=0.9
    ),
    "turn_group_advantages": lambda x, m: (
        est.turn_group_advantages(x, [0, 0, 1, 1], torch.arange(9).expand(4, 9) // 3, m),
    ),
    "process_reward_advantages": lambda x, m: (est.process_reward_advantages(x, [0, 0, 1, 1], m),),
    "vtrace": lambda x, m: est.vtrace(x, x, x, m, gamma=0.9),
}


@pytest.mark.parametrize("name", MASKED)
def test_nan_at_masked_positions_changes_nothing(name: str) -> None:
    x, mask = torch.randn(4, 9), torch.rand(4, 9) < 0.6
    mask[1] = False
    clean = MASKED[name](x, mask)
    dirty = MASKED[name](torch.where(mask, x, NAN), mask)
    for a, b in zip(clean, dirty):
        assert torch.equal(a, b)
        assert torch.count_nonzero(a[~mask]) == 0
