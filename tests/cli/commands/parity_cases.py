"""Folders written by transformers, of tiny random models of every family."""

from __future__ import annotations

from pathlib import Path

from models.model_zoo import CONFIGS, folder_of, transformers_model

ENGINE_PATHS = ("paged", "chunked", "prefix-cached", "preempted", "score")


def model_folder(name: str, path: Path) -> Path:
    return folder_of(transformers_model(CONFIGS[name]), path)
