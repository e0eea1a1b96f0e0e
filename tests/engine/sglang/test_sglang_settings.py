"""Settings of SGLang engines and the command that starts a server: no SGLang is needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tidemill.core.config import build, dump
from tidemill.core.errors import ConfigError
from tidemill.core.interfaces import Capabilities
from tidemill.engine.engine_kinds import BaseEngineSettings
from tidemill.engine.remote.server_command import find_python
from tidemill.engine.sglang.sglang_command import kv_bytes, server_command, server_environment
from tidemill.engine.sglang.sglang_settings import BUILD, ENVIRONMENT, SglangSettings
from tidemill.engine.vllm.vllm_settings import VllmSettings
from tidemill.models.architecture import Architecture
from tidemill.run.capability_check import UNPROVEN, UNSEEDED, check_engine
from tidemill.run.planner.server_memory import server_memory
from tidemill.run.recipe import load_recipe

ARCH = Architecture("llama", vocab=61, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=48, context=96)
TOKEN = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, numbers, bytes


def command(on_cpu: bool = True, **settings: object) -> list[str]:
    chosen = SglangSettings.model_validate(settings)
    return server_command("python", chosen, Path("model"), ARCH, port=80, on_cpu=on_cpu)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ["-m", "sglang.launch_server"]),
        ({}, ["--dtype", "float32"]),
        ({}, ["--context-length", "103"]),  # SGLang takes prompts of at most six tokens less, and `score` samples one
        ({"context": 50}, ["--context-length", "57"]),
        ({}, ["--disable-overlap-schedule"]),
        ({}, ["--skip-tokenizer-init"]),
        ({"max_sequences": 9}, ["--max-running-requests", "9"]),
        ({"kv_memory_mb": 3}, ["--max-total-tokens", str((3 << 20) // TOKEN)]),
        ({"tensor_parallel": 2}, ["--tp-size", "2"]),
        ({"prefix_cache": False}, ["--disable-radix-cache"]),
        ({}, ["--attention-backend", "torch_native"]),
        ({"options": {"chunked_prefill_size": 512}}, ["--chunked-prefill-size", "512"]),
        ({"options": {"attention-backend": "intel_amx"}}, ["--attention-backend", "intel_amx"]),
    ],
)
def test_the_command_follows_the_settings(settings: dict[str, object], words: list[str]) -> None:
    found = command(**settings)
    at = found.index(words[0])
    assert found[at : at + len(words)] == words and found.count(words[0]) == 1


def test_on_a_gpu_the_server_chooses_its_kernels_and_its_memory() -> None:
    found = command(on_cpu=False)
    assert found[found.index("--device") + 1] == "cuda" and "--disable-radix-cache" not in found
    assert not {"--attention-backend", "--max-total-tokens", "--disable-decode-cuda-graph"} & {*found}
    assert "SGLANG_USE_CPU_ENGINE" in server_environment(2, 1, True).keys() - server_environment(2, 1, False).keys()
    assert server_environment(4, 2, True)["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"context_length": 8}, "'context-length' is set by engine.context"),
        ({"--tp-size": 2}, "'tp-size' is set by engine.tensor_parallel"),
        ({"disable-overlap-schedule": False}, "'disable-overlap-schedule' is decided by engine.kind = 'sglang' itself"),
    ],
)
def test_options_that_something_else_decides_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        command(options=options)


def test_what_cannot_be_served_is_refused_before_a_server_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"engine.tensor_parallel = 3: the model has 4 attention heads"):
        command(tensor_parallel=3)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tidemill.__file__", str(tmp_path / "tidemill" / "__init__.py"))
    with pytest.raises(ConfigError, match=r"'sglang': there is no .peers/sglang/bin/python; set engine.python"):
        find_python(SglangSettings(), ENVIRONMENT, BUILD)


def test_settings_with_an_address_travel_to_the_engines_process() -> None:
    for kind in (SglangSettings, VllmSettings):
        given = kind(url=["http://a:1", "http://b:1"], max_sequences=3)
        assert build(BaseEngineSettings, dump(given)) == given


def test_the_kv_cache_holds_all_sequences_or_a_share_of_the_free_memory() -> None:
    settings = SglangSettings(max_sequences=100)
    assert kv_bytes(settings, ARCH, on_cpu=True, free=1 << 40) == 100 * 103 * TOKEN
    assert kv_bytes(settings, ARCH, on_cpu=True, free=5 << 20) == 5 << 18
    held = {each.what: each.bytes for each in server_memory(settings, ARCH, 1000, True, 1 << 40, True, adapted=True)}
    assert held["KV cache"] == 100 * 103 * TOKEN and held["the next version, received by the engine"] == 4000
    assert held["frozen base, to which adapters are added"] == 4000


def test_its_weaker_proof_and_its_seeds_are_said_at_the_start_or_refused() -> None:
    def recipe(*more: str) -> object:
        return load_recipe([], list(more), {"run_dir": "runs/x", "model": "new:0.1m", "env": "guess"})

    can = Capabilities(96, support=False, seeds=False, scores_at=1.0, proof="received")
    told = check_engine("sglang", can, recipe("engine.kind=sglang", "record.probe_every=5"), "engine")  # type: ignore[arg-type]
    assert told == [f"engine.kind = 'sglang': {said}" for said in (UNPROVEN, UNSEEDED)]
    for wrong, says in (
        (("record.probe_every=0",), "probes must hold it against the trainer"),
        (
            ("rollout.temperature=0.7",),
            "only what it received .* lacks the capability 'score' at rollout.temperature",
        ),
        (("rollout.top_p=0.9",), "lacks the capability 'support'"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_engine("sglang", can, recipe("engine.kind=sglang", *wrong), "engine")  # type: ignore[arg-type]


def test_scores_at_another_temperature_are_no_reason_to_refuse_an_engine_that_proves_what_it_serves() -> None:
    config = load_recipe([], ["rollout.temperature=0.7"], {"run_dir": "runs/x", "model": "new:0.1m", "env": "guess"})
    can = replace(Capabilities(96), scores_at=1.0)
    assert any("no probe" in said for said in check_engine("vllm", can, config, "engine"))
