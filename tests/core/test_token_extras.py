"""Declarations of token extras, what engines return under them, and payloads from before there were any."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tidemill.core.attempt_checks import check_row
from tidemill.core.serialization import decode, encode
from tidemill.core.token_extras import TokenExtra, joined, taken
from tidemill.core.types import Finish, Trajectory

EXPERTS = TokenExtra("experts", "uint8", (2, 3), fill=255)


def test_a_declaration_travels_and_names_what_it_is() -> None:
    assert decode(encode(EXPERTS), TokenExtra) == EXPERTS
    assert str(EXPERTS) == "experts: uint8 [2, 3], fill 255"
    with pytest.raises(ValueError, match=r"token extra 'x' has dtype 'float12': expected one of int8, uint8, bool"):
        TokenExtra("x", "float12")


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        ({}, "nothing"),
        ({"experts": np.zeros((4, 2, 3), np.int8)}, r"int8 \[4, 2, 3\]"),
        ({"experts": np.zeros((3, 2, 3), np.uint8)}, r"uint8 \[3, 2, 3\]"),
        ({"experts": np.zeros((4, 3, 2), np.uint8)}, r"uint8 \[4, 3, 2\]"),
    ],
)
def test_an_engine_must_return_what_it_declared(returned: dict[str, np.ndarray], found: str) -> None:
    with pytest.raises(
        ValueError, match=rf"engine 'e-1' returned {found} for the token extra 'experts': expected uint8 \[4"
    ):
        taken([EXPERTS], returned, 4, "e-1")


def test_turns_are_joined_with_the_fill_for_messages() -> None:
    first, second = (np.arange(n * 6, dtype=np.uint8).reshape(n, 2, 3) for n in (2, 1))
    whole = joined([EXPERTS], [(3, {"experts": first}), (0, {"experts": second})])["experts"]
    assert whole.dtype == np.uint8 and whole.shape == (6, 2, 3)
    assert (whole[:3] == 255).all() and (whole[3:5] == first).all() and (whole[5:] == second).all()
    assert joined([EXPERTS], [])["experts"].shape == (0, 2, 3)
    assert joined([], [(3, {})]) == {}


def test_payloads_from_before_and_with_extras_of_any_kind_are_read() -> None:
    none = np.zeros(2, np.float32)
    made = Trajectory(none.astype(np.int32), none.astype(bool), none, none.astype(np.int32) - 1, Finish.STOP)
    raw = msgspec.msgpack.decode(encode(made))
    del raw["extras"]
    assert decode(encode(raw), Trajectory).extras == {}
    made.extras = {"experts": EXPERTS.filled(2), "entropy": none}
    back = decode(encode(made), Trajectory)  # the reader knows no declaration
    assert {name: (str(a.dtype), a.shape) for name, a in back.extras.items()} == {
        "experts": ("uint8", (2, 2, 3)),
        "entropy": ("float32", (2,)),
    }
    made.extras["entropy"] = none[:1]
    with pytest.raises(ValueError, match=r"'entropy' of a trajectory has shape \(1,\): expected 2 entries"):
        check_row(made)
