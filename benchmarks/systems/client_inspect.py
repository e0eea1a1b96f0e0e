"""Inspect of the UK's AI Security Institute: as an OpenAI-compatible provider, and as vLLM."""

from __future__ import annotations

import asyncio
import os

from trials import KEY, MODEL, URL, trial

os.environ |= {"MILL_BASE_URL": f"{URL}/v1", "MILL_API_KEY": KEY, "VLLM_BASE_URL": f"{URL}/v1", "VLLM_API_KEY": KEY}
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageSystem, ChatMessageUser, GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, system_message

OPENAI, VLLM = f"openai-api/mill/{MODEL}", f"vllm/{MODEL}"
HELLO = [ChatMessageSystem(content="Be brief."), ChatMessageUser(content="2 + 2?")]


def evaluated(model: str, **config: object) -> None:
    samples = [Sample(input=f"{i} + 1?", target=str(i + 1)) for i in range(4)]
    task = Task(dataset=samples, solver=[system_message("Be brief."), generate()], scorer=includes())
    log = eval(task, model=model, display="none", log_dir="logs", fail_on_error=True, **config)[0]
    assert log.status == "success", log.error
    assert log.results and log.results.completed_samples == 4 * (log.eval.config.epochs or 1)


@trial("eval, openai-api provider")
def _() -> None:
    evaluated(OPENAI, max_tokens=16)


@trial("eval without max_tokens")
def _() -> None:
    evaluated(OPENAI)


@trial("eval, vllm provider, by its address")
def _() -> None:
    evaluated(VLLM, max_tokens=16)


@trial("eval with seed, penalties, stop, top_k and several choices")
def _() -> None:
    evaluated(
        VLLM,
        max_tokens=16,
        seed=3,
        presence_penalty=0.2,
        frequency_penalty=0.2,
        stop_seqs=["zzz"],
        top_p=0.9,
        top_k=20,
        epochs=2,
    )


@trial("generate with logprobs and two choices")
def _() -> None:
    async def ask() -> None:
        config = GenerateConfig(max_tokens=8, logprobs=True, top_logprobs=2, num_choices=2)
        async with get_model(OPENAI, config=config) as model:
            reply = await model.generate(HELLO)
        assert len(reply.choices) == 2 and all(choice.logprobs for choice in reply.choices)
        assert reply.usage and reply.usage.output_tokens <= 16

    asyncio.run(ask())
