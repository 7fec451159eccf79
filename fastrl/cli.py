"""The command ``fastrl``: train, eval, report, doctor, advise, replay, info."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fastrl import __version__
from fastrl.train.advise import QUESTIONS

__all__ = ["main"]

_EXAMPLES = """\
examples:
  fastrl train configs/grpo_tiny.toml
  fastrl train configs/grpo_smollm2.toml --set optim.lr=1e-5 --set rollout.samples=4
  fastrl train configs/grpo_tiny.toml --run-dir runs/a --resume
  fastrl eval runs/a
  fastrl report runs/a
  fastrl doctor runs/a
  fastrl replay runs/a/samples.jsonl
  fastrl advise --verifiable yes --samples cheap --rewards end --memory no
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 for an error, 128 + n when stopped by signal n."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.command != "info":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    run: Callable[[argparse.Namespace, list[str]], int] = arguments.run
    try:
        return run(arguments, rest)
    except KeyboardInterrupt:
        print("fastrl: interrupted", file=sys.stderr)
        return 130
    except (OSError, ValueError, FloatingPointError) as error:
        # Several processes print to one terminal.
        rank = (
            f" (rank {os.environ.get('RANK')})"
            if int(os.environ.get("WORLD_SIZE", "1")) > 1
            else ""
        )
        print(f"fastrl{rank}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(
            f'fastrl: {error}; the trainer needs pip install "fastrl-kernels[train]"',
            file=sys.stderr,
        )
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastrl",
        description="Fused kernels and a lean PPO and GRPO trainer for language models.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fastrl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train a model with PPO or GRPO",
        description="Train as CONFIG.toml says. The run folder receives config.toml, metrics.jsonl, "
        "eval.jsonl, samples.jsonl and checkpoints. Ctrl-C ends the step in progress, saves and exits "
        "with code 130.",
    )
    train.add_argument("config", type=Path, nargs="?", metavar="CONFIG.toml")
    _add_set(train)
    train.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="folder of the run (default: run_dir of the file)",
    )
    train.add_argument(
        "--resume",
        action="store_true",
        help="continue from the newest undamaged checkpoint of the run folder, bit for bit",
    )
    train.add_argument(
        "--keys", action="store_true", help="print every key with default and meaning, and exit"
    )
    train.set_defaults(run=_train)

    evaluate = commands.add_parser(
        "eval",
        help="accuracy on the held-out questions",
        description="Evaluate the newest checkpoint of a run folder, or the untrained model of a "
        "configuration file, on the questions that training never sees.",
    )
    evaluate.add_argument("target", type=Path, metavar="RUN_DIR_OR_CONFIG")
    _add_set(evaluate)
    evaluate.set_defaults(run=_eval)

    report = commands.add_parser(
        "report",
        help="plots of a run as PNG and one HTML page",
        description="Draw the metrics of a run folder and print the path of the page.",
    )
    report.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    report.set_defaults(run=_report)

    doctor = commands.add_parser(
        "doctor",
        help="classic failures that the metrics of a run show",
        description="Print each finding with its evidence, what it means and what to try.",
    )
    doctor.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    doctor.set_defaults(run=_doctor)

    advise = commands.add_parser(
        "advise",
        help="which algorithm and settings to begin with",
        description="Propose the start of a configuration, with reasons and sources. Asks for the "
        "answers that are not given.",
    )
    for name, (question, answers) in QUESTIONS.items():
        advise.add_argument(f"--{name}", choices=answers, help=question)
    advise.set_defaults(run=_advise)

    replay = commands.add_parser(
        "replay",
        help="rewards and advantages of recorded trajectories, computed again",
        description="Score the records of a trajectory file anew. The configuration is config.toml "
        "beside the file, unless --config names another.",
    )
    replay.add_argument("file", type=Path, metavar="FILE")
    replay.add_argument("--config", type=Path, metavar="CONFIG.toml")
    _add_set(replay)
    replay.set_defaults(run=_replay)

    info = commands.add_parser(
        "info",
        help="versions, and which implementation each operation uses",
        description="The same as python -m fastrl.info; its own options are passed on.",
        add_help=False,
    )
    info.set_defaults(run=_info)
    return parser


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace one value, for example optim.lr=1e-4; may be given several times",
    )


def _train(arguments: argparse.Namespace, _: list[str]) -> int:
    from fastrl.train import config as configs

    if arguments.keys:
        print(configs.describe())
        return 0
    if arguments.config is None:
        raise ValueError("train needs a CONFIG.toml; --keys lists what it may hold")
    config = configs.load(arguments.config, arguments.set)

    from fastrl.train.loop import train

    run_dir = arguments.run_dir or Path(config.run_dir)
    outcome = train(config, run_dir, resume=arguments.resume)
    return 128 + outcome.stopped_by if outcome.stopped_by else 0


def _eval(arguments: argparse.Namespace, _: list[str]) -> int:
    from fastrl.train import config as configs
    from fastrl.train.collect import evaluate_run

    is_run = arguments.target.is_dir()
    file = arguments.target / "config.toml" if is_run else arguments.target
    config = configs.load(file, arguments.set)
    result = evaluate_run(config, arguments.target if is_run else None).figures
    print(
        f"step {int(result['step'])}: accuracy {result['accuracy']:.3f}, reward "
        f"{result['reward']:.3f} on {int(result['questions'])} held-out questions"
    )
    return 0


def _report(arguments: argparse.Namespace, _: list[str]) -> int:
    from fastrl.train.report import write_report

    print(write_report(arguments.run_dir))
    return 0


def _doctor(arguments: argparse.Namespace, _: list[str]) -> int:
    from fastrl.train.diagnose import doctor, text_of

    print(text_of(doctor(arguments.run_dir)))
    return 0


def _advise(arguments: argparse.Namespace, _: list[str]) -> int:
    from fastrl.train.advise import advise

    answers = {name: getattr(arguments, name) for name in QUESTIONS}
    for name, (question, allowed) in QUESTIONS.items():
        while answers[name] not in allowed:
            if not sys.stdin.isatty():
                raise ValueError(f"advise needs --{name} {'|'.join(allowed)}: {question}")
            answers[name] = input(f"{question} [{'/'.join(allowed)}] ").strip()
    print(advise(**answers))
    return 0


def _replay(arguments: argparse.Namespace, _: list[str]) -> int:
    from fastrl.train import config as configs
    from fastrl.train.replay import replay, text_of

    file = arguments.config or arguments.file.parent / "config.toml"
    print(text_of(replay(arguments.file, configs.load(file, arguments.set))))
    return 0


def _info(_: argparse.Namespace, rest: list[str]) -> int:
    from fastrl import info

    return info.main(rest)
