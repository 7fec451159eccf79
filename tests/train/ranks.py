"""One of the processes of ``test_world``: trains several configurations one after another.

``python -m tests.train.ranks JOBS.json``, started with the environment that torchrun makes; JOBS.json
holds pairs of a configuration file and a run folder, and whether the run is resumed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from fastrl.train import config as configs
from fastrl.train.loop import train


def main(jobs: list[tuple[str, str, bool]]) -> None:
    torch.set_num_threads(1)
    port = int(os.environ["MASTER_PORT"])
    for i, (config, run_dir, resume) in enumerate(jobs):
        os.environ["MASTER_PORT"] = str(port + i)
        train(configs.load(Path(config)), Path(run_dir), resume=resume)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
