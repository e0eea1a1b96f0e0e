"""Comparison of the logprobs of engine, trainer and `transformers` for one model.

A path through the engine counts only with evidence that it was taken: prompts found in the prefix cache, sequences that were
preempted. Everything is computed in float32 on the CPU; the engine in bfloat16 is reported beside it, without a verdict.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tidemill.cli.logprob_sources import engine_of, logits_of, sample_of, trained
from tidemill.core.config import build
from tidemill.core.errors import ConfigError
from tidemill.core.interfaces import EngineStats
from tidemill.core.types import GenerateRequest, SamplingParams
from tidemill.engine.native.cache_size import page_bytes
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.models.architecture import Architecture
from tidemill.models.decoder import Decoder
from tidemill.models.hf_weights import hf_views, load_folder, save_folder
from tidemill.models.tokenizer import load_tokenizer
from tidemill.observability.diagnosis.mismatch import EXACT, SAME, Limit, LogprobComparison
from tidemill.trainer.trainer_kinds import TrainerSettings

TEMPERATURES = (1.0, 0.7)  # alternate between rows
TEXT = (
    "The tide comes in, the pond fills, and the wheel turns at a steady rate all day long.",
    "Q: What is 12 * 7 + 5?\nA: 12 * 7 = 84, and 84 + 5 = 89.",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))  # 5",
)


@dataclass(slots=True)
class ParityRow:
    """A row of tokens with the engine's logprobs; tokens from `start` on are compared."""

    tokens: np.ndarray  # [T] int32
    start: int
    temperature: float
    engine: np.ndarray  # [T - start] float32


@dataclass(frozen=True, slots=True)
class ParityReport:
    """All comparisons of one model."""

    model: str
    family: str
    length: int
    text: bool  # True if there was a tokenizer to encode text with
    evidence: dict[str, int]  # counts that show that a path was taken
    comparisons: list[LogprobComparison]

    @property
    def ok(self) -> bool:
        return all(c.ok for c in self.comparisons) and all(self.evidence.values())


async def check(folder: Path, length: int = 64, seed: int = 0) -> ParityReport:
    """Compare everything. length: tokens of a row. Raises ValueError for an unsupported model."""
    arch = Architecture.from_folder(folder)
    length = min(length, arch.context)
    if length < 8:
        raise ConfigError(f"{folder}: a context of {length} is too short to compare anything; expected at least 8")
    decoder = load_folder(folder)
    _check_finite(decoder, folder)
    texts = _texts(folder, length)
    rows, evidence = await _through_engine(load_folder(folder), texts, length, seed)  # an engine keeps its decoder
    low = await _low_precision(folder, [row.tokens[: row.start] for row in rows["paged"]], length)
    trainer = await _trained(load_folder(folder), [*rows.items(), ("bfloat16", low)])
    reference = _transformers(folder)
    comparisons: list[LogprobComparison] = []
    for path, of_path in rows.items():
        theirs = [_reference_logprobs(reference, row) for row in of_path]
        ours = [row.engine for row in of_path]
        comparisons += [
            _compare(path, "engine - transformers", ours, theirs),
            _compare(path, "engine - trainer", ours, trainer[path]),
            _compare(path, "trainer - transformers", trainer[path], theirs),
        ]
    comparisons += _round_trip(decoder, reference, rows["score"])
    comparisons.append(_compare("bfloat16", "engine - trainer", [r.engine for r in low], trainer["bfloat16"], None))
    return ParityReport(str(folder), arch.family, length, bool(texts), evidence, comparisons)


async def _through_engine(
    decoder: Decoder, texts: list[np.ndarray], length: int, seed: int
) -> tuple[dict[str, list[ParityRow]], dict[str, int]]:
    """Rows by the engine's path, and the evidence that the paths were taken."""
    prompts = _prompts(decoder.arch, texts, length, seed)
    paged = build(
        EngineSettings, {"max_sequences": 16, "page_size": 4, "context": length, "device": "cpu", "prefix_cache": False}
    )
    rows: dict[str, list[ParityRow]] = {}
    rows["paged"], _ = await _generate(decoder, paged, prompts, length)
    chunked = paged.model_copy(update={"prefill_chunk": 5})
    rows["chunked"], _ = await _generate(decoder, chunked, prompts, length)
    cached = paged.model_copy(update={"prefix_cache": True, "page_size": 2})
    twice = [*prompts, *prompts]  # the second of each finds its prompt in the cache
    rows["prefix-cached"], engine = await _generate(decoder, cached, twice, length)
    evidence = {"cached tokens": engine.cached_tokens}
    many, settings = _crowd(decoder.arch, prompts, length)
    rows["preempted"], engine = await _generate(decoder, settings, many, length)
    evidence["preemptions"] = engine.preemptions
    rng = np.random.default_rng(seed + 1)
    whole = [rng.integers(0, decoder.arch.vocab, length).astype(np.int32) for _ in range(4)]
    rows["score"] = await _score(decoder, paged.model_copy(update={"prefill_chunk": 16}), [*whole, *texts])
    return rows, evidence


async def _generate(
    decoder: Decoder, settings: EngineSettings, prompts: Sequence[np.ndarray], length: int
) -> tuple[list[ParityRow], EngineStats]:
    """Continue each prompt to `length` tokens, all at the same time. Also returns the engine's stats."""
    temperatures = [TEMPERATURES[i % len(TEMPERATURES)] for i in range(len(prompts))]
    asked = [
        SamplingParams(temperature=temperature, max_tokens=length - len(prompt), ignore_eos=True, seed=i)
        for i, (prompt, temperature) in enumerate(zip(prompts, temperatures, strict=True))
    ]
    requests = [GenerateRequest(prompt, params) for prompt, params in zip(prompts, asked, strict=True)]
    async with engine_of(decoder, settings) as engine:
        replies = await asyncio.gather(*map(engine.generate, requests))
        stats = await engine.stats()
    rows = [
        ParityRow(np.concatenate([prompt, reply.tokens]), len(prompt), temperature, reply.logprobs)
        for prompt, reply, temperature in zip(prompts, replies, temperatures, strict=True)
    ]
    return rows, stats


async def _score(decoder: Decoder, settings: EngineSettings, tokens: Sequence[np.ndarray]) -> list[ParityRow]:
    async with engine_of(decoder, settings) as engine:
        scored = await asyncio.gather(*(engine.score(row, "policy", 1.0, 0) for row in tokens))
    return [ParityRow(row, 1, 1.0, result.logprobs[1:]) for row, result in zip(tokens, scored, strict=True)]


async def _low_precision(folder: Path, prompts: Sequence[np.ndarray], length: int) -> list[ParityRow]:
    settings = build(EngineSettings, {"dtype": "bfloat16", "device": "cpu", "max_sequences": 16, "context": length})
    rows, _ = await _generate(load_folder(folder, torch.bfloat16), settings, prompts, length)
    return rows


def _prompts(arch: Architecture, texts: list[np.ndarray], length: int, seed: int) -> list[np.ndarray]:
    """Random rows of several lengths, some with a common beginning, and the beginnings of texts."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, arch.vocab, size).astype(np.int32) for size in rng.integers(length // 4, length // 2 + 1, 4)]
    branches = [np.concatenate([rows[0][: length // 4 - 1], row[: length // 8]]) for row in rows[1:3]]
    return [*rows, *branches, *(text[: max(1, length // 3)] for text in texts)]


def _crowd(arch: Architecture, prompts: list[np.ndarray], length: int) -> tuple[list[np.ndarray], EngineSettings]:
    """More sequences than the KV memory holds: they begin together, and some are preempted."""
    each = page_bytes(arch, 4, torch.float32) * -(-length // 4)  # bytes of a whole sequence
    count = max(8, -(-(3 << 20) // (2 * each)))  # about 1.5 MiB of them, or eight
    megabytes = max(1, -(-each // (1 << 20)), (count * each * 6 // 10) >> 20)
    many = [prompts[i % len(prompts)][: length // 4 + i % 3] for i in range(count)]
    sizes = {"max_sequences": count, "page_size": 4, "kv_memory_mb": megabytes, "context": length}
    return many, build(EngineSettings, sizes | {"device": "cpu", "prefix_cache": False})


async def _trained(decoder: Decoder, rows: Sequence[tuple[str, list[ParityRow]]]) -> dict[str, list[np.ndarray]]:
    """The trainer's logprobs of the same tokens, by path."""
    every = [row for _, of_path in rows for row in of_path]
    samples = [sample_of(row.tokens, np.arange(len(row.tokens)) >= row.start, row.temperature) for row in every]
    said = zip(every, await trained(decoder, TrainerSettings(device="cpu"), samples), strict=True)
    found = iter([values[row.start :] for row, values in said])
    return {path: [next(found) for _ in of_path] for path, of_path in rows}


def _transformers(folder: Path) -> Any:
    """The folder's model as `transformers` reads it. Raises ConfigError unless it takes every weight."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    load: Any = AutoModelForCausalLM.from_pretrained
    model, about = load(
        str(folder), dtype=torch.float32, attn_implementation="eager", local_files_only=True, output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if about[kind]:
            raise ConfigError(
                f"{folder}: transformers reports {kind.replace('_', ' ')}: {sorted(map(str, about[kind]))[:3]}"
            )
    return model.eval()


@torch.inference_mode()
def _reference_logits(model: Any, tokens: np.ndarray) -> torch.Tensor:
    """Logits of `transformers`, [T, V]."""
    return model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0]


def _reference_logprobs(model: Any, row: ParityRow) -> np.ndarray:
    logits = _reference_logits(model, row.tokens)[row.start - 1 : -1].double() / row.temperature
    targets = torch.from_numpy(row.tokens[row.start :].astype(np.int64))
    return torch.log_softmax(logits, -1).gather(1, targets[:, None]).squeeze(1).numpy()


def _round_trip(decoder: Decoder, reference: Any, rows: list[ParityRow]) -> list[LogprobComparison]:
    """Compare logits of a model saved by one and read by the other: they must be identical."""
    with tempfile.TemporaryDirectory() as place:
        ours, theirs = Path(place) / "ours", Path(place) / "theirs"
        save_folder(decoder, ours, tokenizer_from=None, dtype=torch.float32)
        read_by_them = _transformers(ours)
        reference.save_pretrained(theirs)
        read_by_us = load_folder(theirs)
        tokens = [row.tokens for row in rows]
        there = _compare(
            "saved by Tidemill",
            "transformers",
            [_reference_logits(reference, t).numpy().ravel() for t in tokens],
            [_reference_logits(read_by_them, t).numpy().ravel() for t in tokens],
            EXACT,
        )
        back = _compare(
            "saved by transformers",
            "Tidemill",
            [logits_of(decoder, t).ravel() for t in tokens],
            [logits_of(read_by_us, t).ravel() for t in tokens],
            EXACT,
        )
    return [there, back]


def _check_finite(decoder: Decoder, folder: Path) -> None:
    if bad := next((name for name, view in hf_views(decoder) if not torch.isfinite(view).all()), None):
        raise ConfigError(f"{folder}: {bad} holds NaN or infinite values, so nothing can be computed with it")


def _texts(folder: Path, length: int) -> list[np.ndarray]:
    """Some text in the model's own tokens; none if the folder has no tokenizer."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return []
    tokenizer = load_tokenizer(folder)
    rows = [np.array(tokenizer.encode(text, add_special_tokens=True)[:length], np.int32) for text in TEXT]
    return [row for row in rows if len(row) >= 2]


def _compare(
    what: str, pair: str, ours: list[np.ndarray], theirs: list[np.ndarray], limit: Limit | None = SAME
) -> LogprobComparison:
    found = LogprobComparison(what, pair, limit)
    for a, b in zip(ours, theirs, strict=True):
        found.add(a, b)
    return found
