"""LoRA: what is trained, what the reference is, what a checkpoint holds, and the adapter of the lm_head in the op."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fastrl.cli import main
from fastrl.train.config import Config
from fastrl.train.forward import policy_outputs
from fastrl.train.loop import train
from fastrl.train.metrics import Timer
from fastrl.train.models import Policy, load_policy
from tests.train.test_memory import _micro

CPU = torch.device("cpu")
HEAD_TOO = 'model.lora.targets=["q_proj", "lm_head"]'


@pytest.fixture(autouse=True)
def _peft() -> None:
    pytest.importorskip("peft", reason="model.lora needs peft, which is not installed")


def _policy(config: Config, *, moved: bool = True) -> Policy:
    """`moved`: away from the start, where the second factors are 0 and adapters change nothing."""
    policy = load_policy(config.model, seed=0, device=CPU)
    if moved:
        _move(policy)
    return policy


def _move(policy: Policy, seed: int = 1) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trained():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))


def test_the_trained_weights_are_those_of_the_adapters(small: Callable[..., Config]) -> None:
    policy = _policy(small("grpo", "model.lora.rank=4"), moved=False)
    trained = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
    # Seven linear layers in each of two layers, two factors each; the lm_head has none.
    assert len(trained) == 2 * 7 * 2 and all("lora_" in name for name in trained)
    assert {4} == {min(p.shape) for p in trained.values()}
    plain = load_policy(small("grpo").model, seed=0, device=CPU)
    micro = _micro(config := small("grpo", "optim.mini_batches=1"))
    with torch.no_grad():
        torch.rand(1)  # the adapters are drawn from the seed, whatever was drawn before
        again = load_policy(small("grpo", "model.lora.rank=4").model, seed=0, device=CPU)
        assert all(map(torch.equal, policy.trained(), again.trained()))
        same = [policy_outputs(p, micro, config, Timer()).logp for p in (policy, plain)]
    assert torch.equal(*same)


def test_the_reference_is_the_frozen_model_and_no_copy(small: Callable[..., Config]) -> None:
    settings = ("optim.mini_batches=1", "model.lora.rank=4", HEAD_TOO)
    config = small("grpo", *settings)
    policy, micro = _policy(config, moved=False), _micro(config)
    reference = policy.reference()
    _move(policy)
    ours = {id(p) for p in policy.model.parameters()}
    assert {id(p) for p in reference.parameters()} == ours
    plain = load_policy(small("grpo").model, seed=0, device=CPU)
    for head in ("fused", "eager"):
        config = small("grpo", *settings, f"model.head={head}")
        with torch.no_grad():
            found, base, moved = (
                policy_outputs(p, micro, config, Timer()).logp for p in (reference, plain, policy)
            )
        assert torch.equal(found, base)
        assert (moved - base).abs().max() > 1e-3
    assert len(policy.trained()) == 6, "adapters are trained again after they were left out"


def test_adapters_of_a_warm_start_stay_in_the_reference(small: Callable[..., Config]) -> None:
    config = small("grpo", "optim.mini_batches=1", "model.lora.rank=4", HEAD_TOO)
    policy, micro = _policy(config), _micro(config)

    def logp(of: Policy) -> Tensor:
        with torch.no_grad():
            return policy_outputs(of, micro, config, Timer()).logp

    start, reference = logp(policy), policy.reference()
    _move(policy, seed=2)
    assert torch.equal(logp(reference), start)
    assert (logp(policy) - start).abs().max() > 1e-3
    assert not reference.trained()


def test_the_adapter_of_the_head_goes_through_the_op(small: Callable[..., Config]) -> None:
    """The fused head against the eager one, in which peft computes the low-rank term itself."""
    results = []
    for head in ("fused", "eager"):
        config = small(
            "grpo", "optim.mini_batches=1", "model.lora.rank=4", HEAD_TOO, f"model.head={head}"
        )
        policy = _policy(config)
        out = policy_outputs(policy, _micro(config), config, Timer(), entropy=True)
        (out.logp.sin() + out.entropy).sum().backward()  # type: ignore[operator]
        gradients = {n: p.grad for n, p in policy.named_parameters() if p.requires_grad}
        assert any("lm_head" in name for name in gradients)
        results.append((out.logp.detach(), gradients))
    (fused, fused_gradients), (eager, eager_gradients) = results
    torch.testing.assert_close(fused, eager, rtol=1e-5, atol=1e-5)
    for name, gradient in fused_gradients.items():
        assert gradient is not None and gradient.abs().max() > 0, name
        torch.testing.assert_close(gradient, eager_gradients[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_run_is_resumed_bit_for_bit_from_the_adapter_alone(
    small: Callable[..., Config], tmp_path: Path, algorithm: str
) -> None:
    lora = ("model.lora.rank=2", "kl.coef=0.1", "ppo.warmup_steps=0", "optim.lr=0.01")
    lora += ("optim.decay=constant",)  # a decay to step 4 is another one than to step 2

    def config(steps: int) -> Config:
        return small(algorithm, *lora, f"steps={steps}")

    train(config(4), tmp_path / "whole")
    train(config(2), tmp_path / "parts")
    train(config(4), tmp_path / "parts", resume=True)
    whole, parts = (
        load_file(tmp_path / name / "checkpoints" / "step_000004" / "policy.safetensors")
        for name in ("whole", "parts")
    )
    assert whole.keys() == parts.keys() and all("lora_" in name for name in whole)
    assert all(torch.equal(x, parts[name]) for name, x in whole.items())
    assert any(x.abs().max() > 0 for name, x in whole.items() if "lora_B" in name)
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    assert abs(json.loads(lines[-1])["kl/ref"]) > 1e-7, "the policy moved away from the reference"
    if algorithm == "ppo":
        critic = load_file(
            tmp_path / "whole" / "checkpoints" / "step_000004" / "critic.safetensors"
        )
        assert critic["head.weight"].abs().max() > 0, "the value head is trained as a whole"


def test_eval_reads_the_adapter(
    small: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(small("grpo", "model.lora.rank=2", "optim.lr=0.01", "steps=3"), tmp_path)
    last = json.loads((tmp_path / "eval.jsonl").read_text().splitlines()[-1])
    capsys.readouterr()
    assert main(["eval", str(tmp_path)]) == 0
    assert f"step 3: accuracy {last['accuracy']:.3f}, reward {last['reward']:.3f}" in (
        capsys.readouterr().out
    )


def test_checkpointing_and_adapters_together(small: Callable[..., Config]) -> None:
    gradients = []
    for enabled in ("false", "true"):
        config = small(
            "grpo",
            "optim.mini_batches=1",
            "model.lora.rank=4",
            f"model.activation_checkpointing={enabled}",
        )
        policy = _policy(config)
        policy_outputs(policy, _micro(config), config, Timer()).logp.sum().backward()
        gradients.append([p.grad for p in policy.trained()])
    for x, y in zip(*gradients, strict=True):
        assert x is not None and y is not None and torch.equal(x, y)


def test_unknown_layers_and_a_missing_peft_are_named(
    small: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small("grpo", "model.lora.rank=2", 'model.lora.targets=["no_such_layer"]')
    with pytest.raises(ValueError, match=r"model\.lora\.targets = \['no_such_layer'\]"):
        load_policy(config.model, seed=0, device=CPU)
    with pytest.raises(ValueError, match=r"model\.lora\.rank must be at least 0, got -1"):
        small("grpo", "model.lora.rank=-1")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r'pip install "fastrl-kernels\[lora\]"'):
        load_policy(small("grpo", "model.lora.rank=2").model, seed=0, device=CPU)


@pytest.mark.parametrize(
    "option", ["scale.strategy=fsdp2", "engine.kind=sglang", "rollout.overlap=1"]
)
def test_what_does_not_know_of_adapters_is_refused(
    small: Callable[..., Config], option: str
) -> None:
    options = ("engine.urls=['http://localhost:1']", "correction.kind=tis", option)
    with pytest.raises(ValueError, match=r"model\.lora\.rank = 2 needs"):
        small("grpo", "model.lora.rank=2", *options)
