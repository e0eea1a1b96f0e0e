"""Constraints as data: what makes one, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from pydantic import BaseModel

from tidemill.core.constraints import JSON_OBJECT, MOST_TEXT, Constraint, choice, constraint_of, json_schema, regex
from tidemill.core.serialization import decode, encode


class City(BaseModel):
    name: str
    people: int


def test_what_makes_a_schema() -> None:
    described = City.model_json_schema()
    for given in (City, described, json.dumps(described)):
        assert json.loads(json_schema(given).text) == described
    assert [*json.loads(json_schema({"properties": {"b": {}, "a": {}}}).text)["properties"]] == ["b", "a"]


def test_what_a_caller_may_mean() -> None:
    assert constraint_of(None) is None
    assert constraint_of(JSON_OBJECT) is JSON_OBJECT
    assert constraint_of(City) == json_schema(City)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "not JSON"),
        ([1], "type list: expected a dict"),
        (3, "type int"),
        (City(name="Ulm", people=1), "not plain JSON|expected a dict"),
        ({"const": float("nan")}, "not plain JSON"),
        ({"const": {1}}, "not plain JSON"),
    ],
)
def test_what_is_no_schema(given: Any, said: str) -> None:
    if isinstance(given, City):
        assert json_schema(given) == json_schema(City)  # an instance knows its model
        return
    with pytest.raises(ValueError, match=said):
        json_schema(given)


@pytest.mark.parametrize("texts", [["yes", "no"], ["a.b", "a|b", "(", "\\", "^$", "x y", "ü", "a\nb", "-#&~/"]])
def test_choices_are_taken_as_they_stand(texts: list[str]) -> None:
    pattern = re.compile(choice(texts).text)
    assert all(pattern.fullmatch(text) for text in texts)
    assert not any(pattern.fullmatch(text) for text in ("axb", "", "yesno", "ab"))


@pytest.mark.parametrize("texts", [[], [""], "yes", [3]])
def test_what_is_no_choice(texts: Any) -> None:
    with pytest.raises(ValueError, match="expected a list of texts"):
        choice(texts)


def test_limits() -> None:
    with pytest.raises(ValueError, match=f"expected at most {MOST_TEXT}"):
        regex("a" * (MOST_TEXT + 1))
    with pytest.raises(ValueError, match="empty pattern"):
        regex("")


def test_a_constraint_travels() -> None:
    given = json_schema(City)
    back = decode(encode(given), Constraint)
    assert back == given and back.digest == given.digest
    assert len({given.digest, regex(given.text).digest, JSON_OBJECT.digest}) == 3
