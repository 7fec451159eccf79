"""What vLLM and SGLang are asked and answer: token ids in, token ids and their log-probabilities out.

Both sample from softmax(logits / temperature) over the whole vocabulary only when every other sampling
parameter is set to do nothing, because a server fills in what a model's generation_config.json says.

vLLM counts the seeds of the samples of a request from the one that it names; SGLang takes one for each and
heeds it only when started with --enable-deterministic-inference. The log-probabilities of vLLM are
those at temperature 1 unless it runs with --logprobs-mode processed_logprobs. SGLang's are those at the
temperature of sampling unless SGLANG_RETURN_ORIGINAL_LOGPROB is set, which it does not tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from fastrl.train.http_json import EngineError, Unavailable, exchange, field
from fastrl.train.seeding import derived_seed

__all__ = ["DIALECTS", "Ask", "Dialect", "Sampled", "SGLang", "VLLM"]

_PLAIN = {
    "skip_special_tokens": False,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""What both servers call the parameters that must do nothing."""


class Ask(NamedTuple):
    """Samples of one prompt; number `first` and those after it."""

    prompt: Sequence[int]
    place: int
    seed: int
    first: int
    samples: int
    max_new_tokens: int
    temperature: float
    eos_ids: Sequence[int]


class Sampled(NamedTuple):
    """One sample as the server words it; `reason` is why it ended."""

    token_ids: list[Any]
    logprobs: list[Any]
    reason: str


class Dialect(Protocol):
    """One kind of server. What it raises is EngineError, or Unavailable where asking again can help."""

    def load(
        self, url: str, folder: str, version: int, *, temperature: float, timeout: float
    ) -> None:
        """Make the server sample from the weights in `folder`.

        Refuses one whose log-probabilities would not be those at `temperature`, where it says so.
        """
        ...

    def sample(self, url: str, ask: Ask, version: int, *, timeout: float) -> dict[int, Sampled]:
        """The samples that the server gives, by number; some may be missing."""
        ...


class VLLM:
    """`vllm serve` with VLLM_SERVER_DEV_MODE=1, for the endpoints that load weights."""

    remedy = "use a vLLM whose /v1/completions knows return_token_ids"

    def load(
        self, url: str, folder: str, version: int, *, temperature: float, timeout: float
    ) -> None:
        """See `Dialect.load`. Cached prefixes were computed with the old weights and are dropped."""
        self._check_logprobs(url, temperature, timeout)
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        exchange(f"{url}/collective_rpc", body, timeout=timeout)
        answer = exchange(f"{url}/reset_prefix_cache", {}, timeout=timeout)
        # Older versions answer nothing.
        if isinstance(answer, dict) and answer.get("success") is False:
            raise Unavailable(f"engine: {url}/reset_prefix_cache could not drop the old prefixes")

    def sample(self, url: str, ask: Ask, version: int, *, timeout: float) -> dict[int, Sampled]:
        """See `Dialect.sample`."""
        url = f"{url}/v1/completions"
        body = {
            "prompt": list(ask.prompt),
            "n": ask.samples,
            # Room above it, because sample k of a request has the seed + k, of 63 bits in all.
            "seed": (derived_seed(ask.seed, ask.place) >> 1) + ask.first,
            "max_tokens": ask.max_new_tokens,
            "temperature": ask.temperature,
            "stop_token_ids": list(ask.eos_ids),
            "logprobs": 0,
            "return_token_ids": True,
            **_PLAIN,
        }
        choices = field(
            exchange(url, body, timeout=timeout), url, "choices", list, "check engine.kind"
        )
        found = {}
        for i, choice in enumerate(choices):
            where = f"{url}: choices[{i}]"
            index = field(choice, where, "index", int, self.remedy)
            reason = field(choice, where, "finish_reason", str, self.remedy)
            if reason == "abort":
                continue
            logprobs = field(choice, where, "logprobs", dict, self.remedy)
            found[ask.first + index] = Sampled(
                field(choice, where, "token_ids", list, self.remedy),
                field(logprobs, f"{where}.logprobs", "token_logprobs", list, self.remedy),
                reason,
            )
        return found

    def _check_logprobs(self, url: str, temperature: float, timeout: float) -> None:
        """Refuse log-probabilities of another distribution than the one sampled from."""
        url = f"{url}/server_info?config_format=json"
        remedy = "start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment"
        try:
            info = exchange(url, timeout=timeout)
        except Unavailable:
            raise
        except EngineError as error:
            raise EngineError(f"{error}; {remedy}") from error
        config = field(
            field(info, url, "vllm_config", dict, remedy), url, "model_config", dict, remedy
        )
        mode = field(config, url, "logprobs_mode", str, "use a vLLM that has --logprobs-mode")
        if mode == "processed_logprobs" or (mode == "raw_logprobs" and temperature == 1):
            return
        raise EngineError(
            f"engine: {url}: logprobs_mode must be processed_logprobs at rollout.temperature = "
            f"{temperature}, got {mode}; start vLLM with --logprobs-mode processed_logprobs"
        )


class SGLang:
    """`python -m sglang.launch_server`."""

    remedy = "check that engine.kind is what the server is"

    def load(
        self, url: str, folder: str, version: int, *, temperature: float, timeout: float
    ) -> None:
        """See `Dialect.load`. The server drops its cached prefixes by itself."""
        url = f"{url}/update_weights_from_disk"
        body = {"model_path": folder, "weight_version": str(version)}
        answer = exchange(url, body, timeout=timeout)
        if not field(answer, url, "success", bool, self.remedy):
            raise EngineError(
                f"engine: {url}: the weights in {folder} were not loaded: {answer.get('message')}; "
                "engine.weights_dir must be a folder that the server sees under the same path"
            )

    def sample(self, url: str, ask: Ask, version: int, *, timeout: float) -> dict[int, Sampled]:
        """See `Dialect.sample`."""
        url = f"{url}/generate"
        numbers = range(ask.first, ask.first + ask.samples)
        body = {
            "input_ids": [list(ask.prompt)] * ask.samples,
            "sampling_params": [self._parameters(ask, number) for number in numbers],
            "return_logprob": True,
        }
        answer = exchange(url, body, timeout=timeout)
        answers = field({"the answer": answer}, url, "the answer", list, self.remedy)
        found = {}
        for i, item in enumerate(answers):
            where = f"{url}: [{i}]"
            info = field(item, where, "meta_info", dict, self.remedy)
            self._check_version(info, where, version)
            reason = field(info, where, "finish_reason", dict, self.remedy)
            if field(reason, where, "type", str, self.remedy) == "abort":
                continue
            pairs = field(info, where, "output_token_logprobs", list, self.remedy)
            found[ask.first + i] = Sampled(
                [field(pair, where, 1, int, self.remedy) for pair in pairs],
                [field(pair, where, 0, float, self.remedy) for pair in pairs],
                reason["type"],
            )
        return found

    def _parameters(self, ask: Ask, number: int) -> dict[str, Any]:
        return {
            "max_new_tokens": ask.max_new_tokens,
            "temperature": ask.temperature,
            # Versions differ in the width of a seed; 31 bits are in all of them.
            "sampling_seed": derived_seed(ask.seed, ask.place, number) >> 32,
            "stop_token_ids": list(ask.eos_ids),
            **_PLAIN,
        }

    def _check_version(self, info: Mapping[str, Any], where: str, version: int) -> None:
        """A server that was started anew has other weights, and says so."""
        held = info.get("weight_version")
        if held is not None and held != str(version):
            raise Unavailable(f"engine: {where}: weight_version must be {version}, got {held}")


DIALECTS: dict[str, Dialect] = {"vllm": VLLM(), "sglang": SGLang()}
