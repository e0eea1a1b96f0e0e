"""Two tasks that contradict each other on the same prompts, a frozen judge, and what the record of their run must hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tidemill.core.types import Version
from tidemill.ledger.ledger import SqliteLedger
from tidemill.models.adapter_config import AdapterConfig
from tidemill.models.adapter_files import export_adapter
from tidemill.models.hf_weights import load_folder, save_folder
from tidemill.models.lora import adapters, attach, gathered_factors
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.run.frozen_folders import frozen_version

LETTERS = "abcd"
ALPHABET = LETTERS + "=:\n"
PLAYED = {"same": "echo", "next": "follow"}  # environment -> policy
POLICIES: dict[str, Any] = {"echo": {}, "follow": {}}
SOURCE = """
import tidemill

def tasks(split):
    return [{"prompt": c + ("=" if split == "train" else ":")} for c in "abcd"]

def says(reply, wanted):
    return float(reply.startswith(wanted))

@tidemill.environment(tasks=tasks)
async def same(task, chat):
    return tidemill.Score(says(await chat.reply(task.prompt), task.prompt[0]))

@tidemill.environment(tasks=tasks)
async def following(task, chat):
    return tidemill.Score(says(await chat.reply(task.prompt), "bcda"["abcd".index(task.prompt[0])]))

@tidemill.environment(tasks=tasks)
async def judged(task, chat):
    wanted, reply = "bcda"["abcd".index(task.prompt[0])], await chat.reply(task.prompt)
    said = await chat.ask("judge", reply or "a", max_tokens=2)
    return tidemill.Score(says(reply, wanted), {"asked": 1.0, "length": float(len(said))})
"""


def environments(folder: Path, judged: bool = False) -> list[dict[str, Any]]:
    """The tables of both tasks, whose file is written to `folder`. judged: the second one asks the frozen policy `judge`."""
    file = folder / "contradicting.py"
    file.write_text(SOURCE)
    names = {"same": "same", "next": "judged" if judged else "following"}
    path = {env: f"{file}:{function}" for env, function in names.items()}
    return [{"kind": "python", "path": path[env], "name": env, "policy": policy} for env, policy in PLAYED.items()]


def base_model(folder: Path) -> Path:
    """A 0.1 M-parameter model that knows nothing, and whose adapters can make it certain.

    The head of a new model is its embedding, whose small numbers allow no token more than a quarter of the probability, and
    which no adapter changes. Its last norm makes up for it.
    """
    raw = folder.with_name(f"{folder.name}-raw")
    fresh_model(raw, alphabet=ALPHABET, context=64, **SIZES["0.1m"])
    decoder = load_folder(raw)
    with torch.no_grad():
        decoder.norm.weight.mul_(5)
    save_folder(decoder, folder, tokenizer_from=raw, dtype=torch.float32)
    return folder


def random_adapter(model: Path, folder: Path, seed: int = 7) -> Path:
    """A PEFT folder with an adapter of the model in which nothing is 0."""
    decoder, config = load_folder(model), AdapterConfig(rank=2, alpha=8, targets=("q_proj", "up_proj"))
    attach(decoder, config, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for _, adapter in adapters(decoder):
            for b in adapter.b:
                b.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(seed))
    export_adapter(gathered_factors(decoder), config, folder)
    return folder


def check_record(
    folder: Path,
    steps: int,
    played: Mapping[str, str] = PLAYED,
    frozen: Mapping[str, Path | str] | None = None,
    killed: bool = False,
) -> None:
    """No token of one policy is of another's version; all are of published ones; frozen ones sampled nothing.

    killed: a kill kept some publication from being recorded."""
    policies, known = set(played.values()), dict[str, Version]()
    with SqliteLedger(folder, mode="read") as ledger:
        counts, versions = ledger.counts(), ledger.versions()
        assert counts.conserved and counts.pending == 0, counts
        by_policy = {name: [v for v in versions if v.policy == name] for name in {v.policy for v in versions}}
        assert by_policy.keys() == policies | {*(frozen or {})}
        for name, where in (frozen or {}).items():
            assert by_policy[name] == [frozen_version(name, str(where), "float32")]
        for name in policies:
            published = {version.step for version in by_policy[name]}
            assert published == set(range(steps + 1)) if not killed else {0, steps} <= published <= set(range(steps + 1))
        last = {by_policy[name][-1].fingerprint for name in policies}
        assert len(last) == len(policies) and all(last), "two policies have the same weights"
        known = {version.key: version for version in versions}
        groups = [ledger.load(group_id) for group_id in ledger.recorded()]
    assert {group.task.env for group in groups} == {*played}
    for group in groups:
        for row in group.trajectories:
            assert row.sources and {source.policy for source in row.sources} == {played[group.task.env]}
            assert all(known[source.key] == source for source in row.sources), "of weights that were never published"
            assert set(row.versions[row.mask].tolist()) == {source.step for source in row.sources}
