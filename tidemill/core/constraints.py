"""Constraints: what a reply must be, as data: JSON of a schema, any JSON object, or a text that a pattern matches."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, cast

from tidemill.core.errors import CodecError
from tidemill.core.serialization import parse_json

Kind = Literal["json_schema", "json_object", "regex"]
MOST_TEXT = 1 << 19  # bytes of a schema or pattern: larger ones take seconds to compile
_SPECIAL = frozenset("\\.+*?()|[]{}^$#&-~/")  # characters of a pattern that do not stand for themselves


@dataclass(frozen=True, slots=True)
class Constraint:
    """Constraint on a reply, which is followed token by token: a reply that ends by itself always meets it."""

    kind: Kind
    text: str = ""  # the schema as JSON, or the pattern

    def __post_init__(self) -> None:
        if (size := len(self.text.encode(errors="surrogatepass"))) > MOST_TEXT:
            raise ValueError(f"{self.name} of {size} bytes: expected at most {MOST_TEXT}")
        if self.kind != "json_object" and not self.text:
            raise ValueError(f"an empty {self.name}: expected a text, which replies are held to")

    @property
    def name(self) -> str:
        """The kind in words."""
        return {"json_schema": "JSON schema", "json_object": "JSON object", "regex": "pattern"}[self.kind]

    @property
    def digest(self) -> str:
        """Equal for equal constraints."""
        return blake2b(f"{self.kind}\0{self.text}".encode(errors="surrogatepass"), digest_size=16).hexdigest()


JSON_OBJECT = Constraint("json_object")


def json_schema(given: Any) -> Constraint:
    """The constraint to JSON of a schema: a dict, its JSON text, or a pydantic model, whose schema is taken.

    Properties come in the schema's order. Raises ValueError for anything else.
    """
    if callable(describe := getattr(given, "model_json_schema", None)):
        given = describe()
    if isinstance(given, str):
        try:
            given = parse_json(given)
        except CodecError as error:
            raise ValueError(f"a JSON schema that is {error}") from None
    if not isinstance(given, Mapping | bool):
        raise ValueError(f"a JSON schema of type {type(given).__name__}: expected a dict, or a pydantic model")
    try:
        text = json.dumps(given, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a JSON schema that is not plain JSON: {error}") from None
    return Constraint("json_schema", text)


def regex(pattern: str) -> Constraint:
    """The constraint to a text that the pattern matches as a whole.

    A pattern has no look-around and no back-references; its digits and word characters are ASCII's.
    """
    return Constraint("regex", pattern)


def choice(texts: Sequence[str]) -> Constraint:
    """The constraint to one of several texts. Raises ValueError if there is none, or an empty one."""
    if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"choices {texts!r}: expected a list of texts that are not empty")
    return regex("|".join("".join(f"\\{c}" if c in _SPECIAL else c for c in text) for text in texts))


def constraint_of(given: Any) -> Constraint | None:
    """The constraint that a caller means: None, a Constraint, or whatever `json_schema` takes."""
    return cast(Constraint | None, given) if given is None or isinstance(given, Constraint) else json_schema(given)
