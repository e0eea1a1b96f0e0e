"""TRL's own losses, advantages and corrections on given tensors. See `harness.py` and `against_trl.py`.

A request is {"folder", "cases"}; `given.npz` is read there and `found.npz` written, with the arrays of case i as "i/NAME".
Trainers are TRL's, made by their own constructors around a random model of a few thousand weights, and what computes is run
as it stands. Put in its place is only where numbers come from: generation, rewards, and the forward passes, whose logprobs
(or logits) are the given ones and the leaf of the gradient. The asynchronous trainer's constructor wants a server: it alone
gets its few attributes by hand. Everything is float64 but what TRL itself rounds.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
import trl
from accelerate import Accelerator
from datasets import Dataset
from serve import given, serve
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, _AsyncRolloutLoop
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.trainer.utils import split_tensor_dict

wanted = given()
torch.set_num_threads(wanted["threads"])
place = tempfile.TemporaryDirectory()
WORDS, PAD, EOS = 61, 61, 63
Found = dict[str, Any]


def pieces() -> tuple[str, Any]:
    """A folder with a tiny random model, and a tokenizer whose words are w0, w1, ..."""
    words = {f"w{i}": i for i in range(WORDS)} | {"<pad>": PAD, "<bos>": 62, "<eos>": EOS}
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), **special)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **shape)).save_pretrained(place.name)
    tokenizer.save_pretrained(place.name)
    return place.name, tokenizer


model, tokenizer = pieces()
torch.set_default_dtype(torch.float64)


def made(trainer: type, config: type, settings: Found, rows: dict[str, list[str]], of: Any = model, **more: Any) -> Any:
    common = {"output_dir": place.name, "use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True}
    args = config(**common, gradient_checkpointing=False, **settings)
    found = trainer(model=of, args=args, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer, **more)
    found.model.train()
    return found


class Step:
    """The answers of a step as TRL's trainers of policies ask for them."""

    def __init__(self, t: Found, feed: Found) -> None:
        def tensor(name: str) -> Any:
            return torch.tensor(t[feed[name]]) if feed.get(name) else None

        self.feed, self.lengths, self.groups = feed, t[feed["lengths"]].tolist(), t["groups"].tolist()
        self.old, self.mu, self.ref, self.tools = (tensor(name) for name in ("old", "mu", "ref", "tools"))
        self.width, self.rows, self.rewards = max(self.lengths), slice(None), np.atleast_2d(t[feed["rewards"]].T)
        self.live, self.entropy = (tensor(name)[:, : self.width].requires_grad_() for name in ("live", "entropy"))
        self.truncated = t[feed["truncated"]] if feed.get("truncated") else np.zeros(len(self.lengths), bool)

    def scorers(self) -> list[Callable[..., list[float | None]]]:
        def scorer(k: int) -> Callable[..., list[float | None]]:
            def score(completions: list[str], **_: Any) -> list[float | None]:
                rewards = (float(self.rewards[k][int(completion)]) for completion in completions)
                return [None if np.isnan(reward) else reward for reward in rewards]

            score.__name__ = f"reward_{k}"
            return score

        return [scorer(k) for k in range(len(self.rewards))]

    def generated(self) -> tuple[list[list[int]], ...]:
        """Prompts and completions as ids, and the completions as text: the row's number."""
        ends = [1 if cut else EOS for cut in self.truncated]
        answers = [[1] * (n - 1) + [end] for n, end in zip(self.lengths, ends, strict=True)]
        return [[2, 3] for _ in self.lengths], answers, [str(i) for i in range(len(self.lengths))]

    def lists(self, values: Any) -> list[list[float]] | None:
        return None if values is None else [row[:n].tolist() for row, n in zip(values, self.lengths, strict=True)]

    def forward(self, reference: Any) -> Callable[..., Any]:
        def logprobs(asked: Any, *_: Any, **__: Any) -> tuple[Any, ...]:
            if asked is reference and reference is not None:
                return self.ref[:, : self.width], None, None
            if not torch.is_grad_enabled():
                return self.old[:, : self.width], None, None
            live, bound = self.live, self.feed.get("clamp")
            if bound:
                live = self.old[:, : self.width] + (live - self.old[:, : self.width]).clamp(-bound, bound)
            return live[self.rows], self.entropy[self.rows], None

        return logprobs


def policy(trainer: type, config: type, case: Found, t: Found) -> Found:
    """GRPO, GMPO, RLOO: from rewards to the gradient, in `micro` micro-batches."""
    step, n, micro = Step(t, case["feed"]), len(t["groups"]), case["micro"]
    sizes = {"per_device_train_batch_size": n // micro, "gradient_accumulation_steps": micro, "num_iterations": 2}
    settings = sizes | {"num_generations": case["group"], "max_completion_length": case["longest"]} | case["settings"]
    it = made(trainer, config, settings, {"prompt": ["w2 w3"] * n}, reward_funcs=step.scorers())
    prompts, answers, texts = step.generated()
    if config is trl.RLOOConfig:
        it._generate = lambda _: (prompts, answers, texts)
    else:
        tools, sampled = step.lists(step.tools), step.lists(step.mu)
        it._generate = lambda _: (prompts, answers, tools, texts, sampled, {}, None, None)
        it.use_vllm = "vllm_importance_sampling_mode" in settings
    it._get_per_token_logps_and_entropies = step.forward(it.ref_model)
    it.current_gradient_accumulation_steps = micro
    batch = it._generate_and_score_completions([{"prompt": "w2 w3"} for _ in range(n)])
    total = torch.zeros(())
    for number, part in enumerate(split_tensor_dict(batch, micro)):
        step.rows = slice(number * n // micro, (number + 1) * n // micro)
        loss = it.compute_loss(it.model, part)
        loss.backward()
        total += loss.detach()
    found = {"loss": total, "gradient": step.live.grad, "advantages": batch["advantages"]}
    if step.entropy.grad is not None:
        found["entropy gradient"] = step.entropy.grad
    if (factors := batch.get("importance_sampling_ratio")) is not None:
        found["factors"] = factors.expand(step.live.shape) * batch["completion_mask"]
    return found


def asynchronous(case: Found, t: Found) -> Found:
    """AsyncGRPO: its worker's advantages, group by group, then its trainer's loss on flat tokens."""
    step = Step(t, case["feed"])
    worker, samples = object.__new__(_AsyncRolloutLoop), []
    worker._env_reward_types, worker._provides_rollout_reward = [], False
    worker.reward_funcs = step.scorers()
    worker.reward_func_names = [each.__name__ for each in worker.reward_funcs]
    prompts, answers, texts = step.generated()
    for group in np.unique(step.groups):
        own = np.flatnonzero(np.array(step.groups) == group)
        rows = [
            [SimpleNamespace(input_ids=answers[i], completion_mask=[1] * step.lengths[i], old_log_probs=[])] for i in own
        ]
        chosen = ([each[i] for i in own] for each in (prompts, texts, answers))
        named = dict(zip(("prompts", "completions", "completions_ids"), chosen, strict=True))
        zeros = {"tool_call_counts": [0] * len(own), "tool_failure_counts": [0] * len(own), "rollout_rewards": []}
        numbers = {"model_version": 0, "group_id": int(group), "env_rewards": [], "reward_kwargs": {}}
        made_up = RolloutGroup(**named, completions_sequences=rows, **zeros, **numbers)
        samples += asyncio.run(worker._score_group(made_up))
    it = object.__new__(AsyncGRPOTrainer)
    vars(it).update(case["settings"], accelerator=Accelerator(cpu=True), aux_loss_enabled=False)
    it.current_gradient_accumulation_steps, it._metrics = 1, {"train": defaultdict(list)}
    it._step_forward_tokens = it._step_trained_tokens = it._step_seq_len_weighted = it._step_samples = it._step_forward_s = (
        0.0
    )
    trained = torch.arange(step.width) < torch.tensor(step.lengths)[:, None]
    row = torch.arange(len(step.lengths)).repeat_interleave(torch.tensor(step.lengths))
    count = torch.tensor([len(row)])
    advantages = torch.tensor([each.advantage for each in samples])
    flat = {"token_index": torch.arange(len(row)), "advantages": advantages[row], "segment_id": row}
    flat |= {"old_log_probs": step.mu[:, : step.width][trained], "attention_mask": torch.ones(len(row), dtype=torch.long)}
    unused = ("input_ids", "position_ids", "shift_labels", "tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
    batch = {name: value[None] for name, value in flat.items()} | {name: torch.zeros_like(row)[None] for name in unused}
    batch |= {"tree_max_seqlens": torch.tensor([[1, 1]]), "global_n_tokens": count, "global_n_forward_tokens": count}
    values = SimpleNamespace(log_probs=step.live[trained][None], entropy=torch.zeros(1, len(row)))
    batch |= {"mean_seq_len": torch.tensor([1.0])}
    torch.set_default_dtype(torch.float32)  # its metrics count on it
    try:
        loss = it.compute_loss(lambda **_: values, batch)
    finally:
        torch.set_default_dtype(torch.float64)
    loss.backward()
    return {"loss": loss.detach(), "gradient": step.live.grad, "advantages": advantages}


class Answers:
    """Single answers, each to a prompt of two tokens, as rows of ids; and a model that gives them their logprobs."""

    def __init__(self, lengths: Any, first: int) -> None:
        self.trained = torch.arange(int(lengths.max())) < torch.tensor(lengths)[:, None]
        prompt = torch.ones(len(lengths), 2, dtype=torch.long)
        self.mask = torch.cat([prompt * 0, self.trained.long()], dim=1)
        self.attended = torch.cat([prompt, self.trained.long()], dim=1)
        self.ids = torch.cat([prompt * first, torch.where(self.trained, 1, PAD)], dim=1)

    def model(self, logprobs: Any) -> Callable[..., Any]:
        def run(labels: Any, **_: Any) -> Any:
            kept = labels[:, 1:] != -100
            zeros = torch.zeros(kept.shape)
            values = zeros.masked_scatter(kept, logprobs[:, : self.trained.shape[1]][self.trained])
            return SimpleNamespace(log_probs=values, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

        return run

    def expect_zeros_elsewhere(self, real: Any) -> None:
        """A real model's logprobs are 0 where `model` above says so: TRL sums them without a mask."""
        labels = self.ids.masked_fill(self.mask == 0, -100)
        found = real(input_ids=self.ids, attention_mask=self.attended, labels=labels, fused_lm_head=True).log_probs
        assert (found[labels[:, 1:] == -100] == 0).all() and (found[labels[:, 1:] != -100] < 0).all()


PAIR = {"prompt": ["w2 w3"] * 2, "chosen": ["w4 w5"] * 2, "rejected": ["w6"] * 2}


def dpo(case: Found, t: Found) -> Found:
    answers, live = Answers(t["pair_lengths"], 2), torch.tensor(t["pair_live"]).requires_grad_()
    it = made(trl.DPOTrainer, trl.DPOConfig, case["settings"], PAIR)
    answers.expect_zeros_elsewhere(it.model)
    it.ref_model = answers.model(torch.tensor(t["pair_ref"]))
    batch = {"input_ids": answers.ids, "attention_mask": answers.attended, "completion_mask": answers.mask}
    loss = it.compute_loss(answers.model(live), batch)
    loss.backward()
    return {"loss": loss.detach(), "gradient": live.grad}


def kto(case: Found, t: Found) -> Found:
    own, others = Answers(t["pair_lengths"], 2), Answers(t["pair_lengths"], 5)  # told apart by how their prompts begin
    live = torch.tensor(t["pair_live"]).requires_grad_()
    rows = {"prompt": ["w2 w3"] * 4, "completion": ["w4", "w5", "w6", "w7"], "label": [True, False] * 2}
    it = made(trl.KTOTrainer, trl.KTOConfig, case["settings"] | {"per_device_train_batch_size": 4}, rows)

    def either(logprobs: Any, shifted: str) -> Callable[..., Any]:
        models = {2: own.model(logprobs), 5: others.model(torch.tensor(t[shifted]))}
        return lambda input_ids, **more: models[int(input_ids[0, 0])](**more)

    it.ref_model = either(torch.tensor(t["pair_ref"]), case["feed"]["shifted_ref"])
    batch = {"input_ids": own.ids, "attention_mask": own.attended, "completion_mask": own.mask}
    batch |= {"KL_input_ids": others.ids, "KL_attention_mask": others.attended, "KL_completion_mask": others.mask}
    batch["label"] = torch.tensor(t["desirable"])
    loss = it.compute_loss(either(live, case["feed"]["shifted_live"]), batch)
    loss.backward()
    return {"loss": loss.detach(), "gradient": live.grad}


def from_logits(trainer: type, config: type, case: Found, t: Found) -> Found:
    """CPO and ORPO, which take their own logprobs: rows of a prompt and an answer, the chosen ones first."""
    lengths, ids, prompt = (
        torch.tensor(t[case["feed"]["lengths"]]),
        torch.tensor(t["pair_ids"]),
        case["feed"].get("prompt", 1),
    )
    logits = torch.tensor(t["logits"]).requires_grad_()
    it = made(trainer, config, case["settings"], PAIR, of=transformers.AutoModelForCausalLM.from_pretrained(model))
    attended = (torch.arange(ids.shape[1]) < prompt + lengths[:, None]).long()
    labels = ids.masked_fill(attended == 0, -100)
    labels[:, :prompt] = -100
    halves = {"input_ids": ids, "attention_mask": attended, "labels": labels}
    parts = {name: value.chunk(2) for name, value in halves.items()}
    batch = {f"{which}_{name}": part[i] for name, part in parts.items() for i, which in enumerate(("chosen", "rejected"))}
    loss = it.compute_loss(lambda *_, **__: SimpleNamespace(logits=logits), batch)
    loss.backward()
    return {"loss": loss.detach(), "gradient": logits.grad}


def reward(case: Found, t: Found) -> Found:
    scores, n = torch.tensor(t["scores"])[:, None].requires_grad_(), len(t["scores"])
    config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config.num_labels, config.pad_token_id = 1, PAD
    rows = {name: PAIR[name] for name in ("chosen", "rejected")}
    it = made(trl.RewardTrainer, trl.RewardConfig, case["settings"], rows, of=LlamaForSequenceClassification(config).float())
    batch = {"input_ids": torch.ones(n, 2), "attention_mask": torch.ones(n, 2), "margin": torch.tensor(t["margin"])}
    loss = it.compute_loss(lambda **_: SimpleNamespace(logits=scores), batch)
    loss.backward()
    return {"loss": loss.detach(), "gradient": scores.grad[:, 0]}


def online(case: Found, t: Found) -> Found:
    """OnlineDPO: two answers to each prompt, of which its own code takes the better one for chosen."""
    answers, live = Answers(t["pair_lengths"], 2), torch.tensor(t["pair_live"]).requires_grad_()
    p, width = len(live) // 2, answers.trained.shape[1]

    def score(completions: list[str], **_: Any) -> list[float]:
        return t["pair_rewards"].tolist()

    asked = {"reward_funcs": [score], "of": transformers.AutoModelForCausalLM.from_pretrained(model)}
    it = made(OnlineDPOTrainer, OnlineDPOConfig, case["settings"], {"prompt": ["w2 w3"] * p}, **asked)
    prompt = torch.ones(2 * p, 2, dtype=torch.long)
    it._generate = lambda *_: (prompt, prompt, answers.ids[:, 2:], answers.trained.long(), None)
    values = {True: live, False: torch.tensor(t["pair_ref"])}
    it._forward = lambda *_: values[torch.is_grad_enabled()][:, :width]
    loss = it.training_step(it.model, {"prompt": ["w2 w3"] * p})
    return {"loss": loss, "gradient": live.grad}


RUNS: dict[str, Callable[[Found, Found], Found]] = {
    "GRPO": lambda case, t: policy(trl.GRPOTrainer, trl.GRPOConfig, case, t),
    "GMPO": lambda case, t: policy(GMPOTrainer, GMPOConfig, case, t),
    "RLOO": lambda case, t: policy(trl.RLOOTrainer, trl.RLOOConfig, case, t),
    "AsyncGRPO": asynchronous,
    "DPO": dpo,
    "KTO": kto,
    "CPO": lambda case, t: from_logits(CPOTrainer, CPOConfig, case, t),
    "ORPO": lambda case, t: from_logits(ORPOTrainer, ORPOConfig, case, t),
    "Reward": reward,
    "OnlineDPO": online,
}


def answer(folder: str, cases: list[Found]) -> Found:
    with np.load(Path(folder) / "given.npz") as file:
        t = dict(file)
    found = {}
    for number, case in enumerate(cases):
        for name, value in RUNS[case["trainer"]](case, t).items():
            found[f"{number}/{name}"] = np.asarray(value)
    np.savez(Path(folder) / "found.npz", **found)
    return {"cases": len(cases)}


serve({"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}, answer)
