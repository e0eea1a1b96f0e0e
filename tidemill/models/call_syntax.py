"""Readers of tool calls, one for each way in which model families write them: see `tool_calls`.

A reader gets hostile text of any shape. It takes what is a call, and says in one sentence what is wrong with the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tidemill.models.chat_template import Tools, arguments_form, half_character


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_JSON = json.JSONDecoder(parse_constant=_no_number)
_CALLED, _KEYWORD = re.compile(r"\s*([A-Za-z_][\w.]{0,127})\("), re.compile(r"([A-Za-z_]\w{0,127})\s*=\s*")
_WORD, _QUOTED = re.compile(r"(?:True|False|None)\b"), re.compile(r"'((?:[^'\\]|\\.)*)'", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,127}")


class ParsedCalls(NamedTuple):
    """The calls in a text."""

    content: str  # the text without them
    calls: list[tuple[str, str]]  # name, arguments as JSON
    faults: list[str]  # what cannot be read, in one sentence each


class _Unreadable(ValueError):
    """A call that cannot be read, with the reason."""


def hermes_calls(text: str, tools: Tools) -> ParsedCalls:
    return _in_tags(text, "<tool_call>", "</tool_call>", lambda inner: _named(_json(inner), "arguments"))


def xml_calls(text: str, tools: Tools) -> ParsedCalls:
    def read(inner: str) -> tuple[str, str]:
        head = re.match(r"\s*<function=([^>\n]{1,128})>", inner)
        if head is None:
            raise _Unreadable("a call begins with <function=NAME>")
        pairs = _between(inner[head.end() :], "<parameter=", "</parameter>")
        values = [pair.partition(">") for pair in pairs]
        return _typed(
            head[1].strip(), {key.strip(): value.removeprefix("\n").removesuffix("\n") for key, _, value in values}, tools
        )

    if "<tool_call>" not in text and "<function=" in text:  # as some models leave the outer tag out
        text = text.replace("<function=", "<tool_call><function=").replace("</function>", "</function></tool_call>")
    return _in_tags(text, "<tool_call>", "</tool_call>", read)


def glm_calls(text: str, tools: Tools) -> ParsedCalls:
    def read(inner: str) -> tuple[str, str]:
        name, _, rest = inner.partition("<arg_key>")
        pairs = _between("<arg_key>" + rest, "<arg_key>", "</arg_value>") if rest else []
        values = [pair.partition("</arg_key>") for pair in pairs]
        found = {key.strip(): value.lstrip().removeprefix("<arg_value>") for key, _, value in values}
        return _typed(name.strip(), found, tools)

    return _in_tags(text, "<tool_call>", "</tool_call>", read)


def deepseek_calls(text: str, tools: Tools) -> ParsedCalls:
    def read(inner: str) -> tuple[str, str]:
        before, _, after = inner.partition("<｜tool▁sep｜>")
        name, fenced, block = after.partition("\n")
        if before.strip() == "function" and fenced:  # V3 and R1: the type, the name, and a fenced block
            return name.strip(), _arguments(_json(block.strip().removeprefix("```json").removesuffix("```")))
        return before.strip(), _arguments(_json(after))

    body = text.replace("<｜tool▁calls▁begin｜>", "").replace("<｜tool▁calls▁end｜>", "")
    return _in_tags(body, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", read)


def kimi_calls(text: str, tools: Tools) -> ParsedCalls:
    def read(inner: str) -> tuple[str, str]:
        name, _, arguments = inner.partition("<|tool_call_argument_begin|>")
        name = name.strip().rpartition(":")[0] or name.strip()
        return name.removeprefix("functions."), _arguments(_json(arguments))

    body = text.replace("<|tool_calls_section_begin|>", "").replace("<|tool_calls_section_end|>", "")
    return _in_tags(body, "<|tool_call_begin|>", "<|tool_call_end|>", read)


def mistral_calls(text: str, tools: Tools) -> ParsedCalls:
    content, found, rest = text.partition("[TOOL_CALLS]")
    if not found:
        return ParsedCalls(text, [], [])
    if rest.lstrip().startswith("["):  # up to version 7: a list
        calls, faults = _read_all([rest], lambda inner: [_named(each, "arguments") for each in _json(inner)])
        return ParsedCalls(content, calls, faults)
    calls, faults = _read_all(rest.split("[TOOL_CALLS]"), _mistral_call)
    return ParsedCalls(content, calls, faults)


def _mistral_call(inner: str) -> tuple[str, str]:
    name, _, arguments = inner.partition("{")
    name = name.partition("[CALL_ID]")[0].removesuffix("[ARGS]").strip()
    return name, _arguments(_json("{" + arguments))


def llama_calls(text: str, tools: Tools) -> ParsedCalls:
    before, found, rest = text.partition("<|python_tag|>")
    body = rest if found else text
    if not body.lstrip().startswith("{"):
        return ParsedCalls(text, [], [])
    if not found and not re.match(r'\s*\{\s*"(name|type|function|parameters)"', body):
        return ParsedCalls(text, [], [])  # an answer that is JSON
    parts, place = list[Any](), 0
    while (place := _skip(body, place, " \n\t;,")) < len(body):
        try:
            value, place = _JSON.raw_decode(body, place)
        except (ValueError, RecursionError) as error:
            parts.append(_Unreadable(f"it is no JSON: {error}"))
            break
        parts.append(value)
    calls, faults = _read_all(parts, lambda each: _named(each, "parameters"))
    return ParsedCalls(before if found else "", calls, faults)


def harmony_parts(text: str) -> tuple[str, ParsedCalls]:
    """(reasoning, the rest) of a reply in gpt-oss' channels."""
    if "<|message|>" not in text:
        return "", ParsedCalls(text, [], [])
    reasoning, content, inside = list[str](), list[str](), list[tuple[str, str]]()
    for part in text.split("<|start|>"):
        head, _, body = part.partition("<|message|>")
        body = re.split(r"<\|(?:end|call|return|channel)\|>", body, maxsplit=1)[0]
        if (to := re.search(r"to=(?:functions\.)?([\w.-]+)", head)) is not None:
            inside.append((to[1], body))
        else:
            (reasoning if "<|channel|>analysis" in head else content).append(body)
    calls, faults = _read_all(inside, lambda each: (each[0], _arguments(_json(each[1]))))
    return "\n".join(reasoning), ParsedCalls("".join(content), calls, faults)


def listed_calls(text: str, tools: Tools) -> ParsedCalls:
    """Calls in a list as Python writes it, between tags of their own: those of LFM."""
    return _in_tags(text, "<|tool_call_start|>", "<|tool_call_end|>", lambda inner: _python_list(inner, tools))


def _python_list(inner: str, tools: Tools) -> list[tuple[str, str]]:
    found, place = list[tuple[str, str]](), _skip(inner, 0, " \n[")
    while place < len(inner) and inner[place] != "]":
        head = _CALLED.match(inner, place)
        if head is None:
            raise _Unreadable(f"{inner[place : place + 20]!r} is no call")
        values, place = _python_arguments(inner, head.end(), schema_of(head[1], tools) or {})
        found.append((head[1], _arguments(values)))
        place = _skip(inner, place, " \n,")
    return found


def python_calls(text: str, tools: Tools) -> ParsedCalls:
    """A call as Python writes it, `add(1, b=2)`, that is the whole reply; only of a tool that there is."""
    head = _CALLED.match(text)
    if head is None or (schema := schema_of(head[1], tools)) is None:
        return ParsedCalls(text, [], [])

    def read(inner: str) -> tuple[str, str]:
        values, place = _python_arguments(inner, head.end(), schema)
        if inner[place:].strip():
            raise _Unreadable("something follows it")
        return head[1], _arguments(values)

    calls, faults = _read_all([text], read)
    return ParsedCalls("", calls, faults)


def _python_arguments(text: str, place: int, schema: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """(arguments, where the text goes on) of a call behind its bracket."""
    names, found = list(schema.get("parameters", {}).get("properties", {})), dict[str, Any]()
    while (place := _skip(text, place, " ,")) < len(text) and text[place] != ")":
        keyword = _KEYWORD.match(text, place)
        place = keyword.end() if keyword else place
        if not keyword and len(found) >= len(names):
            raise _Unreadable(f"it has more than {len(names)} arguments")
        value, place = _python_value(text, place)
        found[keyword[1] if keyword else names[len(found)]] = value
    if place >= len(text):
        raise _Unreadable("it does not end with a bracket")
    return found, place + 1


def _python_value(text: str, place: int) -> tuple[Any, int]:
    if word := _WORD.match(text, place):
        return {"True": True, "False": False, "None": None}[word[0]], word.end()
    if quoted := _QUOTED.match(text, place):
        return re.sub(r"\\(.)", lambda each: {"n": "\n", "t": "\t"}.get(each[1], each[1]), quoted[1]), quoted.end()
    try:
        return _JSON.raw_decode(text, place)
    except (ValueError, RecursionError):
        raise _Unreadable(f"the argument {text[place : place + 20]!r} is no value") from None


def python_call(call: Any) -> str:
    """A call of a message as `python_calls` reads it."""
    function: Any = call.get("function", call) if isinstance(call, Mapping) else {}
    arguments = arguments_form(function.get("arguments"))
    values = arguments if isinstance(arguments, dict) else {}
    return f"{function.get('name')}({', '.join(f'{key}={json.dumps(value)}' for key, value in values.items())})"


def schema_of(name: str, tools: Tools) -> Mapping[str, Any] | None:
    """The schema of the function of this name."""
    functions = (each.get("function", each) for each in tools)
    return next((each for each in functions if isinstance(each, Mapping) and each.get("name") == name), None)


def _in_tags(text: str, begin: str, end: str, read: Callable[[str], Any]) -> ParsedCalls:
    """The calls between tags; what stands outside them is content."""
    outside, inside = list[str](), list[Any]()
    head, *blocks = text.split(begin)
    outside.append(head)
    for block in blocks:
        inner, closed, after = block.partition(end)
        inside.append(inner if closed else _Unreadable(f"it does not end with {end}"))
        outside.append(after)
    calls, faults = _read_all(inside, read)
    return ParsedCalls("".join(outside), calls, faults)


def _read_all(parts: Sequence[Any], read: Callable[[Any], Any]) -> tuple[list[Any], list[str]]:
    """(calls, faults) of parts that hold a call each, or a list of them."""
    found, faults = list[Any](), list[str]()
    for part in parts:
        try:
            if isinstance(part, _Unreadable):
                raise part
            read_ones = read(part)
            calls = read_ones if isinstance(read_ones, list) else [read_ones]
            if bad := [call[0] for call in calls if not _NAME.fullmatch(call[0])]:
                raise _Unreadable(f"{bad[0]!r:.60} is no name of a function")
            found += calls
        except (_Unreadable, RecursionError) as error:
            faults.append(f"a tool call cannot be read: {error!s:.200}")
    return found, faults


def _json(text: str) -> Any:
    try:
        return _JSON.decode(text)
    except (ValueError, RecursionError) as error:
        raise _Unreadable(f"it is no JSON: {error}") from None


def _named(call: Any, key: str) -> tuple[str, str]:
    """(name, arguments) of a call that is a mapping."""
    call = call.get("function", call) if isinstance(call, dict) and isinstance(call.get("function"), dict) else call
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise _Unreadable('expected {"name": NAME, "' + key + '": {...}}')
    other = "parameters" if key == "arguments" else "arguments"
    return call["name"], _arguments(call.get(key, call.get(other, {})))


def _arguments(value: Any) -> str:
    if isinstance(value, str):  # JSON within JSON, as OpenAI writes it
        value = _json(value or "{}")
    if not isinstance(value, dict):
        raise _Unreadable(f"its arguments are a {type(value).__name__}, and not an object")
    if half := half_character(value):
        raise _Unreadable(half)
    return json.dumps(value, ensure_ascii=False)


def _between(text: str, begin: str, end: str) -> Iterator[str]:
    for part in text.split(begin)[1:]:
        inner, closed, _ = part.partition(end)
        if not closed:
            raise _Unreadable(f"an argument does not end with {end}")
        yield inner


def _typed(name: str, values: Mapping[str, str], tools: Tools) -> tuple[str, str]:
    """A call whose arguments are texts: those that the schema does not call strings are read as JSON."""
    known = (schema_of(name, tools) or {}).get("parameters", {}).get("properties", {})
    return name, _arguments({key: _value(text, known.get(key, {})) for key, text in values.items()})


def _value(text: str, schema: Any) -> Any:
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return _JSON.decode(text)
    except (ValueError, RecursionError):
        return text


def _skip(text: str, place: int, some: str) -> int:
    while place < len(text) and text[place] in some:
        place += 1
    return place
