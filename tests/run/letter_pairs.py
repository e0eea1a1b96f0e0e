"""A task of two letters and a reward of the sum of characters: runs in this process that end in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tidemill
from tidemill.models.new_model import SIZES, fresh_model

TASKS = [{"prompt": f"{a}{b}=", "answer": a} for a in "abcdefgh" for b in "abcdefgh"]


def score(completion: str, answer: str) -> float:
    return (sum(map(ord, completion + answer)) % 5) / 4


def letter_model(folder: Path) -> Path:
    fresh_model(folder, alphabet="abcdefgh=", context=32, **SIZES["0.1m"])
    return folder


def train(model: Path, folder: Path, steps: int, settings: dict[str, Any]) -> tidemill.run.api.Run:
    usual: dict[str, Any] = {
        "trainer": {"lr": 1e-2},
        "placement": {"kind": "inline", "environment": {"workers": 0}},
        "scoring": {"accept": ["gold", "garbage"]},
        "quiet": True,
    }
    return tidemill.train(score, model, tasks=TASKS, run_dir=folder, steps=steps, **usual | settings)
