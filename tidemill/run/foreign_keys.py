"""Keys known from other projects, and keys of features that do not exist here yet.

`core.config` looks up an unknown key here before it guesses. A name with dots is one place in a recipe; a name without dots
stands for itself wherever it is given. docs/from_trl.md and docs/from_others.md list the first kind.
"""

from __future__ import annotations

from collections.abc import Mapping

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


def by_name(names: Mapping[str, str]) -> dict[str, str]:
    """Sentences by name, from names, separated by spaces, by sentence."""
    return {name: said for said, listed in names.items() for name in listed.split()}


TRL = by_name(
    {
        "'trainer.lr'": "learning_rate",
        "'rollout.group_size'": "num_generations",
        "'rollout.max_tokens'": "max_completion_length",
        STEP_SIZE: "per_device_train_batch_size",
        "'steps'": "max_steps",
        EPOCHS: "num_train_epochs",
        "'trainer.dtype' and 'engine.dtype'": "bf16",
        "'trainer.checkpointing'": "gradient_checkpointing",
        KL: "beta",
        "'algorithm'": "loss_type",
        CLIP: "epsilon",
        UPDATES: "num_iterations",
        "'eval.every'": "eval_steps",
        "'record.checkpoint_every'": "save_steps",
        "'record.sinks'": "report_to",
        REWARDS: "reward_funcs reward_weights",
        ROWS: "train_dataset eval_dataset",
        "'run_dir'": "output_dir",
        REWARDS + ', or path = [...] where kind = "python"': "env.reward",
    }
)

OTHERS = by_name(
    {
        "'model'": "actor_rollout_ref.model.path model.name pretrain",
        "'trainer.checkpointing'": "actor_rollout_ref.model.enable_gradient_checkpointing trainer.model.ac.freq",
        "'trainer.lr'": "actor_rollout_ref.actor.optim.lr trainer.optim.lr actor_learning_rate",
        "'trainer.weight_decay'": "actor_rollout_ref.actor.optim.weight_decay trainer.optim.weight_decay l2",
        "'trainer.warmup_steps'": "actor_rollout_ref.actor.optim.lr_warmup_steps lr_warmup_ratio",
        "'trainer.schedule'": "actor_rollout_ref.actor.optim.warmup_style lr_scheduler",
        "'trainer.min_lr_ratio'": "actor_rollout_ref.actor.optim.min_lr_ratio",
        "'trainer.max_grad_norm'": "actor_rollout_ref.actor.grad_clip max_norm",
        UPDATES: "actor_rollout_ref.actor.ppo_mini_batch_size actor_rollout_ref.actor.ppo_epochs max_epochs",
        "'trainer.micro_batch_tokens'": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu micro_train_batch_size",
        CLIP: "actor_rollout_ref.actor.clip_ratio actor_rollout_ref.actor.clip_ratio_low "
        "actor_rollout_ref.actor.clip_ratio_high eps_clip eps_clip_low_high",
        ENTROPY: "actor_rollout_ref.actor.entropy_coeff entropy_loss_coef",
        KL: "actor_rollout_ref.actor.use_kl_loss actor_rollout_ref.actor.kl_loss_coef use_kl_loss",
        KL_ESTIMATOR: "actor_rollout_ref.actor.kl_loss_type kl_estimator",
        "'algorithm.reduction'": "actor_rollout_ref.actor.loss_agg_mode",
        "'rollout.group_size'": "actor_rollout_ref.rollout.n rollout.n rollouts_per_example n_samples_per_prompt",
        "'rollout.temperature'": "actor_rollout_ref.rollout.temperature sampling.temperature "
        "orchestrator.sampling.temperature",
        "'rollout.top_p'": "actor_rollout_ref.rollout.top_p",
        "'rollout.top_k'": "actor_rollout_ref.rollout.top_k",
        "'rollout.max_tokens'": "actor_rollout_ref.rollout.response_length data.max_response_length sampling.max_tokens "
        "orchestrator.sampling.max_tokens max_completion_tokens generate_max_len",
        "'engine.dtype'": "actor_rollout_ref.rollout.dtype",
        "'engine.context'": "actor_rollout_ref.rollout.max_model_len data.max_prompt_length seq_len max_model_len "
        "trainer.model.seq_len prompt_max_len",
        "'engine.max_sequences'": "actor_rollout_ref.rollout.max_num_seqs micro_rollout_batch_size",
        "'engine.kv_memory_mb'": "actor_rollout_ref.rollout.gpu_memory_utilization vllm_gpu_memory_utilization",
        ROWS: "data.train_files data.val_files prompt_data eval_dataset",
        COLUMNS: "data.prompt_key input_key label_key",
        "'rollout.groups'": "data.train_batch_size rollout_batch_size",
        "'data.order'": "data.shuffle",
        REWARD: "custom_reward_function.path custom_reward_function.name",
        "'algorithm.critic.lr'": "critic.optim.lr critic_learning_rate",
        "'algorithm.advantage'": "algorithm.adv_estimator algorithm.norm_adv_by_std_in_grpo advantage_estimator",
        KL_IN_REWARD: "algorithm.use_kl_in_reward algorithm.kl_ctrl.kl_coef init_kl_coef",
        DROP: "algorithm.filter_groups.enable dynamic_filtering",
        "'steps'": "trainer.total_training_steps",
        EPOCHS: "trainer.total_epochs num_episodes",
        "'record.checkpoint_every'": "trainer.save_freq ckpt.interval",
        "'record.checkpoints'": "trainer.max_actor_ckpt_to_keep ckpt.keep_last max_ckpt_num",
        "'eval.every'": "trainer.test_freq orchestrator.eval.interval eval.interval",
        "'record.sinks'": "trainer.logger",
        "'record.project'": "trainer.project_name wandb.project wandb_project",
        "'run_dir'": "trainer.experiment_name trainer.default_local_dir output_dir save_path",
        "'max_lag'": "max_async_level async_level max_off_policy_steps async_train async_queue_size",
        STEP_SIZE: "batch_size train_batch_size",
        "'placement.sync.transport'": "weight_broadcast.type",
        "'trainer.betas'": "adam_betas",
        "'trainer.moments_on'": "actor_rollout_ref.actor.fsdp_config.optimizer_offload optimizer_offload adam_offload",
        "'placement.share'": "actor_rollout_ref.rollout.free_cache_engine vllm_enable_sleep colocate_all_models "
        "vllm_enable_sleep_mode",
        "'placement.engines'": "vllm_num_engines",
        "'deterministic'": "full_determinism",
        WANDB: "use_wandb",
    }
)
"""Keys of verl, prime-rl and OpenRLHF."""

ANYWHERE = dict.fromkeys(("epochs", "num_epochs", "total_epochs"), EPOCHS)

ELSEWHERE = ANYWHERE | OTHERS | TRL

_LORA = (
    "a LoRA adapter is trained by trainer.lora.rank = 16, with trainer.lora.alpha, targets, rslora and dropout, QLoRA by "
    "trainer.lora.base_dtype = 'nf4', and several of them by policies; other adapters do not exist here yet"
)
_SHARDS = (
    "trainer.ranks says how many processes train together, on one machine, and trainer.shard what each of them holds; "
    "several machines do not exist yet"
)
_DEVICES = (
    "every visible CUDA device is used: CUDA_VISIBLE_DEVICES says which there are, and placement.devices which of them "
    "train and which sample"
)
_ZERO = f"{_SHARDS}; trainer.kind = 'deepspeed' with trainer.shard = 'zero1' or 'zero2' is DeepSpeed's own ZeRO"
_PARALLEL = (
    "an engine of the kind 'native' has one device, and placement.engines says how many there are; engine.kind = 'vllm' or "
    "'sglang' with engine.tensor_parallel puts one on several"
)
_ENGINES = (
    "engine.kind says which engine samples: 'native', 'vllm', 'sglang' or 'transformers'; others, such as TensorRT-LLM, do "
    "not exist here yet"
)
_MACHINES = "several machines do not exist yet: a run has one; placement is 'local' (processes) or 'inline' (one process)"
_QUANTIZED = (
    "quantised weights do not exist yet but for a frozen base under an adapter, trainer.lora.base_dtype = 'nf4'; "
    "trainer.dtype and engine.dtype are 'float32' or 'bfloat16'"
)
_OFFLOAD = (
    "only AdamW's moments can lie in the host's memory, by trainer.moments_on = 'host'; trainer.checkpointing = true and a "
    "lower trainer.micro_batch_tokens take less memory, too"
)
_OPTIMIZERS = "other optimizers do not exist yet: AdamW is the one; trainer.betas, eps and weight_decay set it"
_SPECULATIVE = (
    "engine.speculation.method says where the native engine finds drafts: in a sequence's own tokens ('ngram') or also in "
    "other replies to its prompt ('rollouts'); vLLM has its own, by engine.options.speculative-config; draft models for the "
    "native engine do not exist yet"
)

_MISSING = {
    _LORA: "lora peft peft_config use_peft qlora dora adapter adapters enable_lora lora_r lora_rank lora_alpha "
    "lora_dropout lora_name lora_target_modules target_modules",
    _SHARDS: "fsdp fsdp2 fsdp_config fsdp_size ranks shard shards sharding world_size "
    "num_processes ddp data_parallel data_parallel_size megatron context_parallel context_parallel_size sequence_parallel "
    "sequence_parallel_size ulysses_sequence_parallel_size ring_attn_size actor_rollout_ref.actor.strategy",
    _DEVICES: "n_gpus_per_node gpus num_gpus gpu_ids actor_num_gpus_per_node ref_num_gpus_per_node",
    _ZERO: "deepspeed deepspeed_config deepspeed_plugin ds_config zero zero_stage",
    _PARALLEL: "tensor_parallel tensor_parallel_size tensor_model_parallel_size vllm_tensor_parallel_size tp tp_size "
    "pipeline_parallel_size pipeline_model_parallel_size pp pp_size expert_parallel_size ep ep_size",
    _ENGINES: "vllm sglang use_vllm vllm_mode vllm_config engine.name engine.backend rollout.name "
    "rollout.backend rollout.engine actor_rollout_ref.rollout.name actor_rollout_ref.rollout.mode",
    _MACHINES: "ray ray_kwargs slurm cluster nnodes nodes num_nodes hosts actor_num_nodes deployment.type",
    _QUANTIZED: "quantization quantize quantization_config load_in_4bit load_in_8bit bnb fp8 int8 gptq awq kv_cache_dtype",
    _OFFLOAD: "offload cpu_offload param_offload offload_policy ac_offloading",
    _OPTIMIZERS: "trainer.optimizer trainer.optim.type trainer.optim.name muon adafactor lion",
    _SPECULATIVE: "speculative speculative_config speculative_model num_speculative_tokens draft_model",
}
_TABLES = {
    "verl": "actor_rollout_ref custom_reward_function reward_model global_profiler",
    "prime-rl": "orchestrator inference ckpt wandb sampling weight_broadcast",
}
NOT_YET = by_name(_MISSING)
NOT_YET |= {
    f"{table}.*": f"a key of {project}'s that has no counterpart here; `tidemill settings` lists all there are"
    for project, tables in _TABLES.items()
    for table in tables.split()
}
"""By name; `TABLE.*` matches any other key in that table."""

NOT_YET_VALUES = {
    "placement": dict.fromkeys(("ray", "slurm", "cluster", "kubernetes", "multi_node"), _MACHINES),
    "engine": dict.fromkeys(("hf", "tgi", "trt-llm"), _ENGINES),
    "trainer": dict.fromkeys(("fsdp", "fsdp2", "megatron"), _SHARDS) | {"lora": _LORA, "qlora": _LORA},
}
"""Values of a table's `kind`, also when given in place of the table."""
NOT_YET_VALUES |= {f"{table}.kind": values for table, values in NOT_YET_VALUES.items()}
NOT_YET_VALUES["engine"] = NOT_YET_VALUES["engine"] | dict.fromkeys(("vllm", "sglang", "transformers", "openai"), _ENGINES)
