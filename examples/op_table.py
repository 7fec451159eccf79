"""Each fastrl op beside plain PyTorch, and beside verl where that is installed, timed on this machine in a few seconds.

The cases, the plain versions and the timing are those of `benchmarks/`, at its quick sizes; `make bench` measures the same
at full size and against `torch.compile`.
"""

from __future__ import annotations

from benchmarks.registry import FASTRL, cases
from benchmarks.timing import measure
from benchmarks.verify import verified

RIVALS = ("eager", "verl")


def table(scale: str = "quick", rounds: int = 5) -> str:
    """One line per case that has a plain version; whoever computes something else gets no figure."""
    lines = [f"{'op':<18}{'size':<46}{'fastrl ms':>10}{'torch ms':>10}{'ratio':>8}{'verl':>8}"]
    for case in cases(scale, with_compile=False):
        prepared = case.prepare()
        calls = {p.name: p.call for p in prepared.providers if p.name in (FASTRL, *RIVALS)}
        if "eager" not in calls:
            continue
        _, wrong = verified(prepared)
        times = measure({n: c for n, c in calls.items() if n not in wrong}, rounds)
        if FASTRL in wrong or "eager" in wrong:
            lines.append(f"{case.op:<18}{case.size:<46}  differs: {wrong}")
            continue
        ours, plain = (1e3 * times[name].median for name in (FASTRL, "eager"))
        verl = f"{1e3 * times['verl'].median / ours:>7.1f}x" if "verl" in times else f"{'-':>8}"
        lines.append(
            f"{case.op:<18}{case.size:<46}{ours:>10.3f}{plain:>10.3f}{plain / ours:>7.1f}x{verl}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
