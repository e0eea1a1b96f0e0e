"""The demo's task, for Tidemill and for its peers: rows of a JSON file, and a score of 1 for the whole answer."""

from __future__ import annotations

import json
import os
from pathlib import Path

ROWS = "REWARD_ROWS"  # names the file: {"train": [{"prompt": ..., "text": ..., "answer": ...}, ...], "eval": [...]}


def rows(split: str) -> list[dict[str, str]]:
    return json.loads(Path(os.environ[ROWS]).read_text())[split]


def score(completion: str, answer: str) -> float:
    return float(completion.strip().lower() == answer.lower())


def tasks(split: str) -> list[dict[str, str]]:
    return [{"prompt": row["prompt"], "answer": row["answer"]} for row in rows(split)]
