"""Structured output by the unmodified `openai` client: every reply that ends is valid, by `jsonschema` and pydantic."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Annotated, Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field
from serving_cases import Running

Word = Annotated[str, Field(max_length=4, pattern="^[a-z]*$")]


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    name: Word


class Household(BaseModel):
    pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]] = Field(min_length=1, max_length=2)
    street: Word | None
    number: int = Field(ge=1, le=99)
    tidy: bool


SMALL: dict[str, Any] = {
    "type": "object",
    "properties": {"word": {"enum": ["tide", "mill"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["word", "count"],
    "additionalProperties": False,
}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "small", "schema": SMALL, "strict": True}}
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


def chat(running: Running, **more: Any) -> Any:
    asked = {"max_completion_tokens": 180, "seed": 5, **more}
    return running.client.chat.completions.create(model=running.name, messages=MESSAGES, **asked)


def expect_small(text: str) -> None:
    jsonschema.validate(json.loads(text), SMALL)


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0}, {"top_p": 0.7}, {"temperature": 2, "extra_body": {"top_k": 9}}]
)
def test_a_schema(chats: Running, sampling: dict[str, Any]) -> None:
    reply = chat(chats, response_format=SCHEMA_FORMAT, n=4, **sampling)
    for choice in reply.choices:
        assert choice.finish_reason == "stop"
        expect_small(choice.message.content)


@pytest.mark.parametrize("seed", range(3))
def test_a_pydantic_model_is_parsed(chats: Running, seed: int) -> None:
    reply = chats.client.chat.completions.parse(
        model=chats.name, messages=MESSAGES, response_format=Household, max_completion_tokens=220, seed=seed
    )
    parsed = reply.choices[0].message.parsed
    assert isinstance(parsed, Household) and 1 <= len(parsed.pets) <= 2


def test_a_streamed_reply_says_the_same(chats: Running) -> None:
    whole = chat(chats, response_format=SCHEMA_FORMAT)
    chunks = chat(chats, response_format=SCHEMA_FORMAT, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    expect_small(text)


def test_any_object(chats: Running) -> None:
    close = str(chats.tokenizer.convert_tokens_to_ids("}"))
    reply = chat(chats, response_format={"type": "json_object"}, logit_bias={close: 30})  # so that it ends
    assert isinstance(json.loads(reply.choices[0].message.content), dict)


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_regex": r"[0-9]{3}-[a-f]{2}"}, r"[0-9]{3}-[a-f]{2}"),
        ({"guided_choice": ["yes", "no (never)"]}, r"yes|no \(never\)"),
        ({"structured_outputs": {"regex": r"\d\d"}}, r"\d\d"),
        ({"structured_outputs": {"choice": ["a", "b"], "json": None}}, "a|b"),
    ],
)
def test_patterns_and_choices_of_vllm(chats: Running, extra: dict[str, Any], pattern: str) -> None:
    for text in (
        chat(chats, extra_body=extra).choices[0].message.content,
        chats.client.completions.create(model=chats.name, prompt="x", max_tokens=40, seed=1, extra_body=extra)
        .choices[0]
        .text,
    ):
        assert re.fullmatch(pattern, text, re.ASCII)


@pytest.mark.parametrize(
    "extra", [{"guided_json": SMALL}, {"guided_json": json.dumps(SMALL)}, {"structured_outputs": {"json": SMALL}}]
)
def test_schemas_of_vllm(chats: Running, extra: dict[str, Any]) -> None:
    expect_small(chat(chats, extra_body=extra).choices[0].message.content)


def test_a_reply_that_is_cut_says_so(chats: Running) -> None:
    reply = chat(chats, response_format=SCHEMA_FORMAT, max_completion_tokens=3)
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].message.content.startswith("{")


async def test_replies_with_and_without_a_schema_run_side_by_side(chats: Running) -> None:
    """Both kinds are what they are alone, though they share every step."""
    kinds = [{"response_format": SCHEMA_FORMAT}, {"max_completion_tokens": 40}]
    alone = [[chat(chats, seed=i, **kind).choices[0].message.content for i in range(4)] for kind in kinds]
    async with chats.asynchronous() as client:

        async def ask(kind: dict[str, Any], seed: int) -> str:
            asked = {"max_completion_tokens": 180, "seed": seed, **kind}
            reply = await client.chat.completions.create(model=chats.name, messages=MESSAGES, **asked)
            return reply.choices[0].message.content

        together = await asyncio.gather(*(ask(kind, i) for i in range(4) for kind in kinds))
    assert [together[::2], together[1::2]] == alone


NESTED = {"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(1200)}}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"response_format": {"type": "json_schema"}}, "json_schema = None: should be an object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "expected a JSON schema"),
        ({"response_format": {"type": "xml"}}, "expected 'text', 'json_object' or 'json_schema'"),
        ({"response_format": "json"}, "should be an object"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json: .*uniqueItems"),
        ({"guided_json": {"type": "object", "not": {}, "x-guidance": {"lenient": True}}}, 'guided_json: .*"not"'),
        ({"guided_json": {"$ref": "file:///etc/passwd"}}, "file:///etc/passwd"),
        ({"guided_json": {"type": "string", "format": "telephone"}}, "telephone"),
        ({"guided_json": NESTED}, "too deep"),
        ({"guided_json": False}, "expected a JSON schema"),
        ({"guided_json": "{"}, "not JSON"),
        ({"guided_regex": "(a"}, "unclosed group"),
        ({"guided_regex": "(?=a)b"}, "look-around"),
        ({"guided_regex": "a\\"}, "backslash"),
        ({"guided_choice": "yes"}, "expected a list of texts"),
        ({"guided_choice": ["yes", 3]}, "expected a list of texts"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "both given"),
        ({"structured_outputs": {"json": SMALL, "regex": "a"}}, "expected one of"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar is not supported"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_cannot_be_followed_is_refused(chats: Running, body: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(chats, extra_body=body)
    assert re.search(said, refused.value.message), refused.value.message
    assert refused.value.param in body
    assert "\n" not in refused.value.message and len(refused.value.message) < 400


def test_a_vocabulary_that_cannot_spell_it(characters: Running) -> None:
    """Letters alone: no brace can ever be sampled, and the client is told before it waits."""
    with pytest.raises(openai.BadRequestError, match=r"cannot be (held|followed)"):
        characters.client.completions.create(
            model=characters.name, prompt="a", max_tokens=4, extra_body={"response_format": {"type": "json_object"}}
        )
