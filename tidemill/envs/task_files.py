"""Tasks from files: JSON lines, or a Hugging Face dataset if `datasets` is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tidemill.core.errors import ConfigError, UnsupportedModel
from tidemill.core.hub import shown
from tidemill.core.import_object import load_object
from tidemill.core.task_places import remember
from tidemill.core.types import Outcome, Task, Trajectory, Unscorable
from tidemill.envs.code_checks.code_settings import check_rows
from tidemill.envs.environment import SingleTurn
from tidemill.envs.environment_settings import NO_REWARD, RowsSettings
from tidemill.envs.json_lines import json_lines
from tidemill.envs.python_tasks import splits_of
from tidemill.envs.reward_list import judge_of
from tidemill.envs.reward_workers.reward_pool import RewardPool
from tidemill.envs.tasks import columns_of, split_by_hash, task_of, told_apart
from tidemill.models.architecture import Architecture


def rows(settings: RowsSettings, pool: RewardPool) -> SingleTurn:
    """The single-turn environment of rows and a reward. Raises ConfigError when they do not fit each other."""
    if settings.reward == "model":
        _expect_reward_model(settings.reward_options)
    elif "model" in settings.reward and not isinstance(settings.reward, str):
        _expect_reward_model(settings.reward_options.get("model", {}))
    splits = row_splits(settings)
    if settings.reward in NO_REWARD:
        return SingleTurn(_title(settings.data), splits, _nobody)
    judge = judge_of(settings.reward, pool, weights=settings.reward_weights, options=settings.reward_options)
    judge.check(columns_of([*splits["train"], *splits["eval"]]))
    if judge.sandbox:
        check_rows([*splits["train"], *splits["eval"]])
    return SingleTurn(_title(settings.data), splits, judge)


def _title(data: str) -> str:
    name = shown(data)
    return f"rows:{Path(data).stem if name == data else name.partition('@')[0].rpartition('/')[2]}"


def _expect_reward_model(options: Any) -> None:
    folder = options.get("folder") if isinstance(options, dict) else options
    if not isinstance(folder, str):
        raise ConfigError(f"env.reward = 'model' needs reward_options.folder, the reward model's; given was {folder!r}")
    try:
        Architecture.from_folder(folder)
    except UnsupportedModel as error:
        raise ConfigError(f"env.reward_options.folder: {error}") from None


async def _nobody(task: Task, attempts: list[Trajectory]) -> list[Outcome]:
    return [Unscorable("the rows have no reward: name one in env.reward") for _ in attempts]


def row_splits(settings: RowsSettings) -> dict[str, list[Task]]:
    """Train and held-out tasks, from two sources or split by hash. Raises ConfigError when one is not usable."""
    if ".py:" in settings.data:
        return splits_of(load_object(settings.data), _title(settings.data), settings.eval_share)
    tasks = _read(settings, settings.data)
    if not settings.eval_data:
        splits = split_by_hash(tasks, settings.eval_share)
        if not all(splits.values()):
            side = "training" if splits["eval"] else "held-out"
            raise ConfigError(
                f"{settings.data!r} has {len(tasks)} rows, and of their prompts' hashes none falls on the {side} side of "
                f"eval_share = {settings.eval_share:g}: give eval_data, or another eval_share (a run's training tasks were "
                "split by the same hash before)"
            )
        return splits
    return {"train": tasks, "eval": _read(settings, settings.eval_data)}


def _read(settings: RowsSettings, data: str) -> list[Task]:
    tasks = [task for _, task in _located(settings, data)]
    if not tasks:
        raise ConfigError(f"{data!r} is empty: expected at least one row")
    remember(data, lambda: ((where, task.id) for where, task in _located(settings, data)))
    return told_apart(tasks)


def _located(settings: RowsSettings, data: str) -> Iterator[tuple[str, Task]]:
    """Iterate over (place, task). Raises ConfigError for what cannot be read."""
    if (file := _json_lines_of(settings, data)) is not None:
        found = json_lines(file.expanduser(), f"data file {str(file)!r}")
    else:
        found = _dataset(settings, data)
    answer = settings.answer_column
    for where, row in found:
        if answer != "answer":
            if answer not in row:
                raise ConfigError(f"{where} has no column {answer!r}: its columns are {', '.join(row)}; set answer_column")
            row = {**row, "answer": row[answer]}
        yield where, task_of(row, where, prompt_column=settings.prompt_column, template=settings.template)


def _json_lines_of(settings: RowsSettings, data: str) -> Path | None:
    """The JSON-lines file that `data` names, or the split's in that folder; None: `datasets` has to load it."""
    if data.endswith((".jsonl", ".ndjson")):
        return Path(data)
    if importlib.util.find_spec("datasets") is not None or not (folder := Path(data).expanduser()).is_dir():
        return None
    split = settings.split
    found = [file for file in (folder / f"{split}.jsonl", folder / "data" / f"{split}.jsonl") if file.is_file()]
    return found[0] if found else None


def _dataset(settings: RowsSettings, data: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate over (place, row) of a dataset that the `datasets` package loads. Raises ConfigError if it fails."""
    path = Path(data).expanduser()
    if importlib.util.find_spec("datasets") is None:
        exists = "" if path.exists() else " and is no file here"
        raise ConfigError(f"data {data!r} is not a .jsonl file{exists}: other formats and names need `pip install datasets`")
    import datasets  # pyright: ignore[reportMissingImports]

    split = settings.split
    try:
        if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(str(path))
            found = found[split] if isinstance(found, datasets.DatasetDict) else found
        elif path.is_file():
            kind = {".json": "json", ".csv": "csv", ".parquet": "parquet"}.get(path.suffix, path.suffix)
            found = datasets.load_dataset(kind, data_files=str(path), split="train")
        else:
            found = datasets.load_dataset(data, split=split)
    except (OSError, ValueError, KeyError, RuntimeError) as error:  # for names, splits, files, network
        raise ConfigError(
            f"data {shown(data)!r} (split {split!r}) does not load: {str(error) or type(error).__name__}"
        ) from None
    for number, row in enumerate(found):
        yield f"{shown(data)!r}, row {number}", dict(row)
