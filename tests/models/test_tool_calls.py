"""Tool calls in replies: each family's form is read, and hostile text of any shape is a sentence and never an exception."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
from envs.scripted_engine import CHATML, chat_tokenizer

from tidemill.models.chat_template import as_messages
from tidemill.models.tokenizer import Tokenizer, character_tokenizer
from tidemill.models.tool_calls import is_reply, read_reply, takes_tools, told

ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": ADD}}]
ONE, TWO = ("add", {"a": 1, "b": "x"}), ("add", {"a": 2, "b": '"é"\n'})
QUOTED = json.dumps(TWO[1], ensure_ascii=False)
WITH = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
THINKS = "{{ '' if true else '</think>' }}"
FORMS: dict[str, tuple[str, str]] = {  # family -> (what its template has in it, a reply with both calls)
    "Hermes": (
        "<tool_call>",
        f'so <tool_call>\n{{"name": "add", "arguments": {{"a": 1, "b": "x"}}}}\n</tool_call>\n'
        f'<tool_call>{{"name": "add", "arguments": {QUOTED}}}</tool_call>',
    ),
    "Qwen coder": (
        "<function= <tool_call>",
        "so <tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n</function>"
        "\n</tool_call>"
        '<tool_call>\n<function=add>\n<parameter=a>2</parameter><parameter=b>"é"\n\n</parameter></function></tool_call>',
    ),
    "GLM": (
        "<arg_key> <tool_call>",
        "so <tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>x</arg_value>\n"
        '</tool_call><tool_call>add<arg_key>a</arg_key><arg_value>2</arg_value><arg_key>b</arg_key><arg_value>"é"\n</arg_value>'
        "</tool_call>",
    ),
    "Llama": (
        "<|python_tag|>",
        f'so <|python_tag|>{{"name": "add", "parameters": {{"a": 1, "b": "x"}}}}; {{"name": "add", "parameters": {QUOTED}}}',
    ),
    "Mistral, a list": (
        "[TOOL_CALLS]",
        f'so [TOOL_CALLS][{{"name": "add", "arguments": {{"a": 1, "b": "x"}}, "id": "123456789"}}, '
        f'{{"name": "add", "arguments": {QUOTED}}}]',
    ),
    "Mistral, tags": (
        "[TOOL_CALLS]",
        f'so [TOOL_CALLS]add[ARGS]{{"a": 1, "b": "x"}}[TOOL_CALLS]add[CALL_ID]1[ARGS]{QUOTED}',
    ),
    "DeepSeek V3": (
        "<｜tool▁calls▁begin｜>",
        "so <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 1, "b": "x"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n'
        f"{QUOTED}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "DeepSeek V3.1": (
        "<｜tool▁calls▁begin｜>",
        'so <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": "x"}<｜tool▁call▁end｜>'
        f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{QUOTED}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "Kimi": (
        "<|tool_calls_section_begin|>",
        "so <|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 1, "b": "x"}<|tool_call_end|><|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>'
        f"{QUOTED}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "gpt-oss": (
        "<|channel|><|message|>",
        "<|channel|>final<|message|>so<|end|><|start|>assistant to=functions.add<|channel|>commentary json<|message|>"
        '{"a": 1, "b": "x"}<|call|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>'
        f"{QUOTED}",
    ),
    "LFM": ("<|tool_call_start|>", "so <|tool_call_start|>[add(a=1, b='x'), add(2, b='\"é\"\\n')]<|tool_call_end|>"),
}


@cache
def tokenizer_of(mark: str) -> Tokenizer:
    made = chat_tokenizer(WITH + THINKS + "{# " + mark + " #}")
    return made


@pytest.mark.parametrize("family", FORMS)
def test_the_calls_of_each_family_are_read(family: str) -> None:
    mark, text = FORMS[family]
    found = read_reply(tokenizer_of(mark), text, TOOLS)
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == [ONE, TWO] and not found.faults
    assert found.content == "so"
    message = found.message(3)
    assert [call["id"] for call in message["tool_calls"]] == ["c00003000", "c00003001"] and message["content"] == "so"
    alone = read_reply(tokenizer_of(mark), text.replace("so ", "", 1).replace("<|message|>so", "<|message|>"), TOOLS)
    assert alone.message(0)["content"] is None and len(alone.calls) == 2


def test_without_tools_a_call_is_text() -> None:
    mark, text = FORMS["Hermes"]
    assert read_reply(tokenizer_of(mark), text, ()).message(0) == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("text", "opened", "thought", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, "hm", "yes"),
        ("hm</think>yes", True, "hm", "yes"),
        ("hm", True, "hm", ""),  # cut while it thought
        ("<think>hm", False, "hm", ""),
        ("yes </think>", False, "", "yes </think>"),
    ],
)
def test_reasoning_stands_apart(text: str, opened: bool, thought: str, content: str) -> None:
    found = read_reply(tokenizer_of("<tool_call>"), text, (), opened=opened)
    assert (found.reasoning, found.content) == (thought, content)
    assert ("reasoning_content" in found.message(0)) == bool(thought)


def test_a_call_may_end_the_reasoning() -> None:
    found = read_reply(tokenizer_of("<tool_call>"), 'hm <tool_call>{"name": "add"}</tool_call>', TOOLS, opened=True)
    assert found == ("", "hm", [("add", "{}")], [])


LETTERS = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 <>/\n()=,'\".")


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("add(1, 'x')", {"a": 1, "b": "x"}),
        ('add(b="x", a=1)', {"a": 1, "b": "x"}),
        ("add()", {}),
        (' add(a=True, b=None, c=[1, {"d": 2}]) ', {"a": True, "b": None, "c": [1, {"d": 2}]}),
    ],
)
def test_a_call_without_a_template_is_written_as_python_writes_it(text: str, arguments: dict[str, Any]) -> None:
    found = read_reply(LETTERS, text, TOOLS)
    assert [(name, json.loads(given)) for name, given in found.calls] == [("add", arguments)] and found.content == ""


@pytest.mark.parametrize("text", ["mul(1, 2)", "add", "so add(1)", "1 + 2", ""])
def test_other_text_without_a_template_is_an_answer(text: str) -> None:
    assert read_reply(LETTERS, text, TOOLS) == (text, None, [], [])


@pytest.mark.parametrize(
    ("family", "text", "why"),
    [
        ("Hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}', "</tool_call>"),
        ("Hermes", "<tool_call>add 1 and 2</tool_call>", "no JSON"),
        ("Hermes", '<tool_call>{"arguments": {}}</tool_call>', '"name"'),
        ("Hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "list"),
        ("Hermes", '<tool_call>{"name": "a b", "arguments": {}}</tool_call>', "no name"),
        ("Hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN"),
        ("Hermes", '<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>', "half a character"),
        ("Hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "cannot be read"),
        ("Qwen coder", "<tool_call><function=add><parameter=a>1</function></tool_call>", "</parameter>"),
        ("GLM", "<tool_call>add<arg_key>a</arg_key><arg_value>1</tool_call>", "</arg_value>"),
        ("Mistral, a list", '[TOOL_CALLS][{"name": "add"', "no JSON"),
        ("Llama", '<|python_tag|>{"name": "add"', "no JSON"),
        ("LFM", "<|tool_call_start|>[add(1]<|tool_call_end|>", "no value"),
    ],
)
def test_a_call_that_cannot_be_read_is_a_sentence(family: str, text: str, why: str) -> None:
    found = read_reply(tokenizer_of(FORMS[family][0]), text, TOOLS)
    assert not found.calls and len(found.faults) == 1 and why in found.faults[0], found


@pytest.mark.parametrize("family", [*FORMS, "no template"])
def test_hostile_text_is_never_an_exception(family: str) -> None:
    mark, text = FORMS.get(family, ("", "add(1, b='x')"))
    tokenizer, rng = (tokenizer_of(mark) if mark else LETTERS), random.Random(family)
    pieces = [*"{}[]()\"'\\,:;=<>/|", "\\u", "[" * 3000, "1e999", "tool_call", mark, text]
    for _ in range(300):
        made = text
        for _ in range(rng.randint(1, 4)):
            place, end = sorted(rng.randrange(len(made) + 1) for _ in range(2))
            made = made[:place] + rng.choice(pieces) + made[rng.choice([place, end]) :]
        found = read_reply(tokenizer, made, TOOLS, opened=rng.random() < 0.2)
        assert all(isinstance(json.loads(arguments), dict) and name for name, arguments in found.calls)
        json.dumps(found.message(0)).encode()


def test_a_reply_is_recognised_however_clients_write_it() -> None:
    text = FORMS["Hermes"][1]
    own = read_reply(tokenizer_of("<tool_call>"), "<think>hm</think>" + text, TOOLS).message(4)
    back = as_messages([own])[0]
    assert is_reply(own, text, own) and is_reply(back, text, own) and isinstance(own["tool_calls"][0]["function"], dict)
    assert isinstance(back["tool_calls"][0]["function"]["arguments"], dict)
    spaced = json.loads(json.dumps(own))
    spaced["tool_calls"][0]["function"]["arguments"] = ' {"b":"x","a":1}'
    del spaced["reasoning_content"], spaced["tool_calls"][1]["id"]
    assert is_reply(spaced, text, own)
    for change in (
        {"content": "no"},
        {"tool_calls": own["tool_calls"][:1]},
        {"reasoning_content": "other"},
        {"role": "user"},
    ):
        assert not is_reply({**own, **change}, text, own), change
    other = json.loads(json.dumps(own))
    other["tool_calls"][0]["id"] = "c00009000"
    assert not is_reply(other, text, own)
    assert is_reply({"role": "assistant", "content": text + "\n"}, text, own)  # as text, whole


def test_a_template_that_takes_no_tools_is_told_in_text() -> None:
    assert takes_tools(chat_tokenizer(WITH)) and not takes_tools(chat_tokenizer(CHATML))
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    first, *rest = told([{"role": "user", "content": "hi"}, call, {"role": "tool", "content": "2"}], TOOLS)
    assert first["role"] == "system" and json.dumps(TOOLS[0]["function"]) in first["content"]
    assert rest[1] == {"role": "assistant", "content": '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'}
    assert rest[2] == {"role": "user", "content": "<tool_response>\n2\n</tool_response>"}
    found = told([{"role": "user", "content": "hi"}], TOOLS, system=False)
    assert len(found) == 1 and found[0]["content"].endswith("\n\nhi")
