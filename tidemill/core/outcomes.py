"""Conversion of a reward function's return value to an outcome (I5).

Only a finite number becomes a score.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tidemill.core.amounts import amount
from tidemill.core.types import Array, InfraError, Outcome, Score, Trajectory, Unscorable

SOLVED = 1.0  # a score from here on counts as solved; what falls short by rounding is a partial score
MOST_PARTS = 1000  # parts of a score; each is a column of the metrics
SHOWN = 300  # characters of a user's value or exception in a reason


def outcome_of(value: Any, name: str) -> Outcome:
    """The outcome for `value`, which the reward `name` returned. Never raises.

    A finite number (also a bool, a NumPy or a torch scalar) becomes a Score, None becomes Unscorable, and an outcome
    stays itself. Anything else becomes an InfraError whose reason shows the value.
    """
    if isinstance(value, Outcome):
        return _checked(value, name)
    if value is None:
        return Unscorable(f"{name} returned None")
    number = _number(value)
    if number is None:
        return InfraError(f"{name} returned {shown(value)} ({type(value).__name__}): expected a number or None")
    if not math.isfinite(number):
        return InfraError(f"{name} returned {number}: expected a finite number or None")
    return Score(number)


def outcomes_of(values: Any, name: str, count: int) -> list[Outcome]:
    """The outcomes of a group, from the `count` values that one reward function returned."""
    if hasattr(values, "tolist"):
        values = values.tolist()  # an array, or a torch tensor
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or len(values) != count:
        given = f"{len(values)} values" if hasattr(values, "__len__") else shown(values)
        return [InfraError(f"{name} returned {given}: expected a list of {count} numbers")] * count
    return [outcome_of(value, name) for value in values]


def parts_of(ends: Iterable[Trajectory], most: int | None = None) -> dict[str, Array]:
    """Values of each named part of the scores of attempts (by their last rows), NaN where missing. most: names kept."""
    parts = [t.outcome.parts for t in ends if isinstance(t.outcome, Score)]
    names = [*dict.fromkeys(name for part in parts for name in part)][:most]
    return {name: np.array([part.get(name, np.nan) for part in parts], np.float64) for name in names}


def shown(value: Any) -> str:
    """A short `repr` of a user's value; building it takes little memory however large the value is."""
    if isinstance(value, bytes | bytearray):
        value = value[:SHOWN]
    return clip(_repr.repr(value))


def clip(text: str, length: int = SHOWN) -> str:
    return plain(text) if len(text) <= length else f"{plain(text[:length])}... ({len(text)} characters)"


def plain(text: str) -> str:
    """The text with lone surrogates, as in file names that are no UTF-8, escaped for any file."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = SHOWN


def _checked(outcome: Outcome, name: str) -> Outcome:
    """An outcome that the user made, with every field checked."""
    if not isinstance(outcome, Score):
        reason = outcome.reason if isinstance(outcome.reason, str) else shown(outcome.reason)
        return type(outcome)(clip(reason))
    parts = outcome.parts if isinstance(outcome.parts, dict) else {"parts": outcome.parts}
    turns, seats = (x if isinstance(x, tuple | list) else (x,) for x in (outcome.turns, outcome.seats))
    if len(parts) > MOST_PARTS:
        return InfraError(f"{name} returned a Score of {len(parts):,} parts: expected at most {MOST_PARTS:,}")
    given = [("value", outcome.value), *parts.items(), *((f"turns[{i}]", turn) for i, turn in enumerate(turns))]
    given += [(f"seats[{i}]", reward) for i, reward in enumerate(seats)]
    for part, value in given:
        if not isinstance(part, str) or len(part) > SHOWN:
            return InfraError(f"{name} returned a Score with a part named {shown(part)}: expected a short text")
        number = _number(value)
        if number is None or not math.isfinite(number):
            return InfraError(f"{name} returned a Score whose {part} is {shown(value)}: expected a finite number")
    named = {plain(part): float(value) for part, value in parts.items()}
    return Score(float(outcome.value), named, tuple(map(float, turns)), tuple(map(float, seats)))


def fitting(outcome: Outcome | None, replies: int, name: str) -> Outcome | None:
    """The outcome, or an InfraError for a Score that rewards more turns than there were replies."""
    if not isinstance(outcome, Score) or len(outcome.turns) <= replies:
        return outcome
    given, there = amount(len(outcome.turns), "turn"), amount(replies, "reply")
    return InfraError(f"{name} returned a Score that rewards {given} of an attempt with {there}: give one a reply")


def _number(value: Any) -> float | None:
    if isinstance(value, str | bytes | bytearray | complex) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # an array or a tensor of more than one element
        return None
    except OverflowError:  # an integer beyond every float
        return math.inf
