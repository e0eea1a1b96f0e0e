"""Messages on tasks name the row that the user wrote, and not only the hash that is its id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tidemill.core.config import build
from tidemill.core.errors import ConfigError
from tidemill.core.task_places import named
from tidemill.core.types import Task
from tidemill.envs.environment_settings import RowsSettings
from tidemill.envs.python_tasks import splits_of
from tidemill.envs.reward_workers.reward_pool import RewardPool
from tidemill.envs.task_files import row_splits, rows
from tidemill.models.tokenizer import character_tokenizer
from tidemill.run.sft_warmup import check_answers


def of(path: Path, **given: Any) -> RowsSettings:
    return build(RowsSettings, {"data": str(path), "eval_data": str(path), "reward": "exact", **given})


def test_a_row_without_an_answer_is_named_by_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n\n{"prompt": "b"}\n')
    tasks = row_splits(of(path))["train"]
    with pytest.raises(ConfigError) as raised:
        check_answers(tasks, character_tokenizer("ab"), 8)
    assert f"task {tasks[1].id} (data file {str(path)!r}, line 3) has None" in str(raised.value)
    with pytest.raises(ConfigError, match=r"\(data file '.*rows.jsonl', line 1\) has neither `tests` nor `cases`"):
        rows(of(path, reward="code"), RewardPool(workers=0))


def test_equal_rows_are_told_apart_and_a_changed_file_has_no_places(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "c"}\n{"prompt": "a"}\n')
    first, _, third = row_splits(of(path))["train"]
    assert named(first.id).endswith(", line 1)") and named(third.id).endswith(", line 3)")
    for text in ('{"prompt": "d"}\n', "no JSON\n"):
        path.write_text(text)
        assert named(first.id) == f"task {first.id}"


def test_rows_of_python_have_a_number_and_tasks_their_own_id() -> None:
    given = [Task("mine", "p"), {"prompt": "q"}]
    tasks = splits_of({"train": given, "eval": [{"prompt": "r"}]}, "places")
    assert named("mine") == "task mine"
    assert named(tasks["train"][1].id) == f"task {tasks['train'][1].id} (environment 'places': train task 1)"
    assert named(tasks["eval"][0].id).endswith("(environment 'places': eval task 0)")
