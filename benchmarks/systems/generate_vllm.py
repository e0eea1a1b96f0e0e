"""Sampling with vLLM, offline. See `harness.py`."""

from __future__ import annotations

import time

from serve import given, serve


def main() -> None:
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    wanted = given()
    llm = LLM(
        wanted["model"],
        dtype=wanted["dtype"],
        skip_tokenizer_init=True,
        max_model_len=wanted["context"],
        max_num_seqs=wanted["sequences"],
        enable_prefix_caching=True,
        seed=0,
        **wanted.get("more", {}),
    )

    def answer(prompts: list[list[int]], samples: int, tokens: int | list[int], seed: int, replies: bool = False) -> dict:
        texts = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(samples)]
        counts = [tokens] * len(texts) if isinstance(tokens, int) else tokens
        params = [
            SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, logprobs=0, seed=None, detokenize=False)
            for n in counts
        ]
        begin = time.perf_counter()
        done = llm.generate(texts, params, use_tqdm=False)
        made = sum(len(each.outputs[0].token_ids) for each in done)
        assert all(len(each.outputs[0].logprobs) == len(each.outputs[0].token_ids) for each in done)
        found = {"seconds": time.perf_counter() - begin, "tokens": made}
        return found | ({"replies": [list(each.outputs[0].token_ids) for each in done]} if replies else {})

    serve({"vllm": vllm.__version__, "torch": torch.__version__, "more": wanted.get("more", {})}, answer)


if __name__ == "__main__":
    main()
