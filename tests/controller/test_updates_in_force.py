"""The updates in force: no policy steps back, what is gone is waited for, and a member lacks what it has not had."""

from __future__ import annotations

import pytest

from tidemill.controller.updates_in_force import UpdatesInForce
from tidemill.core.errors import PolicyMismatch
from tidemill.core.types import Version
from tidemill.core.weight_update import WeightPart, WeightUpdate


def update(policy: str, step: int, incarnation: int = 0) -> WeightUpdate:
    version = Version(step, incarnation, policy, f"{policy}{step}.{incarnation}")
    return WeightUpdate(version, (WeightPart("memory", ""),))


def begun(*updates: WeightUpdate) -> UpdatesInForce:
    updates_in_force = UpdatesInForce()
    for each in updates:
        updates_in_force.begin(each)
    return updates_in_force


def test_one_version_of_each_policy_is_in_force_and_steps_back_for_none() -> None:
    found = begun(update("a", 3), update("b", 3), update("a", 4))
    assert [str(version) for version in found.versions] == ["a@v4", "b@v3"]
    with pytest.raises(PolicyMismatch, match="a@v3 would follow a@v4"):
        found.begin(update("a", 3))
    found.begin(update("b", 3, incarnation=1))
    assert [str(version) for version in found.versions] == ["a@v4", "b@v3.1"]


def test_a_step_is_whole_once_every_policy_has_it() -> None:
    found = begun(update("a", 0))
    assert found.of_one_step, "of other policies nothing is known"
    found.begin(update("b", 0))
    assert found.of_one_step
    found.begin(update("a", 1))
    assert not found.of_one_step
    found.begin(update("b", 1))
    assert found.of_one_step
    found.withdraw()
    assert not found.of_one_step
    found.begin(update("a", 1, incarnation=1))
    assert not found.of_one_step
    found.begin(update("b", 1, incarnation=1))
    assert found.of_one_step


def test_what_a_member_lacks_begins_with_what_is_gone() -> None:
    first, second = update("a", 2), update("b", 2)
    found = begun(first, second)
    assert found.lacking({}) == [first, second]
    assert found.lacking({"a": first.version}) == [second]
    assert found.lacking({"a": first.version, "b": second.version}) == []
    found.withdraw()
    assert found.lacking({"a": first.version, "b": second.version}) == [first, second], "it has to wait for the next ones"
    again = update("a", 2, incarnation=1)
    found.begin(again)
    assert found.lacking({"a": first.version, "b": second.version}) == [second, again]
    assert found.follows(first) and not found.follows(second)


def test_the_same_weights_of_another_trainer_are_brought_on() -> None:
    first, second = update("a", 2), update("b", 2)
    found = begun(first, second)
    found.withdraw()
    same = WeightUpdate(second.version, (WeightPart("memory", "elsewhere"),))
    found.restore(same)
    assert found.is_gone(first) and not found.is_gone(second) and found.follows(second)
    assert found.lacking({}) == [first, same]
    with pytest.raises(AssertionError):
        found.restore(update("b", 3))


def test_a_full_version_in_place_of_a_change_is_kept_only_while_it_is_in_force() -> None:
    first = update("a", 2)
    found, whole = begun(first), WeightUpdate(first.version, (WeightPart("memory", "whole"),))
    found.replace(whole, first)
    assert found.lacking({}) == [whole]
    following = update("a", 3)
    found.begin(following)
    found.replace(first, whole)
    assert found.lacking({}) == [following]
