"""Servers as generators: weights go out through a shared folder, tokens come back over HTTP.

Every request can be repeated: its answer depends on weights, prompt, seed, place and number of the
sample, so one that failed is asked again, at another server where there is one, and of an answer that
is not whole only the rest. A server that did not answer may come back as a new process, so it is given
the weights again before it samples.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from safetensors.torch import save_file
from torch import Tensor

from fastrl.train.config import Config
from fastrl.train.dialects import DIALECTS, Ask, Sampled
from fastrl.train.http_json import EngineError, Unavailable
from fastrl.train.models import Policy
from fastrl.train.rollout import Completion, Engine, TransformersGenerator
from fastrl.train.world import ALONE, World

__all__ = ["HttpGenerator", "make_engine"]

T = TypeVar("T")
_LONGEST_PAUSE = 30.0


def make_engine(
    config: Config, policy: Policy, run_dir: Path, say: Callable[[str], None], world: World = ALONE
) -> Engine:
    """The engine that `[engine]` names; `say` is told when a server fails or is back.

    Several processes sample with the model in training alone: servers would each be given the weights
    by one rank while others ask, and a thread that samples ahead would speak to the other ranks between
    the words of the training.
    """
    options = config.engine
    if world.size > 1 and (options.kind != "transformers" or config.rollout.overlap):
        raise ValueError(
            "engine: several processes sample step by step with the model in training, got engine.kind = "
            f'"{options.kind}" and rollout.overlap = {config.rollout.overlap} with {world.size} processes; '
            'set engine.kind = "transformers" and rollout.overlap = 0, or train in one process'
        )
    if options.kind != "transformers":
        return HttpGenerator(config, policy, run_dir, say)
    model = config.model
    if options.autocast != "model":
        model = dataclasses.replace(model, autocast=options.autocast)
    is_copy = config.rollout.overlap > 0
    return TransformersGenerator(
        policy.frozen_copy() if is_copy else policy,
        model,
        batch_size=config.rollout.batch_size,
        is_copy=is_copy,
    )


class _Server:
    """One server, and what is known about it. Threads that find it without the weights take turns."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.version: int | None = None  # of the weights it holds
        self.is_down = False
        self.loading = threading.Lock()
        self.failed_loads: list[str] = []


class HttpGenerator:
    """Samples from servers that speak vLLM's or SGLang's protocol."""

    def __init__(
        self, config: Config, policy: Policy, run_dir: Path, say: Callable[[str], None]
    ) -> None:
        self._options = config.engine
        self._temperature = config.rollout.temperature
        self._policy = policy
        self._say = say
        self._dialect = DIALECTS[config.engine.kind]
        self._servers = [_Server(url) for url in config.engine.urls]
        folder = config.engine.weights_dir
        self._root = (run_dir / "weights" if folder is None else Path(folder)).resolve()
        if folder is None:
            # What a killed run left behind; a folder of somebody's choice may have other users.
            shutil.rmtree(self._root, ignore_errors=True)
        self._folder: Path | None = None
        self._version = -1
        self._marking = threading.Lock()
        self._give_up = threading.Event()
        self._is_closed = False

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Write `weights` for the servers, each of which loads them before it samples next.

        It does so even if it was given this version before: between a training step and an evaluation
        it may have been started anew.
        """
        if self._folder is None or version != self._version:
            previous = self._folder
            # A new name each time, because servers keep what they know about a path.
            self._folder = self._root / f"step_{version:06d}_{uuid.uuid4().hex[:8]}"
            _write(self._folder, self._policy, weights)
            self._version = version
            if previous is not None:
                shutil.rmtree(previous)
        for server in self._servers:
            server.version, server.is_down = None, False

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        samples: int,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        places: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """See `Generator.generate`. Raises EngineError as [engine] on_failure says."""
        if self._folder is None:
            raise ValueError("engine: generate needs weights; call update before it")
        if temperature not in (0, self._temperature):
            raise ValueError(
                f"engine: temperature must be 0 or rollout.temperature = {self._temperature}, got "
                f"{temperature}"
            )
        places = range(len(prompts)) if places is None else places
        # The likeliest tokens are the same every time.
        count = samples if temperature else 1
        asks = [
            Ask(p, place, seed, 0, count, max_new_tokens, temperature, self._policy.eos_ids)
            for p, place in zip(prompts, places, strict=True)
        ]
        if self._is_closed:
            raise Unavailable("engine: the run is over")
        self._give_up = threading.Event()
        pool = ThreadPoolExecutor(max(min(self._options.concurrency, len(asks)), 1))
        try:
            jobs = [pool.submit(self._complete, i, ask) for i, ask in enumerate(asks)]
            return [group * (samples // count) for group in _results(jobs)]
        finally:
            self._give_up.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """See `Engine.close`."""
        self._is_closed = True
        self._give_up.set()

    def _complete(self, number: int, ask: Ask) -> list[Completion]:
        """All samples of one prompt; those missing in an answer are asked for again, and no others."""
        found: dict[int, Completion] = {}
        while missing := [k for k in range(ask.samples) if k not in found]:
            end = min((k for k in found if k > missing[0]), default=ask.samples)
            part = ask._replace(first=missing[0], samples=end - missing[0])
            request = functools.partial(self._sample, ask=part)
            found |= self._persist(number, request)
        return [found[k] for k in range(ask.samples)]

    def _sample(self, server: _Server, ask: Ask) -> dict[int, Completion]:
        self._load(server)
        version, timeout = self._version, self._options.timeout
        answer = self._dialect.sample(server.url, ask, version, timeout=timeout)
        where = f"{server.url}: a request for {ask.samples} samples"
        asked = range(ask.first, ask.first + ask.samples)
        if beyond := sorted(set(answer) - set(asked)):
            raise EngineError(
                f"engine: {where} must be answered with samples {list(asked)}, got also {beyond}; check "
                "engine.kind"
            )
        if not answer:
            raise Unavailable(f"engine: {where} was answered with none")
        return {k: self._completion(sampled, ask, where) for k, sampled in answer.items()}

    def _load(self, server: _Server) -> None:
        """Give the server the weights, unless it has them."""
        failed_before = len(server.failed_loads)
        with server.loading:
            if server.version == self._version:
                return
            if len(server.failed_loads) > failed_before:
                # One attempt counts for all that waited for it, or each would wait for a timeout.
                raise Unavailable(server.failed_loads[-1])
            try:
                self._dialect.load(
                    server.url,
                    str(self._folder),
                    self._version,
                    temperature=self._temperature,
                    timeout=self._options.timeout,
                )
            except Unavailable as error:
                server.failed_loads.append(str(error))
                raise
            server.version = self._version

    def _persist(self, number: int, request: Callable[[_Server], T]) -> T:
        """What `request` returns for the first server at which it succeeds, in the end."""
        options, began, attempts = self._options, time.monotonic(), 0
        while True:
            server = self._pick(number)
            try:
                result = request(server)
            except Unavailable as error:
                attempts += 1
                server.version = None
                self._mark(server, error)
                waited = time.monotonic() - began
                is_over = options.on_failure == "raise" or waited > options.wait_limit
                if attempts > options.retries and is_over:
                    raise EngineError(
                        f"{error}; that was attempt {attempts} in {waited:.1f} s; start the server and "
                        'pass --resume, or set engine.on_failure = "wait"'
                    ) from error
                pause = options.backoff * 2.0 ** min(attempts - 1, 30)
                if self._give_up.wait(min(pause, _LONGEST_PAUSE)) or self._is_closed:
                    raise
                continue
            self._mark(server, None)
            return result

    def _pick(self, number: int) -> _Server:
        """The server of a request: each has its share, and those that are down have none."""
        servers = [s for s in self._servers if not s.is_down] or self._servers
        return servers[number % len(servers)]

    def _mark(self, server: _Server, error: Unavailable | None) -> None:
        with self._marking:
            if server.is_down == (error is not None):
                return
            server.is_down = error is not None
        self._say(f"{error}; trying again" if error else f"engine: {server.url} answers again")

    def _completion(self, sampled: Sampled, ask: Ask, where: str) -> Completion:
        """The sample, checked: a wrong one would be trained on without anybody noticing."""
        tokens, logprobs, reason = sampled
        ends = set(ask.eos_ids)
        # Both servers say length when the last token that may be sampled ends the sequence.
        finished = bool(tokens) and tokens[-1] in ends
        wrong = ""
        if reason not in ("stop", "length"):
            wrong = f"must end by stop or length, got {reason!r}"
        elif not all(type(t) is int and t >= 0 for t in tokens):
            wrong = f"must have token ids, got {tokens[:8]}"
        elif not 0 < len(tokens) <= ask.max_new_tokens:
            wrong = f"must have 1 to {ask.max_new_tokens} tokens, got {len(tokens)}"
        elif (reason == "stop" and not finished) or not ends.isdisjoint(tokens[:-1]):
            wrong = (
                f"must stop at the first of the tokens {sorted(ends)} and at no other, got {reason} "
                f"after {tokens[-8:]}; serve the model and tokenizer that are trained"
            )
        elif len(logprobs) != len(tokens):
            wrong = f"must have {len(tokens)} log-probabilities, got {len(logprobs)}"
        elif not all(isinstance(p, (int, float)) and -math.inf < p < 1e-3 for p in logprobs):
            wrong = f"must have log-probabilities of 0 or less, got {logprobs[:8]}"
        if wrong:
            raise EngineError(f"engine: {where}: a completion {wrong}")
        if not ask.temperature:
            logprobs = [0.0] * len(tokens)
        return Completion(tokens, finished, [float(p) for p in logprobs], self._version)


def _results(jobs: Sequence[Future[T]]) -> list[T]:
    """What the jobs return, or the first error, without waiting for what is still on its way."""
    done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
    for job in done:
        job.result()
    return [job.result() for job in jobs]


def _write(folder: Path, policy: Policy, weights: Mapping[str, Tensor]) -> None:
    """A folder that `from_pretrained` and servers read; it has its name only when it is whole."""
    draft = folder.with_suffix(".tmp")
    draft.mkdir(parents=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    policy.model.config.save_pretrained(draft)
    policy.tokenizer.save_pretrained(draft)
    os.rename(draft, folder)
