from fastrl.ops.token_logprobs.api import LogProbs, token_logprobs

__all__ = ["LogProbs", "token_logprobs"]
