"""The benchmarks themselves: every case runs at next to no size, a wrong provider is caught, records are complete."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import machine, plain, registry_linear, run, trainer_step
from benchmarks.memory import peak_bytes
from benchmarks.peers import MissingPeer
from benchmarks.registry import Bar, Case, Prepared, Provider, cases
from benchmarks.timing import measure
from benchmarks.verify import Disagreement, check, verified

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

TINY = [
    *cases("tiny", with_compile=False),
    *registry_linear.cases("tiny", with_compile=False),
    *trainer_step.cases("tiny"),
]


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_every_provider_computes_the_case(case: Case) -> None:
    torch.manual_seed(0)
    prepared = case.prepare()
    errors, wrong = verified(prepared)
    assert not wrong
    assert len(errors) == len(prepared.providers) >= 2
    assert {bar.provider for bar in case.bars} <= set(errors) | set(prepared.missing) | {
        "torch.compile"
    }


def test_there_is_a_case_for_every_bar_of_the_design() -> None:
    bars = {(case.op, bar.kind, bar.provider): bar.limit for case in cases() for bar in case.bars}
    assert bars["gae", "bandwidth", "fastrl out="] == 0.8
    assert bars["gae", "speedup", "verl"] == 300
    assert bars["gae", "speedup", "torch.compile"] == 20
    assert bars["group_advantages", "speedup", "verl"] == 100
    assert bars["group_advantages", "speedup", "verl vectorised"] == 1
    assert bars["policy_loss", "speedup", "verl"] == 10
    assert bars["policy_loss", "speedup", "torch.compile"] == 1.5
    assert bars["token_logprobs", "speedup", "eager"] == 5
    assert bars["call overhead", "overhead", "gae"] == 3
    linear = registry_linear.cases()
    bars = {(case.op, bar.kind, bar.provider): bar.limit for case in linear for bar in case.bars}
    assert bars["linear_policy_loss", "memory", "eager"] == 8
    assert bars["linear_policy_loss", "memory", "liger"] == 1
    assert bars["linear_policy_loss", "speedup", "eager"] == 1
    assert bars["linear_policy_loss", "speedup", "liger"] == 1


def test_peak_memory_counts_what_lives_at_the_same_time() -> None:
    def call() -> object:
        first = torch.ones(1_000_000)
        del first
        return torch.ones(500_000) + torch.ones(1)

    assert 4_000_000 <= peak_bytes(call) < 4_200_000


def test_a_trainer_step_without_all_logits_needs_less_memory() -> None:
    """A vocabulary that outweighs everything else, as in real models."""
    size = trainer_step.Size(16, 8, 4, 32, 1, 64, 16384)
    update = trainer_step.Update(size)
    eager, fused = update.phases("eager"), update.phases("fused")
    logits = 16 * 8 * 32 * size.classes * 2
    assert fused.peak_bytes < eager.peak_bytes - logits
    assert min(*eager[:3], *fused[:3]) > 0


def test_the_scan_that_torch_compile_gets_is_right() -> None:
    """Uncompiled: what is compiled in the real run."""
    rewards, values, mask = torch.randn(3, 33), torch.randn(3, 33), torch.rand(3, 33) < 0.6
    inputs = (rewards, values, mask, 0.9, 0.8)
    got = torch.compile(plain.gae_by_scan, backend="eager", fullgraph=True)(*inputs)
    for x, y in zip(got, plain.gae_float64(*inputs)):
        torch.testing.assert_close(x.double(), y, atol=1e-5, rtol=1e-5)


EXPECTED = (torch.linspace(-2, 2, 500_000), torch.tensor(3.0))


@pytest.mark.parametrize(
    "results",
    [
        (EXPECTED[0] * 1.001, EXPECTED[1]),
        (EXPECTED[0], EXPECTED[1] + 0.01),
        (EXPECTED[0].where(EXPECTED[0] != EXPECTED[0][-1], float("nan")).flip(0), EXPECTED[1]),
        (EXPECTED[0][:-1], EXPECTED[1]),
        (EXPECTED[0],),
        (torch.cat([EXPECTED[0][:-100], torch.zeros(100)]), EXPECTED[1]),
    ],
    ids=("scaled", "scalar", "flipped", "short", "missing", "tail"),
)
def test_a_wrong_provider_is_caught(results: tuple[Tensor, ...]) -> None:
    with pytest.raises(Disagreement):
        check(Provider("wrong", lambda: results), EXPECTED)


def test_a_nan_is_caught_and_one_flip_among_many_is_not() -> None:
    few = (torch.tensor([1.0, float("nan")]),)
    with pytest.raises(Disagreement):
        check(Provider("nan", lambda: few), (torch.tensor([1.0, 2.0]),))
    flipped = EXPECTED[0].clone()
    flipped[7] = -flipped[7]
    assert check(Provider("flip", lambda: (flipped, EXPECTED[1])), EXPECTED) == 0


def _case(*providers: Provider, missing: dict[str, str] | None = None) -> Case:
    expected = (torch.ones(4),)
    return Case(
        "toy",
        "4 elements",
        16,
        (Bar("speedup", "slow", 5), Bar("speedup", "liar", 2), Bar("speedup", "absent", 2)),
        lambda: Prepared(list(providers), missing or {}, lambda: expected),
    )


def test_no_speed_up_is_shown_for_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "copy_bandwidth", lambda rounds: 1e10)
    busy = torch.randn(300, 300)

    def slow() -> tuple[Tensor, ...]:
        busy @ busy
        return (torch.ones(4),)

    measured = run.run_case(
        _case(
            Provider("fastrl", lambda: (torch.ones(4),)),
            Provider("slow", slow),
            Provider("liar", lambda: (torch.zeros(4),)),
            missing={"absent": "absent: ModuleNotFoundError"},
        ),
        rounds=3,
    )
    assert set(measured.timings) == {"fastrl", "slow"}
    text = run.report(measured, judge=True)
    assert re.search(r"liar +WRONG, not timed: differs by 1", text)
    assert re.search(r"absent +not installed: absent: ModuleNotFoundError", text)
    assert re.search(r"slow / fastrl >= 5x +\d[\d.]*x  (met|MISSED)", text)
    assert re.search(r"liar / fastrl >= 2x +not measured", text)

    lines = run.records(measured, {"machine": {}}, judge=True)
    assert [line["provider"] for line in lines] == ["fastrl", "slow", "liar", "absent"]
    assert lines[1]["bars"][0]["met"] == (lines[1]["ratio_to_first"] >= 5)
    assert lines[2]["failed"].startswith("differs by") and "median_ms" not in lines[2]


def test_no_ratio_when_fastrl_itself_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "copy_bandwidth", lambda rounds: 1e10)
    measured = run.run_case(
        _case(
            Provider("fastrl", lambda: (torch.zeros(4),)),
            Provider("slow", lambda: (torch.ones(4),)),
        ),
        rounds=3,
    )
    assert measured.ratio("slow") is None
    assert "fastrl            WRONG" in run.report(measured, judge=True)


def test_interleaving_counts_rounds_and_limits_the_slow() -> None:
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    timings = measure(calls, rounds=7)
    assert timings["a"].rounds == timings["b"].rounds == 7
    assert timings["a"].low <= timings["a"].median <= timings["a"].high
    one_round = measure({"a": lambda: None}, rounds=7, provider_seconds=0.0)
    assert one_round["a"].rounds == 3


def test_run_writes_complete_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "copy_bandwidth", lambda rounds: 1e10)
    monkeypatch.setattr(run, "cases", lambda scale, **_: TINY)
    monkeypatch.setattr(registry_linear, "cases", lambda scale, **_: [])
    monkeypatch.setattr(trainer_step, "cases", lambda scale: [])
    target = tmp_path / "folder" / "results.jsonl"
    arguments = ["--op", "group_advantages", "--quick", "--json", str(target)]
    assert run.main(arguments) == 0
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert {line["op"] for line in lines} == {"group_advantages"}
    for line in lines:
        assert line["machine"]["threads"] == torch.get_num_threads()
        assert line["versions"]["torch"] == torch.__version__
        assert line["command"].startswith("python -m benchmarks.run --op group_advantages --quick")
        assert str(tmp_path) not in line["command"]
        assert line["median_ms"] > 0 or "failed" in line
    assert "group_advantages" in capsys.readouterr().out

    assert run.main(["--op", "nothing"]) == 2
    assert "no op is called nothing" in capsys.readouterr().out


def test_a_missing_peer_is_reported_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise MissingPeer("verl: ModuleNotFoundError: No module named 'verl'")

    monkeypatch.setattr("benchmarks.registry.verl_algorithms", missing)
    prepared = next(case for case in TINY if case.op == "gae").prepare()
    assert prepared.missing == {"verl": "verl: ModuleNotFoundError: No module named 'verl'"}
    assert "verl" not in {provider.name for provider in prepared.providers}


def test_machine_names_no_host_and_no_path() -> None:
    text = json.dumps([machine.machine(), machine.versions(), machine.slug()])
    assert not platform.node() or platform.node() not in text
    assert "/" not in text.replace("+cpu", "")
    assert re.fullmatch(r"[a-z0-9.-]+-\d+-cores", machine.slug())
