"""Conversations with tools through a chat: sampled ids stay, and the text is what the template makes of the whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from envs.scripted_engine import ScriptedEngine, chat_tokenizer

from tidemill.core.types import SamplingParams
from tidemill.envs.chat import EpisodeChat, rollout_seeds
from tidemill.models.tokenizer import Tokenizer, character_tokenizer

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
BEGIN = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
CALLS = (
    "{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endif %}"
)
END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
HERMES = BEGIN + "<|im_start|>{{ m.role }}\n{{ m.content or '' }}" + CALLS + END
STRICT = (  # as Mistral's: results of tools may only follow calls that stand apart
    BEGIN + "{% set before = messages[loop.index0 - 1] %}{% if m.role == 'tool' and before.role == 'assistant' "
    "and not before.tool_calls %}{{ raise_exception('no calls') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content or '' }}" + CALLS + END
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ODD = '<tool_call>{"name":"add","arguments":{"b":2,"a":1}}</tool_call>'  # not as the template writes it


def chat_of(tokenizer: Tokenizer, *texts: str) -> tuple[EpisodeChat, ScriptedEngine]:
    left = list(texts)

    def answer(tokens: Any, params: SamplingParams) -> list[int]:
        ids = [i for each in left.pop(0) for i in tokenizer.encode(each, add_special_tokens=False)]  # letter by letter
        return [*ids, tokenizer.eos_token_id]

    engine = ScriptedEngine(answer)
    params = SamplingParams(stop_ids=(tokenizer.eos_token_id,), max_tokens=400)
    return EpisodeChat(engine, tokenizer, params, context=4000, key="k", seeds=rollout_seeds(0, 0, 0)), engine


def result(call: dict[str, Any], content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "name": "add", "content": content}


def as_client(message: dict[str, Any]) -> dict[str, Any]:
    """The message as a client sends it back: through JSON, with fields of its own and other spaces."""
    sent = {"refusal": None, "annotations": [], **json.loads(json.dumps(message))}
    for call in sent.get("tool_calls") or ():
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
    return sent


@pytest.mark.parametrize("template", [HERMES, STRICT], ids=["Hermes", "strict"])
@pytest.mark.parametrize("text", [CALL, ODD], ids=["as the template", "odd"])
async def test_a_loop_of_calls_is_one_row(template: str, text: str) -> None:
    tokenizer = chat_tokenizer(template)
    chat, engine = chat_of(tokenizer, text, text + text, "three")
    history: list[dict[str, Any]] = [{"role": "user", "content": "1 and 2?"}]
    counts = []
    for _ in range(3):
        reply = await chat.complete(history, tools=TOOLS)
        history.append(as_client(reply.message))
        calls = reply.message.get("tool_calls", [])
        counts.append(len(calls))
        history += [result(call, "3") for call in calls]
    assert counts == [1, 2, 0] and reply.text == reply.message["content"] == "three" and not reply.faults
    assert reply.prompt_tokens == len(engine.prompts[-1]) and reply.tokens == len(engine.completions[-1].tokens)
    (row,) = chat.rows()
    for prompt, made in zip(engine.prompts, engine.completions, strict=True):
        assert row.tokens[: len(prompt)].tolist() == prompt.tolist()
        assert row.tokens[len(prompt) : len(prompt) + len(made.tokens)].tolist() == made.tokens.tolist()
    assert int(row.mask.sum()) == sum(len(made.tokens) for made in engine.completions)
    whole = tokenizer.decode(row.tokens.tolist(), skip_special_tokens=False)
    assert '"name": "add"' in whole and whole.count("<|im_start|>tool\n3<|im_end|>") == 3
    if text == CALL:
        plain = [{k: v for k, v in each.items() if k in ("role", "content", "tool_calls")} for each in history]
        for each in plain:
            for call in each.get("tool_calls", ()):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        assert whole == tokenizer.apply_chat_template(plain, tools=TOOLS, tokenize=False).removesuffix("\n")


async def test_other_tools_are_another_conversation() -> None:
    tokenizer = chat_tokenizer(HERMES)
    chat, engine = chat_of(tokenizer, "one", "two", "three")
    first = [{"role": "user", "content": "a"}]
    one = await chat.complete(first, tools=TOOLS)
    more = [*first, one.message, {"role": "user", "content": "b"}]
    await chat.complete(more, tools=TOOLS)
    other = [{"type": "function", "function": {"name": "sub", "parameters": PARAMETERS}}]
    await chat.complete(more, tools=other)
    rows = chat.rows()
    assert [row.turns for row in rows] == [2, 1]
    assert '"sub"' in tokenizer.decode(engine.prompts[2].tolist()) and '"add"' not in tokenizer.decode(
        engine.prompts[2].tolist()
    )


async def test_a_fault_and_a_call_without_a_template() -> None:
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 ()=,?\n")
    chat, _ = chat_of(tokenizer, "add(1, 2)", "add(1, 2", "3")
    history: list[dict[str, Any]] = [{"role": "user", "content": "1, 2?"}]
    first = await chat.complete(history, tools=TOOLS)
    (call,) = first.message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'} and first.message["content"] is None
    history += [as_client(first.message), result(call, "3")]
    second = await chat.complete(history, tools=TOOLS)
    assert not second.message.get("tool_calls") and "bracket" in second.faults[0]
    history += [second.message, {"role": "user", "content": "again"}]
    await chat.complete(history, tools=TOOLS)
    (row,) = chat.rows()
    assert tokenizer.decode(row.tokens.tolist(), skip_special_tokens=True) == "1, 2?\nadd(1, 2)3\nadd(1, 2again\n3"


async def test_a_client_that_leaves_reasoning_out_goes_on_in_its_row() -> None:
    tokenizer = chat_tokenizer(HERMES + "{# </think> #}")
    chat, _ = chat_of(tokenizer, "<think>hm</think>yes", "<think>oh</think>" + CALL, "end")
    history: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
    for heard in ({"role": "user", "content": "b"}, {"role": "tool", "content": "3"}, None):
        reply = await chat.complete(history, tools=TOOLS)
        sent = as_client(reply.message)
        if heard is not None:
            assert sent.pop("reasoning_content") in ("hm", "oh") and "think" not in (sent["content"] or "")
            history += [sent, heard]
    (row,) = chat.rows()
    assert row.turns == 3


@pytest.mark.parametrize(
    ("shown", "role"),
    [("{{ m.role }}", "developer"), ("{{ m.role if m.role != 'developer' else raise_exception('no') }}", "system")],
)
async def test_a_developer_is_the_system_where_the_template_has_none(shown: str, role: str) -> None:
    tokenizer = chat_tokenizer(HERMES.replace("{{ m.role }}", shown))
    chat, engine = chat_of(tokenizer, "yes")
    await chat.complete([{"role": "developer", "content": "be kind"}, {"role": "user", "content": "a"}])
    assert tokenizer.decode(engine.prompts[0].tolist()).startswith(f"<|im_start|>{role}\nbe kind<|im_end|>")
