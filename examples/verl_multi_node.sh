#!/usr/bin/env bash
# GRPO of verl 0.9.1 over several nodes, with fastrl in its driver and its workers.
#
# On the first node:       ray start --head --port 6379
# On each of the others:   ray start --address FIRST_NODE:6379
# On the first node, then: MODEL=... TRAIN=... EVAL=... NODES=2 GPUS=8 examples/verl_multi_node.sh [more=options]
#
# fastrl and verl are installed on every node. verl loads the entry point `verl.plugins` of fastrl in each of its processes;
# VERL_USE_EXTERNAL_MODULES does the same by name and fails aloud if it cannot. FASTRL_VERL=0 trains with verl alone.
set -euo pipefail

export RAY_ADDRESS=auto VERL_USE_EXTERNAL_MODULES=fastrl.integrations.verl_plugin

exec python -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  algorithm.use_kl_in_reward=False \
  data.train_files="${TRAIN:?a parquet file of prompts}" \
  data.val_files="${EVAL:?a parquet file of prompts}" \
  data.train_batch_size=512 \
  data.max_prompt_length=1024 \
  data.max_response_length=4096 \
  actor_rollout_ref.model.path="${MODEL:?a folder with a model}" \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=128 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  actor_rollout_ref.actor.policy_loss.loss_mode=vanilla \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True \
  trainer.n_gpus_per_node="${GPUS:-8}" \
  trainer.nnodes="${NODES:-2}" \
  trainer.total_epochs=1 \
  trainer.logger='[console]' \
  +ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES="$VERL_USE_EXTERNAL_MODULES" \
  "$@"
