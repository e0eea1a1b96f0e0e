"""Rows as other programs write them: they are read, or one sentence names the row that is not."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tidemill.cli.commands.reward import read_answers
from tidemill.core.config import build, load
from tidemill.core.errors import ConfigError
from tidemill.core.types import Finish, Score, Task, Trajectory, Unscorable
from tidemill.envs.build_environment import make_environment
from tidemill.envs.environment_settings import RowsSettings
from tidemill.envs.json_lines import json_lines
from tidemill.envs.reward_workers.reward_pool import RewardPool
from tidemill.envs.rewards.functions import exact, last_boxed, numeric, regex
from tidemill.envs.rewards.math import score
from tidemill.envs.tasks import task_of

ROW = b'{"prompt": "a", "answer": "1"}'
READ = {
    "mark": (b"\xef\xbb\xbf" + ROW, [{"prompt": "a", "answer": "1"}]),
    "marks of joined files": (b"\xef\xbb\xbf" + ROW + b"\n\xef\xbb\xbf" + ROW + b"\n", [{"prompt": "a", "answer": "1"}] * 2),
    "UTF-16": ("\ufeff".encode("utf-16-le") + ROW.decode().encode("utf-16-le"), [{"prompt": "a", "answer": "1"}]),
    "UTF-16, big end": ("\ufeff".encode("utf-16-be") + ROW.decode().encode("utf-16-be"), [{"prompt": "a", "answer": "1"}]),
    "Windows line ends": (ROW + b"\r\n" + ROW + b"\r\n", [{"prompt": "a", "answer": "1"}] * 2),
    "blank lines": (b"\n \r\n" + ROW + b"\n\n\t\n", [{"prompt": "a", "answer": "1"}]),
    "separators in a string": ('{"a": "x\u2028y\x85z"}'.encode(), [{"a": "x\u2028y\x85z"}]),
    "NaN": (b'{"a": NaN, "b": [NaN]}', [{"a": None, "b": [None]}]),
    "infinity": (b'{"a": -Infinity}', [{"a": float("-inf")}]),
    "large": (b'{"a": 123456789012345678901234567890}', [{"a": 123456789012345678901234567890}]),
    "empty": (b"\xef\xbb\xbf\r\n", []),
}


@pytest.mark.parametrize("case", READ)
def test_what_other_programs_write_is_read(case, tmp_path: Path):
    raw, rows = READ[case]
    (tmp_path / "rows.jsonl").write_bytes(raw)
    assert [row for _, row in json_lines(tmp_path / "rows.jsonl", "f")] == rows


REFUSED = {
    "bytes": (ROW + b"\n" + ROW + b'\n{"prompt": "caf\xe9"}', "f, line 3 holds the byte 0xe9, which is no utf-8:"),
    "repeated key": (ROW + b'\n{"prompt": "a", "x": {"k": 1, "l": 2, "k": 3}}', "f, line 2 gives the key 'k' twice"),
    "not JSON": (b"\n" + ROW + b"\n{'prompt': 1}", "f, line 3 is not JSON: Expecting property name"),
    "no object": (ROW + b"\n3", "f, line 2 is a int: expected one object a line"),
    "deep": (ROW + b"\n" + b"[" * 100_000, "f, line 2 is nested deeper than can be read"),
    "long number": (ROW + b'\n{"a": ' + b"9" * 5000 + b"}", "f, line 2 holds a number of more than 4,300 digits"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_one_sentence_names_the_line(case, tmp_path: Path):
    raw, message = REFUSED[case]
    (tmp_path / "rows.jsonl").write_bytes(raw)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}") as caught:
        list(json_lines(tmp_path / "rows.jsonl", "f"))
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    for path, word in (
        ("pipe", "is a device or pipe"),
        (".", "is a folder"),
        ("dangling", "does not exist"),
        ("a\0b", "not"),
    ):
        with pytest.raises(ConfigError, match=word):
            list(json_lines(tmp_path / path, "f"))
    reader, writer = os.pipe()  # what a shell's <(command) is
    try:
        os.write(writer, ROW)
        os.close(writer)
        assert len(list(json_lines(Path(f"/proc/self/fd/{reader}"), "f"))) == 1
    finally:
        os.close(reader)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": 1 << 64}, r"line 2: column 'answer' holds an integer of more than 64 bits: write it as a text"),
        ({"meta": {"deep": [-(1 << 70)]}}, r"line 2: column 'meta' holds an integer of more than 64 bits"),
        ({"answer": "\ud83d"}, r"line 2: column 'answer' holds half a character, '\\ud83d'"),
        ({"\udc00": 1}, r"line 2: column '\\udc00' holds half a character"),
        ({"x": [{"text": "so\udc8d"}]}, r"line 2: column 'x' holds half a character"),
        ({"x": json.loads("[" * 120 + "]" * 120)}, "line 2: column 'x' is nested more than 100 deep"),
    ],
)
def test_data_that_cannot_travel_is_named_by_row_and_column(row, message, tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(ROW + b"\n" + json.dumps({"prompt": "b", **row}).encode())
    with pytest.raises(ConfigError, match=message):
        make_environment(RowsSettings(kind="rows", data=str(path), reward="exact"), RewardPool(workers=0))
    if "answer" in row:
        path.write_bytes(b'{"answer": "1"}\n' + json.dumps(row).encode())
        with pytest.raises(ConfigError, match=message):
            read_answers(path)


def test_the_users_answers_and_recipes_may_begin_with_a_mark(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"reply": "x", "expect": "pass"}\r\n\r\n{"answer": 7}\r\n')
    assert [(own.text, own.expect) for own in read_answers(tmp_path / "a.jsonl")] == [("x", "pass"), ("7", "fail")]
    (tmp_path / "r.toml").write_bytes(b'\xef\xbb\xbfkind = "rows"\r\ndata = "\xc3\xa9.jsonl"\r\n')
    assert load(RowsSettings, [tmp_path / "r.toml"]).data == "é.jsonl"


REWARDS = """
def needs(completion, answer, unit):
    return None if unit is None else float(completion == f"{answer} {unit}")

def rest(completion, **columns):
    return None if columns["unit"] is None else float(completion == f"{columns['answer']} {columns['unit']}")

def default(completion, answer, unit="s"):
    return float(completion == f"{answer} {unit}")

def group(completions, answer, unit):
    return [None if u is None else float(c == f"{a} {u}") for c, a, u in zip(completions, answer, unit)]

def absent(completion, colour):
    return 1.0

def gold(answer, unit):
    return answer if unit is None else f"{answer} {unit}"
"""


def attempt(text: str) -> Trajectory:
    import numpy as np

    tokens = np.array([0, *map(ord, text)], np.int32)
    mask = np.arange(len(tokens)) > 0
    return Trajectory(tokens, mask, np.where(mask, -1, 0).astype(np.float32), np.where(mask, 0, -1), Finish.STOP, text=text)


async def test_a_column_that_only_some_rows_have_is_none_for_the_others(tmp_path: Path):
    (tmp_path / "r.py").write_text(REWARDS)
    path = tmp_path / "rows.jsonl"
    given = [{"prompt": f"p{i}", "answer": str(i)} | ({"unit": "m"} if i % 2 else {}) for i in range(40)]
    path.write_text("\n".join(map(json.dumps, given)))
    pool = RewardPool(workers=0)

    def env(name: str):
        return make_environment(RowsSettings(kind="rows", data=str(path), reward=f"{tmp_path}/r.py:{name}"), pool)

    with pytest.raises(ConfigError, match=r"needs 'colour', which no task has \(columns: answer, unit\)"):
        env("absent")
    for name in ("needs", "rest", "group", "default"):
        found = env(name)
        tasks = {task.prompt: task for task in found.tasks("train")}
        without, has = tasks["p2"], tasks["p3"]
        assert "unit" not in without.data  # what is recorded is the row as it was given
        assert await found.judge(has, [attempt("3 m")]) == [Score(1.0)]
        (outcome,) = await found.judge(without, [attempt("2 s")])
        assert outcome == Score(1.0) if name == "default" else isinstance(outcome, Unscorable), name
    assert env("needs").gold(without) == "2" and env("needs").gold(has) == "3 m"
    await pool.close()


def test_a_row_without_an_answer_is_not_judged():
    """The text of None or NaN is no answer, and a reply that says it is not right."""
    for nothing in (None, float("nan")):
        for text in ("None", "nan", "NaN", "\\boxed{None}", "\\boxed{nan}"):
            assert exact(text, nothing) is exact(text, nothing, normalise=True) is numeric(text, nothing) is None
            assert last_boxed(text, nothing) is score(text, nothing) is regex(text, nothing, pattern=".+") is None
    task = task_of({"prompt": "a", "answer": float("nan"), "more": [{"x": float("nan")}, 1.5]}, "row 1")
    assert task == task_of({"prompt": "a", "answer": None, "more": [{"x": None}, 1.5]}, "row 1")
    assert build(RowsSettings, {"kind": "rows", "data": "x"}).data == "x" and isinstance(task, Task)
