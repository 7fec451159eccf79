"""Several processes: the numbers of one process up to rounding, uneven work, and processes that are lost."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import TCPStore

from fastrl.envs import read_trajectories
from fastrl.train import config as configs
from fastrl.train.batch import make_batch, plan_updates
from fastrl.train.config import Config
from fastrl.train.grpo import GRPO
from fastrl.train.loop import train
from fastrl.train.metrics import StepMetrics, Timer
from fastrl.train.models import load_policy
from fastrl.train.ppo import PPO
from fastrl.train.world import ALONE, World, connect
from tests.train.test_batch import ragged

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SIGNAL = "task.rewards=[{function='tests.train.rewards:signal_to_second'}]"


# --- shares, without processes -----------------------------------------------------------------


def test_shares_by_hand() -> None:
    assert [World(r, 3).share([0, 1, 2, 3]) for r in range(3)] == [[0, 3], [1], [2]]
    # 9 and 7 first, then back: 5 to the second, 4 to the first, and 1 to the first again.
    assert [World(r, 2).deal([1, 9, 5, 7, 4]) for r in range(2)] == [[0, 1, 4], [2, 3]]
    assert [World(r, 4).deal([3, 8]) for r in range(4)] == [[1], [0], [], []]
    assert ALONE.deal([3, 1, 2]) == [0, 1, 2]


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("share_prompts", ["true", "false"])
def test_ranks_train_every_token_once(size: int, share_prompts: str) -> None:
    """With as many micro-batches on each rank, as wide as the trunk needs for as many calls."""
    batch = make_batch(ragged(), ["task"])
    options = {"micro_batch_tokens": 20, "mini_batches": 2}
    config = configs.parse({"optim": options, "model": {"share_prompts": share_prompts == "true"}})
    arguments: dict[str, Any] = {"step": 0, "epoch": 0, "device": CPU}
    alone = plan_updates(batch, config, **arguments)
    plans = [plan_updates(batch, config, **arguments, world=World(r, size)) for r in range(size)]
    for i, mini in enumerate(alone):
        own = [plan[i] for plan in plans]
        assert {m.num_tokens for m in own} == {mini.num_tokens}
        assert {m.num_sequences for m in own} == {mini.num_sequences}
        micros = [micro for m in own for micro in m.micro_batches]
        assert len({len(m.micro_batches) for m in own}) == 1
        # All ranks have work before one of them has more than it would have alone.
        assert len(own[0].micro_batches) <= math.ceil(len(mini.micro_batches) / size)
        found = torch.cat([micro.batch_index for micro in micros]).sort().values
        expected = torch.cat([m.batch_index for m in mini.micro_batches]).sort().values
        assert torch.equal(found, expected)
        assert all(micro.inputs.completion_ids.shape[1] >= 2 for micro in micros)


def test_micro_batches_get_smaller_until_all_ranks_have_one() -> None:
    batch = make_batch(ragged(num_prompts=8), ["task"])
    config = configs.parse({"optim": {"micro_batch_tokens": 100_000}})
    plans = [
        plan_updates(batch, config, step=0, epoch=0, device=CPU, world=World(r, 4))
        for r in range(4)
    ]
    tokens = [len(m.micro_batches[0].tokens) for (m,) in plans]
    assert all(len(m.micro_batches) == 1 for (m,) in plans)
    assert sum(tokens) == int(batch.mask.sum())
    assert max(tokens) < 2 * min(tokens)


@pytest.mark.parametrize("algorithm", [GRPO, PPO])
@pytest.mark.parametrize("num_prompts", [5, 1])
def test_gradients_of_ranks_add_up_to_those_of_one(
    algorithm: type[GRPO] | type[PPO], num_prompts: int
) -> None:
    """Also with more ranks than completions: what has no tokens adds nothing, and no NaN."""
    tree = {"model": {"hidden_size": 32}, "kl": {"coef": 0.1}, "loss": {"entropy_coef": 0.01}}
    config = configs.parse(tree)
    batch = make_batch(ragged(num_prompts), ["task"])

    def gradients(worlds: Sequence[World]) -> tuple[dict[str, Tensor], float]:
        policy = load_policy(config.model, seed=1, device=CPU)
        learner = algorithm(config, policy, Timer())
        plans = [plan_updates(batch, config, step=0, epoch=0, device=CPU, world=w) for w in worlds]
        # Constants of the rollout as all ranks hold them together.
        targets: Any = learner.targets(batch, [m for plan in plans for m in plan])
        metrics = StepMetrics()
        total = 0.0
        for plan in plans:
            for mini in plan:
                for micro in mini.micro_batches:
                    loss = learner.loss(micro, mini, targets, metrics)
                    loss.backward()
                    total += float(loss.detach())
        figures = metrics.result()
        assert all(math.isfinite(v) for k, v in figures.items() if k.startswith("policy/"))
        named = [p for m in learner.modules().values() for p in m.named_parameters()]
        return {name: p.grad.clone() for name, p in named if p.grad is not None}, total

    (one, loss), (many, sum_of_losses) = (
        gradients([ALONE]),
        gradients([World(r, 4) for r in range(4)]),
    )
    assert sum_of_losses == pytest.approx(loss, rel=1e-5)
    assert one.keys() == many.keys()
    largest = max(float(g.abs().max()) for g in one.values())
    assert largest > 1e-3
    for name, gradient in one.items():
        torch.testing.assert_close(many[name], gradient, rtol=0, atol=1e-5 * largest)


def test_errors_name_the_remedy(
    small: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"scale\.timeout must be positive, got 0\.0"):
        small("grpo", "scale.timeout=0")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(ValueError, match=r"RANK, LOCAL_RANK.* not set; start with torchrun"),
        connect(small("grpo")),
    ):
        pass
    for name, value in {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with (
        pytest.raises(ValueError, match=r"torch finds 1; start with --nproc-per-node 1 or fewer"),
        connect(small("grpo", "device=cuda")),
    ):
        pass


@pytest.mark.parametrize(
    ("message", "kind"),
    [("[gloo/transport/tcp] Connection closed by peer", ConnectionError), ("shapes", RuntimeError)],
)
def test_only_errors_of_the_connection_are_called_so(
    small: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, message: str, kind: type
) -> None:
    for name, value in {"is_initialized": True, "get_rank": 0, "get_world_size": 2}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    with pytest.raises(kind), connect(small("grpo", "device=cpu")):
        raise RuntimeError(message)


# --- runs --------------------------------------------------------------------------------------


def case(algorithm: str, *overrides: str) -> Config:
    """A configuration of a few seconds whose steps do not depend on the last bits of gradients."""
    return configs.load(
        ROOT / f"configs/{algorithm}.toml",
        [
            "rollout.prompts=5",
            "rollout.samples=4",
            "model.hidden_size=32",
            "log.tensorboard=false",
            "log.progress=false",
            "log.samples=100",
            "log.samples_every=1",
            "eval.size=3",
            "steps=3",
            "optim.decay=constant",
            # Else Adam makes steps of the full learning rate from gradients that are all rounding.
            "optim.eps=1e-4",
            "scale.timeout=60",
            *overrides,
        ],
    )


def cases(tied: Path) -> dict[str, Config]:
    """What is run by one, two and four processes. `tied` is a model whose head is its embedding."""
    sharded = "scale.strategy=fsdp2"
    return {
        "grpo_ddp": case("grpo_tiny", "optim.max_grad_norm=0.1", "filter.groups=true"),
        "grpo_fsdp2": case(
            *("grpo_tiny", sharded, "kl.coef=0.01", f"model.source={tied}"),
            *("optim.max_grad_norm=0.1", "loss.agg=token_mean"),
            # It computes layers again whose weights are no longer whole.
            "model.activation_checkpointing=true",
        ),
        "ppo_fsdp2": case(
            *("ppo_tiny", sharded, "ppo.critic=separate", "ppo.warmup_steps=1", "kl.coef=0.01"),
            *("kl.target=0.01", "optim.micro_batch_tokens=24", "model.share_prompts=false"),
        ),
        # One question and three completions: most ranks ask nothing, and one of four trains nothing.
        "few_ppo_fsdp2": case(
            *("ppo_tiny", sharded, "ppo.critic=head", "rollout.prompts=1", "rollout.samples=3"),
            *("optim.mini_batches=1", "eval.size=1", "optim.micro_batch_tokens=1"),
        ),
        "few_grpo_ddp": case(
            "grpo_tiny", "rollout.prompts=2", "rollout.samples=2", "optim.mini_batches=2"
        ),
        "turns": case("guess_grpo", sharded, "rollout.prompts=3", "model.head=eager"),
    }


class Ranks:
    """`size` processes that do `jobs`, over a store that they find as under torchrun."""

    def __init__(self, folder: Path, size: int, jobs: Sequence[dict[str, Any]]) -> None:
        self._file = folder / f"jobs_{size}.json"
        self._file.write_text(json.dumps(jobs))
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = {
            **os.environ,
            **{"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(size)},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port)},
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.train.ranks", str(self._file)],
                cwd=ROOT,
                env={**environment, "RANK": str(r), "LOCAL_RANK": str(r)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for r in range(size)
        ]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def outcomes(self) -> list[list[Any]]:
        """How each job ended, by rank."""
        errors = [p.communicate(timeout=240)[1] for p in self.processes]
        assert not any(p.returncode for p in self.processes), "\n".join(errors)
        files = [Path(f"{self._file}.{r}") for r in range(len(self.processes))]
        return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders "<case>_<number of processes>" and those of the tests of stopping and resuming."""
    folder = tmp_path_factory.mktemp("runs")
    threads = torch.get_num_threads()
    for name, config in cases(_tied_model(folder / "tied")).items():
        (folder / f"{name}.toml").write_text(configs.dumps(config))
        train(config, folder / f"{name}_1")
    torch.set_num_threads(threads)
    names = [p.stem for p in folder.glob("*.toml")]

    sharded = ("scale.strategy=fsdp2", "kl.coef=0.01", "kl.target=0.01", "ppo.critic=head")
    for steps in (2, 4):
        config = case("ppo_tiny", *sharded, f"steps={steps}", "optim.warmup_steps=3")
        (folder / f"until_{steps}.toml").write_text(configs.dumps(config))
    stopped = case("grpo_tiny", SIGNAL, "steps=9", "eval.size=0", "filter.groups=false")
    (folder / "stopped.toml").write_text(configs.dumps(stopped))

    def job(config: str, run_dir: str, **options: Any) -> dict[str, Any]:
        return {"config": f"{folder}/{config}.toml", "run_dir": f"{folder}/{run_dir}", **options}

    jobs = [job(name, f"{name}_2") for name in names]
    jobs += [job("until_4", "whole"), job("until_2", "resumed")]
    jobs += [job("until_4", "resumed", resume=True), job("until_2", "half")]
    # Two of the five questions are those of rank 1: its call 12 is in the middle of step 2.
    jobs += [job("stopped", "stopped", signal_at=f"12:{signal.SIGTERM:d}")]
    with Ranks(folder, 2, jobs) as two:
        outcomes = two.outcomes()
    (folder / "outcomes.json").write_text(json.dumps([o[-1] for o in outcomes]))

    shutil.copytree(folder / "half", folder / "half_on_4")
    jobs = [job(name, f"{name}_4") for name in names]
    with Ranks(folder, 4, [*jobs, job("until_4", "half_on_4", resume=True)]) as four:
        four.outcomes()
    return folder


def _tied_model(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = case("grpo_tiny").model
    policy = load_policy(config, seed=0, device=CPU)
    policy.tokenizer.save_pretrained(folder)
    options = policy.model.config.to_dict() | {"tie_word_embeddings": True}
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**options)).save_pretrained(folder)
    return folder


def saved(run_dir: Path, step: int) -> dict[str, Tensor]:
    folder = run_dir / "checkpoints" / f"step_{step:06d}"
    files = [f for f in sorted(folder.glob("*.safetensors")) if not f.name.startswith("rng")]
    return {f"{f.name}/{k}": v for f in files for k, v in load_file(f).items()}


def figures(run_dir: Path, name: str) -> list[dict[str, float]]:
    """Lines of a run without what depends on the clock; NaN for what is not defined."""
    clock = ("time/", "throughput/", "seconds")
    lines = (run_dir / name).read_text().splitlines()
    return [
        {
            k: math.nan if v is None else v
            for k, v in json.loads(line).items()
            if not k.startswith(clock)
        }
        for line in lines
    ]


def assert_agree(run_dir: Path, other: Path, step: int) -> None:
    """The same samples, and figures, weights and optimiser the same up to rounding."""
    for name in ("samples.jsonl", "eval_samples.jsonl"):
        pairs = zip(read_trajectories(run_dir / name), read_trajectories(other / name), strict=True)
        for a, b in pairs:
            assert (a.uid, a.completion_ids, a.reward) == (b.uid, b.completion_ids, b.reward)
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert_figures_agree(run_dir, other, name)
    assert_close(saved(run_dir, step), saved(other, step))


def assert_figures_agree(run_dir: Path, other: Path, name: str) -> None:
    for a, b in zip(figures(run_dir, name), figures(other, name), strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=2e-6, nan_ok=True)


def assert_close(tensors: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    """Weights are of the order of 0.1, and half of them change by more than 3e-3 in a run."""
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, others[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", cases(Path("tied")))
def test_numbers_do_not_depend_on_the_number_of_processes(runs: Path, name: str, size: int) -> None:
    last = figures(runs / f"{name}_1", "metrics.jsonl")[-1]
    assert last["optim/updates"] > 0
    assert last["optim/grad_norm"] > 0
    assert_agree(runs / f"{name}_{size}", runs / f"{name}_1", 3)


def test_a_signal_to_one_process_stops_all_after_the_same_step(runs: Path) -> None:
    assert json.loads((runs / "outcomes.json").read_text()) == [[2, signal.SIGTERM]] * 2
    assert [p.name for p in (runs / "stopped/checkpoints").iterdir()] == ["step_000002"]


def test_resume_continues_bit_for_bit(runs: Path) -> None:
    for name in ("metrics.jsonl", "eval.jsonl", "samples.jsonl"):
        found, whole = (
            [x for x in figures(runs / d, name) if x["step"] > 2] for d in ("resumed", "whole")
        )
        assert repr(found) == repr(whole) != "[]"
    folder = runs / "resumed/checkpoints/step_000004"
    assert (folder / "rng.1.safetensors").exists()
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        others = load_file(runs / "whole/checkpoints/step_000004" / file.name)
        assert tensors.keys() == others.keys()
        assert all(torch.equal(tensors[k], others[k]) for k in tensors)


def test_resume_on_another_number_of_processes(runs: Path) -> None:
    """Saved by two with shards; continued by four, and by one that has no shards."""
    config = configs.load(runs / "until_4.toml", ["scale.strategy=ddp"])
    train(config, runs / "half", resume=True)
    for name in ("half", "half_on_4"):
        assert_close(saved(runs / name, 4), saved(runs / "whole", 4))


# --- processes that are lost -------------------------------------------------------------------


def test_a_killed_process_ends_the_others_and_the_run_goes_on(tmp_path: Path) -> None:
    """By the command of the README; what is left is continued by one process."""
    options = (SIGNAL, "steps=4", "checkpoint.every=1", "scale.strategy=fsdp2", "eval.size=0")
    config = case("grpo_tiny", *options)
    train(config, tmp_path / "whole")
    file = tmp_path / "config.toml"
    file.write_text(configs.dumps(config))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "fastrl", "train"]
    # Two questions and eight completions a step are those of rank 1.
    environment = {"FASTRL_TEST_SIGNAL_AT": f"20:{signal.SIGKILL:d}", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, *command, str(file), "--run-dir", str(tmp_path / "killed")],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 1, run.stderr
    assert "fastrl (rank 0): scale: rank 0 of 2 lost another process" in run.stderr
    assert "--resume continues from the last checkpoint" in run.stderr
    assert [r["step"] for r in figures(tmp_path / "killed", "metrics.jsonl")] == [1, 2]
    assert train(config, tmp_path / "killed", resume=True) == (4, 0)
    assert_figures_agree(tmp_path / "killed", tmp_path / "whole", "metrics.jsonl")


def test_a_process_that_says_nothing_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    config = case("grpo_tiny", SIGNAL, "scale.timeout=4", "eval.size=0")
    file = tmp_path / "config.toml"
    file.write_text(configs.dumps(config))
    job = {
        "config": str(file),
        "run_dir": str(tmp_path / "run"),
        "signal_at": f"12:{signal.SIGSTOP:d}",
    }
    with Ranks(tmp_path, 2, [job]) as ranks:
        first, second = ranks.processes
        while not (tmp_path / "run/metrics.jsonl").exists():
            assert first.poll() is None
            time.sleep(0.1)
        began = time.monotonic()
        _, said = first.communicate(timeout=60)
        assert first.returncode == 1
        assert "said nothing for scale.timeout = 4 s" in said
        assert 2 < time.monotonic() - began < 20
        assert second.poll() is None
