"""LiteLLM, as its users name an OpenAI-compatible server and as they name vLLM."""

from __future__ import annotations

import asyncio

import litellm
from trials import KEY, MODEL, URL, trial

where = {"api_base": f"{URL}/v1", "api_key": KEY, "timeout": 60, "num_retries": 0}
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]


@trial("completion: openai/ and hosted_vllm/")
def _() -> None:
    said = {
        litellm.completion(f"{kind}/{MODEL}", HELLO, max_tokens=16, temperature=0, **where).choices[0].message.content
        for kind in ("openai", "hosted_vllm")
    }
    assert len(said) == 1


@trial("completion streamed = whole")
def _() -> None:
    asked = {"max_tokens": 16, "seed": 2, "temperature": 1.0, **where}
    parts = litellm.completion(f"openai/{MODEL}", HELLO, stream=True, stream_options={"include_usage": True}, **asked)
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == litellm.completion(f"openai/{MODEL}", HELLO, **asked).choices[0].message.content


@trial("acompletion: 16 at a time")
def _() -> None:
    async def ask() -> None:
        calls = (litellm.acompletion(f"openai/{MODEL}", HELLO, max_tokens=8, seed=i, **where) for i in range(16))
        assert len(await asyncio.gather(*calls)) == 16

    asyncio.run(ask())


@trial("text_completion with logprobs")
def _() -> None:
    reply = litellm.text_completion("The tide", f"text-completion-openai/{MODEL}", max_tokens=8, logprobs=2, **where)
    assert len(reply.choices[0].logprobs.tokens) == reply.usage.completion_tokens


@trial("penalties, logprobs, tool_choice none, vLLM's extras")
def _() -> None:
    reply = litellm.completion(
        f"hosted_vllm/{MODEL}",
        HELLO,
        max_tokens=16,
        presence_penalty=0.3,
        frequency_penalty=0.3,
        logprobs=True,
        top_logprobs=2,
        min_tokens=4,
        repetition_penalty=1.1,
        stop_token_ids=[7],
        **where,
    )
    assert reply.choices[0].logprobs and reply.usage.completion_tokens >= 4


@trial("a refusal is BadRequestError")
def _() -> None:
    try:
        litellm.completion(f"openai/{MODEL}", HELLO, max_tokens=8, top_p=0.0, **where)
    except litellm.BadRequestError as error:
        assert "top_p" in str(error)
    else:
        raise AssertionError("accepted")
