"""TRL's `GRPOTrainer` on the demo's task, its weights kept every few steps. See `harness.py` and `time_to_reward.py`.

A request is {"seed", "folder", "limit_s"}; the answer is the seconds of training up to each kept step. The clock stands
still while weights are written.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
import transformers
import trl
from datasets import Dataset
from reward_task import rows, score
from serve import given, serve
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

wanted = given()
torch.set_num_threads(wanted["threads"])
tokenizer = AutoTokenizer.from_pretrained(wanted["model"])


class Keep(TrainerCallback):
    def __init__(self, folder: Path, trained, limit_s: float) -> None:
        self.folder, self.model, self.limit_s, self.seconds = folder, trained, limit_s, {}

    def on_train_begin(self, args, state, control, **more):
        self.begin = time.perf_counter()

    def on_step_end(self, args, state, control, **more):
        spent = time.perf_counter() - self.begin
        if state.global_step % wanted["every"] == 0:
            self.seconds[state.global_step] = spent
            self.model.save_pretrained(self.folder / f"step-{state.global_step}")
            tokenizer.save_pretrained(self.folder / f"step-{state.global_step}")
            self.begin = time.perf_counter() - spent
        if spent > self.limit_s:
            control.should_training_stop = True


def reward(completions, answer, **more):
    return [score(completion, right) for completion, right in zip(completions, answer, strict=True)]


def answer(seed: int, folder: str, limit_s: float) -> dict:
    model = AutoModelForCausalLM.from_pretrained(wanted["model"], dtype=torch.float32)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    keep = Keep(Path(folder), model, limit_s)
    with tempfile.TemporaryDirectory() as place:
        config = GRPOConfig(
            output_dir=place,
            per_device_train_batch_size=wanted["groups"] * wanted["samples"] // wanted["accumulate"],
            gradient_accumulation_steps=wanted["accumulate"],
            num_generations=wanted["samples"],
            max_completion_length=wanted["tokens"],
            max_steps=wanted["steps"],
            learning_rate=wanted["lr"],
            lr_scheduler_type="constant",
            warmup_steps=0,
            weight_decay=0.0,
            max_grad_norm=1.0,
            beta=0.0,
            epsilon=0.2,
            loss_type="grpo",
            temperature=1.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            cache_implementation=None if wanted["cache"] == "dynamic" else wanted["cache"],
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=seed,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=[reward],
            args=config,
            train_dataset=Dataset.from_list([{"prompt": row["text"], "answer": row["answer"]} for row in rows("train")]),
            processing_class=tokenizer,
            callbacks=[keep],
        )
        trainer.train()
    return {"seconds": keep.seconds}


serve({"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}, answer)
