"""Sampling with Hugging Face `generate`, padded batches; its cache is "static" or None (dynamic). See `harness.py`."""

from __future__ import annotations

import time

import torch
import transformers
from serve import given, serve
from transformers import AutoModelForCausalLM

wanted = given()
torch.set_num_threads(wanted["threads"])
dtype = getattr(torch, wanted["dtype"])
model = AutoModelForCausalLM.from_pretrained(wanted["model"], dtype=dtype, attn_implementation=wanted["attention"]).eval()
model.generation_config.eos_token_id = None
model.generation_config.pad_token_id = 0


def answer(prompts: list[list[int]], samples: int, tokens: int | list[int], seed: int) -> dict:
    """Batches of so many sequences, each to the length of its longest: what is beyond a sequence's own is not counted.

    Of many batches `most` are made, and their tokens and seconds are told."""
    torch.manual_seed(seed)
    texts = [prompt for prompt in prompts for _ in range(samples)]
    counts = [tokens] * len(texts) if isinstance(tokens, int) else tokens
    begin = time.perf_counter()
    counts = counts[: wanted["batch"] * wanted["most"]]
    for at in range(0, len(counts), wanted["batch"]):
        generate(torch.tensor(texts[at : at + wanted["batch"]]), max(counts[at : at + wanted["batch"]]))
    return {"seconds": time.perf_counter() - begin, "tokens": sum(counts)}


@torch.inference_mode()
def generate(batch: torch.Tensor, longest: int) -> None:
    done = model.generate(
        batch,
        attention_mask=torch.ones_like(batch),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=longest,
        min_new_tokens=longest,
        use_cache=True,
        cache_implementation=wanted["cache"],
        return_dict_in_generate=True,
        output_logits=True,
    )
    new = done.sequences[:, batch.shape[1] :]
    logprobs = [
        torch.log_softmax(logits.float(), dim=-1).gather(1, new[:, t : t + 1]) for t, logits in enumerate(done.logits)
    ]
    assert torch.isfinite(torch.cat(logprobs, dim=1)).all() and new.shape[1] == longest


serve(
    {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "attention": wanted["attention"],
        "cache": wanted["cache"],
    },
    answer,
)
