"""What the Triton kernels take, compiled ahead of time for GPUs that need not be there: registers, memory, spills.

Kernels are compiled for the arguments of real launches: `launches` records what an op would have launched.
"""

from __future__ import annotations

import inspect
import itertools
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from benchmarks import cuda_resources
from benchmarks.cuda_resources import Resources
from fastrl import _triton
from fastrl.ops.affine_scan import triton as affine_scan
from fastrl.ops.gae import triton as gae
from fastrl.ops.group_advantages import triton as group_advantages
from fastrl.ops.policy_loss import triton as policy_loss
from fastrl.ops.token_logprobs import triton as token_logprobs
from fastrl.ops.value_loss import triton as value_loss
from fastrl.ops.whiten import triton as whiten

TARGETS = {
    "cuda": [GPUTarget("cuda", arch, 32) for arch in (80, 90, 100)],
    "hip": [GPUTarget("hip", arch, 64) for arch in ("gfx942", "gfx950")],
}


class Launch(NamedTuple):
    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]  # constexpr arguments and the compiler's options

    def specialised(self, target: GPUTarget) -> tuple[Any, ...]:
        """(arguments by name, what of them the compiler looks at, options) as a launch on ``target`` finds them."""
        bind = create_function_from_signature(
            self.kernel.signature, self.kernel.params, make_backend(target)
        )
        return bind(*self.args, **self.options)

    def key(self, target: GPUTarget) -> tuple[str, str, str]:
        """Launches with the same key share one compilation."""
        _, specialization, options = self.specialised(target)
        return self.kernel.__name__, str(specialization), str(options)

    def compile(self, target: GPUTarget) -> Any:
        arguments, specialization, options = self.specialised(target)
        backend = make_backend(target)
        options, signature, constants, attributes = self.kernel._pack_args(
            backend, self.options, arguments, specialization, options
        )
        source = ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=target, options=options.__dict__)


def launches(call: Callable[[], Any]) -> list[Launch]:
    """Those of one call, which runs nothing: its tensors may be on the CPU."""
    found = []
    signature = inspect.signature(_triton.launch)

    def record(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        named = dict(bound.arguments)
        options = named["meta"] | {
            "num_warps": named["num_warps"],
            "enable_fp_fusion": named["fusion"],
        }
        found.append(Launch(named["kernel"], named["args"], options))

    with mock.patch.object(_triton, "launch", record):
        call()
    return found


def examples() -> dict[str, Callable[[], Any]]:
    """One call per specialisation worth a budget, on inputs that choose it."""
    x, x64, short = torch.zeros(4, 600), torch.zeros(4, 600).double(), torch.zeros(64, 32)
    mask, short_mask = torch.ones(4, 600).bool(), torch.ones(64, 32).bool()
    medium, medium_mask = torch.zeros(16, 128), torch.ones(16, 128).bool()
    packed, packed_mask = torch.zeros(600), torch.ones(600).bool()
    offsets, row = torch.tensor([0, 200, 600], dtype=torch.int32), torch.zeros(4)
    long, long_mask = torch.zeros(4, 5000), torch.ones(4, 5000).bool()
    long_packed, two_rows = torch.zeros(5000), torch.tensor([0, 200, 5000])
    logits, tokens = torch.zeros(2, 4096, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.long)
    odd, narrow = torch.zeros(2, 4095), torch.zeros(2, 1000)
    logp, statistics = torch.zeros(2), torch.zeros(2, 3)
    # gamma, lambda, lambda of the returns (negative: the same), holes, and for the forward pass fill_carry
    gae_numbers, two = (0.99, 0.95, -1.0, 0), (0.99, 0.95, 1.0, 0)
    scan, adjoint = affine_scan.affine_scan, affine_scan.affine_scan_backward
    logprobs, logprobs_adjoint = (
        token_logprobs.token_logprobs,
        token_logprobs.token_logprobs_backward,
    )
    return {
        "gae": lambda: gae.gae(x, x, mask, None, None, None, None, *gae_numbers, False),
        "gae, T <= 128": lambda: gae.gae(
            *(medium, medium, medium_mask, None, None, None, None, *gae_numbers, False)
        ),
        "gae, T <= 32": lambda: gae.gae(
            *(short, short, short_mask, None, None, None, None, *gae_numbers, False)
        ),
        "gae, packed": lambda: gae.gae(
            *(packed, packed, packed_mask, None, None, None, offsets, *gae_numbers, False)
        ),
        "gae, packed, long": lambda: gae.gae(
            *(long_packed, long_packed, long_packed > 0, None, None, None, two_rows),
            *(*gae_numbers, False),
        ),
        "gae, long, dones, bootstrap, two lambdas": lambda: gae.gae(
            *(long, long, long_mask, long_mask, row, row, None, *two, True)
        ),
        "gae, float64": lambda: gae.gae(
            x64, x64, mask, None, None, None, None, *gae_numbers, False
        ),
        "gae, dones, bootstrap, two lambdas": lambda: gae.gae(
            *(x, x, mask, mask, row, row, None, *two, True)
        ),
        "discounted_returns": lambda: gae.discounted_returns(
            x, mask, None, None, None, 0.99, 0, False
        ),
        "gae_backward": lambda: gae.gae_backward(x, x, mask, None, None, None, *gae_numbers),
        "gae_backward, T <= 32": lambda: gae.gae_backward(
            short, short, short_mask, None, None, None, *gae_numbers
        ),
        "gae_backward, dones, two lambdas": lambda: gae.gae_backward(
            x, x, mask, mask, row, None, *two
        ),
        "gae_backward, long, dones, two lambdas": lambda: gae.gae_backward(
            long, long, long_mask, long_mask, row, None, *two
        ),
        "affine_scan": lambda: scan(x, x, None, None, True),
        "affine_scan, long": lambda: scan(long, long, row, None, True),
        "affine_scan, T <= 32": lambda: scan(short, short, None, None, True),
        "affine_scan_backward": lambda: adjoint(x, x, x, None, None, True),
        "affine_scan_backward, T <= 32": lambda: adjoint(short, short, short, None, None, True),
        "affine_scan_backward, long": lambda: adjoint(long, long, long, row, None, True),
        "token_logprobs": lambda: logprobs(logits, tokens, None, 1.0, True),
        "token_logprobs, unaligned": lambda: logprobs(odd, tokens, None, 1.0, True),
        "token_logprobs, V <= 1024": lambda: logprobs(narrow, tokens, None, 1.0, True),
        "token_logprobs_backward": lambda: logprobs_adjoint(
            logp, logp, logits, tokens, None, 1.0, statistics
        ),
    } | _examples_of_losses_and_statistics()


def _examples_of_losses_and_statistics() -> dict[str, Callable[[], Any]]:
    x, mask, rows = torch.zeros(4, 600), torch.ones(4, 600).bool(), torch.zeros(4)
    packed, offsets = torch.zeros(600), torch.tensor([0, 200, 600], dtype=torch.int32)
    long = torch.zeros(4, 5000)
    scores, ids, weights = torch.zeros(64), torch.zeros(64).long(), torch.ones(3).double()
    moments = torch.zeros(3).double()
    # clip_low, clip_high, dual_clip, ratio_cap, log_ratio_clamp, kl_coef, kl_input_clamp, kl_clamp, entropy_coef
    numbers = [0.2, 0.2, 3.0, float("inf"), 20.0, 0.1, 20.0, 10.0, 0.1]

    def policy(ratio: int, surrogate: int, tensor: torch.Tensor, *layout: Any) -> None:
        valid, cu_seqlens = layout
        inputs = (tensor, tensor, tensor, valid, None, tensor, tensor, cu_seqlens)
        choices = [ratio, surrogate, 2, 0, 3]
        policy_loss.policy_loss(*inputs, None, 0.0, numbers, choices, True, True)

    groups = group_advantages.group_advantages
    return {
        "masked_moments": lambda: whiten.masked_moments(x, mask),
        "whiten_apply": lambda: whiten.whiten_apply(x, mask, moments, 1, 1e-8, 0, True),
        "group_advantages": lambda: groups(scores, ids, None, None, None, 0, 0, 1, 1e-6, False),
        "group_advantages, objectives, batch_std": lambda: groups(
            torch.zeros(64, 3), ids, None, weights, None, 1, 1, 1, 1e-6, False
        ),
        "group_advantages, token rewards, length_weighted": lambda: groups(
            x, ids[:4], rows > 0, None, mask, 2, 2, 1, 1e-6, True
        ),
        "value_loss": lambda: value_loss.value_loss(
            x, x, x, mask, None, None, 0.0, 0.5, float("inf"), 0, True
        ),
        "value_loss, packed": lambda: value_loss.value_loss(
            packed, None, packed, None, offsets, None, 0.0, 0.5, 1.0, 0, True
        ),
        "value_loss, long": lambda: value_loss.value_loss(
            long, long, long, long > 0, None, None, 0.0, 0.5, 1.0, 0, True
        ),
        "policy_loss": lambda: policy(0, 0, x, mask, None),
        "policy_loss, packed": lambda: policy(0, 0, packed, None, offsets),
        "policy_loss, sequence": lambda: policy(1, 0, x, mask, None),
        "policy_loss, sequence_token, cispo": lambda: policy(2, 1, x, mask, None),
        "policy_loss, reinforce, float64": lambda: policy(0, 2, x.double(), mask, None),
    }


def worst(of: list[Resources]) -> Resources:
    return Resources(
        registers=max(r.registers for r in of),
        shared_bytes=max(r.shared_bytes for r in of),
        stack_bytes=max(r.stack_bytes for r in of),
        spills=max(r.spills for r in of),
        wide_load_share=min(r.wide_load_share for r in of),
    )


def all_resources(backend: str) -> Mapping[str, Resources]:
    """By example, the worst of its launches over the targets of ``backend``."""
    measured: dict[tuple[GPUTarget, tuple[str, str, str]], Resources] = {}
    found = {}
    for name, call in examples().items():
        keys = []
        for launch, target in itertools.product(launches(call), TARGETS[backend]):
            key = target, launch.key(target)
            if key not in measured:
                measured[key] = _of_compiled(launch.compile(target))
            keys.append(key)
        found[name] = worst([measured[key] for key in keys])
    return found


def _of_compiled(compiled: Any) -> Resources:
    if "cubin" in compiled.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            (found,) = cuda_resources.resources(Path(file.name), architecture=None).values()
        return found._replace(shared_bytes=compiled.metadata.shared)
    code = compiled.asm["amdgcn"]

    def count(name: str) -> int:
        return max(int(n) for n in re.findall(rf"\.{name}: *(\d+)", code))

    loads = re.findall(r"\b(?:global|buffer)_load_(\w+)", code)
    wide = sum(load in ("dwordx4", "b128") for load in loads)
    return Resources(
        registers=count("vgpr_count"),
        shared_bytes=compiled.metadata.shared,
        stack_bytes=count("private_segment_fixed_size"),
        spills=count("vgpr_spill_count") + count("sgpr_spill_count"),
        wide_load_share=round(wide / len(loads), 3) if loads else 1.0,
    )
