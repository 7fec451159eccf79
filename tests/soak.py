"""kill -9 at random moments, then --resume, again and again: `python -m tests.soak --kills 50 --seed 0`.

Every life is a process of `fastrl train`. A third of the kills comes at any time, a third while a checkpoint is
being written, a third just after a line was appended to a file. A run is killed until one life reaches its end;
its files are then compared with those of a run that was left alone: every line of metrics, evaluations and
samples (but for what depends on the clock), and every byte of the last checkpoints. After each kill the newest
finished checkpoint must still be there, and the next life must start from it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
STEPS = 8
OPTIONS = (
    f"steps={STEPS}",
    "model.hidden_size=32",
    "rollout.prompts=4",
    "rollout.samples=4",
    "eval.size=4",
    "eval.every=3",
    "kl.coef=0.01",
    "log.samples_every=2",
    "log.tensorboard=false",
    "checkpoint.every=1",
    # Draws from Python's global generator, whose state must come back as well.
    "task.rewards=[{function='tests.train.rewards:noisy_position'}]",
)
KINDS = ("any time", "checkpoint", "append")
LOGS = ("metrics.jsonl", "eval.jsonl", "samples.jsonl", "eval_samples.jsonl")
CLOCK = ("time/", "throughput/", "seconds")


class Life(NamedTuple):
    """A process that trains."""

    pid: int
    wait: Callable[[], int]
    """Its exit code, -9 after SIGKILL."""


def _main(arguments: list[str], output: str) -> None:
    """What a process of the fork server does: the command, with its output in a file."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    from fastrl import cli

    sys.exit(cli.main(arguments))


def start(algorithm: str, run_dir: Path, output: Path, *, fresh: bool) -> Life:
    """`fastrl train --resume` in a new process: of an interpreter of its own, or a fork of one that waits."""
    arguments = ["train", str(ROOT / f"configs/{algorithm}_tiny.toml"), "--run-dir", str(run_dir)]
    arguments += ["--resume", *(part for option in OPTIONS for part in ("--set", option))]
    if fresh:
        with open(output, "a") as file:
            command = [sys.executable, "-m", "fastrl", *arguments]
            child = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
        return Life(child.pid, child.wait)
    process = _server().Process(target=_main, args=(arguments, str(output)))
    process.start()
    assert process.pid is not None

    def wait() -> int:
        process.join()
        return process.exitcode or 0

    return Life(process.pid, wait)


@functools.cache
def _server() -> Any:
    """The fork server, when it is ready: it has imported everything, which takes longer than a run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["fastrl.train.loop", "tests.train.rewards", "transformers.models.llama.modeling_llama",
         "transformers.tokenization_utils_tokenizers"]
    )  # fmt: skip
    first = context.Process(target=int)
    first.start()
    first.join()
    return context


def soak(kills: int, seed: int, folder: Path, *, fresh: bool = False) -> Counter[str]:
    """Kill `kills` times; how often at which moment. AssertionError when anything was lost or differs."""
    rng = random.Random(seed)
    count: Counter[str] = Counter()
    wholes: dict[str, tuple[Path, float]] = {}
    run = killed = 0
    while killed < kills:
        algorithm = ("grpo", "ppo")[run % 2]
        if algorithm not in wholes:
            wholes[algorithm] = _whole(algorithm, folder, fresh)
        whole, seconds = wholes[algorithm]
        run_dir, output = folder / f"{algorithm}_{run}", folder / f"{algorithm}_{run}.txt"
        saved, ended = 0, False
        while not ended:
            life = start(algorithm, run_dir, output, fresh=fresh)
            kind = KINDS[killed % len(KINDS)] if killed < kills else ""
            began = time.monotonic()
            if kind:
                _wait_for(kind, run_dir, life.pid, rng, seconds)
            if kind and _is_alive(life.pid):
                os.kill(life.pid, signal.SIGKILL)
            code, said = life.wait(), output.read_text()
            assert code in (0, -signal.SIGKILL), said
            ended = code == 0
            newest = _newest(run_dir)
            assert newest >= saved, f"step {saved} was saved and is gone"
            expected = f"resumed from {run_dir}/checkpoints/step_{saved:06d}"
            assert "resumed from" not in said or expected in said, said
            assert not (saved and "starting at step 0" in said), said
            output.write_text("")
            saved = newest
            if not ended:
                killed += 1
                draft = any(run_dir.glob("checkpoints/*.tmp"))
                count[f"{kind}{', half a checkpoint left' if draft else ''}"] += 1
                print(f"{killed:3d} {algorithm} run {run}: {kind}, {time.monotonic() - began:.2f} s, "
                      f"step {saved} saved{', half a checkpoint left' if draft else ''}", flush=True)  # fmt: skip
        assert_same(whole, run_dir)
        shutil.rmtree(run_dir)
        run += 1
    return count


def _whole(algorithm: str, folder: Path, fresh: bool) -> tuple[Path, float]:
    """A run that is left alone, and its seconds."""
    began = time.monotonic()
    output = folder / f"{algorithm}.txt"
    code = start(algorithm, folder / algorithm, output, fresh=fresh).wait()
    assert code == 0, output.read_text()
    return folder / algorithm, time.monotonic() - began


def _wait_for(kind: str, run_dir: Path, pid: int, rng: random.Random, seconds: float) -> None:
    """Return at a moment of this kind, or when the process has ended."""
    end = time.monotonic() + rng.random() * seconds
    before, old = _sizes(run_dir), _drafts(run_dir)
    passed = rng.randrange(4)
    was = False
    while _is_alive(pid):
        if kind == "any time":
            if time.monotonic() >= end:
                return
        else:
            if kind == "checkpoint":
                now = bool(_drafts(run_dir) - old)
            else:
                sizes = _sizes(run_dir)
                now, before = sizes > before, sizes
            # The first few times pass, so that a life gets some steps further.
            if now and not was:
                if passed == 0:
                    time.sleep(rng.random() * 0.01)
                    return
                passed -= 1
            was = now
        time.sleep(0.0005 if kind != "any time" else 0.005)


def _drafts(run_dir: Path) -> set[int]:
    """Times of change of half-written checkpoints: what a kill left behind does not change any more."""
    times = set()
    for path in run_dir.glob("checkpoints/*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            times.add(path.stat().st_mtime_ns)
    return times


def _sizes(run_dir: Path) -> int:
    return sum((run_dir / n).stat().st_size for n in LOGS if (run_dir / n).exists())


def _is_alive(pid: int) -> bool:
    """Whether the process has not ended; one that nobody has waited for yet has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _newest(run_dir: Path) -> int:
    finished = [p for p in run_dir.glob("checkpoints/step_*") if p.suffix != ".tmp"]
    return max((int(p.name.removeprefix("step_")) for p in finished), default=0)


def assert_same(whole: Path, other: Path) -> None:
    """Equal but for the clock, and nothing left over."""
    assert sorted(p.relative_to(whole) for p in whole.rglob("*")) == sorted(
        p.relative_to(other) for p in other.rglob("*")
    )
    for name in LOGS:
        assert _lines(whole / name) == _lines(other / name), name
    for file in whole.rglob("checkpoints/*/*"):
        assert file.read_bytes() == (other / file.relative_to(whole)).read_bytes(), file


def _lines(path: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    return [{k: v for k, v in r.items() if not k.startswith(CLOCK)} for r in records]


def main() -> None:
    """Run from the command line; prints each kill and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--fresh", action="store_true", help="a new interpreter for every life, not a fork"
    )
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        count = soak(options.kills, options.seed, Path(folder), fresh=options.fresh)
    print(f"{options.kills} kills, nothing lost, every run equal to the one left alone; {dict(count)}; "
          f"{time.monotonic() - began:.0f} s")  # fmt: skip


if __name__ == "__main__":
    main()
