"""Whatever is read from outside is refused or understood. The figures of the large hunt stand in docs/reliability.md."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fuzz import targets_files, targets_wire
from fuzz.hunting import Target, hunt
from fuzz.targets_files import MINIMAL

from tidemill.core import serialization
from tidemill.core.errors import CodecError
from tidemill.runtime import local
from tidemill.runtime.wire_format import Failed

pytestmark = pytest.mark.runs

TARGETS = [*targets_files.TARGETS, *targets_wire.TARGETS]
FEW = 60  # inputs a target, the same each time
MANY = 3_000  # inputs a target, new ones each time


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_some_inputs(target: Target) -> None:
    assert hunt(target, FEW).tried >= FEW // 2


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_many_inputs(target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    bag = hunt(target, MANY, fixed=False)
    with capsys.disabled():
        figures = f"{bag.tried:,} inputs, {bag.refused:,} refused, {bag.seconds:.0f} s, memory +{bag.memory_mb:.0f} MB"
        print(f"\n{target.name}: {figures}", flush=True)


def model(**changes: Any) -> tuple[bytes, None]:
    sizes = {"vocab_size": 5, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return json.dumps({"model_type": "llama", **sizes, **changes}).encode(), None


ROWS = b"".join(b'{"prompt": "p%d", "answer": 1}\n' % i for i in range(40))
DEEP = b'{"a":' * 100_000
ONCE: dict[str, list[Any]] = {
    "recipe: trees": [
        MINIMAL | {"env": {"kind": []}},
        MINIMAL | {"algorithm": []},
        MINIMAL | {"algorithm": {"name": {}}},
        *(MINIMAL | {"algorithm": {"name": "grpo", key: []}} for key in ("loss", "advantage", "preference", "constants")),
        *(MINIMAL | {"algorithm": {"name": "grpo", key: 1}} for key in ("loss", "constants", "reference", "critic")),
        MINIMAL | {"algorithm": {"name": "opd", "reference": {"model": []}, "corrections": [[]]}},
        MINIMAL | {"deterministic": True, "engine": []},
    ],
    "recipe: TOML text": [b"x = " + b"[" * 5000 + b"]" * 5000, b"x = " + b"9" * 5000, b"a." * 3000 + b"a = 1", b"\xff"],
    "recipe: overrides": [[f"x={'[' * 5000}{']' * 5000}"], [f"steps={'9' * 5000}"], [f"{'a.' * 3000}a=1"]],
    "run folder: JSON": [DEEP, b"[" * 100_000, b"9" * 5000],
    "rows: JSONL": [
        DEEP,
        b"\xff",
        ROWS + b'{"prompt": "a", "answer": ' + b"9" * 30 + b"}",
        ROWS + b'{"prompt": "a", "answer": "\\ud800"}',
        ROWS + b'{"prompt": "a", "answer": ' + b"[" * 300 + b"]" * 300 + b"}",
        b'{"prompt": "a", "answer": ' + b"[" * 2000 + b"]" * 2000 + b"}",
    ],
    "weights: manifest": [DEEP, b"[" * 100_000],
    "model folder: config.json and safetensors": [
        (DEEP, None),
        (b"[]", None),
        model(vocab_size=1 << 40),
        model(num_hidden_layers=10**30),
        model(hidden_size=-16),
        model(num_attention_heads=True),
        model(intermediate_size=[8]),
        model(head_dim=0.5),
        model(max_position_embeddings="long"),
        model(rope_theta=float("nan")),
        model(rope_scaling=[1]),
        model(eos_token_id={"a": 1}),
        model(model_type=[]),
        (None, (1 << 63).to_bytes(8, "little")),
        (None, b""),
    ],
    "wire: a child's report": [b"\xff\xff\xff\xff" + b"x" * 1000, b"", b"\x00\x00\x00\x01\xc1"],
    "wire: replies to a caller": [[[serialization.encode(Failed(0, ["ValueError"], "", "")), b""]]],
    "ledger: database": [
        lambda whole: whole.replace(b'{"loss":1.0}', b'{"loss":\xff.0}'),
        lambda whole: whole.replace(b'{"loss":1.0}', b'{"loss":1.0['),
        lambda whole: whole.replace(b"begun_at REAL", b"begum_at REAL"),
        lambda whole: whole.replace(b"CREATE TABLE steps", b"CREATE TABLE \x80teps"),
        lambda whole: whole.replace(b"incarnation INTEGER", b"incarnatio\x80 INTEGER"),
        lambda whole: whole[:5000],
        lambda whole: b"",
    ],
    "HTTP: the wire": [b"POST /v1/nothing HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"],
}
"""What once made a target fail, and must be refused."""


@pytest.mark.parametrize("name", ONCE)
def test_what_was_found(name: str, tmp_path: Path) -> None:
    target = next(target for target in TARGETS if target.name == name)
    with target.open(tmp_path) as attack:
        for given in ONCE[name]:
            if not target.refuses:
                attack(given)
                continue
            with pytest.raises(target.refuses) as caught:
                attack(given)
            assert str(caught.value)


def test_config_json_takes_no_memory_that_its_files_do_not_fill(tmp_path: Path) -> None:
    target = next(target for target in TARGETS if target.name.startswith("model folder"))
    with target.open(tmp_path) as attack, pytest.raises(ValueError, match=r"describes .* weights, its safetensors have"):
        attack(model(vocab_size=1 << 22, hidden_size=1 << 17, head_dim=128))  # possible, but not with these files


async def test_a_report_is_not_waited_for_when_it_is_too_long() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(b"\xff\xff\xff\xff")
    with pytest.raises(CodecError, match="at most"):
        await asyncio.wait_for(local._read(reader), 5)
