"""The task of the step benchmark, for Tidemill and for its peers: prompts of random characters, and a score that differs
between samples. Nothing is to be learnt; every reply has its full length."""

from __future__ import annotations

import json
import os
import random
import zlib


def alphabet(characters: int) -> str:
    """So many, each a token of its own."""
    return "".join(chr(0x10000 + i) for i in range(characters))


def prompt_texts(characters: int, count: int, length: int, seed: int) -> list[str]:
    rng, letters = random.Random(seed), alphabet(characters)
    return ["".join(rng.choices(letters, k=length)) for _ in range(count)]


def score(completion: str) -> float:
    return zlib.crc32(completion.encode()) % 1000 / 1000


def tasks(split: str) -> list[dict[str, str]]:
    """Tidemill's rows: what they are made of comes with the environment."""
    given = json.loads(os.environ["STEP_TASK"])
    texts = prompt_texts(given["characters"], 4096, given["prompt"], seed=0 if split == "train" else 1)
    return [{"prompt": text} for text in (texts if split == "train" else texts[:16])]
