"""The record of what an engine has served: numbers, epochs, what may follow, and whose prefix cache is kept."""

from __future__ import annotations

import pytest

from tidemill.core.errors import PolicyMismatch
from tidemill.core.policy_version import PolicyKey
from tidemill.core.types import Version
from tidemill.engine.native.served_versions import ServedVersions


def of(policy: str, step: int, life: int = 0) -> Version:
    return Version(step, life, policy, fingerprint=f"{policy}{step}{life}")


@pytest.fixture
def served() -> ServedVersions:
    return ServedVersions([of("a", -1), of("b", -1), of("judge", 0)], cached=2, frozen={"judge"})


def test_each_policy_has_a_version_and_an_epoch_of_its_own(served: ServedVersions) -> None:
    assert served.epochs.tolist() == [0, 1, 2] and served.latest == of("a", -1)
    assert [served.commit(version) for version in (of("b", 0), of("a", 0), of("b", 1))] == [1, 0, 1]
    assert served.epochs.tolist() == [4, 5, 2]
    assert [served.every[epoch] for epoch in served.epochs] == [of("a", 0), of("b", 1), of("judge", 0)]
    assert [served.present(number) for number in range(3)] == [of("a", 0), of("b", 1), of("judge", 0)]
    assert served.latest == of("b", 1) and served.of("a") == of("a", 0) and served.of("policy") is None
    assert served.every[:3] == [of("a", -1), of("b", -1), of("judge", 0)], "what was stamped keeps its meaning"


def test_weights_that_come_again_are_no_new_version(served: ServedVersions) -> None:
    served.commit(of("a", 0))
    before = len(served.every)
    assert served.commit(of("a", 0)) == 0 and len(served.every) == before


def test_the_prefix_cache_of_each_policys_latest_versions_is_kept(served: ServedVersions) -> None:
    for step in range(4):
        served.commit(of("a", step))
    served.commit(of("b", 0))
    kept = {PolicyKey("a", 0, 2), PolicyKey("a", 0, 3), PolicyKey("b", 0, -1), PolicyKey("b", 0, 0), PolicyKey("judge")}
    assert served.recent == kept


def test_a_policy_is_known_by_its_name(served: ServedVersions) -> None:
    assert [served.number(name, "engine-0") for name in ("a", "b", "judge")] == [0, 1, 2]
    with pytest.raises(ValueError, match="policy 'policy' is not served here: engine engine-0 serves 'a', 'b', 'judge'"):
        served.number("policy", "engine-0")


@pytest.mark.parametrize(
    ("new", "says"),
    [
        (of("a", 2), "a@v2 is older than a@v3"),
        (of("a", 9, -1), "versions only go forward"),
        (of("judge", 1), "judge@v1 would update a frozen policy"),
        (of("c", 9), r"c@v9 is not of the policy that engine engine-0 serves \(a@v3, b@v-1, judge@v0\)"),
    ],
    ids=lambda value: str(value),
)
def test_what_may_not_follow_is_refused(served: ServedVersions, new: Version, says: str) -> None:
    served.commit(of("a", 3))
    with pytest.raises(PolicyMismatch, match=says):
        served.expect_next(new, "engine-0")
    for next_one in (of("a", 3), of("a", 4), of("a", 0, 1), of("b", 0)):
        served.expect_next(next_one, "engine-0")


def test_one_policy_is_a_case_of_several() -> None:
    served = ServedVersions([Version(0)], cached=1)
    served.expect_next(Version(1), "engine-0")
    assert served.commit(Version(1)) == 0 and served.recent == {PolicyKey(step=1)} and served.epochs.tolist() == [1]
