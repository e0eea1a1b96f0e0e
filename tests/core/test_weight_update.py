"""Weight updates keep their fields on the wire, and who cannot take one refuses it by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.errors import CodecError, PolicyMismatch
from tidemill.core.interfaces import Capabilities
from tidemill.core.serialization import decode, encode
from tidemill.core.types import Version
from tidemill.core.weight_update import UpdateKind, UpdateSupport, WeightPart, WeightUpdate

FULL = WeightUpdate(Version(5, fingerprint="f"), (WeightPart("a", "b"),))

texts = st.text(max_size=9)
versions = st.builds(Version, st.integers(0, 1 << 40), st.integers(0, 99), texts, texts)
parts = st.lists(st.builds(WeightPart, texts, texts, st.integers(0, 1 << 50)), min_size=1, max_size=4).map(tuple)
changes = st.builds(WeightUpdate, versions, parts, st.sampled_from(["delta", "adapter"]), versions, note=texts)
updates = st.builds(WeightUpdate, versions, parts, note=texts) | changes


@given(updates)
def test_round_trip(update: WeightUpdate) -> None:
    assert decode(encode(update), WeightUpdate) == update
    assert update.bytes == sum(part.bytes for part in update.parts)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kind": "everything"}, "kind"),
        ({"kind": "delta"}, "has no base, expected one"),
        ({"base": Version(1)}, "has the base policy@v1, expected none"),
        ({"parts": ()}, "has no part"),
        ({"parts": ({"transport": "a"},)}, "location"),
    ],
)
def test_an_update_that_makes_no_sense_is_refused_on_arrival(fields: dict[str, Any], says: str) -> None:
    plain = decode(encode(FULL), dict[str, Any])
    assert decode(encode(plain), WeightUpdate) == FULL
    with pytest.raises(CodecError, match=says):
        decode(encode(plain | fields), WeightUpdate)


@given(updates, st.lists(st.sampled_from(get_args(UpdateKind)), unique=True).map(tuple), st.booleans(), versions)
def test_an_update_is_taken_if_its_kind_its_parts_and_its_base_are(
    update: WeightUpdate, kinds: tuple[UpdateKind, ...], several: bool, served: Version
) -> None:
    can, expected = UpdateSupport(kinds, several), None
    if update.kind not in kinds or (len(update.parts) > 1 and not several):
        expected = ValueError
    elif update.kind == "delta" and update.base != served:  # an adapter's base is what its engine keeps beside
        expected = PolicyMismatch
    if expected is None:
        can.check(update, "x", served)
        return
    with pytest.raises(expected, match=r"^x takes|but x serves"):
        can.check(update, "x", served)


def test_a_base_of_the_same_step_with_other_weights_is_another_base() -> None:
    can, served = UpdateSupport(("delta",)), Version(4, fingerprint="right")
    update = replace(FULL, kind="delta", base=served)
    can.check(update, "engine-0", served)
    for other in (replace(served, fingerprint="wrong"), replace(served, incarnation=1), replace(served, policy="b")):
        with pytest.raises(PolicyMismatch, match="but engine-0 serves"):
            can.check(update, "engine-0", other)


def test_an_engine_takes_through_a_transport_what_both_take() -> None:
    all_kinds = UpdateSupport(("full", "delta"), several_parts=True)
    assert all_kinds.both(UpdateSupport(("delta", "adapter"), True)) == UpdateSupport(("delta",), True)
    assert all_kinds.both(UpdateSupport()) == UpdateSupport().both(all_kinds) == UpdateSupport()
    assert decode(encode(Capabilities(8, updates=all_kinds)), Capabilities).updates == all_kinds
