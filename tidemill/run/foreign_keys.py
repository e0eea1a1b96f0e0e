"""Keys known from other projects, and keys of features that do not exist here yet.

Data, no code. `recipe` gives both to `config`, which looks up an unknown key here before it guesses. A name with dots is one
place in a recipe; a name without dots stands for itself wherever it is given. docs/from_trl.md and docs/from_others.md list
the first kind.
"""

from __future__ import annotations

STEP_SIZE = "'rollout.groups' times 'rollout.group_size'"
CLIP = "algorithm.constants = { clip_low = 0.2, clip_high = 0.28 }"
UPDATES = "algorithm.updates = { epochs = 1, minibatches = 1 }"
KL = "algorithm.reference = { kl = 0.04 }"
KL_IN_REWARD = 'algorithm.reference = { kl = 0.04, into = "reward" }'
KL_ESTIMATOR = 'algorithm.reference = { kl = 0.04, estimator = "k3" }'
ENTROPY = "algorithm.entropy = { coefficient = 0.001 }"
DROP = 'algorithm.zero_variance = "drop"'
REWARDS = 'env = { kind = "rows", data = "train.jsonl", reward = ["math", "exact"], reward_weights = [0.8, 0.2] }'
ROWS = 'env = { kind = "rows", data = "train.jsonl", eval_data = "test.jsonl", reward = "math" }'
COLUMNS = 'env = { kind = "rows", data = "a.jsonl", reward = "math", prompt_column = "question", answer_column = "answer" }'
REWARD = 'env = "FILE.py:FUNCTION"'
EPOCHS = "'steps': one pass over the tasks is their number divided by 'rollout.groups'"
WANDB = 'record.sinks = ["wandb"]'

TRL = {
    "learning_rate": "'trainer.lr'",
    "num_generations": "'rollout.group_size'",
    "max_completion_length": "'rollout.max_tokens'",
    "per_device_train_batch_size": STEP_SIZE,
    "max_steps": "'steps'",
    "num_train_epochs": EPOCHS,
    "bf16": "'trainer.dtype' and 'engine.dtype'",
    "gradient_checkpointing": "'trainer.checkpointing'",
    "beta": KL,
    "loss_type": "'algorithm'",
    "epsilon": CLIP,
    "num_iterations": UPDATES,
    "eval_steps": "'eval.every'",
    "save_steps": "'record.checkpoint_every'",
    "report_to": "'record.sinks'",
    "reward_funcs": REWARDS,
    "reward_weights": REWARDS,
    "train_dataset": ROWS,
    "eval_dataset": ROWS,
    "output_dir": "'run_dir'",
    "env.reward": REWARDS + ', or path = [...] where kind = "python"',
}

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

VERL = {
    "actor_rollout_ref.model.path": "'model'",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "'trainer.checkpointing'",
    f"{_ACTOR}.optim.lr": "'trainer.lr'",
    f"{_ACTOR}.optim.weight_decay": "'trainer.weight_decay'",
    f"{_ACTOR}.optim.lr_warmup_steps": "'trainer.warmup_steps'",
    f"{_ACTOR}.optim.warmup_style": "'trainer.schedule'",
    f"{_ACTOR}.optim.min_lr_ratio": "'trainer.min_lr_ratio'",
    f"{_ACTOR}.grad_clip": "'trainer.max_grad_norm'",
    f"{_ACTOR}.ppo_mini_batch_size": UPDATES,
    f"{_ACTOR}.ppo_epochs": UPDATES,
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": "'trainer.micro_batch_tokens'",
    f"{_ACTOR}.ppo_max_token_len_per_gpu": "'trainer.micro_batch_tokens'",
    f"{_ACTOR}.clip_ratio": CLIP,
    f"{_ACTOR}.clip_ratio_low": CLIP,
    f"{_ACTOR}.clip_ratio_high": CLIP,
    f"{_ACTOR}.entropy_coeff": ENTROPY,
    f"{_ACTOR}.use_kl_loss": KL,
    f"{_ACTOR}.kl_loss_coef": KL,
    f"{_ACTOR}.kl_loss_type": KL_ESTIMATOR,
    f"{_ACTOR}.loss_agg_mode": "'algorithm.reduction'",
    f"{_ROLLOUT}.n": "'rollout.group_size'",
    f"{_ROLLOUT}.temperature": "'rollout.temperature'",
    f"{_ROLLOUT}.top_p": "'rollout.top_p'",
    f"{_ROLLOUT}.top_k": "'rollout.top_k'",
    f"{_ROLLOUT}.response_length": "'rollout.max_tokens'",
    f"{_ROLLOUT}.dtype": "'engine.dtype'",
    f"{_ROLLOUT}.max_model_len": "'engine.context'",
    f"{_ROLLOUT}.max_num_seqs": "'engine.max_sequences'",
    f"{_ROLLOUT}.gpu_memory_utilization": "'engine.kv_memory_mb'",
    "rollout.n": "'rollout.group_size'",
    "data.train_files": ROWS,
    "data.val_files": ROWS,
    "data.prompt_key": COLUMNS,
    "data.train_batch_size": "'rollout.groups'",
    "data.max_prompt_length": "'engine.context'",
    "data.max_response_length": "'rollout.max_tokens'",
    "data.shuffle": "'data.order'",
    "custom_reward_function.path": REWARD,
    "custom_reward_function.name": REWARD,
    "critic.optim.lr": "'algorithm.critic.lr'",
    "algorithm.adv_estimator": "'algorithm.advantage'",
    "algorithm.norm_adv_by_std_in_grpo": "'algorithm.advantage'",
    "algorithm.use_kl_in_reward": KL_IN_REWARD,
    "algorithm.kl_ctrl.kl_coef": KL_IN_REWARD,
    "algorithm.filter_groups.enable": DROP,
    "trainer.total_training_steps": "'steps'",
    "trainer.total_epochs": EPOCHS,
    "trainer.save_freq": "'record.checkpoint_every'",
    "trainer.max_actor_ckpt_to_keep": "'record.checkpoints'",
    "trainer.test_freq": "'eval.every'",
    "trainer.logger": "'record.sinks'",
    "trainer.project_name": "'record.project'",
    "trainer.experiment_name": "'run_dir'",
    "trainer.default_local_dir": "'run_dir'",
}

PRIME_RL = {
    "model.name": "'model'",
    "max_async_level": "'max_lag'",
    "async_level": "'max_lag'",
    "max_off_policy_steps": "'max_lag'",
    "batch_size": STEP_SIZE,
    "rollouts_per_example": "'rollout.group_size'",
    "seq_len": "'engine.context'",
    "max_model_len": "'engine.context'",
    "sampling.max_tokens": "'rollout.max_tokens'",
    "sampling.temperature": "'rollout.temperature'",
    "orchestrator.sampling.max_tokens": "'rollout.max_tokens'",
    "orchestrator.sampling.temperature": "'rollout.temperature'",
    "orchestrator.eval.interval": "'eval.every'",
    "max_completion_tokens": "'rollout.max_tokens'",
    "trainer.optim.lr": "'trainer.lr'",
    "trainer.optim.weight_decay": "'trainer.weight_decay'",
    "trainer.model.seq_len": "'engine.context'",
    "trainer.model.ac.freq": "'trainer.checkpointing'",
    "eval.interval": "'eval.every'",
    "ckpt.interval": "'record.checkpoint_every'",
    "ckpt.keep_last": "'record.checkpoints'",
    "weight_broadcast.type": "'placement.sync.transport'",
    "wandb.project": "'record.project'",
    "output_dir": "'run_dir'",
}

OPENRLHF = {
    "pretrain": "'model'",
    "prompt_data": ROWS,
    "eval_dataset": ROWS,
    "input_key": COLUMNS,
    "label_key": COLUMNS,
    "actor_learning_rate": "'trainer.lr'",
    "critic_learning_rate": "'algorithm.critic.lr'",
    "lr_scheduler": "'trainer.schedule'",
    "lr_warmup_ratio": "'trainer.warmup_steps'",
    "l2": "'trainer.weight_decay'",
    "adam_betas": "'trainer.betas'",
    "max_norm": "'trainer.max_grad_norm'",
    "n_samples_per_prompt": "'rollout.group_size'",
    "rollout_batch_size": "'rollout.groups'",
    "train_batch_size": STEP_SIZE,
    "micro_train_batch_size": "'trainer.micro_batch_tokens'",
    "micro_rollout_batch_size": "'engine.max_sequences'",
    "generate_max_len": "'rollout.max_tokens'",
    "prompt_max_len": "'engine.context'",
    "num_episodes": EPOCHS,
    "max_epochs": UPDATES,
    "advantage_estimator": "'algorithm.advantage'",
    "eps_clip": CLIP,
    "eps_clip_low_high": CLIP,
    "init_kl_coef": KL_IN_REWARD,
    "use_kl_loss": KL,
    "kl_estimator": KL_ESTIMATOR,
    "entropy_loss_coef": ENTROPY,
    "dynamic_filtering": DROP,
    "async_train": "'max_lag'",
    "async_queue_size": "'max_lag'",
    "vllm_num_engines": "'placement.engines'",
    "vllm_gpu_memory_utilization": "'engine.kv_memory_mb'",
    "full_determinism": "'deterministic'",
    "max_ckpt_num": "'record.checkpoints'",
    "save_path": "'run_dir'",
    "use_wandb": WANDB,
    "wandb_project": "'record.project'",
}

ANYWHERE = dict.fromkeys(("epochs", "num_epochs", "total_epochs"), EPOCHS)

ELSEWHERE = ANYWHERE | OPENRLHF | PRIME_RL | VERL | TRL

_LORA = "LoRA and other adapters do not exist here yet: every weight of the model is trained"
_SHARDS = (
    "a trainer on several devices or machines does not exist yet: there is one, on one device; on a CPU "
    "placement.trainer_threads gives it more cores"
)
_PARALLEL = (
    "one engine on several devices does not exist yet: each engine has one device; placement.engines says how many there are"
)
_ENGINES = (
    "other engines (vLLM, SGLang) do not exist here yet: Tidemill samples with its own; placement.engines says how many"
)
_MACHINES = "several machines do not exist yet: a run has one; placement is 'local' (processes) or 'inline' (one process)"
_QUANTIZED = "quantised weights do not exist yet: trainer.dtype and engine.dtype are 'float32' or 'bfloat16'"
_OFFLOAD = (
    "offloading does not exist yet: trainer.checkpointing = true and a lower trainer.micro_batch_tokens take less memory"
)
_OPTIMIZERS = "other optimizers do not exist yet: AdamW is the one; trainer.betas, eps and weight_decay set it"
_SPECULATIVE = "speculative decoding does not exist yet: engines sample one token of a sequence at a time"

_MISSING = {
    _LORA: "lora peft peft_config use_peft qlora dora adapter adapters enable_lora lora_r lora_rank lora_alpha "
    "lora_dropout lora_name lora_target_modules target_modules",
    _SHARDS: "fsdp fsdp2 fsdp_config fsdp_size deepspeed zero zero_stage ranks shard shards sharding world_size "
    "num_processes ddp data_parallel data_parallel_size megatron context_parallel context_parallel_size sequence_parallel "
    "sequence_parallel_size ulysses_sequence_parallel_size ring_attn_size n_gpus_per_node gpus num_gpus "
    "actor_num_gpus_per_node actor_rollout_ref.actor.strategy trainer.devices",
    _PARALLEL: "tensor_parallel tensor_parallel_size tensor_model_parallel_size vllm_tensor_parallel_size tp tp_size "
    "pipeline_parallel_size pipeline_model_parallel_size pp pp_size expert_parallel_size ep ep_size engine.devices",
    _ENGINES: "vllm sglang use_vllm vllm_mode vllm_config engine.name engine.backend rollout.name "
    "rollout.backend rollout.engine actor_rollout_ref.rollout.name actor_rollout_ref.rollout.mode",
    _MACHINES: "ray ray_kwargs slurm cluster nnodes nodes num_nodes hosts actor_num_nodes deployment.type",
    _QUANTIZED: "quantization quantize quantization_config load_in_4bit load_in_8bit bnb fp8 int8 gptq awq kv_cache_dtype",
    _OFFLOAD: "offload cpu_offload param_offload optimizer_offload offload_policy adam_offload ac_offloading",
    _OPTIMIZERS: "trainer.optimizer trainer.optim.type trainer.optim.name muon adafactor lion",
    _SPECULATIVE: "speculative speculative_config speculative_model num_speculative_tokens draft_model",
}
_TABLES = {
    "verl": "actor_rollout_ref custom_reward_function reward_model global_profiler",
    "prime-rl": "orchestrator inference ckpt wandb sampling weight_broadcast",
}
NOT_YET = {name: said for said, names in _MISSING.items() for name in names.split()}
NOT_YET |= {
    f"{table}.*": f"a key of {project}'s that has no counterpart here; `tidemill settings` lists all there are"
    for project, tables in _TABLES.items()
    for table in tables.split()
}
"""By name; `TABLE.*` matches any other key in that table."""

NOT_YET_VALUES = {
    "placement": dict.fromkeys(("ray", "slurm", "cluster", "kubernetes", "multi_node"), _MACHINES),
    "engine": dict.fromkeys(("vllm", "sglang", "hf", "transformers", "tgi", "trt-llm"), _ENGINES),
    "trainer": dict.fromkeys(("fsdp", "fsdp2", "deepspeed", "megatron"), _SHARDS) | {"lora": _LORA, "qlora": _LORA},
}
"""Values of a table's `kind`, also when given in place of the table."""
NOT_YET_VALUES |= {f"{table}.kind": values for table, values in NOT_YET_VALUES.items()}
