"""The codec: everything that travels comes back equal; anything else is refused, whatever the bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.attempt_checks import check_row
from tidemill.core.errors import CodecError
from tidemill.core.serialization import decode, encode
from tidemill.core.types import (
    Completion,
    Constraint,
    Finish,
    GenerateRequest,
    Group,
    InfraError,
    Outcome,
    Sample,
    SamplingParams,
    Score,
    Support,
    Task,
    Trajectory,
    Unscorable,
    Version,
)


def trajectory(outcome: Outcome | None, n: int = 5) -> Trajectory:
    mask = np.arange(n) >= 2
    return Trajectory(
        np.arange(n, dtype=np.int32),
        mask,
        np.where(mask, -0.5, 0).astype(np.float32),
        np.where(mask, 3, -1).astype(np.int32),
        Finish.STOP,
        outcome,
        (Version(3, 1, "policy", "abcd"),),
        support=Support(np.arange(4, dtype=np.int32), np.array([0, 2, 3, 4], np.int32)),
        parent=(0, 2),
        info={"reward_s": 0.1},
    )


@pytest.mark.parametrize(
    "outcome", [None, Score(1.0, {"a": 0.5}, (0.5, -1.0)), Unscorable("no answer"), InfraError("crashed")]
)
def test_a_group_comes_back_equal(outcome):
    group = Group(7, Task("t", [{"role": "user", "content": "hi"}], {"answer": 3}), [trajectory(outcome)])
    back = decode(encode(group), Group)
    a, b = group.trajectories[0], back.trajectories[0]
    check_row(b)
    for name in ("tokens", "mask", "logprobs", "versions"):
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype and np.array_equal(x, y)
    for name in ("ids", "offsets", "sets", "lacks"):
        assert np.array_equal(getattr(a.support, name), getattr(b.support, name))
    assert (b.outcome, b.sources, b.parent, b.finish, b.info) == (a.outcome, a.sources, a.parent, a.finish, a.info)
    assert back.task == group.task


@pytest.mark.parametrize("rest", [{}, {"policy": "teacher", "key": "g1/0", "constraint": Constraint("regex", "[0-9]+")}])
def test_a_request_comes_back_equal(rest):
    request = GenerateRequest(np.arange(3, dtype=np.int32), SamplingParams(seed=2**63, stop_ids=(1, 2)), **rest)
    back = decode(encode((request,)), tuple[GenerateRequest])[0]
    assert back.tokens.dtype == np.int32 and back.tokens.tolist() == [0, 1, 2]
    assert replace(back, tokens=None) == replace(request, tokens=None)


def test_arrays_are_writable_copies():
    back = decode(encode(trajectory(None)), Trajectory)
    back.tokens[0] = 9  # raises when it is a view of immutable bytes


@given(st.binary(max_size=300))
def test_hostile_bytes_are_refused(raw):
    for kind in (Group, Sample, Completion, GenerateRequest, SamplingParams):
        try:
            decode(raw, kind)
        except CodecError as error:
            assert str(error)


@given(st.integers(-5, 5), st.integers(0, 40), st.sampled_from(["<i4", "|O", "<f4", "zz", "|b1"]))
def test_array_headers_that_lie_are_refused(size, length, dtype):
    raw = encode((dtype, (size,), b"\0" * length))
    try:
        array = decode(raw, np.ndarray)
    except CodecError:
        return
    assert array.nbytes == length and array.dtype != object


def test_only_known_dtypes_travel():
    with pytest.raises(TypeError, match="do not travel"):
        encode(np.array(["text"]))
