"""One of the processes of ``test_world``: does several runs one after another.

``python -m tests.train.ranks JOBS.json``, started with the environment that torchrun makes; JOBS.json
holds keyword arguments of `main`. Starting a process takes longer than a run does.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fastrl.train import config as configs
from fastrl.train.loop import train
from tests.train import rewards


def main(config: str, run_dir: str, *, resume: bool = False, signal_at: str = "0:0") -> list[int]:
    """One run; how it ended."""
    rewards.restart_counting()
    os.environ[rewards.SIGNAL_AT] = signal_at
    return list(train(configs.load(Path(config)), Path(run_dir), resume=resume))


if __name__ == "__main__":
    jobs: list[dict[str, Any]] = json.loads(Path(sys.argv[1]).read_text())
    outcomes = []
    if len(jobs) > 1:
        # One group for all of them: gloo does not always succeed in connecting two processes again.
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for job in jobs:
        outcomes.append(main(**job))
    Path(f"{sys.argv[1]}.{os.environ['RANK']}").write_text(json.dumps(outcomes))
