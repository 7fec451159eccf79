from fastrl.ops.linear_token_logprobs.api import linear_token_logprobs

__all__ = ["linear_token_logprobs"]
