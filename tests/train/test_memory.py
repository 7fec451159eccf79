"""What the options that save memory change: bytes, and neither losses nor gradients."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.memory import peak_bytes
from fastrl.envs import Trajectory
from fastrl.train.batch import MicroBatch, make_batch, plan_updates
from fastrl.train.checkpointing import checkpointed_layers
from fastrl.train.config import Config
from fastrl.train.loop import train
from fastrl.train.models import Policy, completion_hidden, load_policy

CPU = torch.device("cpu")
LAYERS = ("model.num_layers=6", "rollout.max_new_tokens=24")


def _micro(config: Config) -> MicroBatch:
    """Four prompts with four completions each, of several lengths."""
    draw = torch.Generator().manual_seed(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(
            torch.randint(2, 2 + len(config.model.alphabet), (count,), generator=draw).tolist()
        )

    prompts = [ids(3 + i) for i in range(4)]
    rows = [
        Trajectory(
            uid=f"q{i}",
            prompt="",
            completion="",
            answer="",
            prompt_ids=prompts[i],
            completion_ids=(answer := ids(9 + 5 * j)),
            mask=(1,) * len(answer),
            reward=float(j),
            reward_parts={"task": float(j)},
        )
        for i in range(4)
        for j in range(4)
    ]
    (mini,) = plan_updates(make_batch(rows, ["task"]), config, step=0, epoch=0, device=CPU)
    return mini.micro_batches[0]


def _gradients(
    policy: Policy, micro: MicroBatch, share_prompts: bool, checkpointing: bool
) -> tuple[Tensor, list[Tensor]]:
    hidden = completion_hidden(
        policy.trunk, micro.inputs, share_prompts=share_prompts, checkpointing=checkpointing
    )
    weights = [p for p in policy.trunk.parameters() if p.requires_grad]
    return hidden.detach(), list(torch.autograd.grad(hidden.sin().sum(), weights))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("share_prompts", [True, False])
def test_checkpointing_changes_no_bit_and_saves_memory(
    small: Callable[..., Config], share_prompts: bool, autocast: bool
) -> None:
    config = small("grpo", *LAYERS, "optim.mini_batches=1")
    policy, micro = load_policy(config.model, seed=0, device=CPU), _micro(config)

    def run(checkpointing: bool) -> tuple[Tensor, list[Tensor]]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return _gradients(policy, micro, share_prompts, checkpointing)

    (plain, plain_gradients), (hidden, gradients) = run(False), run(True)
    assert torch.equal(plain, hidden)
    assert all(torch.equal(x, y) for x, y in zip(plain_gradients, gradients, strict=True))
    assert any(g.abs().max() > 0 for g in gradients)
    assert peak_bytes(lambda: run(True)) < 0.6 * peak_bytes(lambda: run(False))


def test_checkpointing_leaves_the_layers_as_they_were(small: Callable[..., Config]) -> None:
    config = small("grpo", "optim.mini_batches=1")
    policy, micro = load_policy(config.model, seed=0, device=CPU), _micro(config)
    before = {name: dict(m.__dict__) for name, m in policy.trunk.named_modules()}
    with pytest.raises(KeyError), checkpointed_layers(policy.trunk):
        raise KeyError
    _gradients(policy, micro, True, True)
    twin = copy.deepcopy(policy)  # as the reference and a critic of its own are made
    for name, module in policy.trunk.named_modules():
        assert module.__dict__.keys() == before[name].keys(), name
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    hidden, _ = _gradients(twin, micro, True, True)
    assert hidden.abs().max() > 0


def test_a_trunk_without_layers_is_refused_by_name() -> None:
    with (
        pytest.raises(ValueError, match=r"Linear has no layers.*activation_checkpointing = false"),
        checkpointed_layers(nn.Linear(2, 2)),
    ):
        pass


def test_the_trainer_runs_with_it(small: Callable[..., Config], tmp_path: Path) -> None:
    """The same metrics, from a critic with a trunk of its own too."""
    metrics = []
    for enabled in ("false", "true"):
        settings = ("steps=2", "ppo.critic=separate", f"model.activation_checkpointing={enabled}")
        train(small("ppo", *settings), tmp_path / enabled)
        lines = (tmp_path / enabled / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        metrics.append(
            [{k: v for k, v in r.items() if not k.startswith(("time", "throughput"))} for r in rows]
        )
    assert metrics[0] == metrics[1]
