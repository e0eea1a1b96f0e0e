"""Verifies that the tokens of a step are of known versions (I1), and of none that is too old (I2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tidemill.core.errors import PolicyMismatch
from tidemill.core.policy_version import PolicyKey
from tidemill.core.types import Group, Version

Versions = Mapping[PolicyKey, Version]  # those that were published


def known(versions: Versions, groups: Iterable[Group]) -> bool:
    """True if versions that were published sampled all tokens of these groups."""
    return all(versions.get(source.key) == source for group in groups for source in group.sources)


def check_fresh(versions: Versions, step: int, groups: Sequence[Group], again: Sequence[Group], max_lag: int) -> None:
    """Verify I1 and I2 at the last moment before a gradient.

    Neither applies to offline replies, which no policy sampled. I2 does not apply to replayed groups (`again`).
    """
    for group in (*groups, *again):
        if not known(versions, [group]):
            raise PolicyMismatch(f"group {group.id} holds tokens of a policy which this run never published")
    for group in groups:
        if group.oldest is not None and step - group.oldest > max_lag:
            raise AssertionError(f"group {group.id} is {step - group.oldest} versions old at step {step}: bound broken")
