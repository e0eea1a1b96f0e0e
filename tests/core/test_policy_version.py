"""Keys tell policies, incarnations and steps apart, and a group's age is that of its oldest token of any policy."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.algorithms.token_rows import row_of
from tidemill.core.attempt_checks import check_row
from tidemill.core.policy_version import PolicyKey, Version
from tidemill.core.serialization import decode, encode
from tidemill.core.types import Finish, Group, Sample, Score, Task, Trajectory

versions = st.builds(Version, st.integers(0, 5), st.integers(0, 2), st.sampled_from("ab"), st.sampled_from(["f", "g"]))


@given(versions, versions)
def test_a_key_is_the_version_but_for_its_fingerprint(one: Version, other: Version) -> None:
    assert (one.key == other.key) == (replace(one, fingerprint="") == replace(other, fingerprint=""))
    assert one.key != other.key or hash(one.key) == hash(other.key)
    assert decode(encode(one.key), PolicyKey) == one.key and decode(encode(one), Version) == one
    assert one.key == (one.policy, one.incarnation, one.step)


@given(st.lists(versions, min_size=2))
def test_keys_of_one_policy_are_ordered_as_it_was_trained(many: list[Version]) -> None:
    for earlier, later in pairwise(sorted(version.key for version in many)):
        if earlier.policy == later.policy:
            assert (earlier.incarnation, earlier.step) <= (later.incarnation, later.step)


def test_versions_of_before_are_read() -> None:
    """Recorded trajectories name their sources in this form."""
    old = {"step": 3, "incarnation": 1, "policy": "policy", "fingerprint": "ab"}
    assert decode(encode(old), Version) == Version(3, 1, fingerprint="ab")
    assert decode(encode({"step": 2}), Version).key == PolicyKey("policy", 0, 2)


def trajectory(policy: str, steps: list[int], prompt: int, sample: int) -> Trajectory:
    """An episode of one policy, whose tokens weights of these steps sampled, after a prompt."""
    mask = np.arange(prompt + len(steps)) >= prompt
    stamps = np.concatenate([np.full(prompt, -1), steps]).astype(np.int32)
    sources = tuple(Version(step, policy=policy, fingerprint=f"{policy}{step}") for step in sorted(set(steps)))
    zeros = np.zeros(len(mask), np.float32)
    made = Trajectory(zeros.astype(np.int32), mask, zeros, stamps, Finish.STOP, Score(1.0), sources, sample)
    check_row(made)
    return made


episodes = st.builds(
    trajectory, st.sampled_from(["solver", "critic"]), st.lists(st.integers(0, 9), max_size=4), st.integers(0, 2), st.just(0)
)


@given(st.lists(episodes, max_size=6))
def test_a_groups_age_is_that_of_its_oldest_token_of_any_policy(rows: list[Trajectory]) -> None:
    group = Group(0, Task("t", "?"), rows)
    steps = [int(step) for row in rows for step in row.versions[row.mask]]
    assert group.oldest == (min(steps) if steps else None)
    assert {source.key for source in group.sources} == {
        PolicyKey(row.policy, 0, int(step)) for row in rows for step in row.versions[row.mask]
    }
    back = decode(encode(group), Group)
    assert (back.oldest, back.sources) == (group.oldest, group.sources)
    for row, again in zip(rows, back.trajectories, strict=True):
        assert again.policy == row.policy and again.sources == row.sources
        sample = row_of(group, row, step=9)
        assert sample.policy == row.policy and decode(encode(sample), Sample).policy == row.policy
        assert sample.lags is not None and sample.lags[row.mask].tolist() == [9 - int(s) for s in row.versions[row.mask]]


def test_an_episode_is_of_one_policy() -> None:
    mixed = trajectory("solver", [3, 4], 1, 0)
    mixed.sources = (mixed.sources[0], replace(mixed.sources[1], policy="critic"))
    with pytest.raises(ValueError, match="several policies"):
        check_row(mixed)
