"""Arguments are checked as the jsonschema package checks them, and the sentences say what to do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.tools.argument_check import arguments_of, arguments_problem, value_problem

NAMES = st.sampled_from(["a", "b", "c"])
LEAVES = (
    st.sampled_from(["string", "integer", "number", "boolean", "null"]).map(lambda kind: {"type": kind})
    | st.lists(st.sampled_from(["string", "integer", "boolean"]), min_size=1, unique=True).map(lambda kinds: {"type": kinds})
    | st.lists(st.sampled_from(["a", "b", 1, True, None, 0]), min_size=1).map(lambda values: {"enum": values})
    | st.sampled_from([{"const": 1}, {"const": "a"}, {}])
)


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    more = st.booleans() | inner
    required = st.lists(NAMES, unique=True, max_size=2)
    made = st.builds(
        lambda properties, names, rest: {"properties": properties, "required": names, "additionalProperties": rest},
        st.dictionaries(NAMES, inner, max_size=3),
        required,
        more,
    )
    arrays = st.builds(lambda items: {"type": "array", "items": items}, inner)
    arrays |= st.builds(lambda a, b: {"prefixItems": [a, b], "items": a}, inner, inner)
    return (
        made
        | made.map(lambda each: each | {"type": "object"})
        | arrays
        | st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner)
    )


SCHEMAS = st.recursive(LEAVES, objects, max_leaves=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.5, -1.5]) | st.sampled_from(["a", "b", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300)
@given(SCHEMAS, VALUES)
def test_what_is_refused_is_what_jsonschema_refuses(schema: dict[str, Any], value: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    valid = jsonschema.Draft202012Validator(schema).is_valid(value)
    problem = value_problem(value, schema, "it")
    assert (problem == "") == valid, (problem, schema, value)


ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "number"}}, "required": ["a", "b"]}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"a": 1, "b": 2}, ""),
        ({"a": 1, "b": 2.5}, ""),
        ({"a": 1}, "the argument 'b' is missing"),
        ({"a": "1", "b": 2}, "the argument 'a' is a string: expected an integer"),
        ({"a": 1.5, "b": 2}, "the argument 'a' is a number: expected an integer"),
        ({"a": True, "b": 2}, "the argument 'a' is a boolean: expected an integer"),
        ({"a": 1, "b": 2, "c": 3}, "there is no argument 'c': expected a, b"),
        ({"a": 1, "b": 2, "x" * 500: 3}, f"there is no argument '{'x' * 60}... (500 characters)': expected a, b"),
    ],
)
def test_what_the_model_is_told(arguments: dict[str, Any], problem: str) -> None:
    assert arguments_problem(arguments, ADD, closed=True) == problem


@pytest.mark.parametrize(
    ("given_", "problem"),
    [
        ("{'a': 1}", "the arguments are no JSON: Expecting property name"),
        ('{"a": NaN}', "NaN is no JSON number"),
        ('{"a": 1', "the arguments are no JSON"),
        ("[1, 2]", "the arguments are an array: expected an object"),
        ("7", "the arguments are an integer: expected an object"),
        ("[" * 200_000, "nested too deep"),
        ('{"a": ' + "9" * 10_000 + "}", "the arguments are no JSON"),
        (b"{}", "the arguments are an array"),
    ],
)
def test_what_is_no_mapping(given_: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        arguments_of(given_)


def test_arguments_may_be_a_mapping_or_nothing() -> None:
    assert arguments_of({"a": 1}) == {"a": 1} == arguments_of(json.dumps({"a": 1}))
    assert arguments_of("") == arguments_of(None) == arguments_of(" ") == {}


def test_what_is_nullable_may_be_null() -> None:
    assert value_problem(None, {"type": "integer", "nullable": True}, "it") == ""
    assert value_problem(None, {"type": "integer"}, "it") == "it is null: expected an integer"


def test_what_is_not_understood_passes() -> None:
    assert value_problem("x", {"$ref": "#/$defs/X"}, "it") == "" == value_problem("x", {"type": "audio"}, "it")
