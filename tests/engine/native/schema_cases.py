"""JSON schemas of many shapes, made from a seed, and engines with vocabularies that can spell their replies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from engine_cases import BASE, decoder
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tidemill.api_formats.vocabulary import Vocabulary
from tidemill.core.constraints import Constraint
from tidemill.core.types import Completion, GenerateRequest, SamplingParams, Version
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.models.architecture import Architecture
from tidemill.models.decoder import Decoder

Schema = dict[str, Any]
END = 0  # the id that ends a reply
CONTEXT = 512
PROMPT = np.arange(3, 12, dtype=np.int32)


@cache
def tokenizer() -> Any:
    """Byte-level BPE with merges, so that tokens lie across the borders of a grammar: `{"`, `":`, `"},`, `12`."""
    core = Core(models.BPE())
    core.pre_tokenizer, core.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        decoders.ByteLevel(),
    )
    texts = [json.dumps(schemas(seed, 1)[0], indent=indent) for seed in range(60) for indent in (None, 2)]
    letters = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=400, special_tokens=["<end>"], initial_alphabet=letters, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", clean_up_tokenization_spaces=False)


def architecture() -> Architecture:
    return replace(BASE, vocab=len(tokenizer()) + 3, context=CONTEXT)  # with ids that the tokenizer does not know


@cache
def spelling() -> list[bytes]:
    return Vocabulary(tokenizer()).spelling(architecture().vocab)


@cache
def model() -> Decoder:
    return decoder(architecture())


def make_engine(**settings: Any) -> NativeEngine:
    chosen = EngineSettings(**{"device": "cpu", "max_sequences": 8, "page_size": 4, "kv_memory_mb": 16, **settings})
    weights = decoder(architecture())
    return NativeEngine(
        weights, chosen, receiver=None, version=Version(0), name="engine", eos_ids=(END,), spelling=lambda: [*spelling()]
    )


def bytes_of(tokens: np.ndarray) -> bytes:
    """The bytes of a reply's beginning; ids without text have none."""
    return b"".join(spelling()[token] for token in tokens.tolist())


def text_of(tokens: np.ndarray) -> str:
    """The text of a whole reply."""
    return bytes_of(tokens).decode()


def asked(constraint: Constraint | None, seed: int = 0, prompt: np.ndarray = PROMPT, **more: Any) -> GenerateRequest:
    return GenerateRequest(prompt, SamplingParams(**{"max_tokens": 300, "seed": seed, **more}), constraint=constraint)


async def replies(engine: NativeEngine, requests: list[GenerateRequest]) -> list[Completion]:
    return await asyncio.gather(*(engine.generate(request) for request in requests))


def schemas(seed: int, count: int) -> list[Schema]:
    """Schemas of all `SHAPES` in turn, with random parts."""
    names = [*SHAPES]
    return [_titled(SHAPES[names[i % len(names)]](np.random.default_rng([seed, i]), 2)) for i in range(count)]


Make = Callable[[np.random.Generator, int], Schema]


def _titled(schema: Schema) -> Schema:
    """The schema with its definitions, which shapes leave where they use them, at its root."""
    found = dict[str, Any]()

    def without(value: Any) -> Any:
        if isinstance(value, list):
            return [without(each) for each in value]
        if not isinstance(value, dict):
            return value
        found.update(value.get("$defs", {}))
        return {key: without(each) for key, each in value.items() if key != "$defs"}

    plain = without(schema)
    more = {"$defs": {name: without(each) for name, each in found.items()}} if found else {}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A reply", **plain, **more}


def _any(rng: np.random.Generator, depth: int) -> Schema:
    names = [*(SHAPES if depth > 0 else LEAVES)]
    return SHAPES[names[rng.integers(len(names))]](rng, depth - 1)


def _word(rng: np.random.Generator, most: int = 5) -> str:
    return "".join('abcdefgh_é"\\'[k] for k in rng.integers(0, 12, rng.integers(1, most + 1)))


def _names(rng: np.random.Generator, least: int = 1, most: int = 4) -> list[str]:
    return list(dict.fromkeys(f"{_word(rng)}{i}" for i in range(rng.integers(least, most + 1))))


def _string(rng: np.random.Generator, depth: int) -> Schema:
    least = int(rng.integers(0, 3))
    return {"type": "string", "minLength": least, "maxLength": least + int(rng.integers(0, 4))}


def _pattern(rng: np.random.Generator, depth: int) -> Schema:
    return {
        "type": "string",
        "pattern": str(rng.choice([r"^[a-z]{1,4}$", r"^\d{3}-[A-F]{2}$", r"^(ab|cd){1,2}e?$", r"^#[0-9a-f]{6}$"])),
    }


def _format(rng: np.random.Generator, depth: int) -> Schema:
    return {"type": "string", "format": str(rng.choice(["date", "time", "ipv4", "uuid", "date-time"]))}


def _integer(rng: np.random.Generator, depth: int) -> Schema:
    low = int(rng.integers(-200, 200))
    return {"type": "integer", "minimum": low, "exclusiveMaximum": low + int(rng.integers(1, 500))}


def _number(rng: np.random.Generator, depth: int) -> Schema:
    low = float(rng.integers(-50, 50)) / 4
    return {"type": "number", "exclusiveMinimum": low, "maximum": low + float(rng.integers(1, 90)) / 8}


def _multiple(rng: np.random.Generator, depth: int) -> Schema:
    return {"type": "integer", "multipleOf": int(rng.integers(2, 9)), "minimum": 0, "maximum": 60}


def _enum(rng: np.random.Generator, depth: int) -> Schema:
    values: list[Any] = [None, True, 3, -2.5, _word(rng), [1, _word(rng)], {"k": _word(rng)}]
    return {"enum": [values[i] for i in sorted(rng.choice(len(values), 3, replace=False))]}


def _const(rng: np.random.Generator, depth: int) -> Schema:
    return {"const": {"a": [_word(rng), None, 7], "b": {"c": _word(rng)}}}


def _boolean(rng: np.random.Generator, depth: int) -> Schema:
    return {"type": "boolean", "description": "yes or no", "default": True}


def _nullable(rng: np.random.Generator, depth: int) -> Schema:
    return {"type": [["string", "integer", "boolean"][rng.integers(3)], "null"], "maxLength": 3, "minimum": 0, "maximum": 99}


def _object(rng: np.random.Generator, depth: int) -> Schema:
    """Some properties are required, and nothing else may stand there."""
    properties = {name: _any(rng, depth) for name in _names(rng)}
    required = [name for name in properties if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _open_object(rng: np.random.Generator, depth: int) -> Schema:
    """Further properties may stand there, of a type of their own, up to a number."""
    properties = {name: _any(rng, depth - 1) for name in _names(rng, 1, 2)}
    more = {"minProperties": len(properties), "maxProperties": len(properties) + 1} if rng.random() < 0.5 else {}
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
        **more,
    }


def _pattern_properties(rng: np.random.Generator, depth: int) -> Schema:
    return {
        "type": "object",
        "patternProperties": {"^[a-c]{1,2}$": _any(rng, depth - 1)},
        "additionalProperties": False,
    }


def _array(rng: np.random.Generator, depth: int) -> Schema:
    least = int(rng.integers(0, 3))
    return {"type": "array", "items": _any(rng, depth - 1), "minItems": least, "maxItems": least + int(rng.integers(0, 3))}


def _tuple(rng: np.random.Generator, depth: int) -> Schema:
    items = [_any(rng, depth - 1) for _ in range(rng.integers(1, 4))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _any_of(rng: np.random.Generator, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.integers(2, 4))]}


def _one_of(rng: np.random.Generator, depth: int) -> Schema:
    """Alternatives that a property tells apart, as pydantic writes discriminated unions."""
    parts = [
        {"type": "object", "properties": {"kind": {"const": kind}, "value": _any(rng, depth - 1)}}
        for kind in ("cat", "dog", "eel")
    ]
    return {"oneOf": [part | {"required": ["kind", "value"], "additionalProperties": False} for part in parts]}


def _one_type(rng: np.random.Generator, depth: int) -> Schema:
    return {"oneOf": [_integer(rng, 0), {"type": "string", "maxLength": 3}, {"type": "null"}]}


def _all_of(rng: np.random.Generator, depth: int) -> Schema:
    left, right = _any(rng, depth - 1), _any(rng, depth - 1)
    return {
        "allOf": [
            {"type": "object", "properties": {"left": left}, "required": ["left"]},
            {"type": "object", "properties": {"right": right}, "required": ["right"]},
        ],
        "properties": {"left": True, "right": True},
        "additionalProperties": False,
    }


def _reference(rng: np.random.Generator, depth: int) -> Schema:
    part, pair = (f"{name}{rng.integers(1 << 30)}" for name in ("part", "pair"))
    both = {"x": {"$ref": f"#/$defs/{part}"}, "y": {"$ref": f"#/$defs/{part}"}}
    closed = {"type": "object", "properties": both, "required": ["x", "y"], "additionalProperties": False}
    items = {"items": {"$ref": f"#/$defs/{pair}"}, "minItems": 1, "maxItems": 2}
    return {"$defs": {part: _string(rng, 0), pair: closed}, "type": "array", **items}


def _tree(rng: np.random.Generator, depth: int) -> Schema:
    """A schema that contains itself."""
    name = f"node{rng.integers(1 << 30)}"
    after = {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{name}"}]}
    properties = {"v": {"type": "integer", "minimum": 0, "maximum": 99}, "next": after}
    node = {"type": "object", "properties": properties, "required": ["v", "next"], "additionalProperties": False}
    return {"$defs": {name: node}, "$ref": f"#/$defs/{name}"}


LEAVES: dict[str, Make] = {
    "string": _string,
    "pattern": _pattern,
    "format": _format,
    "integer": _integer,
    "number": _number,
    "multipleOf": _multiple,
    "enum": _enum,
    "const": _const,
    "boolean": _boolean,
    "nullable": _nullable,
}
SHAPES: dict[str, Make] = LEAVES | {
    "object": _object,
    "further properties": _open_object,
    "patternProperties": _pattern_properties,
    "array": _array,
    "tuple": _tuple,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "oneOf types": _one_type,
    "allOf": _all_of,
    "$ref": _reference,
    "tree": _tree,
}
