"""``python -m benchmarks.gpu_smoke``: every op once per layout and dtype on small shapes, for compute-sanitizer.

Results are compared with the reference on CPU, so that few kernels but fastrl's run. Rows are longer than one block
reads at a time, of odd length, and misaligned.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import fastrl
from fastrl.errors import ImplementationError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LAYOUTS = ("padded", "packed", "misaligned", "one long row")
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
COARSE = 3e-2
LENGTHS = (0, 3, 297, 1)

# An op takes the implementation and a function that puts a tensor where the op shall run, and returns tensors.
Call = Callable[[str, Callable[[Tensor], Tensor]], tuple[Tensor, ...]]


def calls() -> Iterator[tuple[str, torch.dtype, Call]]:
    """Name, dtype and call."""
    for dtype in DTYPES:
        for layout in LAYOUTS:
            for op in (scans, losses):
                for name, call in op(dtype, layout):
                    yield f"{name}, {layout}", dtype, call
        yield from ((name, dtype, call) for name, call in groups(dtype))
        for classes in (37, 5001):
            yield f"token_logprobs, {classes} classes", dtype, logprobs(dtype, classes)


def _shape(layout: str) -> tuple[tuple[int, ...], dict[str, Tensor]]:
    if layout == "packed":
        return (sum(LENGTHS),), {"cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0)}
    return (1, 4501) if layout == "one long row" else (3, 301), {}


def _inputs(dtype: torch.dtype, layout: str, count: int) -> tuple[list[Tensor], Tensor]:
    """Tensors in the layout and a mask with holes."""
    shape, _ = _shape(layout)
    inputs = [torch.randn(shape).to(dtype) for _ in range(count)]
    if layout == "misaligned":
        inputs = [torch.cat([x, x[:, :1]], 1)[:, 1:] for x in inputs]
    return inputs, torch.rand(shape) < 0.7


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def scans(dtype: torch.dtype, layout: str) -> Iterator[tuple[str, Call]]:
    (a, b), mask = _inputs(dtype, layout, 2)
    offsets = _shape(layout)[1]

    def gae(impl: str, to: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        rewards, values = _leaf(to(a)), _leaf(to(b))
        rest = {name: to(x) for name, x in offsets.items()}
        out = fastrl.gae(rewards, values, to(mask), gamma=0.9, lam=0.8, impl=impl, **rest)
        (out.advantages.sum() + out.returns.sum()).backward()
        assert rewards.grad is not None and values.grad is not None
        return *out, rewards.grad, values.grad

    def returns(impl: str, to: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        rest = {name: to(x) for name, x in offsets.items()}
        return (fastrl.discounted_returns(to(a), to(mask), gamma=0.9, impl=impl, **rest),)

    def scan(impl: str, to: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        decay, add = _leaf(to(a).tanh()), _leaf(to(b))
        rest = {name: to(x) for name, x in offsets.items()}
        out = fastrl.affine_scan(decay, add, impl=impl, **rest)
        out.sum().backward()
        assert decay.grad is not None and add.grad is not None
        return out, decay.grad, add.grad

    yield from (("gae", gae), ("discounted_returns", returns), ("affine_scan", scan))


def losses(dtype: torch.dtype, layout: str) -> Iterator[tuple[str, Call]]:
    (a, b, c, d), mask = _inputs(dtype, layout, 4)
    offsets = _shape(layout)[1]

    def policy(impl: str, to: Callable[[Tensor], Tensor], ratio: str) -> tuple[Tensor, ...]:
        logp = _leaf(to(0.1 * a))
        rest = {name: to(x) for name, x in offsets.items()}
        out = fastrl.policy_loss(
            *(logp, to(0.1 * b), to(c), to(mask)),
            ref_logp=to(0.1 * d),
            kl="k3",
            kl_coef=0.1,
            ratio=ratio,
            impl=impl,
            **rest,
        )
        out.loss.backward()
        assert logp.grad is not None
        # Clipped tokens differ where rounding decides, so metrics and gradients are compared in sum.
        return out.loss.detach(), logp.grad.double().sum()

    def value(impl: str, to: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        values = _leaf(to(a))
        rest = {name: to(x) for name, x in offsets.items()}
        out = fastrl.value_loss(values, to(b), to(c), to(mask), impl=impl, **rest)
        out.loss.backward()
        assert values.grad is not None
        return out.loss.detach(), values.grad.double().sum()

    for ratio in ("token", "sequence"):
        yield f"policy_loss by {ratio}", lambda impl, to, r=ratio: policy(impl, to, r)  # type: ignore[misc]
    yield "value_loss", value
    yield "whiten", lambda impl, to: (fastrl.whiten(to(a), to(mask), impl=impl),)


def groups(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    scores, mask = torch.rand(500, 3).to(dtype), torch.rand(500, 37) < 0.7
    ids = torch.randint(0, 90, (500,))

    def each(impl: str, to: Callable[[Tensor], Tensor], **options: Any) -> tuple[Tensor, ...]:
        got = fastrl.group_advantages(
            to(scores), to(ids), weights=[1.0, 0.5, 2.0], mask=to(mask), impl=impl, **options
        )
        return (got,)

    for baseline, scale in (("mean", "std"), ("leave_one_out", "batch_std")):
        yield (
            f"group_advantages {baseline}, {scale}",
            lambda impl, to, b=baseline, s=scale: each(impl, to, baseline=b, scale=s),  # type: ignore[misc]
        )


def logprobs(dtype: torch.dtype, classes: int) -> Call:
    wide, tokens = torch.randn(5, classes + 1).to(dtype), torch.randint(classes, (5,))

    def call(impl: str, to: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        logits = _leaf(to(wide)[:, 1:])  # rows that start anywhere
        out = fastrl.token_logprobs(logits, to(tokens), entropy=True, impl=impl)
        assert out.entropy is not None
        (out.logp.sum() + out.entropy.sum()).backward()
        assert logits.grad is not None
        return out.logp.detach(), out.entropy.detach(), logits.grad

    return call


def difference(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest, as a share of the largest value."""
    largest = 0.0
    for x, y in zip(got, expected, strict=True):
        x, y = x.detach().cpu().double(), y.detach().double()
        if y.numel():
            worst = (x - y).abs().nan_to_num(nan=float("inf")).max() / y.abs().max().clamp_min(1)
            largest = max(largest, float(worst))
    return largest


def main() -> int:
    """0 when something ran and all that did agrees; what is not available is named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_smoke", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="the CPU kernels")
    dry_run = parser.parse_args().dry_run
    device, implementations = ("cpu", ("cpu",)) if dry_run else ("cuda", ("cuda", "triton"))
    torch.manual_seed(0)
    done, wrong, missing = 0, 0, set()
    for name, dtype, call in calls():
        expected = call("reference", lambda x: x)
        for impl in implementations:
            try:
                got = call(impl, lambda x: x.to(device))
            except ImplementationError as reason:
                missing.add(str(reason))
                continue
            found = difference(got, expected)
            done += 1
            if not found <= TOLERANCE.get(dtype, COARSE):
                wrong += 1
                print(f"WRONG: {impl} {name}, {dtype}: differs by {found:.1e} from the reference")
    for reason in sorted(missing):
        print(f"not available: {reason}")
    print(f"{done - wrong} of {done} calls agree with the reference, {len(missing)} not available")
    return 1 if wrong or not done else 0


if __name__ == "__main__":
    sys.exit(main())
