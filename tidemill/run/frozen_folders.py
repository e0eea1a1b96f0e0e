"""Folders of frozen policies: a model's, an adapter's, or a version that an earlier run recorded, RUN/NAME@vN.

No torch is imported before weights are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tidemill.core.errors import ConfigError, TidemillError
from tidemill.core.types import Version
from tidemill.models.adapter_config import ADAPTER_CONFIG
from tidemill.run.storage.checkpoint_manifest import step_of
from tidemill.run.storage.run_files import RunReport, read_json

RECORDED = re.compile(r"(.+)/([A-Za-z0-9_-]+)@v(\d{1,9})")


@dataclass(frozen=True, slots=True)
class RecordedVersion:
    """An adapter's version in the record of another run, as RUN/POLICY@vSTEP names it."""

    run: Path
    policy: str
    step: int

    def __str__(self) -> str:
        return f"{self.run}/{self.policy}@v{self.step}"

    @property
    def folder(self) -> Path:
        """The folder that holds it: of a checkpoint, or of what the run exported. Raises ConfigError if there is none."""
        several = self._of_adapters()
        found = dict(self._steps(several))
        if self.step not in found:
            held = ", ".join(f"v{step}" for step in sorted(found)) or "none"
            raise ConfigError(
                f"{self}: that run holds no such version of the policy {self.policy!r}; it holds {held} (the checkpoints "
                "that record.checkpoints and record.keep_every left, and the last step)"
            )
        return found[self.step]

    def expect(self, fingerprint: str) -> None:
        """Raise ConfigError unless the run recorded this version with this fingerprint."""
        from tidemill.ledger.ledger import SqliteLedger

        with SqliteLedger(self.run, mode="read") as ledger:
            known = [each for each in ledger.versions() if (each.policy, each.step) == (self.policy, self.step)]
        if not any(each.fingerprint == fingerprint for each in known):
            recorded = " or ".join(each.exact for each in known) or "no such version"
            raise ConfigError(
                f"{self}: the folder holds the fingerprint {fingerprint[:16]}, and the run recorded {recorded}: its files "
                "were changed; give another version, or the folder itself"
            )

    def _of_adapters(self) -> bool:
        """True if the run had several policies. Raises ConfigError unless it published adapters of this one."""
        recipe = read_json(self.run / "config.json")
        lora, policies = recipe.get("trainer", {}).get("lora"), recipe.get("policies") or {}
        if not lora or lora.get("publish", "adapter") != "adapter":
            raise ConfigError(
                f"{self}: that run published whole weights, and a version of it is no adapter; give the folder of a "
                f"model, such as {self.run}/final"
            )
        names = [name for name, each in policies.items() if each.get("frozen") is None] or ["policy"]
        if self.policy not in names:
            raise ConfigError(f"{self}: that run has no policy {self.policy!r}; expected {' or '.join(map(repr, names))}")
        return bool(policies)

    def _steps(self, several: bool) -> Iterator[tuple[int, Path]]:
        """Steps whose adapter lies in the run's folder, with the folder of each."""
        for checkpoint in (self.run / "checkpoints").glob("step-*"):
            step, place = step_of(checkpoint.name), checkpoint / "trainer" / (self.policy if several else "")
            if step is not None and (place / ADAPTER_CONFIG).is_file():
                yield step, place
        final = self.run / "final" / f"{self.policy}-adapter" if several else self.run / "final-adapter"
        if (final / ADAPTER_CONFIG).is_file() and (report := self.run / "report.json").is_file():
            yield int(read_json(report, RunReport)["steps"]), final


def recorded_version(given: str) -> RecordedVersion | None:
    """The version that RUN/POLICY@vSTEP names; None for anything else, and for a folder of that name."""
    found = RECORDED.fullmatch(given)
    if found is None or Path(given).expanduser().is_dir():
        return None
    return RecordedVersion(Path(found[1]).expanduser(), found[2], int(found[3]))


def frozen_folder(given: str) -> Path:
    """The folder of a frozen policy. Raises ConfigError for a version that its run does not hold."""
    recorded = recorded_version(given)
    return Path(given).expanduser() if recorded is None else recorded.folder


def is_model(folder: Path) -> bool:
    """True for the folder of a whole model, False for one of an adapter, or of neither."""
    return (folder / "config.json").is_file() and not (folder / ADAPTER_CONFIG).is_file()


def known_model(given: str) -> bool:
    """True if a frozen policy is a whole model. One that is not found is none."""
    with suppress(TidemillError, OSError):
        return is_model(frozen_folder(given))
    return False


def frozen_version(name: str, given: str, dtype: str) -> Version:
    """The version that engines serve of a frozen policy, with the fingerprint of its folder's weights.

    dtype: of served weights. Raises UnsupportedModel for a folder without a policy, and ConfigError for a recorded version
    that is not what its run published.
    """
    import torch

    from tidemill.models.adapter_update import folder_fingerprint
    from tidemill.models.hf_weights import load_folder
    from tidemill.models.served_weights import Contents

    folder = frozen_folder(given)
    if is_model(folder):
        fingerprint = Contents.of(load_folder(folder), getattr(torch, dtype)).fingerprint
    else:
        fingerprint = folder_fingerprint(folder)
        if (recorded := recorded_version(given)) is not None:
            recorded.expect(fingerprint)
    return Version(0, policy=name, fingerprint=fingerprint)
