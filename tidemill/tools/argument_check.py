"""Check of a tool's arguments against its JSON schema, with a sentence for the model that wrote them.

It knows the keywords that schemas of tools consist of. It lets pass what it does not know, such as `$ref` and `pattern`: a
server that uses them checks its arguments itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tidemill.core.outcomes import clip

_KINDS = {"null": "null", "boolean": "a boolean", "integer": "an integer", "number": "a number", "string": "a string"}
_KINDS |= {"array": "an array", "object": "an object"}
_SHOWN = 60  # characters of a name or value that the model wrote


def arguments_of(given: Any) -> dict[str, Any]:
    """Arguments as a mapping, from JSON text or a mapping. Raises ValueError, in a clause, for anything else."""
    if isinstance(given, str):
        try:
            given = json.loads(given, parse_constant=_refuse) if given.strip() else {}
        except RecursionError:
            raise ValueError("the arguments are nested too deep") from None
        except ValueError as error:
            raise ValueError(f"the arguments are no JSON: {clip(str(error), _SHOWN)}") from None
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(f"the arguments are {_KINDS[_kind(given)]}: expected an object")
    return {str(key): value for key, value in given.items()}


def arguments_problem(arguments: Mapping[str, Any], schema: Mapping[str, Any], *, closed: bool) -> str:
    """A clause that says what is wrong with the arguments; "" if nothing is. closed: others than the schema's are wrong."""
    properties = schema.get("properties") or {}
    for name in schema.get("required") or ():
        if name not in arguments:
            return f"the argument {name!r} is missing"
    more = schema.get("additionalProperties", not closed)
    for name, value in arguments.items():
        own = properties.get(name, more)
        if own is False:
            known = ", ".join(properties) or "none"
            return f"there is no argument {clip(name, _SHOWN)!r}: expected {known}"
        if isinstance(own, Mapping) and (problem := value_problem(value, own, f"the argument {clip(name, _SHOWN)!r}")):
            return problem
    return ""


def value_problem(value: Any, schema: Mapping[str, Any], what: str) -> str:
    """A clause that says why a value is not as its schema asks; "" if it is."""
    if value is None and schema.get("nullable"):
        return ""
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if isinstance(kinds, list) and all(kind in _KINDS for kind in kinds) and not _is_any(value, kinds):
        return f"{what} is {_KINDS[_kind(value)]}: expected {' or '.join(_KINDS[kind] for kind in kinds)}"
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(allowed, list) and not any(value == each and _kind(value) == _kind(each) for each in allowed):
        return f"{what} is {clip(json.dumps(value), _SHOWN)}: expected one of {clip(json.dumps(allowed))}"
    choices = schema.get("anyOf") or schema.get("oneOf") or []
    problems = [value_problem(value, each, what) for each in choices if isinstance(each, Mapping)]
    if problems and all(problems):
        return problems[0]
    return _inside(value, schema, what)


def _inside(value: Any, schema: Mapping[str, Any], what: str) -> str:
    """The first problem within an array or an object."""
    if isinstance(value, list):
        first, rest = schema.get("prefixItems") or [], schema.get("items")
        for place, each in enumerate(value):
            own = first[place] if place < len(first) else rest
            if isinstance(own, Mapping) and (problem := value_problem(each, own, f"{what}, item {place},")):
                return problem
    if isinstance(value, Mapping) and (problem := arguments_problem(value, schema, closed=False)):
        return f"{what}: {problem}"
    return ""


def _is_any(value: Any, kinds: list[str]) -> bool:
    kind = _kind(value)
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case Mapping():
            return "object"
    return "array"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")
