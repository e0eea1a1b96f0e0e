"""What is read from files: recipes, rows, run folders, models, manifests, trajectories, the ledger."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from fuzz.hunting import NUMBERS, Attack, Target, edited, mutated, trees
from hypothesis import strategies as st
from ledger.ledger_cases import group, task
from safetensors.torch import load_file
from sources import ROOT

from tidemill.core import serialization
from tidemill.core.config import Config, build, load, tables_of
from tidemill.core.errors import CodecError, ConfigError, LedgerError, PolicyMismatch, UnsupportedModel
from tidemill.core.types import Completion, Group, Sample, SamplingParams, Scored, Task, Telemetry, Trajectory, Version
from tidemill.envs.environment_settings import RowsSettings
from tidemill.envs.task_files import row_splits
from tidemill.envs.tasks import check_splits
from tidemill.ledger import SqliteLedger
from tidemill.ledger.row_formats import as_json
from tidemill.ledger.segments import segment_path
from tidemill.models.hf_weights import load_folder
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.models.weight_slices import Slice
from tidemill.run.recipe import RunConfig
from tidemill.run.storage.run_folder import read_json
from tidemill.weight_sync.manifest import Block, WeightManifest

MINIMAL = {"run_dir": "runs/x", "model": "new:0.1m", "env": {"kind": "guess"}}
RECIPES = [path.read_text() for path in sorted((ROOT / "recipes").glob("*.toml"))]


def option_words(kind: type[Config]) -> set[str]:
    nested = [m for info in kind.model_fields.values() for m in tables_of(info.annotation)]
    return set(kind.model_fields).union(*(option_words(m) for m in nested))


KEYS = st.sampled_from(sorted({*option_words(RunConfig), "kind", "__class__", "", "x" * 300})) | st.text(max_size=6)
KINDS = st.sampled_from(
    ["guess", "rows", "python", "reasoning_gym", "local", "inline", "grpo", "shared_memory", ":", "a.py:b"]
)
WHOLE = MINIMAL | {"rollout": {"groups": 2}, "trainer": {"lr": 1e-3}, "steps": 3, "placement": "local", "algorithm": "dapo"}
WHOLE |= {"deterministic": True, "engine": {}, "supervise": {}}
RECIPE_TREES = edited(WHOLE, KEYS) | st.dictionaries(
    KEYS, trees(KEYS, KINDS | NUMBERS | st.text(max_size=8)), max_size=6
).map(lambda tree: MINIMAL | tree)

NAMES = st.sampled_from((ROOT / "tests" / "options.txt").read_text().split())
VALUES = (
    st.integers(-2, 40).map(str)
    | st.floats().map(repr)
    | KINDS
    | st.sampled_from(["true", "none", "{}", "[1]", "1e-4", '"a"'])
)
OVERRIDES = (
    st.builds("{}={}".format, NAMES | st.lists(KEYS, min_size=1, max_size=3).map(".".join), VALUES | st.text(max_size=12))
    | st.builds("{}={}".format, NAMES, VALUES)
    | st.text(max_size=20)
)


@contextmanager
def config_trees(_: Path) -> Iterator[Attack]:
    yield lambda tree: load(RunConfig, base=tree)


@contextmanager
def built_trees(_: Path) -> Iterator[Attack]:
    yield lambda tree: build(RunConfig, tree)


@contextmanager
def config_files(folder: Path) -> Iterator[Attack]:
    def attack(raw: bytes) -> None:
        (folder / "recipe.toml").write_bytes(raw)
        load(RunConfig, [folder / "recipe.toml"], base=MINIMAL)

    yield attack


@contextmanager
def config_overrides(_: Path) -> Iterator[Attack]:
    yield lambda items: load(RunConfig, overrides=items, base=MINIMAL)


@contextmanager
def json_files(folder: Path) -> Iterator[Attack]:
    def attack(raw: bytes) -> None:
        (folder / "config.json").write_bytes(raw)
        read_json(folder / "config.json")

    yield attack


@contextmanager
def row_files(folder: Path) -> Iterator[Attack]:
    def attack(raw: bytes) -> None:
        (folder / "rows.jsonl").write_bytes(raw)
        read = row_splits(RowsSettings(data=str(folder / "rows.jsonl"), reward="exact"))
        check_splits("rows", read, prompts_apart=True)
        for each in (*read["train"], *read["eval"]):
            as_json(each.data, each.id)  # the ledger can record what was accepted

    yield attack


def row_lines() -> st.SearchStrategy[bytes]:
    deep = st.integers(50, 3000).map(lambda n: b'{"prompt": "a", "answer": ' + b"[" * n + b"]" * n + b"}")
    sound = st.text(max_size=9).map(lambda text: json.dumps({"prompt": f"p{text}", "answer": text}).encode())
    columns = st.sampled_from(["prompt", "answer", "role", "content", "id", ""]) | st.text(max_size=4)
    messages = st.lists(st.fixed_dictionaries({"role": st.text(max_size=5), "content": st.text(max_size=5)}), max_size=3)
    row = st.fixed_dictionaries(
        {"prompt": st.text(max_size=9) | messages | trees(columns)}, optional={"answer": trees(columns)}
    )
    line = (row | trees(columns)).map(lambda value: json.dumps(value).encode()) | st.binary(max_size=30)
    whole = st.lists(sound, min_size=20, max_size=30).flatmap(lambda rows: st.just(b"\n".join(rows)))
    one_bad = st.tuples(whole, line | deep).map(b"\n".join)
    return st.lists(line, max_size=8).map(b"\n".join) | whole | one_bad


# --- weights -------------------------------------------------------------------------------------------------------------


def valid_manifest() -> bytes:
    blocks = [Block.of(Slice.whole(name, torch.arange(6.0).view(2, 3))) for name in ("a", "b")]
    return WeightManifest(Version(3, 0, "policy", "f" * 64), blocks).encode()


@contextmanager
def manifests(_: Path) -> Iterator[Attack]:
    yield lambda raw: WeightManifest.decode(raw).encode()


def manifest_trees() -> st.SearchStrategy[bytes]:
    keys = st.sampled_from(["name", "shape", "offset", "size", "dtype", "sum", "part", "start", "version", "blocks"])
    return edited(json.loads(valid_manifest()), keys).map(_as_json)


@contextmanager
def model_folders(folder: Path) -> Iterator[Attack]:
    """Either file of a model is replaced, and the model is read."""
    config, weights = _model(folder)

    def attack(given: tuple[bytes | None, bytes | None]) -> None:
        (folder / "model" / "config.json").write_bytes(config if given[0] is None else given[0])
        (folder / "model" / "model.safetensors").write_bytes(weights if given[1] is None else given[1])
        load_folder(folder / "model")

    yield attack


def _model(folder: Path) -> tuple[bytes, bytes]:
    fresh_model(folder / "model", alphabet="ab", context=64, **SIZES["0.1m"] | {"layers": 1, "hidden": 16})
    return tuple((folder / "model" / name).read_bytes() for name in ("config.json", "model.safetensors"))  # type: ignore[return-value]


def model_inputs() -> st.SearchStrategy[tuple[bytes | None, bytes | None]]:
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        config, weights = _model(Path(place))
        size = int.from_bytes(weights[:8], "little")
        header, data = json.loads(weights[8 : 8 + size]), weights[8 + size :]
        assert load_file(Path(place) / "model" / "model.safetensors")
    keys = st.sampled_from(
        [*json.loads(config), *list(header)[:6], "dtype", "shape", "data_offsets", "rope_scaling", "factor"]
    )

    def with_header(tree: Any, length: int | None = None) -> bytes:
        raw = _as_json(tree)
        return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data

    lengths = st.sampled_from([None, None, None, 0, 1, 2**32, 2**63 - 1, 2**64 - 1, 100_000_001])
    headers = st.builds(with_header, edited(header, keys), lengths)
    configs = edited(json.loads(config), keys).map(_as_json) | mutated(config)
    return st.tuples(configs, st.none()) | st.tuples(st.none(), headers | mutated(weights))


def _as_json(tree: Any) -> bytes:
    return json.dumps(tree, default=str).encode()


# --- nouns and the ledger ------------------------------------------------------------------------------------------------

NOUNS: list[Any] = [Group, Trajectory, Completion, Sample, SamplingParams, Scored, Task, Telemetry, Version, list[Sample]]
NOUNS += [dict[str, float], list[np.ndarray], np.ndarray]


@contextmanager
def decoding(_: Path) -> Iterator[Attack]:
    def attack(given: tuple[Any, bytes]) -> None:
        serialization.encode(serialization.decode(given[1], given[0]))

    yield attack


def noun_bytes() -> st.SearchStrategy[tuple[Any, bytes]]:
    valid = serialization.encode(group(0))
    array = st.tuples(
        st.sampled_from(["<i4", "<f8", "|b1", "|O", "x"]),
        st.lists(st.sampled_from([0, 1, 2, 3, -1, 2**62, 2**31]), max_size=4),
        st.binary(max_size=24),
    )
    arrays = array.map(lambda parts: (np.ndarray, msgspec.msgpack.encode(parts)))
    structured = trees(
        st.sampled_from(["tokens", "mask", "logprobs", "id", "task", "type"]), st.none() | st.integers(0, 9) | array
    )
    nested = st.sampled_from(
        [b"\x91" * 5000 + b"\xc0", b"\x81\xa1a" * 5000 + b"\xc0", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
    )
    raw = mutated(valid) | st.binary(max_size=80) | structured.map(msgspec.msgpack.encode) | nested
    return st.tuples(st.sampled_from(NOUNS), raw) | arrays | st.tuples(st.just(Group), mutated(valid, 2))


@contextmanager
def segments(folder: Path) -> Iterator[Attack]:
    """A damaged segment gives what was recorded or says that it is damaged: never something else."""
    with SqliteLedger(folder, durability="process") as ledger:
        groups = [group(i) for i in range(3)]
        for i, each in enumerate(groups):
            ledger.admit(i, task(i))
            ledger.finish(each)
        path = segment_path(folder / "trajectories", 1)
        whole = path.read_bytes()
        recorded = [serialization.encode(ledger.load(i).trajectories) for i in range(3)]

        def attack(change: Any) -> None:
            path.write_bytes(change(whole))
            ledger.verify()
            for i in range(3):
                assert serialization.encode(ledger.load(i).trajectories) == recorded[i]

        yield attack


def changes() -> st.SearchStrategy[Any]:
    def of(at: int, data: bytes, drop: int) -> Any:
        return lambda whole: whole[: at % len(whole)] + data + whole[at % len(whole) + drop :]

    shifted = st.builds(of, st.integers(0, 1 << 16), st.binary(max_size=40), st.integers(0, 60))
    in_place = st.builds(
        lambda at, data: of(at, data, len(data)), st.integers(0, 1 << 16), st.binary(min_size=1, max_size=200)
    )
    return shifted | in_place | st.builds(of, st.integers(0, 1 << 16), st.just(b""), st.just(1 << 20))


@contextmanager
def ledgers(folder: Path) -> Iterator[Attack]:
    """A damaged database."""
    with SqliteLedger(folder / "whole", durability="process") as ledger:
        for i in range(3):
            ledger.admit(i, task(i))
            ledger.finish(group(i))
        ledger.begin_step(0, 0, [0, 1])
        ledger.end_step(0, 0, {"loss": 1.0})
    whole = (folder / "whole" / "ledger.sqlite").read_bytes()
    (folder / "run" / "trajectories").mkdir(parents=True)

    def attack(change: Any) -> None:
        for name in ("ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm"):
            (folder / "run" / name).unlink(missing_ok=True)
        (folder / "run" / "ledger.sqlite").write_bytes(change(whole))
        with SqliteLedger(folder / "run", mode="read") as damaged:
            for question in (
                damaged.counts,
                damaged.steps,
                damaged.pending,
                damaged.verify,
                damaged.samples,
                damaged.events,
            ):
                question()

    yield attack


_TOML = st.text(alphabet="abkindenvtrollout.=\"'[]{}0123456789-+e#,\n \\u\ud800", max_size=60).map(
    lambda text: text.encode(errors="surrogatepass")
)
TARGETS = [
    Target("recipe: trees", RECIPE_TREES, config_trees, (ConfigError,)),
    Target("recipe: resolved trees", RECIPE_TREES, built_trees, (ConfigError,)),
    Target(
        "recipe: TOML text",
        st.sampled_from(RECIPES).flatmap(lambda t: mutated(t.encode())) | _TOML,
        config_files,
        (ConfigError,),
    ),
    Target(
        "recipe: overrides",
        st.lists(OVERRIDES, max_size=4),
        config_overrides,
        (ConfigError,),
    ),
    Target("run folder: JSON", mutated(json.dumps(MINIMAL).encode()) | st.binary(max_size=60), json_files, (ConfigError,)),
    Target("rows: JSONL", row_lines() | mutated(b'{"prompt": "2 + 2", "answer": 4}\n' * 8), row_files, (ConfigError,)),
    Target(
        "weights: manifest",
        mutated(valid_manifest()) | manifest_trees() | st.binary(max_size=60),
        manifests,
        (PolicyMismatch,),
    ),
    Target("model folder: config.json and safetensors", model_inputs(), model_folders, (UnsupportedModel,)),
    Target("codec: every noun", noun_bytes(), decoding, (CodecError,)),
    Target("ledger: segments", changes(), segments, (LedgerError,)),
    Target("ledger: database", changes(), ledgers, (LedgerError,)),
]
assert all(tomllib.loads(text) for text in RECIPES)
