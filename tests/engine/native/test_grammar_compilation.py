"""Compiling grammars: beside the steps, once for equal ones, within limits; and what is refused, each in one sentence."""

from __future__ import annotations

import asyncio
import threading

import pytest
from schema_cases import Schema, asked, make_engine, replies, spelling, text_of

from tidemill.core.constraints import JSON_OBJECT, Constraint, choice, json_schema, regex
from tidemill.core.errors import ConfigError
from tidemill.core.types import Finish
from tidemill.engine.native import grammars
from tidemill.engine.native.native_engine import NativeEngine

WORDS = ["tide", "tidemill", "mill"]


class Compiling:
    """Counts what is compiled, and lets it wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts = list[str]()
        self.begun, self.go = threading.Event(), threading.Event()
        self.go.set()
        real = grammars.Grammars._built

        def built(own: grammars.Grammars, constraint: Constraint) -> grammars.Grammar:
            self.texts.append(constraint.text)
            self.begun.set()
            assert self.go.wait(60)
            return real(own, constraint)

        monkeypatch.setattr(grammars.Grammars, "_built", built)


async def test_other_replies_go_on_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling = Compiling(monkeypatch)
    compiling.go.clear()
    engine = make_engine()
    held = asyncio.ensure_future(engine.generate(asked(choice(WORDS))))
    await asyncio.to_thread(compiling.begun.wait, 60)
    assert (await engine.generate(asked(None, max_tokens=12, ignore_eos=True))).finish is Finish.LENGTH
    assert not held.done()
    compiling.go.set()
    assert (await held).finish is Finish.STOP
    await engine.close()


async def test_a_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "KEPT", 2)
    compiling, engine = Compiling(monkeypatch), make_engine()
    await replies(engine, [asked(choice(["a", "b"]), i) for i in range(6)])
    await replies(engine, [asked(choice(["a", "c"])), asked(choice(["a", "b"]))])
    assert compiling.texts == ["a|b", "a|c"]
    await engine.generate(asked(choice(["a", "d"])))  # and the one that was used longest ago is forgotten
    await replies(engine, [asked(choice(["a", "d"])), asked(choice(["a", "c"]))])
    assert compiling.texts == ["a|b", "a|c", "a|d"]
    await engine.generate(asked(choice(["a", "b"])))
    assert compiling.texts == ["a|b", "a|c", "a|d", "a|b"]
    await engine.close()


async def test_one_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling, engine = Compiling(monkeypatch), make_engine()
    monkeypatch.setattr(grammars, "COMPILE_S", 0.01)
    compiling.go.clear()
    with pytest.raises(ValueError, match="was not compiled within 0 s"):
        await engine.generate(asked(choice(WORDS)))
    compiling.go.set()
    monkeypatch.setattr(grammars, "COMPILE_S", 60.0)
    assert (await engine.generate(asked(choice(["a", "b"])))).finish is Finish.STOP
    await engine.close()


async def test_a_caller_who_leaves_takes_nothing_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling, engine = Compiling(monkeypatch), make_engine()
    compiling.go.clear()
    leaving, staying = (asyncio.ensure_future(engine.generate(asked(choice(WORDS), i))) for i in range(2))
    await asyncio.to_thread(compiling.begun.wait, 60)
    leaving.cancel()
    compiling.go.set()
    assert (await staying).finish is Finish.STOP
    await engine.close()


def deep(levels: int) -> Schema:
    """References through so many definitions."""
    inner = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}, "maxItems": 1} for i in range(levels)}
    return {"$defs": inner | {f"d{levels}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


async def test_a_schema_as_deep_as_allowed_overflows_nothing() -> None:
    engine = make_engine()
    deepest = grammars.DEPTH // 4 - 2
    assert (await engine.generate(asked(json_schema(deep(deepest)), max_tokens=40))).tokens.size
    with pytest.raises(ValueError, match="too deep"):
        await engine.generate(asked(json_schema(deep(deepest + 1))))
    await engine.close()


@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        (json_schema({"type": "array", "uniqueItems": True}), 'JSON schema: Unimplemented keys: \\["uniqueItems"\\]'),
        (json_schema({"oneOf": [{"const": 1}, {"type": "number"}]}), "oneOf constraints are not supported"),
        (json_schema({"$ref": "https://example.org/schema"}), "https://example.org/schema"),
        (json_schema({"type": "integer", "minimum": 3, "maximum": 2}), "JSON schema: .*3"),
        (json_schema({"type": "number", "exclusiveMinimum": 4, "minimum": "4"}), "JSON schema: .*4"),
        (json_schema(False), "allows nothing"),
        (Constraint("json_schema", "[" * 100_000), "not JSON"),
        (json_schema({"type": "object", "properties": {f"p{i}": {} for i in range(4000)}}), "4002 objects and lists"),
        (regex("a(b"), "pattern: unclosed group"),
        (regex(r"(a)\1"), "pattern: backreferences are not supported"),
        (regex("(" * 5000 + "a" + ")" * 5000), "pattern: .*"),
    ],
)
async def test_what_cannot_be_followed_is_refused_by_its_part(constraint: Constraint, said: str) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=said) as refused:
        await engine.generate(asked(constraint))
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300
    assert (await engine.generate(asked(choice(["a"])))).finish is Finish.STOP
    await engine.close()


async def test_tokens_of_great_length_are_never_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library panics at such vocabularies, and a panic is no Exception."""
    engine = make_engine()
    letter = spelling().index(b"a")
    long = [b"a" * 3000 if token == 9 else part for token, part in enumerate(spelling())]
    monkeypatch.setattr(engine.grammars, "_spelling", lambda: long)
    done = await engine.generate(asked(regex("a{3000,}b?"), max_tokens=20, logit_bias=((9, 100.0), (letter, 50.0))))
    assert 9 not in done.tokens and text_of(done.tokens).startswith("a")
    monkeypatch.setattr(grammars, "LONGEST", 1 << 20)
    with pytest.raises(ValueError, match="cannot be followed: assertion failed"):
        await make_engine_with(long).generate(asked(regex("ab")))
    await engine.close()


def make_engine_with(parts: list[bytes]) -> NativeEngine:
    engine = make_engine()
    engine.grammars = grammars.Grammars("engine", lambda: parts)
    return engine


async def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    assert (await engine.capabilities()).constraint
    monkeypatch.setattr(grammars.importlib.util, "find_spec", lambda name: None)
    assert not (await engine.capabilities()).constraint
    with pytest.raises(ConfigError, match=r"pip install 'tidemill\[structured\]'"):
        await engine.generate(asked(JSON_OBJECT))
    await engine.close()
