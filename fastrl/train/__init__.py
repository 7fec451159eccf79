"""The trainer: a lean PPO and GRPO loop on the public operations of fastrl."""
