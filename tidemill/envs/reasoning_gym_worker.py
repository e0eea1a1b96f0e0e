"""reasoning-gym in other processes: makes tasks as a program, judges replies in reward workers.

Both run with a fixed hash seed, because some datasets iterate over sets: without it the same configuration gives other
tasks in the next run. So an entry need not be sent: a worker makes it again from the dataset and the index.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections.abc import Set
from dataclasses import fields
from functools import lru_cache
from typing import Any

import msgspec
import reasoning_gym
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

_APART = 0.9  # from this share of distinct answers on, no answer is in both splits either
_NEAR = 0.7  # likeness from which a name is suggested


def score(
    completions: list[str],
    *,
    dataset: str,
    args: dict[str, Any],
    seed: int,
    length: int,
    index: int,
    question: str,
    answer_tag: str,
) -> list[float]:
    """The dataset's own score of each completion for the entry at `index`."""
    key = (dataset, json.dumps(args, sort_keys=True), seed, length)
    source, entry = _dataset(*key), _entry(*key, index)
    if entry["question"] != question:
        raise RuntimeError(f"reasoning-gym's {dataset} made another question for index {index} than it did before")
    answers = [extract_answer(text, answer_tag) for text in completions] if answer_tag else completions
    return [source.score_answer(answer, entry) for answer in answers]


def make(dataset: str, args: dict[str, Any], seed: int, size: int, eval_size: int, length: int) -> dict[str, Any]:
    """Draw entries for both splits, which share no question, and no answer if those are almost unique.

    length: size of the dataset from which they are drawn. Returns lists of (index, question, answer) as "train" and "eval",
    or the "error" that prevents them.
    """
    try:
        source = _dataset(dataset, json.dumps(args, sort_keys=True), seed, length)
    except (TypeError, ValueError, AssertionError) as error:
        return {"error": _why(dataset, args, error)}
    stream = iter(range(length))
    seen: set[str] = set()
    held_out = _draw(source, stream, seen, eval_size)
    if len(held_out) < eval_size:
        few = f"has about {len(held_out)} distinct questions with these args"
        return {"error": f"reasoning-gym's {dataset} {few}: lower eval_size={eval_size}, or widen args"}
    answers = {_fold(answer) for _, _, answer in held_out if answer is not None}
    apart = answers if len(answers) >= _APART * len(held_out) else frozenset()
    train = _draw(source, stream, seen, size, apart)
    if not train:
        few = "leaves nothing to train on"
        return {"error": f"reasoning-gym's {dataset} {few}: lower eval_size={eval_size}, or widen args"}
    return {"train": train, "eval": held_out}


def _draw(source: Any, stream: Any, seen: set[str], count: int, answers: Set[str] = frozenset()) -> list:
    """Up to `count` entries with unseen questions and without the answers in `answers`."""
    found = []
    while len(found) < count and (index := next(stream, None)) is not None:
        try:
            entry = source[index]
        except IndexError:  # the dataset ran out of puzzles before its length
            break
        question, answer = entry["question"], entry["answer"]
        if _fold(question) in seen or (answer is not None and _fold(answer) in answers):
            continue
        seen.add(_fold(question))
        found.append((index, question, None if answer is None else str(answer)))
    return found


@lru_cache(maxsize=8)
def _dataset(name: str, args: str, seed: int, length: int) -> Any:
    return reasoning_gym.create_dataset(name, seed=seed, size=length, **json.loads(args))


@lru_cache(maxsize=1024)
def _entry(name: str, args: str, seed: int, length: int, index: int) -> dict[str, Any]:
    return _dataset(name, args, seed, length)[index]


def _fold(text: Any) -> str:
    return " ".join(str(text).casefold().split())


def _why(dataset: str, args: dict[str, Any], error: Exception) -> str:
    if dataset not in DATASETS:
        near = _near(dataset)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(sorted(DATASETS))}"
        return f"reasoning-gym has no dataset {dataset!r}; {hint}"
    known = sorted({f.name for f in fields(DATASETS[dataset][1])} - {"seed", "size"})
    unknown = [key for key in args if key not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
        return f"reasoning-gym's {dataset} has no argument {unknown[0]!r}; {hint}"
    return f"reasoning-gym's {dataset} does not take args={args!r}: {error}"


def _near(name: str) -> list[str]:
    """Up to three datasets like `name` as a whole, or with words like all of its words; the most similar first."""
    likeness = {known: max(_alike(name, known), _words_alike(name, known)) for known in sorted(DATASETS)}
    least = max(_NEAR, max(likeness.values()) - 0.15)
    return sorted((known for known in likeness if likeness[known] >= least), key=lambda known: -likeness[known])[:3]


def _alike(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, "_".join(_words(one)), "_".join(_words(other))).ratio()


def _words_alike(name: str, known: str) -> float:
    found = [max(_alike(word, other) for other in _words(known)) for word in _words(name)]
    return sum(found) / max(len(found), 1)


def _words(name: str) -> list[str]:
    return re.findall(r"[^\W_]+", name.casefold())


def main() -> None:
    replies = os.dup(1)
    os.dup2(2, 1)  # output that the library prints must not mix with the reply
    order = msgspec.msgpack.decode(sys.stdin.buffer.read())  # bounded: the parent writes it at once
    with os.fdopen(replies, "wb") as pipe:
        pipe.write(msgspec.msgpack.encode(make(**order)))


if __name__ == "__main__":
    main()
