"""Settings of vLLM engines and the command that starts a server: no vLLM is needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tidemill.core.config import build
from tidemill.core.errors import ConfigError
from tidemill.engine.remote.server_command import find_python
from tidemill.engine.vllm.vllm_command import check_model, kv_bytes, server_command
from tidemill.engine.vllm.vllm_settings import BUILD, ENVIRONMENT, VllmSettings
from tidemill.models.architecture import Architecture
from tidemill.run.planner.server_memory import server_memory
from tidemill.run.recipe import load_recipe

ARCH = Architecture("llama", vocab=61, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=32, intermediate=48, context=96)


def command(**settings: object) -> list[str]:
    chosen = VllmSettings.model_validate(settings)
    return server_command("python", chosen, Path("model"), ARCH, port=80, name="engine-0", on_cpu=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ["--dtype", "float32"]),
        ({}, ["--max-model-len", "97"]),  # the context, and one token that `score` samples
        ({"context": 50}, ["--max-model-len", "51"]),
        ({}, ["--logprobs-mode", "processed_logprobs"]),
        ({}, ["--weight-transfer-config", '{"backend": "tidemill"}']),
        ({"kv_memory_mb": 3}, ["--kv-cache-memory-bytes", str(3 << 20)]),
        ({"tensor_parallel": 2}, ["--tensor-parallel-size", "2"]),
        ({"prefix_cache": False}, ["--no-enable-prefix-caching"]),
        ({}, ["--no-enable-chunked-prefill"]),
        ({"options": {"max-num-batched-tokens": 4096}}, ["--max-num-batched-tokens", "4096"]),
        ({}, ["--enforce-eager"]),
        ({"options": {"enforce_eager": False}}, ["--no-enforce-eager"]),
        ({"options": {"max-num-batched-tokens": 512}}, ["--max-num-batched-tokens", "512"]),
        ({"options": {"speculative_config": {"method": "ngram"}}}, ["--speculative-config", '{"method": "ngram"}']),
    ],
)
def test_the_command_follows_the_settings(settings: dict[str, object], words: list[str]) -> None:
    found = command(**settings)
    at = found.index(words[0])
    assert found[at : at + len(words)] == words and found.count(words[0]) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_model_len": 8}, "'max-model-len' is set by engine.context"),
        ({"tensor-parallel-size": 2}, "'tensor-parallel-size' is set by engine.tensor_parallel"),
        ({"--model": "other"}, "'model' is decided by engine.kind = 'vllm' itself"),
        ({"quantization": "fp8"}, "'quantization' is decided"),
    ],
)
def test_options_that_something_else_decides_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        command(options=options)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"url": "http://a:1", "tensor_parallel": 2}, "tensor_parallel with url='http://a:1': the server .* runs already"),
        ({"url": "http://a:1", "options": {"seed": 1}}, "leave options out, or leave url out"),
        ({"key_variable": "KEY"}, "key_variable='KEY' without url"),
    ],
)
def test_settings_that_would_have_no_effect_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build(VllmSettings, settings)


def test_the_environment_is_found_or_its_lack_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "python"
    with pytest.raises(ConfigError, match=r"engine.python = '.*python' is no file"):
        find_python(VllmSettings(python=str(own)), ENVIRONMENT, BUILD)
    own.touch()
    assert find_python(VllmSettings(python=str(own)), ENVIRONMENT, BUILD) == str(own)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tidemill.__file__", str(tmp_path / "tidemill" / "__init__.py"))
    with pytest.raises(ConfigError, match=r"there is no .peers/vllm/bin/python; run `make vllm`"):
        find_python(VllmSettings(), ENVIRONMENT, BUILD)
    default = tmp_path / ".peers" / "vllm" / "bin" / "python"
    default.parent.mkdir(parents=True)
    default.touch()
    assert find_python(VllmSettings(), ENVIRONMENT, BUILD) == str(default)


def test_a_model_that_vllm_cannot_serve_is_refused_before_it_starts() -> None:
    check_model(VllmSettings(tensor_parallel=2), ARCH, on_cpu=True)
    small = replace(ARCH, head_dim=8)
    check_model(VllmSettings(), small, on_cpu=False)
    with pytest.raises(ConfigError, match="attention heads have 8 numbers, expected 32, 64"):
        check_model(VllmSettings(), small, on_cpu=True)
    with pytest.raises(ConfigError, match=r"engine.tensor_parallel = 3: the model has 4 attention heads"):
        check_model(VllmSettings(tensor_parallel=3), ARCH, on_cpu=True)


def test_the_kv_cache_holds_all_sequences_or_a_share_of_the_free_memory() -> None:
    settings = VllmSettings(max_sequences=10)
    token = 2 * 2 * 2 * 32 * 4  # keys and values, layers, heads, numbers, bytes
    assert kv_bytes(settings, ARCH, on_cpu=True, free=1 << 40) == 11 * 128 * token  # a block each, and one that vLLM keeps
    assert kv_bytes(settings, ARCH, on_cpu=True, free=4 << 20) == 1 << 20
    assert kv_bytes(settings, ARCH, on_cpu=False) is None, "on CUDA devices vLLM decides"


@pytest.mark.parametrize(
    ("url", "placement", "says"),
    [
        ("http://a:1", {"engines": 2}, "engine.url names 1 server, and placement.engines = 2: each engine updates a server"),
        (["http://a:1", "http://a:1/"], {"engines": 2}, "engine.url names 'http://a:1' twice"),
        ("http://a:1", {"reference_engines": 1}, "the servers of the policy cannot serve the reference"),
    ],
)
def test_a_server_has_one_engine_that_updates_it(url: object, placement: dict[str, int], says: str) -> None:
    frozen = {"algorithm": {"name": "grpo", "reference": {"kl": 0.1}}}
    base = {"run_dir": "runs/x", "model": "new:0.1m", "env": "guess", "engine": {"kind": "vllm", "url": url}} | frozen
    load_recipe(
        [], [], base | {"engine": {"kind": "vllm", "url": ["http://a:1", "http://b:1"]}, "placement": {"engines": 2}}
    )
    with pytest.raises(ConfigError, match=says):
        load_recipe([], [], base | {"placement": placement})


def test_engines_take_the_addresses_in_turn_and_those_that_are_never_updated_share_them() -> None:
    settings = VllmSettings(url=["http://a:1", "http://b:1"])
    assert [settings.url_of(f"engine-{i}", updated=True) for i in (0, 1)] == ["http://a:1", "http://b:1"]
    assert settings.url_of("reference-2", updated=False) == "http://a:1"
    with pytest.raises(ConfigError, match=r"engine-2: engine.url names 2 servers"):
        settings.url_of("engine-2", updated=True)


def test_the_memory_of_a_server_is_known_before_it_starts() -> None:
    def held(updated: bool = True, adapted: bool = False, **settings: object) -> dict[str, int]:
        chosen = VllmSettings.model_validate({"kv_memory_mb": 8, **settings})
        return {each.what: each.bytes for each in server_memory(chosen, ARCH, 1000, True, None, updated, adapted)}

    one, two = held(), held(tensor_parallel=2)
    assert one["weights"] == two["weights"] == 4000 and one["KV cache"] == two["KV cache"] / 2 == 8 << 20
    assert two["the next version, received by each rank"] == 2 * one["the next version, received by each rank"] == 8000
    assert two["the server's 4 processes"] > one["the server's 3 processes"] > 1 << 30
    assert held(dtype="bfloat16")["weights"] == 2000 and not any("next" in what for what in held(updated=False))
    bases = [held(adapted=True, tensor_parallel=ranks) for ranks in (1, 2)]
    assert [each["frozen base, to which adapters are added"] for each in bases] == [4000, 8000], "one in each rank"
    assert not server_memory(VllmSettings(url="http://a:1"), ARCH, 1000, True, None, True), "it runs elsewhere"
