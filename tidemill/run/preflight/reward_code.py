"""Notes when the code that judges a run changed between two of its starts.

A resume uses the reward as it is now. Its scores and accuracies are then no longer comparable with those before.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from tidemill.envs.environment_settings import EnvSettings, PythonSettings, RowsSettings, environments_of
from tidemill.ledger.ledger import SqliteLedger

META = "judging_code"


def judging_code(env: EnvSettings) -> dict[str, str]:
    """Digest of every FILE.py that the recipe's environments and rewards name, by its path."""
    named = [each.path if isinstance(each, PythonSettings) else each.reward for each in _of_users(env)]
    references = [name for names in named for name in ([names] if isinstance(names, str) else names)]
    files = [Path(reference.rpartition(":")[0]) for reference in references if ".py:" in reference]
    return {str(path): blake2b(path.read_bytes(), digest_size=16).hexdigest() for path in files if path.is_file()}


def tell_changes(env: EnvSettings, ledger: SqliteLedger, note: Callable[[str], None]) -> None:
    """Record the code of this start, and note which files differ from the start before."""
    now, before = judging_code(env), json.loads(ledger.meta().get(META, "{}"))
    if changed := sorted(path for path, digest in now.items() if before.get(path, digest) != digest):
        ledger.event("judging_code_changed", {"files": changed})
        note(
            f"warning: {', '.join(changed)} changed since this run was started last: rewards and accuracies from here on "
            "are those of the new code, and no comparison with earlier ones; give another run_dir to begin anew"
        )
    if now != before:
        ledger.set_meta(META, json.dumps(now))


def _of_users(env: EnvSettings) -> list[PythonSettings | RowsSettings]:
    return [each for each in environments_of(env) if isinstance(each, PythonSettings | RowsSettings)]
