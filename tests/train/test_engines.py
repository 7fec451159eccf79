"""Engines over HTTP, against a server on loopback that speaks the two protocols: what is sampled, and every fault."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fastrl import cli
from fastrl.train import checkpoint
from fastrl.train import config as configs
from fastrl.train.config import Config, ModelConfig
from fastrl.train.engines import HttpGenerator
from fastrl.train.http_json import EngineError
from fastrl.train.loop import train
from fastrl.train.models import load_policy
from fastrl.train.rollout import Completion, TransformersGenerator
from tests.train.engine_server import EngineServer, Fault, Reply, cut, failing, fewer, hanging, same
from tests.train.test_rollout import PROMPTS, spread
from tests.train.test_run import assert_same_run, records

CPU = torch.device("cpu")
KINDS = ["vllm", "sglang"]
MODEL = ModelConfig(hidden_size=32)


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[EngineServer]:
    with EngineServer(request.param, MODEL) as server:
        yield server


class Bench:
    """A generator on some servers, with the policy whose weights they have, and what it said."""

    def __init__(self, tmp_path: Path, kind: str, urls: list[str], **options: Any) -> None:
        engine = {"kind": kind, "urls": urls, "backoff": 0.01, "timeout": 5.0, **options}
        self.config = configs.parse({"engine": engine, "rollout": {"temperature": 0.8}})
        self.policy = spread(load_policy(MODEL, seed=0, device=CPU))
        self.said: list[str] = []
        self.generator = HttpGenerator(self.config, self.policy, tmp_path, self.said.append)
        self.update(0)

    def update(self, version: int) -> None:
        self.generator.update(checkpoint.weights(self.policy.model), version)

    def generate(self, **options: Any) -> list[list[Completion]]:
        values = {"samples": 3, "max_new_tokens": 6, "temperature": 0.8, "seed": 5, **options}
        return self.generator.generate(values.pop("prompts", PROMPTS), **values)


@pytest.fixture
def bench(server: EngineServer, tmp_path: Path) -> Bench:
    return Bench(tmp_path, server.kind, [server.url], concurrency=1)


def assert_alike(found: list[list[Completion]], expected: list[list[Completion]]) -> None:
    """The same tokens, and log-probabilities up to the rounding of a batch of another size."""
    for group, other in zip(found, expected, strict=True):
        for one, two in zip(group, other, strict=True):
            assert one._replace(logprobs=None) == two._replace(logprobs=None)
            assert one.logprobs == pytest.approx(two.logprobs, rel=1e-4, abs=1e-5)


# --- what is sampled ---------------------------------------------------------------------------


def test_greedy_tokens_are_those_of_the_transformers_engine(bench: Bench) -> None:
    options = {"samples": 2, "max_new_tokens": 6, "temperature": 0.0, "seed": 0}
    expected = TransformersGenerator(bench.policy, MODEL, batch_size=64).generate(
        PROMPTS, **options
    )
    found = bench.generate(**options)
    assert [[c.token_ids for c in group] for group in found] == [
        [c.token_ids for c in group] for group in expected
    ]
    assert [[c.finished for c in group] for group in found] == [
        [c.finished for c in group] for group in expected
    ]
    assert all(c.logprobs == [0.0] * len(c.token_ids) for group in found for c in group)


def test_logprobs_are_those_of_the_model_at_the_temperature(bench: Bench) -> None:
    for prompt, group in zip(PROMPTS, bench.generate(), strict=True):
        for completion in group:
            ids = torch.tensor([prompt + completion.token_ids])
            with torch.no_grad():
                logits = bench.policy.model(ids).logits[0, len(prompt) - 1 : -1].double()
            expected = (logits / 0.8).log_softmax(-1).gather(1, ids[0, len(prompt) :, None])
            got = torch.tensor(completion.logprobs)
            torch.testing.assert_close(got, expected.squeeze(1).float(), rtol=1e-4, atol=1e-4)
            assert completion.version == 0


def test_seed_and_place_decide(bench: Bench) -> None:
    whole = bench.generate()
    assert whole == bench.generate()
    assert whole != bench.generate(seed=6)
    # Equal prompts in two places are two draws, and so are the samples of one.
    assert PROMPTS[0] == PROMPTS[3]
    assert whole[0] != whole[3]
    assert len({tuple(c.token_ids) for c in whole[2]}) > 1
    some = bench.generate(prompts=[PROMPTS[3], PROMPTS[1]], places=[3, 1])
    assert some == [whole[3], whole[1]]
    assert bench.generate(prompts=[]) == []


def test_weights_are_a_folder_and_have_a_version(
    bench: Bench, server: EngineServer, tmp_path: Path
) -> None:
    first = bench.generate()
    with torch.no_grad():
        for parameter in bench.policy.parameters():
            parameter.add_(0.05)
    # Nothing changes for the server until it is told.
    assert bench.generate() == first
    bench.update(7)
    assert server.versions == ["step_000000"]
    second = bench.generate()
    assert server.versions == ["step_000000", "step_000007"]
    assert second != first
    assert {c.version for group in second for c in group} == {7}
    # The same version again is loaded again, because the server may be another process by now.
    bench.update(7)
    bench.generate()
    assert server.versions[2:] == ["step_000007"]
    (folder,) = (tmp_path / "weights").iterdir()
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    for name, tensor in checkpoint.weights(model).items():
        assert torch.equal(tensor, checkpoint.weights(bench.policy.model)[name])


def test_leftover_weights_go_and_other_folders_stay(tmp_path: Path) -> None:
    for folder in ("weights/step_000009_killed", "shared/of_somebody_else"):
        (tmp_path / folder).mkdir(parents=True)
    Bench(tmp_path, "vllm", ["http://127.0.0.1:1"])
    (own,) = (tmp_path / "weights").iterdir()
    assert own.name.startswith("step_000000_")
    # Another run of the same step has another name: servers may keep what they know about a path.
    Bench(tmp_path, "vllm", ["http://127.0.0.1:1"])
    assert next((tmp_path / "weights").iterdir()).name != own.name
    Bench(tmp_path, "vllm", ["http://127.0.0.1:1"], weights_dir=str(tmp_path / "shared"))
    assert len(list((tmp_path / "shared").iterdir())) == 2


def test_requests_are_spread_over_servers(tmp_path: Path) -> None:
    with EngineServer("vllm", MODEL) as one, EngineServer("vllm", MODEL) as two:
        found = Bench(tmp_path / "both", "vllm", [one.url, two.url]).generate()
        assert len(one.paths("/v1/completions")) == len(two.paths("/v1/completions")) == 2
        assert found == Bench(tmp_path / "one", "vllm", [one.url]).generate()


def test_an_end_at_the_last_place_counts_whatever_the_reason(tmp_path: Path) -> None:
    with EngineServer("vllm", MODEL) as server:
        bench = Bench(tmp_path, "vllm", [server.url])
        logprobs = {"token_logprobs": [-1.0, -2.0]}
        server.faults = [bad_vllm(token_ids=[5, 0], finish_reason="length", logprobs=logprobs)]
        ((first, *_),) = bench.generate(prompts=[[3]], max_new_tokens=2)
        assert first == Completion([5, 0], True, [-1.0, -2.0], 0)


# --- faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "faults",
    [
        failing(500, 2),
        failing(429, 1),
        [cut],
        [fewer],
        [same, fewer, *failing(503, 2), fewer],
        [hanging(0.8)],
    ],
    ids=["500 twice", "429", "cut in the middle", "fewer samples", "several", "hangs"],
)
def test_faults_that_pass_change_no_token(
    bench: Bench, server: EngineServer, faults: list[Fault]
) -> None:
    expected = bench.generate()
    bench.generator._options = dataclasses.replace(bench.config.engine, timeout=0.5)
    server.faults = list(faults)
    assert_alike(bench.generate(), expected)
    assert server.faults == []


def test_only_missing_samples_are_asked_for_again(tmp_path: Path) -> None:
    with EngineServer("vllm", MODEL) as server:
        bench = Bench(tmp_path, "vllm", [server.url], concurrency=1)
        server.faults = [fewer]
        bench.generate(prompts=[[3]], samples=4)
        asked = server.paths("/v1/completions")
        assert [a["n"] for a in asked] == [4, 1, 1]
        # Samples 0 and 3 have the seeds that they would have had.
        assert [a["seed"] - asked[0]["seed"] for a in asked] == [0, 0, 3]


def test_a_client_error_is_not_asked_again(bench: Bench, server: EngineServer) -> None:
    server.faults = failing(400, 1)
    with pytest.raises(EngineError, match=rf"{server.url}/.*answered status 400: .*on purpose"):
        bench.generate(prompts=[[3]])
    assert len(server.paths("/v1/completions") + server.paths("/generate")) == 1


def test_attempts_are_bounded(tmp_path: Path) -> None:
    with EngineServer("vllm", MODEL) as server:
        bench = Bench(tmp_path, "vllm", [server.url], retries=2)
        server.faults = failing(500, 100)
        with pytest.raises(EngineError, match=r"status 500.*attempt 3 in .*--resume.*on_failure"):
            bench.generate(prompts=[[3]])
        assert len(server.paths("/v1/completions")) == 3
        url = server.url
    bench = Bench(tmp_path, "vllm", [url], retries=1)
    with pytest.raises(EngineError, match=r"did not answer: ConnectionRefusedError.*attempt 2 in"):
        bench.generate()


def test_pauses_double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(
        threading.Event, "wait", lambda self, seconds=None: bool(pauses.append(seconds))
    )
    with EngineServer("vllm", MODEL) as server:
        bench = Bench(tmp_path, "vllm", [server.url], retries=9, backoff=0.25, concurrency=1)
        server.faults = failing(500, 9)
        bench.generate(prompts=[[3]])
    assert [p for p in pauses if p is not None] == [0.25, 0.5, 1, 2, 4, 8, 16, 30, 30]


def bad_vllm(**changes: Any) -> Fault:
    """The first choice with other fields; None leaves the field out."""

    def fault(answer: Any) -> Any:
        choice = {**answer["choices"][0], **changes}
        choice = {k: v for k, v in choice.items() if v is not None}
        return {"choices": [choice, *answer["choices"][1:]]}

    return fault


def bad_sglang(**changes: Any) -> Fault:
    return lambda answer: [
        {**answer[0], "meta_info": {**answer[0]["meta_info"], **changes}},
        *answer[1:],
    ]


@pytest.mark.parametrize(
    ("kind", "fault", "message"),
    [
        ("vllm", lambda _: Reply(200, b"<html>hello"), "must answer JSON, got '<html>hello'"),
        ("vllm", lambda _: {"text": "a"}, r"/v1/completions: field 'choices' must be a list"),
        ("vllm", bad_vllm(token_ids=None), r"choices\[0\]: field 'token_ids'.*return_token_ids"),
        ("vllm", bad_vllm(logprobs=None), r"choices\[0\]: field 'logprobs' must be a dict, got No"),
        ("vllm", bad_vllm(index=True), r"field 'index' must be a int, got True"),
        ("vllm", bad_vllm(index=3), r"answered with samples \[0, 1, 2\], got also \[3\]"),
        ("vllm", bad_vllm(token_ids=["a"]), r"must have token ids, got \['a'\]"),
        ("vllm", bad_vllm(token_ids=[]), r"must have 1 to 6 tokens, got 0"),
        ("vllm", bad_vllm(token_ids=[5] * 7), r"must have 1 to 6 tokens, got 7"),
        ("vllm", bad_vllm(finish_reason="tool"), r"must end by stop or length, got 'tool'"),
        (
            "vllm",
            bad_vllm(token_ids=[5, 6], finish_reason="stop"),
            r"must stop at the first of the tokens \[0\] .* got stop after \[5, 6\]",
        ),
        ("vllm", bad_vllm(token_ids=[0, 5], finish_reason="length"), r"got length after \[0, 5\]"),
        (
            "vllm",
            bad_vllm(token_ids=[5], finish_reason="length", logprobs={"token_logprobs": []}),
            "must have 1 log-probabilities, got 0",
        ),
        (
            "vllm",
            bad_vllm(token_ids=[5], finish_reason="length", logprobs={"token_logprobs": [2.5]}),
            r"log-probabilities of 0 or less, got \[2.5\]",
        ),
        ("sglang", lambda answer: {"choices": []}, r"/generate: field 'the answer' must be a list"),
        ("sglang", lambda answer: [*answer, answer[0]], r"got also \[3\]"),
        (
            "sglang",
            bad_sglang(output_token_logprobs=None),
            "'output_token_logprobs' must be a list",
        ),
        ("sglang", bad_sglang(output_token_logprobs=[[None, 5]]), "field 0 must be a float, got"),
        ("sglang", bad_sglang(finish_reason=None), "'finish_reason' must be a dict"),
    ],
)
def test_an_answer_that_cannot_be_used_is_refused(
    tmp_path: Path, kind: str, fault: Fault, message: str
) -> None:
    with EngineServer(kind, MODEL) as server:
        bench = Bench(tmp_path, kind, [server.url])
        server.faults = [fault]
        with pytest.raises(EngineError, match=message) as caught:
            bench.generate(prompts=[[3]])
        assert server.url in str(caught.value)
        assert len(server.paths("/v1/completions") + server.paths("/generate")) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_an_aborted_sample_is_asked_for_again(tmp_path: Path, kind: str) -> None:
    fault = bad_vllm if kind == "vllm" else bad_sglang
    aborted = "abort" if kind == "vllm" else {"type": "abort", "message": "weights are updated"}
    with EngineServer(kind, MODEL) as server:
        bench = Bench(tmp_path, kind, [server.url])
        expected = bench.generate(prompts=[[3]])
        server.faults = [fault(finish_reason=aborted)]
        assert_alike(bench.generate(prompts=[[3]]), expected)
        assert len(server.paths("/v1/completions") + server.paths("/generate")) == 3


def test_logprobs_of_another_distribution_are_refused(tmp_path: Path) -> None:
    with EngineServer("vllm", MODEL) as server:
        server.logprobs_mode = "raw_logprobs"
        bench = Bench(tmp_path, "vllm", [server.url])
        with pytest.raises(EngineError, match=r"at rollout.temperature = 0.8, got raw_logprobs"):
            bench.generate()
        # Without a temperature the two are the same.
        bench.generator._temperature = 1.0
        bench.generate(temperature=1.0)
        with pytest.raises(ValueError, match=r"temperature must be 0 or rollout.temperature = 1.0"):
            bench.generate(temperature=0.5)
    with EngineServer("sglang", MODEL) as other:
        bench = Bench(tmp_path, "vllm", [other.url])
        with pytest.raises(EngineError, match=r"server_info.*404.*VLLM_SERVER_DEV_MODE=1"):
            bench.generate()


def test_weights_that_cannot_be_loaded_end_the_run(tmp_path: Path) -> None:
    with EngineServer("sglang", MODEL) as server:
        bench = Bench(tmp_path, "sglang", [server.url])
        server.load_faults = [lambda _: {"success": False, "message": "no such folder"}]
        with pytest.raises(EngineError, match=r"not loaded: no such folder; engine.weights_dir"):
            bench.generate()
        server.load_faults = failing(500, 2)
        assert bench.generate()


def test_old_prefixes_are_dropped_before_anything_is_sampled(tmp_path: Path) -> None:
    with EngineServer("vllm", MODEL) as server:
        bench = Bench(tmp_path, "vllm", [server.url], concurrency=1)
        server.drops_prefixes = [False, True]
        bench.generate(prompts=[[3]])
        load = ["/server_info", "/collective_rpc", "/reset_prefix_cache"]
        assert [path for path, _ in server.requests] == [*load, *load, "/v1/completions"]
        assert "could not drop the old prefixes" in bench.said[0]


def test_one_attempt_to_load_counts_for_all_that_wait(tmp_path: Path) -> None:
    with EngineServer("vllm", MODEL) as server:
        bench = Bench(tmp_path, "vllm", [server.url], retries=1, concurrency=4)
        server.load_faults = [lambda _: Reply(500, b"out of memory", seconds=0.2)] * 20
        with pytest.raises(EngineError, match=r"500: out of memory.*attempt 2 in"):
            bench.generate()
        # Four requests with two attempts each; a third load is for one that came late.
        assert len(server.paths("/collective_rpc")) <= 3


def test_a_server_that_is_down_leaves_its_share_to_the_others(tmp_path: Path) -> None:
    with EngineServer("vllm", MODEL) as one:
        two = EngineServer("vllm", MODEL)
        bench = Bench(tmp_path, "vllm", [one.url, two.url], concurrency=1)
        expected = bench.generate()
        two.stop()
        assert bench.generate() == expected
        assert [s for s in bench.said if two.url in s] == bench.said
        assert len(bench.said) == 1
        assert "ConnectionRefusedError" in bench.said[0]
        # At the next weights it is tried again.
        with EngineServer("vllm", MODEL, port=two.port) as back:
            bench.update(0)
            assert bench.generate() == expected
            assert len(back.paths("/v1/completions")) == 2
            assert len(bench.said) == 1


def test_a_server_that_comes_back_gets_the_weights_first(
    server: EngineServer, tmp_path: Path
) -> None:
    bench = Bench(tmp_path, server.kind, [server.url], on_failure="wait", retries=0)
    expected = bench.generate()
    server.stop()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(bench.generate()))
    thread.start()
    time.sleep(0.2)
    assert not found
    with EngineServer(server.kind, MODEL, port=server.port) as back:
        thread.join(20)
        assert found == [expected]
        assert set(back.versions) == {"step_000000"}
    assert bench.said[-1] == f"engine: {server.url} answers again"


def test_waiting_has_an_end(tmp_path: Path) -> None:
    with EngineServer("vllm", MODEL) as server:
        pass
    options = {"on_failure": "wait", "retries": 0, "wait_limit": 0.1}
    with pytest.raises(EngineError, match=r"ConnectionRefused.*attempt \d+ in \d+\.\d s"):
        Bench(tmp_path, "vllm", [server.url], **options).generate()


def test_a_restart_that_nobody_saw_shows_in_the_version(tmp_path: Path) -> None:
    with EngineServer("sglang", MODEL) as server:
        bench = Bench(tmp_path, "sglang", [server.url], concurrency=1)
        expected = bench.generate()
        server._policy = load_policy(MODEL, seed=99, device=CPU)
        server._weight_version = "default"
        assert bench.generate() == expected
        assert any("weight_version must be 0, got default" in s for s in bench.said)


# --- configuration -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"engine": {"kind": "vllm"}}, r'engine.kind = "vllm" needs engine.urls'),
        ({"engine": {"urls": ["localhost:8000"]}}, r"engine.urls must begin with http://"),
        ({"engine": {"retries": -1}}, r"engine.retries must be at least 0, got -1"),
        ({"engine": {"timeout": 0}}, r"engine.timeout must be positive"),
        ({"rollout": {"overlap": 1}}, r"rollout.overlap = 1 must be 0.*kind = .none"),
        ({"rollout": {"overlap": -1}}, r"rollout.overlap = -1 must be 0"),
        ({"correction": {"kind": "icepop"}}, r"correction.low = None.*set low = 0.5"),
        ({"correction": {"low": 3.0}}, r"correction.high must be above 0 and correction.low = 3.0"),
    ],
)
def test_options_that_do_not_fit_are_refused(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configs.parse(tree)


# --- whole runs --------------------------------------------------------------------------------


def over_http(small: Callable[..., Config], servers: list[EngineServer], *more: str) -> Config:
    urls = ", ".join(f"'{s.url}'" for s in servers)
    engine = (f"engine.kind={servers[0].kind}", f"engine.urls=[{urls}]", "engine.backoff=0.01")
    return small("grpo", "steps=3", *engine, *more)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_over_http_is_on_policy(
    small: Callable[..., Config], tmp_path: Path, kind: str
) -> None:
    model = small("grpo").model
    with EngineServer(kind, model) as server:
        config = over_http(small, [server], "optim.mini_batches=1", "optim.epochs=1")
        train(config, tmp_path / "a")
        # Weights before each rollout and each evaluation.
        assert server.versions == [f"step_{v:06d}" for v in (0, 0, 1, 2, 3)]
        train(config, tmp_path / "b")
    assert_same_run(tmp_path / "a", tmp_path / "b", 3)
    for record in records(tmp_path / "a"):
        # The engine computes in another order than the trainer, so not all bits agree.
        assert 0 < record["sampler/logp_gap"] < 1e-4
        assert record["sampler/ess"] == pytest.approx(1, abs=1e-6)
        assert record["policy/ratio_max"] == record["policy/ratio_min"] == 1


def test_the_command_line_says_what_is_missing(
    small: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = small("grpo").model
    with EngineServer("vllm", model) as server:
        config = over_http(small, [server], "engine.retries=1")
    file = tmp_path / "c.toml"
    file.write_text(configs.dumps(config))
    assert cli.main(["train", str(file), "--run-dir", str(tmp_path / "run")]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"fastrl: engine: {server.url}/server_info")
    assert "ConnectionRefusedError" in said
    assert "start the server and pass --resume" in said


def test_a_run_survives_a_server_that_dies(small: Callable[..., Config], tmp_path: Path) -> None:
    model = small("grpo").model
    with EngineServer("vllm", model) as server:
        config = over_http(small, [server], "engine.on_failure=wait", "engine.retries=0")
        train(config, tmp_path / "whole")
    revived: list[EngineServer] = []

    def die(answer: Any) -> Reply:
        def revive() -> None:
            first.stop()
            time.sleep(0.1)
            revived.append(EngineServer("vllm", model, port=server.port))

        threading.Thread(target=revive).start()
        return Reply(200, b"{}", cut=1)

    first = EngineServer("vllm", model, port=server.port)
    # Four requests for the evaluation before the first step, four for each step.
    first.faults = [*[same] * 10, die]
    train(config, tmp_path / "died")
    (second,) = revived
    second.stop()
    assert_same_run(tmp_path / "whole", tmp_path / "died", 3)
    assert second.versions[0] == "step_000001"
    # With the other policy the run ends there, and can be resumed.
    again = EngineServer("vllm", model, port=server.port)
    again.faults = [*[same] * 10, *failing(500, 100)]
    config = dataclasses.replace(
        config, engine=dataclasses.replace(config.engine, on_failure="raise")
    )
    with again, pytest.raises(EngineError, match="status 500"):
        train(config, tmp_path / "ended")
    (saved,) = (tmp_path / "ended/checkpoints").iterdir()
    assert saved.name == "step_000001"
    with EngineServer("vllm", model, port=server.port):
        train(config, tmp_path / "ended", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "ended", 3)


def test_an_engine_in_another_precision_is_corrected(
    small: Callable[..., Config], tmp_path: Path
) -> None:
    options = (
        "steps=2",
        "engine.autocast=bfloat16",
        "correction.kind=tis",
        "correction.high=1.0002",
    )
    config = small("grpo", *options)
    assert config.model.autocast == "none"
    train(config, tmp_path)
    for record in records(tmp_path):
        assert record["sampler/logp_gap"] > 1e-5
        assert record["sampler/ratio_max"] > 1.0002
        assert 0 < record["correction/truncated"] < 1
        assert record["correction/weight_max"] == pytest.approx(1.0002)
        assert record["correction/weight_mean"] == pytest.approx(1, abs=1e-2)
        assert record["correction/ess"] >= record["sampler/ess"]
