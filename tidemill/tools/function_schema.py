"""JSON schema of a function, from its type hints and its Google-style docstring.

The result is that of `transformers.utils.get_json_schema`, which TRL uses and templates know; a test compares them. That
function imports torch to look at the first argument: 3.2 seconds and 180 MB in every worker.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tidemill.core.errors import ConfigError

_SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_BARE: dict[Any, dict[str, Any]] = {kind: {"type": name} for kind, name in _SCALARS.items()}
_BARE |= {list: {"type": "array"}, tuple: {"type": "array"}, dict: {"type": "object"}, Any: {}}
_HEADING = re.compile(r"(Args|Arguments|Returns|Raises|Yields):\s*")
_ARGUMENT = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)
_KNOWN = "int, float, str, bool, Literal, Enum, and list, tuple, dict or unions of those"


def function_schema(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """The function as chat completions describe tools. Raises ConfigError, in one sentence, for what is missing."""
    documentation = inspect.getdoc(function)
    if not documentation:
        raise ConfigError(f"tool {name!r} has no docstring: say what it does, and what each argument is under `Args:`")
    sections = _sections(documentation)
    described, hints = _described(sections.get("Args", [])), type_hints(function, name)
    properties, required = dict[str, Any](), list[str]()
    for place, parameter in enumerate(inspect.signature(function).parameters.values()):
        argument = parameter.name
        if place == 0 and argument in ("self", "cls") and argument not in hints:
            continue  # of a method that is not bound yet
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"tool {name!r} takes {parameter}: expected arguments that are given by name")
        if argument not in hints:
            raise ConfigError(f"tool {name!r}: argument {argument!r} has no type hint: expected {_KNOWN}")
        if argument not in described:
            raise ConfigError(
                f"tool {name!r}: the docstring does not describe argument {argument!r}: add `{argument}: ...` under `Args:`"
            )
        properties[argument] = _with_description(_schema(hints[argument], name), described[argument], name)
        if parameter.default is parameter.empty:
            required.append(argument)
    parameters = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    told = {"name": name, "description": "\n".join(sections[""]).strip(), "parameters": parameters}
    return {"type": "function", "function": told | _returned(hints, sections, name)}


def type_hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """The type hints by argument. Raises ConfigError for a hint that names what does not exist."""
    try:
        return get_type_hints(function if inspect.isroutine(function) else type(function).__call__)
    except NameError as error:
        raise ConfigError(f"tool {name!r}: a type hint cannot be read ({error}): define it at the top of the file") from None


def _returned(hints: Mapping[str, Any], sections: Mapping[str, list[str]], name: str) -> dict[str, Any]:
    """The entry `return`, which most templates ignore; nothing where the hint has no form in JSON."""
    try:
        schema = _schema(hints["return"], name)
    except (KeyError, ConfigError):
        return {}
    told = "\n".join(sections.get("Returns", [])).strip()
    return {"return": schema | ({"description": told} if told else {})}


def _sections(documentation: str) -> dict[str, list[str]]:
    """The lines of a docstring by heading; those before the first heading under ""."""
    found: dict[str, list[str]] = {"": []}
    heading = ""
    for line in documentation.strip().splitlines():
        if match := _HEADING.fullmatch(line):
            heading = match[1].replace("Arguments", "Args")
            found.setdefault(heading, [])
        else:
            found[heading].append(line)
    return found


def _described(lines: list[str]) -> dict[str, str]:
    """Descriptions by argument; a line that is indented more than the first one goes on with the one before."""
    found = dict[str, str]()
    lines = [line for line in lines if line.strip()]
    indent, last = min((len(line) - len(line.lstrip()) for line in lines), default=0), ""
    for line in lines:
        match = _ARGUMENT.fullmatch(line[indent:].rstrip())
        if match:
            last = match[1]
            found[last] = match[2]
        elif last:
            found[last] = f"{found[last]} {line.strip()}".strip()
    return found


def _with_description(schema: dict[str, Any], text: str, name: str) -> dict[str, Any]:
    """The schema with its description, and with the choices at its end, as in `(choices: ["tea", "coffee"])`."""
    if not (match := _CHOICES.search(text)):
        return schema | {"description": text}
    try:
        choices = json.loads(match[1])
    except ValueError:
        raise ConfigError(f"tool {name!r}: {match[0]!r} is no JSON list: expected (choices: [...])") from None
    enum = [choice.strip() if isinstance(choice, str) else choice for choice in choices]
    return schema | {"enum": enum, "description": text[: match.start()].strip()}


def _schema(hint: Any, name: str) -> dict[str, Any]:
    """The JSON schema of a type hint. Raises ConfigError where JSON has no such value."""
    inner: tuple[Any, ...] = get_args(hint)
    origin = get_origin(hint)
    if origin is None and isinstance(hint, type) and issubclass(hint, Enum):
        return _enum([member.value for member in hint], hint, name)
    if origin is None and hint in _BARE:
        return dict(_BARE[hint])
    if origin is Literal:
        return _enum(list(inner), hint, name)
    if origin in (Union, types.UnionType):
        return _union(inner, name)
    if origin is list:
        return {"type": "array", "items": _schema(inner[0], name)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(inner[-1], name)}
    if origin is tuple and ... not in inner and len(inner) > 1:
        return {"type": "array", "prefixItems": [_schema(each, name) for each in inner]}
    raise ConfigError(f"tool {name!r}: the type hint {hint!r:.120} has no JSON schema: expected {_KNOWN}")


def _enum(values: list[Any], hint: Any, name: str) -> dict[str, Any]:
    if not values or any(type(value) not in _SCALARS for value in values):
        raise ConfigError(f"tool {name!r}: the type hint {hint!r:.120} has values that are no texts, numbers, bool or None")
    kinds = list(dict.fromkeys(_SCALARS[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def _union(inner: tuple[Any, ...], name: str) -> dict[str, Any]:
    parts = [_schema(each, name) for each in inner if each is not type(None)]
    if len(parts) == 1:
        schema = parts[0]
    elif all(part.keys() == {"type"} and isinstance(part["type"], str) for part in parts):
        kinds = sorted({part["type"] for part in parts})
        schema = {"type": kinds[0] if len(kinds) == 1 else kinds}
    else:
        schema = {"anyOf": parts}
    return schema | ({"nullable": True} if type(None) in inner else {})
