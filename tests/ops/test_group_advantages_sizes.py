"""``fastrl.group_advantages`` over batches and groups of thousands, where GPU kernels share the work out differently."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import fastrl
from tests.helpers import same_bits

NAN = float("nan")


@pytest.mark.parametrize("scale", ["std", "batch_std"])
def test_groups_of_any_size_in_a_large_batch(
    impl: str, scale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of thousands, of hundreds and of a few, mixed; float64 shows a sum in another order."""
    sizes = torch.tensor([2600, 1024, 700, 33, 32, 31, 1, *[8] * 40, 2])
    if (
        impl == "triton"
    ):  # interpreted: chunks of 16 members, of which one group has more than a tile
        from fastrl.ops.group_advantages import triton

        monkeypatch.setitem(triton._GROUPS, "BLOCK", 16)
        sizes = torch.tensor([400, 129, 128, 33, 32, 31, 1, *[8] * 4, 2])
    groups = torch.repeat_interleave(torch.randint(-(2**62), 2**62, sizes.shape), sizes)
    groups = groups[torch.randperm(len(groups))]
    rewards = torch.randn(len(groups), dtype=torch.float64)
    rewards[torch.rand(len(groups)) < 0.1] = NAN
    got = fastrl.group_advantages(rewards, groups, scale=scale, impl=impl)
    torch.testing.assert_close(
        got,
        fastrl.group_advantages(rewards, groups, scale=scale, impl="reference"),
        rtol=1e-9,
        atol=1e-9,
    )
    assert same_bits(got, fastrl.group_advantages(rewards, groups, scale=scale, impl=impl))
    if impl == "reference" or scale == "batch_std":
        return
    for g in groups.unique():
        own, scored = groups == g, (groups == g) & ~rewards.isnan()
        alone = fastrl.group_advantages(rewards[own], groups[own], impl=impl)
        assert same_bits(got[own], alone)
        compressed = fastrl.group_advantages(rewards[scored], groups[scored], impl=impl)
        assert same_bits(got[scored], compressed)


def test_one_group_of_a_large_batch_with_objectives_and_lengths(impl: str) -> None:
    num_samples = 300 if impl == "triton" else 3000
    rewards = torch.randn(num_samples, 2, dtype=torch.float64)
    mask = torch.rand(num_samples, 5) < 0.6
    rewards[::7, 1] = NAN
    options: dict[str, Any] = {"weights": [1.0, -2.0], "mask": mask, "baseline": "length_weighted"}
    groups = torch.zeros(num_samples, dtype=torch.int64)
    call = partial(fastrl.group_advantages, rewards, groups, **options)
    got = call(impl=impl)
    expected = call(impl="reference")
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
