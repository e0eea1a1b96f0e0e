"""Tasks from files: JSON lines, or a Hugging Face dataset if `datasets` is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tidemill.core.errors import ConfigError, UnsupportedModel
from tidemill.core.hub import shown
from tidemill.core.types import Outcome, Task, Trajectory, Unscorable
from tidemill.envs.environment import SingleTurn
from tidemill.envs.environment_settings import NO_REWARD, PythonSettings, RowsSettings
from tidemill.envs.json_lines import json_lines
from tidemill.envs.judge import Scorer
from tidemill.envs.reward_list import judge_of
from tidemill.envs.tasks import columns_of, split_by_hash, task_of, told_apart
from tidemill.models.architecture import Architecture


def rows(settings: RowsSettings, scorer: Scorer) -> SingleTurn:
    """The single-turn environment of rows and a reward.

    Raises ConfigError when the rows or the reward are not usable, or do not fit each other.
    """
    if "model" in ((settings.reward,) if isinstance(settings.reward, str) else settings.reward):
        alone = isinstance(settings.reward, str)
        given = settings.reward_options if alone else settings.reward_options.get("model", {})
        _expect_reward_model(given.get("folder") if isinstance(given, dict) else given)
    splits = row_splits(settings)
    if settings.reward in NO_REWARD:
        return SingleTurn(_title(settings.data), splits, _nobody)
    judge = judge_of(settings.reward, scorer, weights=settings.reward_weights, options=settings.reward_options)
    judge.check(columns_of([*splits["train"], *splits["eval"]]))
    return SingleTurn(_title(settings.data), splits, judge)


def _title(data: str) -> str:
    name = shown(data)
    return f"rows:{Path(data).stem if name == data else name.partition('@')[0].rpartition('/')[2]}"


def _expect_reward_model(folder: Any) -> None:
    if not isinstance(folder, str):
        raise ConfigError(f"env.reward = 'model' needs reward_options.folder, the reward model's; given was {folder!r}")
    try:
        Architecture.from_folder(folder)
    except UnsupportedModel as error:
        raise ConfigError(f"env.reward_options.folder: {error}") from None


async def _nobody(task: Task, attempts: list[Trajectory]) -> list[Outcome]:
    return [Unscorable("the rows have no reward: name one in env.reward") for _ in attempts]


def row_splits(settings: RowsSettings | PythonSettings) -> dict[str, list[Task]]:
    """Train and held-out tasks, from two sources, or from one that is split by its prompts' hash.

    Raises ConfigError when a source is not usable or a split is empty.
    """
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


def _read(settings: RowsSettings | PythonSettings, data: str) -> list[Task]:
    if (file := _json_lines_of(settings, data)) is not None:
        found = json_lines(file.expanduser(), f"data file {str(file)!r}")
    else:
        found = _dataset(settings, data)
    prompt, answer, template = "prompt", "answer", "{prompt}"
    if isinstance(settings, RowsSettings):
        prompt, answer, template = settings.prompt_column, settings.answer_column, settings.template
    tasks = []
    for where, row in found:
        if answer != "answer":
            if answer not in row:
                raise ConfigError(f"{where} has no column {answer!r}: its columns are {', '.join(row)}; set answer_column")
            row = {**row, "answer": row[answer]}
        tasks.append(task_of(row, where, prompt_column=prompt, template=template))
    if not tasks:
        raise ConfigError(f"{data!r} is empty: expected at least one row")
    return told_apart(tasks)


def _json_lines_of(settings: RowsSettings | PythonSettings, data: str) -> Path | None:
    """The JSON-lines file that `data` names; None when `datasets` has to load the data.

    Without that package, it may also be the split's file in the folder `data`.
    """
    if data.endswith((".jsonl", ".ndjson")):
        return Path(data)
    if importlib.util.find_spec("datasets") is not None or not (folder := Path(data).expanduser()).is_dir():
        return None
    split = settings.split if isinstance(settings, RowsSettings) else "train"
    found = [file for file in (folder / f"{split}.jsonl", folder / "data" / f"{split}.jsonl") if file.is_file()]
    return found[0] if found else None


def _dataset(settings: RowsSettings | PythonSettings, data: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate over (place, row) of a dataset's folder, file or name, loaded by the `datasets` package.

    Raises ConfigError when the package is missing or does not load it.
    """
    path = Path(data).expanduser()
    if importlib.util.find_spec("datasets") is None:
        exists = "" if path.exists() else " and is no file here"
        raise ConfigError(f"data {data!r} is not a .jsonl file{exists}: other formats and names need `pip install datasets`")
    import datasets  # pyright: ignore[reportMissingImports]

    split = settings.split if isinstance(settings, RowsSettings) else "train"
    try:
        if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(str(path))
            found = found[split] if isinstance(found, datasets.DatasetDict) else found
        elif path.is_file():
            kind = {".json": "json", ".csv": "csv", ".parquet": "parquet"}.get(path.suffix, path.suffix)
            found = datasets.load_dataset(kind, data_files=str(path), split="train")
        else:
            found = datasets.load_dataset(data, split=split)
    except (
        OSError,
        ValueError,
        KeyError,
        RuntimeError,
    ) as error:  # raised by the package for names, splits, files, network
        raise ConfigError(
            f"data {shown(data)!r} (split {split!r}) does not load: {str(error) or type(error).__name__}"
        ) from None
    for number, row in enumerate(found):
        yield f"{shown(data)!r}, row {number}", dict(row)
