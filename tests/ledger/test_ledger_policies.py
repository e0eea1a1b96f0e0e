"""A record of two policies is read back whole, and a resume tells their versions apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from ledger_cases import assert_same, group

from tidemill.core.errors import LedgerError
from tidemill.core.types import Group, Version
from tidemill.ledger.ledger import SqliteLedger
from tidemill.run.resume import _left, published


def of_two_policies(group_id: int) -> Group:
    """A group whose second attempt is another policy's, at the same steps."""
    made = group(group_id)
    second = made.trajectories[1]
    second.sources = tuple(replace(v, policy="critic", fingerprint=f"critic{v.step}") for v in second.sources)
    return made


def test_groups_and_versions_of_two_policies_come_back(tmp_path: Path) -> None:
    made = [of_two_policies(i) for i in range(3)]
    versions = [source for step in range(2) for source in sorted(made[0].sources) if source.step == step]
    with SqliteLedger(tmp_path) as ledger:
        for version in versions:
            ledger.publish(version)
        for each in made:
            ledger.admit(each.id, each.task)
            ledger.finish(each)
        ledger.begin_step(0, 0, [0, 1])
        ledger.end_step(0, 0, {})
        with pytest.raises(LedgerError, match="critic@v0 was published with fingerprint"):
            ledger.publish(Version(0, 0, "critic", "another"))
    with SqliteLedger(tmp_path, mode="open") as ledger:
        assert sorted(ledger.versions()) == sorted(versions) and len(versions) == 4
        assert {v.policy for v in versions} == {"policy", "critic"}
        for each in made:
            assert_same(ledger.load(each.id), each)
            assert ledger.load(each.id).trajectories[1].policy == "critic"


@pytest.mark.parametrize("unrecorded", [None, "policy", "critic"])
def test_a_group_is_sampled_again_if_a_publication_of_either_policy_was_not_recorded(
    tmp_path: Path, unrecorded: str | None
) -> None:
    made = of_two_policies(0)
    with SqliteLedger(tmp_path) as ledger:
        for version in sorted(made.sources):
            if version.policy != unrecorded:
                ledger.publish(version)
        ledger.admit(0, made.task)
        ledger.finish(made)
        (left,) = _left(ledger, {version.key: version for version in ledger.versions()})
    assert isinstance(left, Group) == (unrecorded is None)


def test_a_frozen_policy_is_recorded_and_never_known_as_one_that_is_trained_on(tmp_path: Path) -> None:
    """A row that it sampled would be one of a policy that was never published."""
    judge, trained = Version(0, policy="judge", fingerprint="j"), Version(0, policy="solver", fingerprint="s")
    with SqliteLedger(tmp_path) as ledger:
        for version in (judge, trained):
            ledger.publish(version)
        assert sorted(ledger.versions()) == sorted([judge, trained])
        assert published(ledger, ("solver", "other")) == {trained.key: trained}
        with pytest.raises(LedgerError, match="judge@v0 was published with fingerprint"):
            ledger.publish(replace(judge, fingerprint="another"))
