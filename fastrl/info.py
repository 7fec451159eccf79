"""``fastrl info`` and ``python -m fastrl.info``: versions, and per op what ``auto`` picks and why the rest is missing."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib import metadata
from typing import Any

import torch

from fastrl import _backends, _library
from fastrl._version import __version__

# Every public op that has more than one implementation, and the operator that stands for it.
OPS = {
    "affine_scan": "affine_scan",
    "discounted_returns": "discounted_returns",
    "gae": "gae",
    "group_advantages": "group_advantages",
    "linear_policy_loss": "linear_policy_loss",
    "linear_token_logprobs": "linear_token_logprobs",
    "policy_loss": "policy_loss",
    "token_logprobs": "token_logprobs",
    "value_loss": "value_loss",
    "whiten": "whiten_apply",
}
_DEVICES = ("cpu", "cuda")


def collect() -> dict[str, Any]:
    """Everything that is printed, as plain values."""
    build: dict[str, Any] = {"compiled": _library.compiled_error is None}
    if _library.compiled_error is None:
        from fastrl import _C

        build |= _C.build_info()
    else:
        build["reason"] = _library.compiled_error
    return {
        "fastrl": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "triton": metadata.version("triton") if _library.triton_installed else None,
        "environment": {
            k: v for k, v in sorted(os.environ.items()) if k.startswith(("FASTRL_", "TRITON_"))
        },
        "build": build,
        "ops": {
            op: {device: _implementations(operator, device) for device in _DEVICES}
            for op, operator in OPS.items()
        },
    }


def _implementations(op: str, device: str) -> dict[str, Any]:
    missing = {
        impl: reason
        for impl in _backends.IMPLEMENTATIONS
        if (reason := _backends.unavailable(op, impl, device)) is not None
    }
    return {
        "auto": _backends.resolve(op, "auto", torch.device(device)),
        "order": _backends.preference(op, device)._asdict(),
        "available": [impl for impl in _backends.IMPLEMENTATIONS if impl not in missing],
        "missing": missing,
    }


def _print(info: dict[str, Any]) -> None:
    build = info["build"]
    print(
        f"fastrl {info['fastrl']}, torch {info['torch']}, Python {info['python']}, {info['machine']}"
    )
    if build["compiled"]:
        built = ", ".join(build["capabilities_built"])
        print(f"CPU kernels: {build['capability']} (built: {built}), {info['threads']} threads")
    else:
        print(f"CPU kernels: none ({build['reason']})")
    if build.get("cuda_archs"):
        print(f"CUDA kernels: {', '.join(build['cuda_archs'])} (nvcc {build['nvcc']})")
    else:
        print("CUDA kernels: not built")
    print(f"Triton kernels: {info['triton'] or 'triton is not installed'}")
    for name, value in info["environment"].items():
        print(f"{name}={value}")
    for device in _DEVICES:
        print(f"\non {device} tensors, impl='auto' runs:")
        for op, devices in info["ops"].items():
            chosen = devices[device]
            order = ", ".join(chosen["order"]["order"])
            print(f"  {op:20} {chosen['auto']:10} first of: {order} ({chosen['order']['reason']})")
        reasons: dict[str, list[str]] = {}
        for op, devices in info["ops"].items():
            for impl, reason in devices[device]["missing"].items():
                reasons.setdefault(f"{impl}: {reason}", []).append(op)
        for reason, ops in reasons.items():
            print(f"  missing {reason}" + ("" if len(ops) == len(OPS) else f" [{', '.join(ops)}]"))


def main(argv: list[str] | None = None) -> int:
    """Print the report; ``--json`` prints it as one JSON object."""
    parser = argparse.ArgumentParser(prog="fastrl info", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    info = collect()
    if options.json:
        json.dump(info, sys.stdout, indent=2)
        print()
    else:
        _print(info)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
