"""The policy and value losses against verl's own functions, by options alone, in values, metrics and gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import fastrl
from fastrl.integrations import verl as integration
from tests.helpers import leaf
from tests.ops.losses import Batch, batch, metric

core_algos = pytest.importorskip(
    "verl.trainer.ppo.core_algos", reason="verl is not installed: requirements/peers-no-deps.txt"
)
config = pytest.importorskip(
    "verl.workers.config", reason="verl is not installed: requirements/peers-no-deps.txt"
)

AGGS = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
}
SHAPE = (5, 60)


def actor(**options: Any) -> Any:
    options = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1} | options
    return config.ActorConfig(**options)


def response_mask() -> Tensor:
    """As verl passes it: bool, with holes, and one row without a token."""
    mask = torch.rand(SHAPE) < 0.6
    mask[3] = False
    return mask


def verl_policy(name: str, data: Batch, mask: Tensor, agg: str, cfg: Any) -> tuple[Any, ...]:
    """Loss, metrics and gradient of verl."""
    logp = leaf(data.logp)
    loss, metrics = core_algos.get_policy_loss_fn(name)(
        old_log_prob=data.old_logp,
        log_prob=logp,
        advantages=data.advantages,
        response_mask=mask,
        loss_agg_mode=agg,
        config=cfg,
        rollout_is_weights=data.is_weights,
    )
    loss.backward()
    return loss.detach(), metrics, logp.grad


def ours(impl: str, data: Batch, mask: Tensor, **options: Any) -> tuple[Any, ...]:
    logp = leaf(data.logp)
    out = fastrl.policy_loss(
        *(logp, data.old_logp, data.advantages, mask),
        is_weights=data.is_weights,
        impl=impl,
        **options,
    )
    out.loss.backward()
    return out.loss.detach(), out, logp.grad


def assert_equal(got: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    torch.testing.assert_close(got[0], expected[0], atol=1e-5, rtol=2e-5)
    torch.testing.assert_close(got[2], expected[2], atol=1e-6, rtol=2e-5)


def assert_metrics(out: fastrl.PolicyLoss, metrics: dict[str, float], lower: str | None) -> None:
    tokens = metric(out, "tokens")
    assert metric(out, "clipped") / tokens == pytest.approx(metrics["actor/pg_clipfrac"], abs=1e-6)
    assert metric(out, "approx_kl") / tokens == pytest.approx(metrics["actor/ppo_kl"], abs=1e-6)
    expected = 0.0 if lower is None else metric(out, lower) / tokens
    assert expected == pytest.approx(metrics["actor/pg_clipfrac_lower"], abs=1e-6)


@pytest.mark.parametrize("agg", AGGS)
def test_vanilla(impl: str, agg: str) -> None:
    """Asymmetric clips and the dual clip that verl always applies, with and without rollout weights."""
    clips = ({"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}, {"clip_ratio_c": 1.5})
    for is_weights, clip in itertools.product((False, True), clips):
        data, mask = batch(SHAPE, is_weights=is_weights), response_mask()
        cfg = actor(**clip)
        expected = verl_policy("vanilla", data, mask, agg, cfg)
        got = ours(
            *(impl, data, mask),
            agg=AGGS[agg],
            clip_low=cfg.clip_ratio_low,
            clip_high=cfg.clip_ratio_high,
            dual_clip=cfg.clip_ratio_c,
        )
        assert_equal(got, expected)
        assert_metrics(got[1], expected[1], "dual_clip")


def test_vanilla_far_off_policy(impl: str) -> None:
    """Log-ratios beyond +-20, where verl clamps, at valid and at masked tokens."""
    data, mask = batch(SHAPE), response_mask()
    far = torch.randn(SHAPE) * 60
    data = data._replace(old_logp=data.logp + torch.where(torch.rand(SHAPE) < 0.3, far, 0.01))
    assert_equal(
        ours(impl, data, mask, dual_clip=3.0),
        verl_policy("vanilla", data, mask, "token-mean", actor()),
    )


@pytest.mark.parametrize("agg", AGGS)
def test_global_counts(impl: str, agg: str) -> None:
    """verl's batch_num_tokens, global_batch_size, loss_scale_factor and dp_size are one denominator."""
    data, mask = batch(SHAPE), response_mask()
    cfg = actor(
        global_batch_info={
            "dp_size": 2,
            "batch_num_tokens": 700,
            "global_batch_size": 12,
            "loss_scale_factor": 100,
        }
    )
    expected = verl_policy("vanilla", data, mask, agg, cfg)
    denom = {"token-mean": 700 / 2, "token-sum": None, "seq-mean-token-sum-norm": 12 * 100 / 2}
    got = ours(impl, data, mask, agg=AGGS[agg], dual_clip=3.0, denom=denom.get(agg, 12 / 2))
    if (
        agg == "token-sum"
    ):  # verl scales the sum by the number of ranks, which only its gradient averaging undoes
        got = (got[0] * 2, got[1], got[2] * 2)
    assert_equal(got, expected)


@pytest.mark.parametrize("agg", ["token-mean", "seq-mean-token-mean"])
def test_gspo(impl: str, agg: str) -> None:
    """clamp(max=10) of verl is one-sided; the lower side of ours acts at a mean log-ratio below -10 only."""
    for is_weights in (False, True):
        data, mask = batch(SHAPE, is_weights=is_weights), response_mask()
        data = data._replace(old_logp=data.logp + 0.3 * torch.randn(SHAPE[0], 1) + 0.05)
        cfg = actor(clip_ratio_low=0.1, clip_ratio_high=0.15)
        expected = verl_policy("gspo", data, mask, agg, cfg)
        got = ours(
            *(impl, data, mask),
            agg=AGGS[agg],
            ratio="sequence_token",
            clip_low=0.1,
            clip_high=0.15,
            log_ratio_clamp=10.0,
        )
        assert_equal(got, expected)
        assert_metrics(got[1], expected[1], None)
        assert metric(got[1], "clipped") > 0


def test_cispo(impl: str) -> None:
    for is_weights in (False, True):
        data, mask = batch(SHAPE, is_weights=is_weights), response_mask()
        expected = verl_policy("cispo", data, mask, "token-mean", actor(clip_ratio_high=0.4))
        got = ours(impl, data, mask, surrogate="cispo", clip_high=0.4)
        assert_equal(got, expected)
        assert_metrics(got[1], expected[1], None)


def test_gpg(impl: str) -> None:
    data, mask = batch(SHAPE, is_weights=True), response_mask()
    expected = verl_policy("gpg", data, mask, "seq-mean-token-sum", actor())
    assert_equal(ours(impl, data, mask, surrogate="reinforce", agg="seq_mean_token_sum"), expected)


KL_TYPES = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3"}


@pytest.mark.parametrize("straight_through", [False, True])
@pytest.mark.parametrize("kl_type", [*KL_TYPES, "k1", "k2", "k3"])
def test_kl_loss(impl: str, kl_type: str, straight_through: bool) -> None:
    """Values and gradients within and far outside of the clamps of low_var_kl; the suffix + is kl_grad="k2"."""
    data, mask = batch(SHAPE), response_mask()
    apart = torch.randn(SHAPE) * 4
    data = data._replace(ref_logp=data.logp + apart, advantages=torch.zeros(SHAPE))
    logp = leaf(data.logp)
    kld = core_algos.kl_penalty(logp, data.ref_logp, kl_type + "+" * straight_through)
    expected = 0.1 * core_algos.agg_loss(kld, mask, "token-mean")
    expected.backward()
    got = ours(
        *(impl, data, mask),
        ref_logp=data.ref_logp,
        kl=KL_TYPES.get(kl_type, kl_type),
        kl_grad="k2" if straight_through else "pathwise",
        kl_coef=0.1,
    )
    assert_equal(got, (expected.detach(), None, logp.grad))
    total = kld.detach()[mask].double().sum().item()
    assert metric(got[1], "ref_kl") == pytest.approx(total, rel=1e-5)


def test_whole_actor_loss_with_entropy_and_kl(impl: str) -> None:
    """What verl's ppo_loss adds up: policy loss, minus entropy, plus KL, each aggregated alike."""
    data, mask = batch(SHAPE, entropy=True), response_mask()
    for agg in AGGS:
        cfg = actor()
        logp, entropy = leaf(data.logp), leaf(data.entropy)
        loss, _ = core_algos.compute_policy_loss_vanilla(
            *(data.old_logp, logp, data.advantages, mask, agg, cfg)
        )
        loss = loss - 0.01 * core_algos.agg_loss(entropy, mask, agg)
        kld = core_algos.kl_penalty(logp, data.ref_logp, "low_var_kl")
        loss = loss + 0.05 * core_algos.agg_loss(kld, mask, agg)
        loss.backward()
        our_logp, our_entropy = leaf(data.logp), leaf(data.entropy)
        out = fastrl.policy_loss(
            *(our_logp, data.old_logp, data.advantages, mask),
            dual_clip=3.0,
            ref_logp=data.ref_logp,
            kl="k3",
            kl_coef=0.05,
            entropy=our_entropy,
            entropy_coef=0.01,
            agg=AGGS[agg],
            impl=impl,
        )
        out.loss.backward()
        assert_equal((out.loss, None, our_logp.grad), (loss, None, logp.grad))
        torch.testing.assert_close(our_entropy.grad, entropy.grad)


@pytest.mark.parametrize("agg", AGGS)
def test_value_loss(impl: str, agg: str) -> None:
    values, old_values, returns = (torch.randn(SHAPE) for _ in range(3))
    old_values = values + 0.6 * old_values
    mask = response_mask()
    counts = {"batch_num_tokens": 700, "global_batch_size": 12, "loss_scale_factor": 100}
    denom = {"token-mean": 700, "token-sum": None, "seq-mean-token-sum-norm": 12 * 100}
    for clip, is_global in itertools.product((0.2, 0.5), (False, True)):
        theirs, mine = leaf(values), leaf(values)
        expected, clip_fraction = core_algos.compute_value_loss(
            *(theirs, returns, old_values, mask, clip, agg), **(counts if is_global else {})
        )
        expected.backward()
        out = fastrl.value_loss(
            *(mine, old_values, returns, mask),
            clip=clip,
            agg=AGGS[agg],
            denom=denom.get(agg, 12) if is_global else None,
            impl=impl,
        )
        out.loss.backward()
        assert_equal((out.loss, None, mine.grad), (expected, None, theirs.grad))
        fraction = metric(out, "clipped") / metric(out, "tokens")
        assert fraction == pytest.approx(clip_fraction.item(), abs=1e-6)


def test_where_verl_has_nan_fastrl_has_none(impl: str) -> None:
    """Two deviations on purpose: NaN at a masked token leaks into verl's sequence modes, and an empty batch is NaN there."""
    data, mask = batch(SHAPE), response_mask()
    clean = ours(impl, data, mask, agg="seq_mean_token_mean", dual_clip=3.0)
    dirty = data._replace(old_logp=data.old_logp.masked_fill(~mask, float("nan")))
    leaked = verl_policy("vanilla", dirty, mask, "seq-mean-token-mean", actor())
    assert torch.isnan(leaked[0])
    got = ours(impl, dirty, mask, agg="seq_mean_token_mean", dual_clip=3.0)
    assert torch.equal(got[0], clean[0])
    nothing = torch.zeros(SHAPE, dtype=torch.bool)
    assert torch.isnan(verl_policy("vanilla", data, nothing, "token-mean", actor())[0])
    assert ours(impl, data, nothing)[0].item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_of_the_model_forward(dtype: torch.dtype) -> None:
    """Log-probabilities and entropies of ``[N, V]`` and ``[B, T, V]``, where verl's engines look them up."""
    from verl.utils import torch_functional

    for shape in ((12,), (3, 4)):
        torch.manual_seed(1)
        logits = (2 * torch.randn(*shape, 301)).to(dtype)
        labels = torch.randint(301, shape)
        results = []
        for ours in (False, True):
            if ours:
                integration.install()
            try:
                leaves = logits.clone().requires_grad_()
                logp = torch_functional.logprobs_from_logits(logits=leaves, labels=labels)
                entropy = torch_functional.entropy_from_logits(leaves.float())
                chunked = torch_functional.entropy_from_logits_with_chunking(
                    leaves.view(-1, 301), chunk_size=5
                )
                (logp.float().sum() + (labels / 301 * entropy).sum() + chunked.sum()).backward()
            finally:
                integration.uninstall()
            assert leaves.grad is not None
            results.append([x.detach().float() for x in (logp, entropy, chunked, leaves.grad)])
        tolerance = 2e-5 if dtype == torch.float32 else 2e-2
        for expected, got in zip(*results):
            torch.testing.assert_close(got, expected, atol=tolerance * 10, rtol=tolerance)
