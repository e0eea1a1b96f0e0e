"""`tidemill pool add` and `remove`: engines join and leave a run that goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tidemill.cli.commands.run_state import state_of
from tidemill.cli.commands.screen import print_json
from tidemill.core.errors import ConfigError
from tidemill.ledger.lock import holder
from tidemill.observability.safe_text import visible
from tidemill.run.pool_requests import Request, ask
from tidemill.run.storage.run_folder import RunFolder


def add(run: Path, as_json: bool) -> int:
    """Start one more engine, which samples once it serves the version in force."""
    return _ask(run, as_json, "samples from now on", lambda pid: Request(pid, "add"))


def remove(run: Path, engine: str, hand_over: bool, as_json: bool) -> int:
    """Let an engine end its requests, leave the pool and stop."""
    return _ask(run, as_json, "left the pool and stopped", lambda pid: Request(pid, "remove", engine, hand_over))


def _ask(run: Path, as_json: bool, said: str, make: Callable[[int], Request]) -> int:
    folder = RunFolder.existing(run)
    now = state_of(folder)
    if now.name != "running" or now.pid is None:
        raise ConfigError(f"run {str(run)!r} does not run, so it has no engines: {now.what_to_do()}")
    pid = now.pid
    engine = ask(folder.path, make(pid), lambda: holder(folder.path) == pid)
    if as_json:
        print_json({"engine": engine})
    else:
        print(f"  {visible(engine)} {said}")
    return 0
