"""An engine behind `/v1/completions`: the contract against our own server, and what other servers lack."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract_base import CONTEXT, EOS, FREE, PROMPT, VOCAB, Reference, refused
from engine.remote.http_server import Asked, reply, serving
from engine.server.serving_cases import Running
from engine_contract import EngineContract
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import tidemill
from tidemill.core.errors import ConfigError, EngineFailed
from tidemill.core.interfaces import Engine
from tidemill.core.types import Finish, GenerateRequest
from tidemill.engine.engine_kinds import EngineSpec
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.openai.openai_engine import OpenaiEngine, build
from tidemill.engine.openai.openai_settings import OpenaiSettings
from tidemill.envs.guess import ALPHABET
from tidemill.models.architecture import Architecture
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.run.planner.memory_model import engine_memory
from tidemill.run.recipe import load_recipe
from tidemill.runtime.cpu_sharing import Cores


def made(url: str, folder: Path, **settings: Any) -> OpenaiEngine:
    return build(EngineSpec(model=folder, engine=OpenaiSettings(url=url, **settings)), None, Cores())


def with_tokenizer(folder: Path) -> Path:
    """The contract's model with the tokenizer that a server needs."""
    words = {f"w{i} ": i for i in range(VOCAB)}
    core = Tokenizer(models.WordLevel(words, unk_token="w0 "))
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token=f"w{EOS} ", pad_token="w0 ").save_pretrained(folder)
    return folder


@pytest.mark.engines
class TestOpenaiEngine(EngineContract):
    """Behind `tidemill serve`."""

    @pytest.fixture(scope="class")
    def server(self, models: list[Reference]) -> Iterator[Running]:
        with Running(with_tokenizer(models[0].folder)) as running:
            yield running

    @pytest.fixture(autouse=True)
    def _address(self, server: Running) -> None:
        self.url = server.url

    def make(self, folder: Path) -> Engine:
        return made(f"{self.url}/v1/", folder)

    async def test_it_declares_what_the_server_does(self, engine: Engine) -> None:
        can = await engine.capabilities()
        assert can.seeds and can.score and (can.scores_at, can.samples_at, can.proof) == (1, 1, "none")
        assert can.context == CONTEXT and not can.updates.kinds and not can.support


class OtherServer:
    """A server with one distribution for every token, and without some of what ours does."""

    def __init__(self, *lacks: str, models: tuple[str, ...] = ("a",), tempered: bool = False) -> None:
        self.lacks, self.models, self.tempered = {*lacks}, models, tempered
        self.scores = np.random.default_rng(1).normal(size=VOCAB)
        self.bodies, self.number = list[dict[str, Any]](), 0

    def logprobs(self, temperature: float) -> np.ndarray:
        scaled = self.scores / temperature
        return scaled - np.log(np.exp(scaled).sum())

    def sampled(self, body: dict[str, Any]) -> tuple[list[int], list[float]]:
        self.number += 1
        seed = self.number if "seeds" in self.lacks else body.get("seed", 0)
        temperature = body.get("temperature", 1.0)
        by = self.logprobs(temperature or 1.0)
        noise = np.random.default_rng(seed).gumbel(size=(body["max_tokens"], VOCAB)) * (temperature > 0)
        ids = (by + noise).argmax(-1).tolist()
        if "stops" not in self.lacks and (stops := {*body.get("stop_token_ids", ())}):
            ids = ids[: next((t for t, each in enumerate(ids, 1) if each in stops), len(ids))]
        told = by if self.tempered else self.logprobs(1.0)
        return ids, [float(told[each]) for each in ids]

    async def __call__(self, asked: Asked) -> bytes:
        if asked.path == "/v1/models":
            return reply({"data": [{"id": name} for name in self.models]})
        body = json.loads(asked.body)
        self.bodies.append(body)
        if "ids" in self.lacks:
            return reply({"error": {"message": "prompt: expected a string"}}, 400)
        if "ignore_eos" in self.lacks and "ignore_eos" in body:
            return reply({"detail": "ignore_eos is not known"}, 400)
        ids, logprobs = self.sampled(body)
        if body.get("echo") and "echo" not in self.lacks:
            known = self.logprobs(1.0)
            logprobs = [None, *(float(known[each]) for each in body["prompt"][1:]), *logprobs]  # type: ignore[list-item]
        choice: dict[str, Any] = {"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": "length"}
        if "token_ids" in self.lacks:
            del choice["token_ids"]
        if not body.get("stream"):
            return reply({"choices": [choice]})
        half = len(ids) // 2
        parts = [(ids[:half], logprobs[:half]), (ids[half:], logprobs[half:])]
        events = [{"choices": [choice | {"token_ids": i, "logprobs": {"token_logprobs": p}}]} for i, p in parts]
        lines = [f"data: {json.dumps(each)}" for each in [*events, {"choices": [], "usage": {}}]]
        if "the middle" in self.lacks:
            lines = [lines[0], 'data: {"error": {"message": "out of memory"}}']
        if "the end" not in self.lacks:
            lines.append("data: [DONE]")
        return reply("\n\n".join([*lines, ""]).encode(), kind="text/event-stream")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Reference.make(tmp_path_factory.mktemp("model"), 0).folder


@asynccontextmanager
async def engine_at(server: OtherServer, folder: Path, **settings: Any) -> AsyncIterator[OpenaiEngine]:
    async with serving(server) as url:
        engine = made(url, folder, **settings)
        try:
            yield engine
        finally:
            await engine.close()


@pytest.mark.parametrize(
    ("server", "settings", "says"),
    [
        (
            OtherServer("ids"),
            {},
            r"refused POST /v1/completions \(400\): prompt: expected a string; expected a server",
        ),
        (OtherServer("token_ids"), {}, "returned no token_ids; expected a server whose /v1/completions takes token ids"),
        (OtherServer(models=("a", "b")), {}, "served_model = '': .* has 'a', 'b'; name one of them"),
        (OtherServer(), {"served_model": "c"}, "served_model = 'c': .* has 'a'; name one of them"),
        (OtherServer(models=()), {}, "has none"),
    ],
)
async def test_a_server_that_cannot_be_used_is_refused_at_the_start(
    server: OtherServer, settings: dict[str, Any], says: str, folder: Path
) -> None:
    async with engine_at(server, folder, **settings) as engine:
        for call in (engine.capabilities(), engine.generate(GenerateRequest(PROMPT, FREE))):
            with pytest.raises(ConfigError, match=says) as error:
                await call
            assert "\n" not in str(error.value) and str(error.value).startswith("engine.")


async def test_what_a_server_does_is_found_out_by_asking_it(folder: Path) -> None:
    async def found(server: OtherServer) -> tuple[bool, bool, float | None]:
        async with engine_at(server, folder) as engine:
            can = await engine.capabilities()
            return can.seeds, can.score, can.samples_at

    assert await found(OtherServer()) == (True, True, 1)
    assert await found(OtherServer(tempered=True)) == (True, True, None)
    assert await found(OtherServer("seeds")) == (False, True, 1)
    assert await found(OtherServer("echo")) == (True, False, 1), "without scores, what logprobs mean is not known"


async def test_what_a_server_lacks_is_refused_by_name_or_done_here(folder: Path) -> None:
    server = OtherServer("stops", "echo", "ignore_eos", models=("a", "b"))
    async with engine_at(server, folder, served_model="b") as engine:
        params = replace(FREE, ignore_eos=False, stop_ids=())
        await refused(engine.generate(GenerateRequest(PROMPT, FREE)), "ignore_eos")
        await refused(engine.score(PROMPT, "policy", 1.0, 0), "score", "no logprobs of a prompt")
        whole = await engine.generate(GenerateRequest(PROMPT, params))
        stop = int(whole.tokens[3])
        done = await engine.generate(GenerateRequest(PROMPT, replace(params, stop_ids=(stop,))))
        first = whole.tokens.tolist().index(stop) + 1
        assert (done.finish, done.tokens.tolist()) == (Finish.STOP, whole.tokens[:first].tolist())
        assert len(done.logprobs) == len(done.versions) == first
        assert server.bodies[-1]["model"] == "b" and not {"stop_token_ids", "ignore_eos"} & server.bodies[-1].keys()


@pytest.mark.parametrize(
    ("lacks", "says"),
    [("the middle", "failed at POST /v1/completions: out of memory"), ("the end", "ended its reply to POST")],
)
async def test_a_reply_that_breaks_off_ends_the_engine(lacks: str, says: str, folder: Path) -> None:
    async with engine_at(OtherServer(lacks), folder) as engine:
        with pytest.raises(EngineFailed, match=says):
            await engine.generate(GenerateRequest(PROMPT, FREE))
        with pytest.raises(EngineFailed, match=says):
            await engine.score(PROMPT, "policy", 1.0, 0)


async def test_the_key_is_read_from_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"engine.key_variable = 'SERVER_KEY': .* not set"):
        made("http://localhost:1", folder, key_variable="SERVER_KEY")
    monkeypatch.setenv("SERVER_KEY", "sesame")
    server, keys = OtherServer(), set[str]()

    async def answer(asked: Asked) -> bytes:
        keys.add(asked.headers["authorization"])
        return await server(asked)

    async with serving(answer) as url:
        engine = made(url, folder, key_variable="SERVER_KEY")
        await engine.generate(GenerateRequest(PROMPT, FREE))
        await engine.close()
    assert keys == {"Bearer sesame"}


async def test_a_server_that_is_gone_ends_the_engine(folder: Path) -> None:
    server = OtherServer()
    async with serving(server) as url:
        engine = made(url, folder)
        await engine.capabilities()
    with pytest.raises(EngineFailed, match="the connection failed"):
        await engine.generate(GenerateRequest(PROMPT, FREE))
    await engine.close()


def test_it_serves_a_reference_as_the_native_engine_does(tmp_path: Path) -> None:
    for seed, name in enumerate(("model", "other")):
        fresh_model(tmp_path / name, alphabet=ALPHABET, context=64, seed=seed, **SIZES["0.1m"])

    reference = {"kl": 0.1, "model": str(tmp_path / "other")}

    def trained(name: str, **given: Any) -> list[dict[str, float]]:
        seen = list[dict[str, float]]()
        settings: dict[str, Any] = {
            "env": {"kind": "guess", "low": 1, "high": 4, "turns": 2},
            "rollout": {"groups": 2, "group_size": 2, "max_tokens": 2},
            "algorithm": {
                "name": "grpo",
                "zero_variance": "keep",
                "reference": reference,
            },
            "eval": {"every": 0, "tasks": 2, "final_tasks": 2},
            "trainer": {"lr": 0.01},
            "placement": {"kind": "inline", "reference_engines": 1},
            "engine": {"device": "cpu"},
        }
        places = {"model": tmp_path / "model", "run_dir": tmp_path / name, "max_lag": 0, "steps": 3, "quiet": True}
        assert tidemill.train(**settings | places | given, callbacks=[lambda step, metrics: seen.append(metrics)]).complete
        return seen

    with Running(tmp_path / "other") as server:
        ours = trained("ours", reference_engine={"kind": "openai", "url": server.url})
        asked = server.call(server.engine.stats()).prompt_tokens
    native = trained("native")
    key = "train/log_reference_ratio"
    found, expected = ([m[key] for m in each if key in m] for each in (ours, native))
    assert asked > 0 and found == pytest.approx(expected, abs=1e-4) and max(map(abs, found)) > 1e-3


@pytest.mark.slow
def test_no_run_trains_on_what_it_samples(tmp_path: Path) -> None:
    fresh_model(tmp_path / "model", alphabet=ALPHABET, context=64, **SIZES["0.1m"])
    with Running(tmp_path / "model") as server, pytest.raises(ConfigError, match="'openai' lacks the capability 'proof'"):
        tidemill.train(
            model=tmp_path / "model",
            run_dir=tmp_path / "run",
            env="guess",
            placement="inline",
            engine={"kind": "openai", "url": server.url},
            quiet=True,
        )


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ['reference_engine={kind="openai", url="http://h:1"}'],
            "placement.reference_engines = 0: set the number of engines",
        ),
        (
            ['reference_engine={kind="openai", url="http://h:1"}', "placement.reference_engines=1", "deterministic=true"],
            "deterministic = true: the reference must be served by the native engine",
        ),
        (['reference_engine={kind="openai"}', "placement.reference_engines=1"], "url"),
        (['reference_engine={kind="oracle"}', "placement.reference_engines=1"], "kind.*oracle.*native"),
    ],
)
def test_an_engine_for_the_reference_that_cannot_serve_it_is_refused(overrides: list[str], says: str) -> None:
    base = {"run_dir": "runs/x", "model": "new:0.1m", "env": "guess"}
    with pytest.raises(ConfigError, match=says) as error:
        load_recipe([], ["algorithm.reference={kl=0.1}", *overrides], base)
    assert "\n" not in str(error.value)


def test_a_server_that_runs_already_takes_no_memory_of_the_run(folder: Path) -> None:
    arch = Architecture.from_folder(folder)
    assert engine_memory(OpenaiSettings(url="http://h:1"), arch) == [] != engine_memory(EngineSettings(), arch)
