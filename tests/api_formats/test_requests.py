"""Request bodies: which ones are taken, and that a refusal names the field, the value given and what was expected."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage

from tidemill.api_formats.parameters import parse
from tidemill.api_formats.requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeChatBody
from tidemill.core.errors import ApiError

KINDS = {"text": CompletionBody, "chat": ChatBody, "tokenize": TokenizeChatBody, "detokenize": DetokenizeBody}
USER = {"role": "user", "content": "a"}
CHAT = {"messages": [USER]}
USUAL = {"text": {"prompt": "a"}, "chat": CHAT, "tokenize": CHAT, "detokenize": {"tokens": []}}
FORMS = "expected a text, a list of texts, a list of token ids, or a list of lists of token ids"
PARTS = "expected a text, or a list of parts of type 'text'"


def body(kind: str, **given: Any) -> Any:
    return parse(KINDS[kind], json.dumps({"model": "m"} | USUAL[kind] | given).encode())


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("text", {"prompt": [1, 2.5]}, f"prompt = a list of 2: {FORMS}"),
        ("text", {"prompt": [True]}, f"prompt = a list of 1: {FORMS}"),
        ("text", {"prompt": [[1], []]}, f"prompt = a list of 2: {FORMS}"),
        ("text", {"prompt": ["a", [1]]}, f"prompt = a list of 2: {FORMS}"),
        ("text", {"prompt": []}, f"prompt = a list of 0: {FORMS}"),
        ("text", {"prompt": 7}, f"prompt = 7: {FORMS}"),
        ("text", {"n": 1.0}, "n = 1.0: should be a valid integer"),
        ("text", {"n": "2"}, "n = '2': should be a valid integer"),
        ("text", {"temperature": 0.0001}, "temperature = 0.0001: expected 0, which is greedy, or a value from 0.001 to 100"),
        ("text", {"stop": ["a", 1]}, "stop[1] = 1: should be a valid string"),
        ("text", {"stop": ["a", ""]}, "stop[1] = '': String should have at least 1 character"),
        ("text", {"logit_bias": {"5": "x"}}, "logit_bias[5] = 'x': should be a valid number"),
        ("text", {"logit_bias": [1]}, "logit_bias = a list of 1: should be a valid dictionary"),
        ("text", {"seed": 2**64}, f"seed = {2**64}: should be less than {2**64}"),
        ("text", {"stream": True, "stream_options": 3}, "stream_options = 3: should be an object"),
        (
            "text",
            {"stream": True, "stream_options": {"x": 1}},
            "stream_options.x is not supported by this server: leave it out",
        ),
        ("text", {"stream_options": {}}, "stream_options was given without stream: set stream to true, or leave it out"),
        ("text", {"temprature": 1}, "unknown parameter 'temprature': did you mean 'temperature'?"),
        ("text", {"zzz": {}}, "unknown parameter 'zzz': leave it out"),
        ("text", {"model": None}, "'model' is required and was not given"),
        ("text", {"tools": [1]}, "tools = a list of 1 is not supported by this server: leave 'tools' out"),
        ("chat", {"add_special_tokens": True}, "add_special_tokens = True is not supported by this server: leave"),
        ("chat", {"messages": "a"}, "messages = 'a': should be a valid list"),
        ("chat", {"messages": []}, "messages = a list of 0: List should have at least 1 item"),
        ("chat", {"messages": [USER, 1]}, "messages[1] = 1: should be an object"),
        ("chat", {"messages": [USER, {"role": "user"}]}, "'messages[1].content' is required and was not given"),
        (
            "chat",
            {"messages": [USER | {"role": "robot"}]},
            "messages[0].role = 'robot': should be 'system', 'developer', 'user'",
        ),
        ("chat", {"messages": [USER | {"content": 5}]}, f"messages[0].content = 5: {PARTS}"),
        ("chat", {"messages": [USER | {"content": [{"type": "image_url"}]}]}, f"messages[0].content = a list of 1: {PARTS}"),
        ("chat", {"messages": [USER | {"name": 5}]}, "messages[0].name = 5: should be a valid string"),
        ("chat", {"messages": [USER | {"audio": {"id": "a"}}]}, "messages[0].audio is not supported"),
        ("chat", {"messages": [USER | {"tool_calls": [1]}]}, "messages[0].tool_calls[0] = 1: should be an object"),
        ("tokenize", {"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs.'a b': expected names that the template"),
        ("detokenize", {"tokens": [1, "a"]}, "tokens[1] = 'a': should be a valid integer"),
    ],
)
def test_a_refusal_names_the_field_the_value_and_what_was_expected(kind: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as refused:
        body(kind, **given)
    told = str(refused.value)
    assert told.startswith(message) and "\n" not in told
    assert refused.value.param in given and refused.value.status == 400


@pytest.mark.parametrize(
    ("given", "prompts"),
    [("ab", ["ab"]), ("", [""]), (["a", "b"], ["a", "b"]), ([5, 6], [[5, 6]]), ([[5], [6, 7]], [[5], [6, 7]])],
)
def test_a_prompt_in_each_of_its_forms(given: Any, prompts: list[Any]) -> None:
    assert body("text", prompt=given).prompt == prompts


def test_a_reply_may_be_sent_back_as_the_client_holds_it():
    reply = ChatCompletionMessage(role="assistant", content="hi", annotations=[]).model_dump(exclude_none=True)
    parts = [{"type": "text", "text": "x", "cache_control": {}}, {"type": "text", "text": "y"}]
    messages = body("chat", messages=[reply, USER | {"content": parts, "name": "", "type": "message"}]).messages
    assert [each.plain for each in messages] == [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "xy"}]
    assert body("chat", messages=[USER | {"refusal": None, "annotations": []}]).messages[0].plain == USER
    assert body("chat", messages=[USER | {"name": "Ada"}]).messages[0].plain == USER | {"name": "Ada"}


def test_what_is_not_given_and_what_changes_nothing():
    plain, neutral = body("text"), {"stop": None, "user": "me", "best_of": 1, "suffix": "", "use_beam_search": False}
    assert body("text", **neutral) == plain and plain.stop == [] and plain.max_tokens == 16
    assert body("text", n=3, best_of=3).n == 3 and body("text", stop="a").stop == ["a"]
    assert body("text", logit_bias={"5": 2, "7": -100}).logit_bias == {5: 2.0, 7: -100.0}
