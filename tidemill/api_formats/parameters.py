"""Base of request bodies: parameters as pydantic models, which raise an ApiError for a bad one.

It names the field, the value given and what was expected. A validator raises ApiError itself where the fault is not one
field's.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WrapValidator, model_validator

from tidemill.api_formats.body_decoding import read, short
from tidemill.core.errors import ApiError


class Parameters(BaseModel):
    """Base of all bodies and their parts. A null, or an unknown parameter that is empty, counts as not given."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        """The known parameters, and the first unknown one: describing thousands takes time."""
        if not isinstance(given, dict):
            return given
        known = [field.alias or name for name, field in cls.model_fields.items()]
        extra = next((key for key, value in given.items() if key not in known and value not in (None, "", [])), None)
        return {key: given[key] for key in (extra, *known) if given.get(key) is not None}


def expected(what: str) -> WrapValidator:
    """One sentence in place of the errors of each type that a field may have."""

    def check(given: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            return validate(given)
        except ValidationError:
            raise ValueError(f"expected {what}") from None

    return WrapValidator(check)


TEXT_ALONE = BeforeValidator(lambda given: [given] if isinstance(given, str) else given)
FIRST = Field(min_length=1, fail_fast=True)  # the first fault is enough: describing thousands takes time

P = TypeVar("P", bound=Parameters)


def parse(kind: type[P], raw: bytes) -> P:
    """Decode and check a body. Raises ApiError."""
    return validated(kind, read(raw))


def validated(kind: type[P], tree: dict[str, Any]) -> P:
    """Check a decoded body. Raises ApiError for its first fault."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise _refusal(kind, error) from None


def _refusal(kind: type[Parameters], error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])[1:]
    param = str(first["loc"][0])[:100] if first["loc"] else None
    match first["type"]:
        case "extra_forbidden" if len(first["loc"]) > 1:
            return ApiError(f"{short(where)[1:-1]} is not supported by this server: leave it out", param=param)
        case "extra_forbidden":
            near = difflib.get_close_matches(where, kind.model_fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out"
            return ApiError(f"unknown parameter {short(where)}: {hint}", param=param)
        case "missing":
            return ApiError(f"{where!r} is required and was not given", param=param)
        case "model_type":
            return ApiError(f"{where} = {short(first['input'])}: should be an object", param=param)
    message = str(first["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    return ApiError(f"{where} = {short(first['input'])}: {message}", param=param)
