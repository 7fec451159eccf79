from fastrl.ops.token_logprobs.api import LogProbs, token_logprobs, token_logprobs_

__all__ = ["LogProbs", "token_logprobs", "token_logprobs_"]
