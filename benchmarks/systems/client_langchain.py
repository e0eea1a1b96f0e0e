"""LangChain's classes for OpenAI's interface."""

from __future__ import annotations

import asyncio

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI
from trials import KEY, MODEL, URL, trial

where = {"base_url": f"{URL}/v1", "api_key": KEY, "model": MODEL, "max_retries": 0, "timeout": 60}
chat = ChatOpenAI(**where, temperature=0, max_tokens=16)
HELLO = [SystemMessage("Be brief."), HumanMessage("2 + 2?"), AIMessage("4"), HumanMessage("3 + 3?")]


@trial("ChatOpenAI.invoke, with usage")
def _() -> None:
    reply = chat.invoke(HELLO)
    assert isinstance(reply.content, str) and reply.usage_metadata["output_tokens"] <= 16
    assert reply.response_metadata["finish_reason"] in ("stop", "length")


@trial("ChatOpenAI.stream = invoke")
def _() -> None:
    parts = list(ChatOpenAI(**where, temperature=0, max_tokens=16, stream_usage=True).stream(HELLO))
    assert "".join(part.content for part in parts) == chat.invoke(HELLO).content
    assert any(part.usage_metadata for part in parts)


@trial("ChatOpenAI.batch and abatch")
def _() -> None:
    asked = ["one", "two", "three"]
    assert [r.content for r in chat.batch(asked)] == [r.content for r in asyncio.run(chat.abatch(asked))]


@trial("a chain with a prompt template, stop and logprobs")
def _() -> None:
    chain = ChatPromptTemplate.from_messages([("system", "You are {who}."), ("human", "{text}")]) | chat.bind(
        stop=["zzz"], logprobs=True, top_logprobs=2, seed=1
    )
    reply = chain.invoke({"who": "a miller", "text": "Grind."})
    assert reply.response_metadata["logprobs"]["content"]


@trial("penalties, seed, n and extra_body")
def _() -> None:
    other = ChatOpenAI(
        **where,
        max_tokens=16,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        seed=4,
        n=2,
        extra_body={"min_tokens": 4, "top_k": 20},
    )
    assert len(other.generate([HELLO]).generations[0]) == 2


@trial("OpenAI (completions).invoke and stream")
def _() -> None:
    plain = OpenAI(**where, temperature=0, max_tokens=16)
    assert plain.invoke("The tide") == "".join(plain.stream("The tide"))
