"""The engine of the kind `sglang` over the fake of its server: updates, salts, aborts, and what fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract_base import FREE, LONG, PROMPT, TOLERANCE, Reference, new_version, until
from damaged_weights import DAMAGE
from engine.sglang.fake_sglang import FakeSglang, running
from engine.sglang.test_sglang_contract import engine_at

from tidemill.core.errors import EngineFailed, PolicyMismatch, StartFailed
from tidemill.core.types import Finish, GenerateRequest, SamplingParams
from tidemill.core.weight_update import WeightUpdate
from tidemill.engine.sglang.sglang_engine import SglangEngine
from tidemill.models.hf_weights import load_folder, serving_slices
from tidemill.weight_sync.sync_settings import SyncSettings
from tidemill.weight_sync.transport import make_sender


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Reference]:
    return [Reference.make(tmp_path_factory.mktemp(f"model-{seed}"), seed) for seed in (0, 1)]


@pytest.fixture
async def published(models: list[Reference], tmp_path: Path) -> AsyncIterator[WeightUpdate]:
    async with new_version(models[1].folder, tmp_path, 1) as version:
        yield version


@asynccontextmanager
async def served(model: Reference, **settings: Any) -> AsyncIterator[tuple[SglangEngine, FakeSglang]]:
    async with running(model.folder) as (url, fake):
        engine = engine_at(url, model.folder, **settings)
        try:
            yield engine, fake
        finally:
            await engine.close()


async def under_way(engine: SglangEngine, tokens: int = 20) -> None:
    async def sampled() -> bool:
        return (await engine.stats()).generated > tokens

    await until(sampled)


@pytest.mark.parametrize("load", ["disk", "collective"])
@pytest.mark.parametrize("mode", ["keep", "recompute", "finish"])
async def test_a_request_in_flight_meets_an_update(
    models: list[Reference], published: WeightUpdate, mode: str, load: str
) -> None:
    async with served(models[0], in_flight=mode, load=load) as (engine, fake):
        fake.scheduler.hold_at = None if mode == "finish" else 40  # the update comes while it is sampled
        call = asyncio.ensure_future(engine.generate(GenerateRequest(PROMPT, LONG)))
        await under_way(engine)
        await engine.update(published)
        done = await call
        pauses = [body["mode"] for path, body in fake.bodies if path == "/pause_generation"]
    steps, old, new = done.versions.tolist(), *(model.logprobs(PROMPT, done.tokens) for model in models)
    cut = steps.index(1) if 1 in steps else len(steps)
    assert steps == [0] * cut + [1] * (len(steps) - cut) and len(steps) == 90
    np.testing.assert_allclose(done.logprobs[:cut], old[:cut], atol=TOLERANCE)
    assert pauses == ["retract" if mode == "recompute" else "in_place"]
    if mode == "finish":
        assert cut == len(steps)
        return
    assert cut == 40
    gap = np.abs(done.logprobs[cut:] - new[cut:]).max()
    assert gap < TOLERANCE if mode == "recompute" else gap > TOLERANCE, "with keep, the KV is that of the old weights"


async def test_old_kv_never_gets_into_a_new_prompt(models: list[Reference], published: WeightUpdate) -> None:
    """Nothing is flushed with `keep`, so only the salt separates what different weights computed."""
    long = np.arange(40, dtype=np.int32)
    async with served(models[0]) as (engine, fake):
        await engine.generate(GenerateRequest(long, FREE))
        await engine.update(published)
        done = await engine.generate(GenerateRequest(long, FREE))
        again = await engine.generate(GenerateRequest(long, FREE))
        np.testing.assert_allclose(done.logprobs, models[1].logprobs(long, done.tokens), atol=TOLERANCE)
        assert done.cached_tokens == 0 and again.cached_tokens == 39
        salts = list(dict.fromkeys(body["extra_key"] for path, body in fake.bodies if path == "/generate"))
        body = {"rid": "x", "input_ids": long.tolist(), "return_logprob": True, "extra_key": salts[-2]}
        reply = await engine._client.post("/generate", body | {"sampling_params": {"max_new_tokens": 4}}, 60)
        stale = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
        true = models[1].logprobs(long, np.array(reply["output_ids"]))
        assert np.abs(stale - true).max() > 0.1, "this server does reuse KV of old weights where the salt is theirs"


async def test_an_episode_finds_its_own_history_after_an_update(models: list[Reference], published: WeightUpdate) -> None:
    async with served(models[0]) as (engine, _):
        first = await engine.generate(GenerateRequest(PROMPT, FREE, key="g0/0"))
        await engine.update(published)
        history = np.concatenate([PROMPT, first.tokens, PROMPT])
        own = await engine.generate(GenerateRequest(history, FREE, key="g0/0"))
        other = await engine.generate(GenerateRequest(history, FREE, key="g0/1"))
    assert own.cached_tokens >= len(PROMPT) + 19 and other.cached_tokens == 0


async def test_an_abort_ends_one_request_though_ids_begin_alike(models: list[Reference]) -> None:
    """SGLang ends every request whose id begins with the given one."""
    async with served(models[0], max_sequences=32) as (engine, fake):
        some = replace(LONG, max_tokens=30)
        fake.scheduler.hold_at = 20
        calls = [asyncio.ensure_future(engine.generate(GenerateRequest(PROMPT, some, key=f"g{i}/0"))) for i in range(12)]
        await under_way(engine, 12)
        await engine.abort("g0/0")
        fake.scheduler.release()
        done = await asyncio.gather(*calls)
    assert [each.finish is Finish.CANCELLED for each in done] == [True] + [False] * 11


async def test_a_request_that_is_aborted_while_it_waits_again_has_each_token_once(models: list[Reference]) -> None:
    async with served(models[0]) as (engine, fake):
        fake.scheduler.hold_at = 40
        call = asyncio.ensure_future(engine.generate(GenerateRequest(PROMPT, LONG, key="g0/0")))
        await under_way(engine)
        fake.scheduler.pause("retract")
        (row,) = fake.scheduler.rows
        await engine.abort("g0/0")
        done = await call
        fake.scheduler.resume()
    assert done.finish is Finish.CANCELLED and done.tokens.tolist() == row.outputs[: row.sent] and row.sent > 16
    np.testing.assert_allclose(done.logprobs, models[0].logprobs(PROMPT, done.tokens), atol=TOLERANCE)


async def test_an_abort_that_overtakes_its_request_is_sent_again(models: list[Reference]) -> None:
    async with served(models[0]) as (engine, fake):
        await engine.capabilities()
        fake._resumed.clear()  # the server has not taken the request yet
        call = asyncio.ensure_future(engine.generate(GenerateRequest(PROMPT, LONG, key="g0/0")))

        async def inside() -> bool:
            return (await engine.stats()).running > 0

        await until(inside)
        await engine.abort("g0/0")
        fake._resumed.set()
        assert (await call).finish is Finish.CANCELLED


@pytest.mark.parametrize("load", ["disk", "collective"])
@pytest.mark.parametrize("fault", ["half", "model.embed_tokens.weight", "dies"])
async def test_after_an_update_that_failed_nothing_is_sampled(
    models: list[Reference], published: WeightUpdate, fault: str, load: str
) -> None:
    """In its middle a server holds a mixture, and so does one that leaves out what it was given."""
    if (fault, load) == ("dies", "collective"):
        pytest.skip("the same as half: the group ends with it")
    async with served(models[0], load=load) as (engine, fake):
        call = asyncio.ensure_future(engine.generate(GenerateRequest(PROMPT, LONG)))
        await under_way(engine)
        fake.broken.add(fault)
        with pytest.raises((EngineFailed, PolicyMismatch)):
            await engine.update(published)
        with pytest.raises(EngineFailed):
            async with asyncio.timeout(10):
                await engine.generate(GenerateRequest(PROMPT, FREE))
        call.cancel()
        assert fake.scheduler.paused, "it is never resumed"
        await asyncio.wait({call})


async def test_a_server_whose_weights_cannot_be_read_back_is_updated_all_the_same(
    models: list[Reference], published: WeightUpdate
) -> None:
    async with served(models[0]) as (engine, fake):
        fake.broken.add("unread")
        assert await engine.update(published) == published.version


async def test_a_sample_of_other_tensors_is_read_back_each_time(models: list[Reference], tmp_path: Path) -> None:
    async with served(models[0]) as (engine, fake):
        for step in range(1, 6):
            async with new_version(models[step % 2].folder, tmp_path / str(step), step) as version:
                await engine.update(version)
        read = [body["name"] for path, body in fake.bodies if path == "/get_weights_by_name"]
    unsure = ("k_proj", "v_proj", "up_proj", "lm_head")
    assert {*read} == {name for name in fake.model.parameters if not any(part in name for part in unsure)}


async def test_a_dead_server_ends_its_engine_and_says_so(models: list[Reference]) -> None:
    async with served(models[0]) as (engine, fake):
        await engine.capabilities()
        fake.broken.add("gone")
        with pytest.raises(EngineFailed, match="the SGLang server of engine-0 did not answer POST /generate"):
            await engine.generate(GenerateRequest(PROMPT, FREE))
        with pytest.raises(EngineFailed, match="did not answer"):
            await engine.score(PROMPT, "policy", 1.0, 0)


async def test_time_counts_as_progress_while_a_server_starts_and_work_afterwards(models: list[Reference]) -> None:
    async with served(models[0]) as (engine, _):
        before = engine.progress()
        await asyncio.sleep(0)
        assert engine.progress() > before > 0, "it must not be taken for stuck"
        await engine.capabilities()
        idle = engine.progress()
        assert engine.progress() == idle
        await engine.generate(GenerateRequest(PROMPT, FREE))
        assert engine.progress() >= idle + 20


async def test_a_server_that_schedules_ahead_is_refused(models: list[Reference]) -> None:
    async with running(models[0].folder, overlap=True) as (url, _):
        engine = engine_at(url, models[0].folder)
        with pytest.raises(StartFailed, match="start it with --disable-overlap-schedule"):
            await engine.capabilities()
        await engine.close()


async def test_an_engine_takes_over_a_server_that_was_left_in_an_update(
    models: list[Reference], published: WeightUpdate
) -> None:
    async with running(models[0].folder) as (url, fake):
        for load in ("collective", "disk"):
            fake.scheduler.pause("in_place")
            fake._resumed.clear()
            fake.session = True
            engine = engine_at(url, models[0].folder, load=load)
            await engine.update(published)
            done = await engine.generate(GenerateRequest(PROMPT, FREE))
            np.testing.assert_allclose(done.logprobs, models[1].logprobs(PROMPT, done.tokens), atol=TOLERANCE)
            await engine.close()


async def test_nothing_is_left_of_the_files_for_a_server(models: list[Reference], tmp_path: Path) -> None:
    sync = SyncSettings.model_validate({"transport": "checkpoint"})
    sender = make_sender(sync, tmp_path / "weights")
    async with (
        served(models[0], transport="checkpoint") as (engine, fake),
        new_version(models[1].folder, tmp_path, 1) as true,
    ):
        sent = sender.send(true.version, serving_slices(load_folder(models[1].folder), torch.float32))  # type: ignore[union-attr]
        await engine.update(sent)
        (folder,) = [Path(body["model_path"]) for path, body in fake.bodies if path == "/update_weights_from_disk"]
    assert folder.parent == tmp_path / "weights", "a server elsewhere shares the transport's disk"
    assert not folder.exists()
    sender.close()


@pytest.mark.runs
async def test_a_refused_request_is_the_callers_fault_and_the_engine_goes_on(models: list[Reference]) -> None:
    async with served(models[0]) as (engine, _):
        await engine.capabilities()
        engine._context += 40  # as if the server had changed its mind
        with pytest.raises(ValueError, match=r"refused POST /generate \(400\): The input \(100 tokens\) is longer"):
            await engine.generate(GenerateRequest(np.zeros(100, np.int32), FREE))
        assert len((await engine.generate(GenerateRequest(PROMPT, FREE))).tokens) == 20


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"top_p": 0.9}, "top_p: engine engine-0 cannot say which tokens each one was chosen from"),
        ({"top_logprobs": 2}, "top_logprobs: engine engine-0 does not return"),
        ({"presence_penalty": 1.0}, "penalties and logit_bias: engine engine-0"),
    ],
)
async def test_what_the_server_cannot_sample_exactly_is_refused_by_name(
    models: list[Reference], params: dict[str, Any], says: str
) -> None:
    async with served(models[0]) as (engine, _):
        with pytest.raises(ValueError, match=says):
            await engine.generate(GenerateRequest(PROMPT, SamplingParams(**params)))


async def test_scores_name_the_likeliest_alternatives(models: list[Reference]) -> None:
    async with served(models[0]) as (engine, _):
        scored = await engine.score(PROMPT, "policy", 1.0, 3)
    rows = models[0].rows(PROMPT[:1], PROMPT[1:])
    assert scored.top_ids is not None and scored.top_ids[1:].tolist() == np.argsort(-rows)[:, :3].tolist()
    assert scored.top_ids[0].tolist() == [-1] * 3


@pytest.mark.parametrize("transport", ["shared_memory", "checkpoint"])
@pytest.mark.runs
async def test_damaged_weights_are_refused_and_the_old_ones_are_served(
    models: list[Reference], tmp_path: Path, transport: str
) -> None:
    greedy = replace(FREE, temperature=0.0)
    pieces = list(serving_slices(load_folder(models[1].folder), torch.float32))
    async with served(models[0], transport=transport) as (engine, fake), new_version(models[1].folder, tmp_path, 1) as true:
        before = (await engine.generate(GenerateRequest(PROMPT, greedy))).tokens.tolist()
        for each in DAMAGE:
            sender = make_sender(SyncSettings.model_validate({"transport": transport}), tmp_path / each.__name__)
            sent = sender.send(true.version, each([*pieces]))  # type: ignore[union-attr]
            with pytest.raises(PolicyMismatch):
                await engine.update(sent)
            sender.close()
            done = await engine.generate(GenerateRequest(PROMPT, greedy))
            assert done.tokens.tolist() == before and {v.step for v in done.sources} == {0}, each.__name__
        assert not any("pause" in path for path, _ in fake.bodies), "it was refused beside the decoding"


async def test_files_that_were_not_written_whole_are_refused(
    models: list[Reference], published: WeightUpdate, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidemill.engine.sglang import hand_over

    def written(tensors: dict[str, torch.Tensor], path: Path) -> None:
        saved({name: tensor * 0 if name.endswith("norm.weight") else tensor for name, tensor in tensors.items()}, path)

    saved = hand_over.save_file
    monkeypatch.setattr(hand_over, "save_file", written)
    async with served(models[0]) as (engine, fake):
        with pytest.raises(PolicyMismatch, match="wrote weights of the fingerprint"):
            await engine.update(published)
        assert len((await engine.generate(GenerateRequest(PROMPT, FREE))).tokens) == 20
        assert not any("update_weights" in path for path, _ in fake.bodies)
