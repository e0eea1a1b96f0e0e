"""Structured output: the constraint that a request asks for, in OpenAI's words or vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidemill.api_formats.body_decoding import short
from tidemill.core.constraints import JSON_OBJECT, Constraint, choice, json_schema, regex
from tidemill.core.errors import ApiError

FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice")
_MAKERS = {"json": json_schema, "regex": regex, "choice": choice}
_ABOUT_SCHEMA = {"name", "description", "schema", "strict"}


def asked_constraint(given: Mapping[str, Any]) -> tuple[str, Constraint] | None:
    """The field that asks for a constraint, and the constraint; None if none does.

    given: the body's `FIELDS`, those that are not None. Raises ApiError for what is not understood, and for several at once.
    """
    found = [(field, held) for field in FIELDS if field in given and (held := _of_field(field, given[field])) is not None]
    if len(found) > 1:
        raise ApiError(f"{found[0][0]} and {found[1][0]} were both given: give one of them", param=found[1][0])
    return found[0] if found else None


def _of_field(field: str, value: Any) -> Constraint | None:
    if field == "response_format":
        return _of_format(value)
    if field != "structured_outputs":
        return _made(field, field.removeprefix("guided_"), value)
    asked = {key: each for key, each in _object(field, value).items() if each not in (None, False)}
    if unknown := next((key for key in asked if key not in (*_MAKERS, "json_object")), None):
        raise ApiError(f"{field}.{short(unknown)[1:-1]} is not supported by this server: leave it out", param=field)
    if len(asked) > 1:
        raise ApiError(f"{field}: expected one of json, regex, choice and json_object", param=field)
    return next((JSON_OBJECT if key == "json_object" else _made(field, key, each) for key, each in asked.items()), None)


def _of_format(value: Any) -> Constraint | None:
    field = "response_format"
    kind = _object(field, value).get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return JSON_OBJECT
    if kind != "json_schema":
        raise ApiError(f"{field}.type = {short(kind)}: expected 'text', 'json_object' or 'json_schema'", param=field)
    about = _object(f"{field}.json_schema", value.get("json_schema"))
    if unknown := next((key for key in about if key not in _ABOUT_SCHEMA), None):
        raise ApiError(
            f"{field}.json_schema.{short(unknown)[1:-1]}: expected {', '.join(sorted(_ABOUT_SCHEMA))}", param=field
        )
    return _made(field, "json", about.get("schema"), "json_schema.schema")


def _made(field: str, kind: str, value: Any, place: str = "") -> Constraint | None:
    """The constraint of one kind. An empty list of choices asks for none."""
    if kind == "choice" and value == []:
        return None
    expected = {"json": dict | str, "regex": str, "choice": list}[kind]
    where = f"{field}.{place}" if place else field
    if not isinstance(value, expected):
        said = {"json": "a JSON schema", "regex": "a pattern", "choice": "a list of texts"}[kind]
        raise ApiError(f"{where} = {short(value)}: expected {said}", param=field)
    try:
        return _MAKERS[kind](value)
    except ValueError as error:
        raise ApiError(f"{where}: {error}", param=field) from None


def _object(field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ApiError(f"{field} = {short(value)}: should be an object", param=field.partition(".")[0])
    return value
