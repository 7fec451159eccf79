"""TRL 1.16.0 on fastrl: :class:`FastGRPOTrainer` and :class:`FastRLOOTrainer` take the arguments of TRL's own.

Log-probabilities, advantages, the loss and, on the CPU, the drawing of tokens run on fastrl; everything else, metrics and
their names included, is TRL's. Runs with an entropy bonus or a router loss keep TRL's loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastrl.integrations import _patch
from fastrl.integrations._sampling import FastSampling
from fastrl.ops.token_logprobs import token_logprobs, token_logprobs_
from fastrl.presets import trl as preset
from fastrl.surrogates import off_policy_mask

PACKAGE = "trl"
TESTED = ("1.16.0",)
_CHUNK_BYTES = 128 << 20

_patch.check_version(PACKAGE, TESTED)

from trl.trainer import utils as trl_utils  # noqa: E402
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402
from trl.trainer.rloo_trainer import RLOOTrainer  # noqa: E402

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class _ChunkedHead:
    """Stands in for TRL's ``ChunkedLogProbFunction``: chunks of rows through the lm_head, logits of all but a
    single chunk made again for the gradient."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("log_probs",),
    ) -> tuple[Tensor | None, ...]:
        if set(outputs) - {"log_probs", "entropy"}:
            return tuple(
                self._original.apply(
                    *(hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale),
                    outputs,
                )
            )
        with_entropy = "entropy" in outputs

        def head(rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
            logits = F.linear(rows, weight, bias)
            if logit_scale != 1.0:
                logits = logits * logit_scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            # The gradient replaces the logits, which nobody else sees.
            score = token_logprobs_ if logits.requires_grad else token_logprobs
            out = score(logits, tokens, temperature=temperature, entropy=with_entropy)
            return out.logp, out.entropy

        rows_at_once = max(1, _CHUNK_BYTES // (4 * weight.shape[0]))
        # A single chunk keeps its logits: they are within the budget, and making them again costs a product.
        recompute = torch.is_grad_enabled() and hidden.shape[0] > rows_at_once
        parts = []
        for rows, tokens in zip(hidden.split(rows_at_once), targets.split(rows_at_once)):
            if recompute:
                parts.append(checkpoint(head, rows, tokens, use_reentrant=False))
            else:
                parts.append(head(rows, tokens))
        logp = torch.cat([part[0] for part in parts])
        entropy = torch.cat([part[1] for part in parts]) if with_entropy else None
        return logp, entropy, None, None, None


@contextmanager
def _fast_head() -> Iterator[None]:
    """TRL's lm_head through fastrl, and only at the positions that are scored."""
    original, use_triton = trl_utils._ChunkedLogProbFunction, trl_utils._use_triton
    trl_utils._ChunkedLogProbFunction = _ChunkedHead(original)
    # Here it decides nothing but the choice of positions.
    trl_utils._use_triton = lambda device: True
    try:
        yield
    finally:
        trl_utils._ChunkedLogProbFunction, trl_utils._use_triton = original, use_triton


class FastTrainer(_Base):
    """Mixin: tokens drawn on the CPU, log-probabilities, entropies and advantages of the completions by fastrl."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        on_cpu = self.accelerator.device.type == "cpu" and not self.use_vllm
        with FastSampling() if on_cpu else nullcontext():
            return super()._generate_single_turn(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        with _fast_head():
            result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if not torch.is_grad_enabled():
            self._scored.append(result[0])
        return result

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        self._rewards_per_func = super()._calculate_rewards(*args, **kwargs)
        return self._rewards_per_func

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        # Of the policy first, where TRL asks for it, and of the reference model last.
        self._scored: list[Tensor] = []
        output = super()._generate_and_score_completions(inputs)
        rewards = self._rewards_per_func
        num_generations = self.num_generations if self.model.training else self.num_generations_eval
        weights = self.reward_weights.to(rewards.device)
        advantages = self._advantages(rewards, weights, num_generations, output)
        count = len(output["advantages"])
        start = self.accelerator.process_index * count
        output["advantages"] = advantages[start : start + count]
        self._scored = []
        return output


class FastGRPO(FastTrainer):
    """Mixin over ``GRPOTrainer``: log-probabilities, advantages and the loss by fastrl."""

    def _advantages(
        self, rewards: Tensor, weights: Tensor, num_generations: int, output: Any
    ) -> Tensor:
        return preset.grpo_advantages(
            *(rewards, weights, num_generations),
            self.scale_rewards,
            self.multi_objective_aggregation,
        )

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        if self._entropy_bonus_enabled or self.aux_loss_enabled:
            return super()._compute_loss(model, inputs)
        completion_ids, completion_mask = inputs["completion_ids"], inputs["completion_mask"]
        mask = completion_mask
        if "tool_mask" in inputs:
            mask = completion_mask * inputs["tool_mask"]
        extras = {name: inputs.get(name) for name in _MULTIMODAL}
        logps, entropies, _ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], completion_ids], dim=1),
            torch.cat([inputs["prompt_mask"], completion_mask], dim=1),
            completion_ids.size(1),
            compute_entropy=True,
            **extras,
        )
        old_logps = inputs.get("old_per_token_logps")
        old_logps = logps.detach() if old_logps is None else old_logps
        advantages = inputs["advantages"]
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages

        args, in_training = self.args, self.model.training
        accumulation = self.current_gradient_accumulation_steps if in_training else 1.0
        num_items = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        if in_training:
            num_items = num_items * accumulation / args.steps_per_generation
        loss = preset.grpo_loss(
            *(logps, old_logps, advantages, mask),
            normalizer=preset.normalizer_of(
                self.loss_type,
                mask,
                accumulation_steps=accumulation,
                max_completion_length=self.max_completion_length,
                num_items=num_items,
            ),
            loss_type=self.loss_type,
            importance_sampling_level=self.importance_sampling_level,
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            delta=args.delta,
            beta=self.beta,
            ref_per_token_logps=inputs.get("ref_per_token_logps"),
            use_bias_correction_kl=args.use_bias_correction_kl,
            weights=self._policy_weights(inputs, logps, old_logps, advantages, mask, entropies),
            importance_sampling_ratio=inputs.get("importance_sampling_ratio"),
            sapo_temperature_pos=args.sapo_temperature_pos,
            sapo_temperature_neg=args.sapo_temperature_neg,
            vespo_k_pos=args.vespo_k_pos,
            vespo_lambda_pos=args.vespo_lambda_pos,
            vespo_k_neg=args.vespo_k_neg,
            vespo_lambda_neg=args.vespo_lambda_neg,
        )
        self._log_loss_metrics(inputs, logps.detach(), old_logps, advantages, mask, entropies)
        return loss

    def _policy_weights(
        self,
        inputs: Any,
        logps: Tensor,
        old_logps: Tensor,
        advantages: Tensor,
        mask: Tensor,
        entropies: Tensor,
    ) -> Tensor | None:
        """What TRL multiplies the policy term with, or None when that is nothing."""
        factors = []
        if self.off_policy_mask_threshold is not None:
            sampled = inputs.get("sampling_per_token_logps", old_logps)
            threshold = self.off_policy_mask_threshold
            factors.append(off_policy_mask(logps, sampled, advantages, mask, threshold=threshold))
        if self.top_entropy_quantile < 1.0:
            # TRL's own: its threshold is a quantile over all processes.
            factors.append(
                self.get_high_entropy_mask(entropies, mask, 1 - self.top_entropy_quantile)
            )
        if self.use_vllm and self.vllm_importance_sampling_correction and self.loss_type != "vespo":
            factors.append(inputs["importance_sampling_ratio"])
        if not factors:
            return None
        product = torch.ones_like(logps, requires_grad=False)
        for factor in factors:
            product = product * factor
        return product

    @torch.no_grad()
    def _log_loss_metrics(
        self,
        inputs: Any,
        logps: Tensor,
        old_logps: Tensor,
        advantages: Tensor,
        mask: Tensor,
        entropies: Tensor,
    ) -> None:
        """The metrics of TRL's loss under their names, with one reduction over the processes."""
        valid = mask != 0
        ratio = preset.importance_ratio(logps, old_logps, mask, self.importance_sampling_level)
        means: dict[str, Tensor] = {}
        if self.beta != 0.0:
            difference = torch.where(valid, inputs["ref_per_token_logps"] - logps, 0.0)
            kl = torch.expm1(difference) - difference
            means["kl"] = kl * ratio if self.args.use_bias_correction_kl else kl
        means["entropy"] = entropies
        low = high = ratio
        if self.loss_type in preset.CLIPPED:
            capped = ratio.clamp(max=math.inf if self.args.delta is None else self.args.delta)
            low = ((capped < 1 - self.epsilon_low) & (advantages < 0)).float()
            high = ((capped > 1 + self.epsilon_high) & (advantages > 0)).float()
            means["clip_ratio/low_mean"], means["clip_ratio/high_mean"] = low, high
            means["clip_ratio/region_mean"] = low + high
        elif self.loss_type == "cispo":
            clipped = (ratio > self.epsilon_high) & (advantages > 0)
            means["cispo_clip_ratio"] = clipped.float()
        elif self.loss_type == "vespo":
            phi = self.get_gamma_weights(
                advantages=advantages,
                log_ratio_per_token=torch.where(valid, logps - old_logps, 0.0),
                mask=mask,
                importance_sampling_ratio=inputs.get("importance_sampling_ratio"),
                k_pos=self.args.vespo_k_pos,
                lambda_pos=self.args.vespo_lambda_pos,
                k_neg=self.args.vespo_k_neg,
                lambda_neg=self.args.vespo_lambda_neg,
            )
            means["vespo/phi_seq_mean"] = phi
        parts = []
        for x in means.values():
            if x.shape[1] == 1:  # one number per sequence
                parts.extend([x.sum(), torch.tensor(float(len(x)), device=x.device)])
            else:
                parts.extend([torch.where(valid, x, 0.0).sum(), valid.sum().float()])
        totals = self.accelerator.reduce(torch.stack(parts), reduction="sum").view(-1, 2).tolist()
        log = self._metrics["train" if self.model.training else "eval"]
        for name, (total, count) in zip(means, totals):
            log[name].append(total / max(count, 1.0))
        if self.loss_type in preset.CLIPPED:
            for name, x, pick in (
                ("clip_ratio/low_min", low, trl_utils.nanmin),
                ("clip_ratio/high_max", high, trl_utils.nanmax),
            ):
                if x.shape[1] == 1:
                    per_row = x.squeeze(1)
                else:
                    per_row = torch.where(valid, x, 0.0).sum(1) / valid.sum(1)
                log[name].append(pick(self.accelerator.gather(per_row)).item())


_MULTIMODAL = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


class FastRLOO(FastTrainer):
    """Mixin over ``RLOOTrainer``: log-probabilities, advantages and the loss by fastrl."""

    def _advantages(
        self, rewards: Tensor, weights: Tensor, num_generations: int, output: Any
    ) -> Tensor:
        kl = None
        if self.beta != 0.0:
            policy, reference = self._scored[0], self._scored[-1]
            kl = preset.sequence_sum(policy - reference, output["completion_mask"])
            kl = self.accelerator.gather(kl)
        scores = preset.rloo_rewards(
            rewards, weights, reward_clip_range=self.reward_clip_range, beta=self.beta, kl=kl
        )
        return preset.rloo_advantages(scores, num_generations, self.normalize_advantages)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        if self.aux_loss_enabled:
            return super()._compute_loss(model, inputs)
        completion_ids, mask = inputs["completion_ids"], inputs["completion_mask"]
        logps, entropies, _ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], completion_ids], dim=1),
            torch.cat([inputs["prompt_mask"], mask], dim=1),
            completion_ids.size(1),
            compute_entropy=True,
            **{name: inputs.get(name) for name in _MULTIMODAL},
        )
        out = preset.rloo_loss(
            *(logps, inputs["old_logps"], inputs["advantages"], mask),
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
        )
        self._log_loss_metrics(out.log_ratio.exp(), inputs["advantages"], mask, entropies)
        return out.loss

    @torch.no_grad()
    def _log_loss_metrics(
        self, ratio: Tensor, advantages: Tensor, mask: Tensor, entropies: Tensor
    ) -> None:
        """The metrics of TRL's loss under their names, with one gathering of the rows."""
        low = (ratio < 1 - self.epsilon_low) & (advantages < 0)
        high = (ratio > 1 + self.epsilon_high) & (advantages > 0)
        entropy = preset.sequence_sum(entropies, mask)
        columns = [low.float(), high.float(), entropy, (mask != 0).sum(1).float()]
        gathered = self.accelerator.gather(torch.stack(columns, 1))
        mean, total = gathered.mean(0).tolist(), gathered.sum(0).tolist()
        log = self._metrics["train" if self.model.training else "eval"]
        log["entropy"].append(total[2] / max(total[3], 1.0))
        log["clip_ratio/low_mean"].append(mean[0])
        log["clip_ratio/low_min"].append(float(gathered[:, 0].min()))
        log["clip_ratio/high_mean"].append(mean[1])
        log["clip_ratio/high_max"].append(float(gathered[:, 1].max()))
        log["clip_ratio/region_mean"].append(mean[0] + mean[1])


class FastGRPOTrainer(FastGRPO, GRPOTrainer):
    """``trl.GRPOTrainer`` with the same arguments."""


class FastRLOOTrainer(FastRLOO, RLOOTrainer):
    """``trl.RLOOTrainer`` with the same arguments."""
