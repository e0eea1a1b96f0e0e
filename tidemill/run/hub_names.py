"""Replaces names on the hub in a recipe by folders, at commits that the run records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tidemill.core.atomic_files import write_json
from tidemill.core.hub import Kind, fetch, is_name
from tidemill.envs.environment_settings import AgentSettings, AnyEnv, PythonSettings, RowsSettings, environments_of
from tidemill.run.recipe import RunConfig
from tidemill.run.storage.run_files import read_json

RECORD = "hub.json"  # in a run's folder: KIND NAME -> commit


def fetched(
    config: RunConfig, run: Path | None = None, note: Callable[[str], None] | None = None, *, data: bool = True
) -> RunConfig:
    """The recipe with a folder for every hub name. Raises ConfigError.

    run: a run's folder, whose recorded commits are used, and which records new ones. data: if False, only the model without
    its weights is fetched.
    """
    record = run / RECORD if run is not None else None
    known: dict[str, Any] = read_json(record) if record is not None and record.is_file() else {}
    found = dict(known)

    def folder(name: str, kind: Kind) -> str:
        if not is_name(name):
            return name
        if note is not None:
            note(f"{kind} {name}: fetched from the hub, where its cache does not hold it")
        path = fetch(name, kind, str(known.get(f"{kind} {name}", "")), weights=data)
        found[f"{kind} {name}"] = path.name  # a folder of the cache has its commit's name
        return str(path)

    changed: dict[str, Any] = {"model": folder(config.model, "model")}
    if data:
        each = tuple(_with_data(env, folder) for env in environments_of(config.env))
        changed["env"] = each if isinstance(config.env, tuple) else each[0]
    if record is not None and found != known:
        write_json(record, found)
    return config.model_copy(update=changed)


def _with_data(env: AnyEnv, folder: Callable[[str, Kind], str]) -> AnyEnv:
    if not isinstance(env, RowsSettings | PythonSettings | AgentSettings) or ".py:" in env.data:
        return env
    names: Mapping[str, str] = {"data": env.data, "eval_data": env.eval_data}
    return env.model_copy(update={key: folder(name, "dataset") for key, name in names.items() if name})
