"""A speed-up counts only for the right answer: every provider's results against float64 before anything is timed."""

from __future__ import annotations

from benchmarks.registry import Prepared, Provider, Results

# Largest difference from float64 as a share of the largest expected value. Sums of a million float32 terms stay an order
# of magnitude below.
TOLERANCE = 1e-4
# One element in this many may be off: where float32 lands on the other side of a clip edge its gradient is another one.
FLIPS = 100_000


class Disagreement(Exception):
    """A provider's results differ from the expected ones; its timings must not be shown."""


def error(got: Results, expected: Results) -> float:
    """Largest difference of any result; infinite where it is not a number."""
    if len(got) != len(expected):
        raise Disagreement(f"{len(got)} results instead of {len(expected)}")
    largest = 0.0
    for x, y in zip(got, expected):
        if x is None or y is None or y.numel() == 0:
            continue
        if x.shape != y.shape:
            raise Disagreement(f"a result of shape {list(x.shape)} instead of {list(y.shape)}")
        scale = float(y.double().abs().max()) or 1.0
        difference = (x.detach().double() - y.double()).abs().flatten().nan_to_num(nan=float("inf"))
        worst = difference.topk(1 + len(difference) // FLIPS).values[-1]
        largest = max(largest, float(worst) / scale)
    return largest


def check(provider: Provider, expected: Results, tolerance: float = TOLERANCE) -> float:
    """Run the provider once; return its error, or raise ``Disagreement`` when that is too large."""
    found = error(provider.comparable(provider.call()), expected)
    if not found <= tolerance:
        raise Disagreement(f"differs by {found:.1e} from float64, more than {tolerance:.0e}")
    return found


def verified(prepared: Prepared) -> tuple[dict[str, float], dict[str, str]]:
    """Errors of the providers that agree, and what is wrong with the others."""
    expected = prepared.expected()
    errors: dict[str, float] = {}
    wrong: dict[str, str] = {}
    for provider in prepared.providers:
        try:
            errors[provider.name] = check(provider, expected, prepared.tolerance)
        except Disagreement as disagreement:
            wrong[provider.name] = str(disagreement)
    return errors, wrong
