"""GRPO steps with TRL's `GRPOTrainer`. See `harness.py`. A request is a number of optimizer steps."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig
from serve import given
from step_task import prompt_texts, score
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

wanted = given()
torch.set_num_threads(wanted["threads"])


class InTurns(TrainerCallback):
    """Waits before a step until it is asked for, and says how long the asked steps took."""

    def __init__(self) -> None:
        self._out = os.fdopen(int(os.environ["BENCHMARK_REPLY"]), "w")
        self._left, self._asked, self._begin = 0, 0, 0.0
        self.spent = dict.fromkeys(("sampling", "preparing"), 0.0)

    def say(self, value: dict) -> None:
        print(json.dumps(value), file=self._out, flush=True)

    def on_step_begin(self, args, state, control, **more):
        if self._left == 0:
            line = sys.stdin.readline()
            if not line:
                os._exit(0)  # nobody asks any more
            self._left = self._asked = json.loads(line)["steps"]
            self.spent = dict.fromkeys(self.spent, 0.0)
            self._begin = time.perf_counter()

    def on_step_end(self, args, state, control, **more):
        self._left -= 1
        if self._left == 0:
            tokens = self._asked * wanted["groups"] * wanted["samples"] * wanted["tokens"]
            seconds = time.perf_counter() - self._begin
            self.spent["preparing"] -= self.spent["sampling"]  # it samples as a part of it
            phases = {phase: each / self._asked for phase, each in self.spent.items()}
            phases["training"] = seconds / self._asked - sum(phases.values())
            self.say({"seconds": seconds, "tokens": tokens, "phases": phases})

    def timed(self, phase: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return work(*given, **named)
            finally:
                self.spent[phase] += time.perf_counter() - begin

        return call


def reward(completions, **more):
    return [score(completion) for completion in completions]


turns = InTurns()
batch, accumulate = wanted["groups"] * wanted["samples"] // wanted["accumulate"], wanted["accumulate"]
model = AutoModelForCausalLM.from_pretrained(wanted["model"], dtype=getattr(torch, wanted["weights"]))
tokenizer = AutoTokenizer.from_pretrained(wanted["model"])
model.generation_config.pad_token_id = tokenizer.pad_token_id
lora = {"r": wanted["lora"], "lora_alpha": 2 * wanted["lora"], "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
with tempfile.TemporaryDirectory() as folder:
    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulate,
        num_generations=wanted["samples"],
        max_completion_length=wanted["tokens"],
        max_steps=100_000,
        learning_rate=1e-5,
        beta=0.0,
        temperature=1.0,
        use_cpu=wanted["device"] == "cpu",
        bf16=wanted["dtype"] == "bfloat16",
        gradient_checkpointing=False,
        cache_implementation=wanted["cache"],
        generation_kwargs={"min_new_tokens": wanted["tokens"]},
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    texts = prompt_texts(wanted["characters"], 4096, wanted["prompt"], seed=0)
    dataset = Dataset.from_dict({"prompt": texts})
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[reward],
        args=config,
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[turns],
        peft_config=LoraConfig(**lora) if wanted["lora"] else None,
    )
    trainer._generate = turns.timed("sampling", trainer._generate)
    trainer._generate_and_score_completions = turns.timed("preparing", trainer._generate_and_score_completions)
    turns.say({"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__})
    trainer.train()
