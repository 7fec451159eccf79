"""A server on loopback that speaks what engines.py needs of vLLM's and SGLang's HTTP, around the tiny model.

It samples from the weights that it was last told to load, and misbehaves when a test says so.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from fastrl.train import checkpoint
from fastrl.train.config import ModelConfig
from fastrl.train.models import load_policy
from fastrl.train.rollout import TransformersGenerator

Fault = Callable[[Any], Any]
"""Takes an answer and returns another one; see `Reply` for what else it may return."""


class Reply:
    """An answer that is not 200 with whole JSON."""

    def __init__(
        self, status: int = 200, body: bytes = b"", cut: int = 0, seconds: float = 0.0
    ) -> None:
        self.status, self.body, self.cut, self.seconds = status, body, cut, seconds


class EngineServer:
    """`kind` is vllm or sglang; a context manager. `faults` are used up by requests for samples, in order."""

    def __init__(self, kind: str, model: ModelConfig, *, port: int = 0) -> None:
        self.kind, self.model = kind, model
        self.logprobs_mode = "processed_logprobs"
        self.faults: list[Fault] = []
        self.load_faults: list[Fault] = []
        self.requests: list[tuple[str, Any]] = []
        self.drops_prefixes: list[bool] = []
        """Answers to /reset_prefix_cache; after them it says nothing, as older versions do."""
        self.versions: list[str] = []
        """Folders that were loaded."""
        self._policy = load_policy(model, seed=99, device=torch.device("cpu"))
        self._weight_version = "default"
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server._answer(self, None)

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                server._answer(self, json.loads(self.rfile.read(length)))

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        class Http(ThreadingHTTPServer):
            request_queue_size = 128

            def handle_error(self, request: Any, address: Any) -> None:
                pass  # A client that no longer waits is what some tests are about.

        self._http = Http(("127.0.0.1", port), Handler)
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self._thread.start()

    def __enter__(self) -> EngineServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def paths(self, name: str) -> list[Any]:
        """Bodies of the requests whose path begins with `name`."""
        return [body for path, body in self.requests if path.startswith(name)]

    def _answer(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        # One at a time, so that what a fault hits does not depend on threads.
        with self._lock:
            path = handler.path.split("?")[0]
            self.requests.append((path, body))
            routes = {
                ("vllm", "/server_info"): self._server_info,
                ("vllm", "/collective_rpc"): self._collective_rpc,
                ("vllm", "/reset_prefix_cache"): self._reset_prefix_cache,
                ("vllm", "/v1/completions"): self._completions,
                ("sglang", "/update_weights_from_disk"): self._update_weights_from_disk,
                ("sglang", "/generate"): self._generate,
            }
            route = routes.get((self.kind, path))
            answer = Reply(404, b'{"detail":"Not Found"}') if route is None else route(body)
            if path in ("/v1/completions", "/generate") and self.faults:
                answer = self.faults.pop(0)(answer)
            if path in ("/collective_rpc", "/update_weights_from_disk") and self.load_faults:
                answer = self.load_faults.pop(0)(answer)
        if not isinstance(answer, Reply):
            answer = Reply(200, b"" if answer is None else json.dumps(answer).encode())
        time.sleep(answer.seconds)
        handler.send_response(answer.status)
        handler.send_header("Content-Length", str(len(answer.body)))
        handler.end_headers()
        handler.wfile.write(answer.body[: len(answer.body) - answer.cut])

    def _load(self, folder: str) -> None:
        checkpoint.load_weights(self._policy.model, load_file(Path(folder) / "model.safetensors"))
        self.versions.append(Path(folder).name.rpartition("_")[0])

    def _sample(
        self, prompt: list[int], seeds: list[int], count: int, temperature: float
    ) -> list[tuple[list[int], list[float], str]]:
        """Draws of a sample depend on its seed alone."""
        draws = torch.stack(
            [torch.rand(count, generator=torch.Generator().manual_seed(s)) for s in seeds]
        )
        generator = TransformersGenerator(self._policy, self.model, batch_size=64)
        with torch.no_grad():
            rows, logprobs = generator._sample([prompt], draws, temperature)
        found = map(generator._completion, rows.tolist(), logprobs.tolist())
        return [(c.token_ids, c.logprobs or [], "stop" if c.finished else "length") for c in found]

    # --- vLLM

    def _server_info(self, _: Any) -> Any:
        return {"vllm_config": {"model_config": {"logprobs_mode": self.logprobs_mode}}}

    def _collective_rpc(self, body: Any) -> Any:
        assert body["method"] == "reload_weights"
        self._load(body["kwargs"]["weights_path"])
        return {"results": [None]}

    def _reset_prefix_cache(self, _: Any) -> Any:
        return {"success": self.drops_prefixes.pop(0)} if self.drops_prefixes else None

    def _completions(self, body: Any) -> Any:
        assert body["top_p"] == body["repetition_penalty"] == 1
        assert body["n"] == 1 or body["temperature"], "vLLM refuses several greedy samples"
        assert 0 <= body["seed"] <= 2**63 - body["n"]
        seeds = [body["seed"] + k for k in range(body["n"])]
        samples = self._sample(body["prompt"], seeds, body["max_tokens"], body["temperature"])
        return {
            "choices": [
                {
                    "index": k,
                    "text": "",
                    "finish_reason": reason,
                    "logprobs": {"token_logprobs": logprobs},
                    "token_ids": tokens,
                }
                for k, (tokens, logprobs, reason) in enumerate(samples)
            ]
        }

    # --- SGLang

    def _update_weights_from_disk(self, body: Any) -> Any:
        try:
            self._load(body["model_path"])
        except OSError as error:
            return Reply(400, json.dumps({"success": False, "message": str(error)}).encode())
        self._weight_version = body["weight_version"]
        return {"success": True, "message": "Succeeded to update model weights."}

    def _generate(self, body: Any) -> Any:
        assert body["return_logprob"] is True
        options = body["sampling_params"]
        assert all(o["top_p"] == o["repetition_penalty"] == 1 for o in options)
        assert len({tuple(ids) for ids in body["input_ids"]}) == 1
        seeds = [o["sampling_seed"] for o in options]
        assert max(seeds) < 2**31
        first = options[0]
        samples = self._sample(
            body["input_ids"][0], seeds, first["max_new_tokens"], first["temperature"]
        )
        return [
            {
                "text": "",
                "meta_info": {
                    "finish_reason": {"type": reason},
                    "weight_version": self._weight_version,
                    "output_token_logprobs": [
                        [p, t, None] for p, t in zip(logprobs, tokens, strict=True)
                    ],
                },
            }
            for tokens, logprobs, reason in samples
        ]


def failing(status: int, times: int) -> list[Fault]:
    """Answers with an HTTP status, some times."""
    return [lambda _: Reply(status, b'{"error":"on purpose"}')] * times


def cut(answer: Any) -> Reply:
    """The connection is lost in the middle of the answer."""
    return Reply(200, json.dumps(answer).encode(), cut=40)


def hanging(seconds: float) -> Fault:
    """The answer comes late."""
    return lambda answer: Reply(200, json.dumps(answer).encode(), seconds=seconds)


def fewer(answer: Any) -> Any:
    """The first and the last sample are left out."""
    if isinstance(answer, list):
        # SGLang names no index, so only what comes last can be missing.
        return answer[:1]
    return {"choices": answer["choices"][1:-1]}


def same(answer: Any) -> Any:
    """No fault, for a place in the order."""
    return answer
