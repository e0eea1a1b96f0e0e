"""Hugging Face Hub: models and datasets by name, as folders of the local cache.

A name is `org/name` or `org/name@revision`. A local folder of that name takes precedence. What is fetched is one commit,
whose files never change; its folder is named after it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from tidemill.core.errors import ConfigError

Kind = Literal["model", "dataset"]
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".py", ".toml", ".txt", ".safetensors")
WEIGHTS = "*.safetensors"
_READ = {
    "model": ("*.json", "merges.txt", "tokenizer.model", "*.jinja", WEIGHTS),
    "dataset": ("*.jsonl", "*.ndjson", "*.json", "*.csv", "*.parquet", "README.md"),
}  # the files that are fetched of each
_SKIPPED = {"model": ("original/*", "onnx/*", "consolidated*", "*.onnx.json"), "dataset": ()}  # the same weights once more


def is_name(given: str) -> bool:
    """True if `given` has the form of a hub name and names nothing on this machine."""
    fits = bool(_NAME.fullmatch(given)) and not given.endswith(_FILES)
    return fits and not Path(given).exists() and not Path(given).parent.is_dir()


def shown(folder: str | Path) -> str:
    """A folder's name for people: `org/name@commit` in the hub's cache, else its path."""
    path = Path(folder)
    kind, _, name = path.parent.parent.name.partition("--")
    if path.parent.name != "snapshots" or kind not in ("models", "datasets"):
        return str(folder)
    return f"{name.replace('--', '/')}@{path.name[:12]}"


def fetch(name: str, kind: Kind, commit: str = "", *, weights: bool = True) -> Path:
    """The cache folder of the model or dataset `name`, downloaded if it is not there.

    commit: the commit to fetch, wherever the name's revision points by now. weights: False leaves a model's weights out.
    Raises ConfigError, in one sentence.
    """
    import huggingface_hub
    from huggingface_hub import errors

    repository, _, revision = name.partition("@")
    patterns = [each for each in _READ[kind] if weights or each != WEIGHTS]
    raised: tuple[Any, ...] = (OSError, ValueError, RuntimeError, getattr(errors, "HTTPError", OSError))
    try:
        with _quiet_where_nobody_looks():
            found = huggingface_hub.snapshot_download(
                repository,
                repo_type=kind,
                revision=commit or revision or None,
                allow_patterns=patterns,
                ignore_patterns=list(_SKIPPED[kind]) or None,
            )
    except raised as error:
        raise ConfigError(f"{kind} {name!r} is no folder here, and {_why(error, repository, revision)}") from None
    return Path(found)


def _why(error: Exception, repository: str, revision: str) -> str:
    from huggingface_hub import constants, errors

    hub, log_in = constants.ENDPOINT, "log in with `hf auth login`, or set HF_TOKEN"
    match error:
        case errors.GatedRepoError():
            return f"the hub wants you to be granted access to it: ask for that at {hub}/{repository}, and {log_in}"
        case errors.RepositoryNotFoundError():
            return f"{hub} has none of that name that you may see: check the name; for a private one {log_in}"
        case errors.RevisionNotFoundError():
            return f"{hub} has no revision {revision!r} of {repository}: give a branch, a tag or a commit"
        case errors.LocalEntryNotFoundError() if constants.HF_HUB_OFFLINE:
            return f"HF_HUB_OFFLINE is set and {constants.HF_HUB_CACHE} does not hold it whole: unset it, or give a folder"
        case errors.LocalEntryNotFoundError():
            return f"{hub} cannot be reached: check the name and the network, or give a folder"
    said = next(iter(str(error).splitlines()), "") or type(error).__name__
    return f"fetching it from {hub} failed: {said:.200}"


@contextmanager
def _quiet_where_nobody_looks() -> Iterator[None]:
    """Show no progress bars unless stderr is a terminal."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
