"""Policies and their versions: the key that names a version's weights, and the fingerprint that verifies them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class PolicyKey(NamedTuple):
    """The name of a policy's weights after a training step. Of one policy, the later weights are the greater key.

    All policies of a run share its step number. Where two keys differ, nothing that was computed with the weights of one,
    such as KV, may be used for the other. It is a tuple because the prefix cache hashes it for every page.
    """

    policy: str = "policy"
    incarnation: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """A published training step, ordered by step. A resume that is not bit-identical makes a new incarnation."""

    step: int
    incarnation: int = 0
    policy: str = "policy"
    fingerprint: str = ""  # of the serving weights, see `models.fingerprint`

    def __str__(self) -> str:
        life = f".{self.incarnation}" if self.incarnation else ""
        return f"{self.policy}@v{self.step}{life}"

    @property
    def key(self) -> PolicyKey:
        return PolicyKey(self.policy, self.incarnation, self.step)

    @property
    def exact(self) -> str:
        """The version with its fingerprint, for errors about versions of one name."""
        return f"{self} (fingerprint {self.fingerprint[:16] or 'none'})"
