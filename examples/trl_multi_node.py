"""GRPO of TRL over several nodes with fastrl: one process per GPU, or with ``--cpu`` per processor.

On every node, with its own ``--node-rank``::

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 8 --master-addr FIRST_NODE --master-port 29500 \\
        -m examples.trl_multi_node --model FOLDER --output runs/grpo

``accelerate launch --num_machines 2 --machine_rank 0 --num_processes 16 --main_process_ip FIRST_NODE --main_process_port
29500 -m examples.trl_multi_node ...`` is the same; with ``--config_file`` it shards the model by FSDP or DeepSpeed.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any


def additions(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"{a} + {b} =", "answer": str(a + b)}
        for a, b in ((i % 10, i // 10 % 10) for i in range(count))
    ]


def is_sum(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 if the first number is the sum, and a tenth for any number."""
    found = [re.search(r"\d+", completion) for completion in completions]
    return [
        0.0 if number is None else 1.0 if number[0] == right else 0.1
        for number, right in zip(found, answer)
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder with a model and its tokenizer")
    parser.add_argument("--output", required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="completions per process and step")
    parser.add_argument("--length", type=int, default=64, help="tokens of a completion at most")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--stock", action="store_true", help="TRL without fastrl, to compare")
    args = parser.parse_args(argv)

    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    trainer_class = GRPOTrainer
    if not args.stock:
        from fastrl.integrations.trl import FastGRPOTrainer

        trainer_class = FastGRPOTrainer
    trainer = trainer_class(
        model=args.model,
        reward_funcs=is_sum,
        train_dataset=Dataset.from_list(additions(1024)),
        args=GRPOConfig(
            output_dir=args.output,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            num_generations=4,
            max_completion_length=args.length,
            learning_rate=1e-5,
            use_cpu=args.cpu,
            bf16=not args.cpu,
            model_init_kwargs={"dtype": "float32" if args.cpu else "bfloat16"},
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            seed=0,
        ),
    )
    trainer.train()
    if trainer.accelerator.is_main_process:
        Path(args.output, "log.json").write_text(json.dumps(trainer.state.log_history))
        trainer.save_model(args.output)


if __name__ == "__main__":
    main()
