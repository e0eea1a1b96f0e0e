"""Memory before a run: every number is held against the part that it is about, and what cannot fit is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tidemill.core.config import load
from tidemill.core.errors import ConfigError
from tidemill.core.types import GenerateRequest, SamplingParams, Version
from tidemill.engine.engine_kinds import EngineSpec
from tidemill.engine.native import cache_size
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.envs.reward_workers.reward_pool import RewardPool
from tidemill.models import trained_linear
from tidemill.models.architecture import Architecture
from tidemill.models.attention import packed_attention, packed_positions
from tidemill.models.decoder import Decoder
from tidemill.models.hf_weights import empty_decoder
from tidemill.models.kernels import library
from tidemill.models.kernels.cpu.compilation import Unavailable
from tidemill.models.kernels.library import native
from tidemill.models.logprobs import chunk_rows, token_logprobs
from tidemill.models.lora import attach
from tidemill.models.new_model import SIZES, ModelSize, fresh_model
from tidemill.models.served_linear import Linear, gathering
from tidemill.models.value_model import ValueModel
from tidemill.run.cluster import start_cluster
from tidemill.run.planner import memory_check, memory_model, trainer_memory
from tidemill.run.planner import plan as plan_module
from tidemill.run.planner.plan import plan_of
from tidemill.run.recipe import RunConfig
from tidemill.run.roles import build_engine, start_engine
from tidemill.run.storage.model_folder import architecture_of, resolve_model
from tidemill.trainer.companions import Critic, Reference
from tidemill.trainer.optimizer import Optimizer
from tidemill.trainer.replica_sums import ReplicaSums
from tidemill.trainer.trainer_checkpoint import Snapshot
from tidemill.trainer.trainer_kinds import TrainerSettings

SHAPE = {
    **{"vocab_size": 48, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 128},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama, every bias": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "mistral": {"model_type": "mistral", "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 16},
}


def recipe(*overrides: str, model: str = "new:0.1m", env: str = "guess") -> RunConfig:
    return load(RunConfig, [], overrides, {"run_dir": "runs/x", "model": model, "env": env, "algorithm": "grpo"})


def of(held: Iterable[memory_model.Held]) -> dict[str, int]:
    return {each.what.partition(",")[0]: each.bytes for each in held}


def size(tensors: Iterable[Tensor | None]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted(family: str):
    arch = Architecture.from_dict(SHAPE | FAMILIES[family])
    decoder = empty_decoder(arch)
    assert trainer_memory.parameters(arch) == sum(p.numel() for p in decoder.parameters())
    assert sorted(trainer_memory.matrices(arch)) == sorted(tuple(weight.shape) for _, weight, _ in decoder.packed())


def test_a_new_models_shape_is_known_before_it_is_made(tmp_path: Path):
    known = architecture_of("new:0.1m")
    assert list(tmp_path.iterdir()) == [] and known is not None
    made = Architecture.from_folder(resolve_model("new:0.1m", tmp_path, seed=0))
    assert trainer_memory.parameters(known) == trainer_memory.parameters(made) and known.context == made.context
    assert architecture_of(str(tmp_path / "nowhere")) is None


@pytest.mark.parametrize(
    ("dtype", "kv", "context"), [("float32", None, 512), ("float32", 1, 240), ("bfloat16", None, 512), ("bfloat16", 1, 496)]
)
async def test_an_engine_holds_what_was_said(tmp_path: Path, dtype: str, kv: int | None, context: int):
    sizes = ModelSize(layers=8, hidden=64, heads=2, kv_heads=2, intermediate=96)
    arch = fresh_model(tmp_path / "model", alphabet="abcdef", **sizes)
    settings = EngineSettings.model_validate({"dtype": dtype, "device": "cpu", "kv_memory_mb": kv, "max_sequences": 7})
    engine = build_engine(EngineSpec(model=tmp_path / "model", engine=settings))
    assert isinstance(engine, NativeEngine) and engine._cache is not None
    said, decoder = of(memory_model.engine_memory(settings, arch)), engine._updates.weights.decoder
    assert said["weights"] == said["spare for the next version"] == size(decoder.parameters())
    assert said["KV cache"] == size([engine._cache.kv])
    assert memory_model.row_tokens(settings, arch) == (await engine.capabilities()).context == context
    compiled = native()
    if compiled is not None and compiled.packs(decoder.head_weight):
        assert said["packed copies of both"] == 2 * size(packed.numbers for _, _, packed in decoder.packed())
    await engine.close()


def test_what_an_engine_does_not_pack(monkeypatch):
    arch = Architecture.from_dict(SHAPE | FAMILIES["qwen3"])
    invariant = EngineSettings(batch_invariant=True, device="cpu")
    assert not any("packed" in what for what in of(memory_model.engine_memory(invariant, arch)))
    narrow = EngineSettings(device="cuda", dtype="bfloat16")
    on_gpu = of(memory_model.engine_memory(narrow, arch))
    assert on_gpu.keys() == {"weights", "spare for the next version", "a step of at most 2", "KV cache"}
    monkeypatch.setattr(memory_model, "MIXES", False)  # a PyTorch that multiplies no narrow matrices into a wide one
    assert of(memory_model.engine_memory(narrow, arch))["head in float32"] == 4 * 48 * 32


class Alive(TorchDispatchMode):
    """The most bytes that tensors have at a time which are made while this is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._before, self._made = set[int](), dict[int, tuple[StorageWeakRef, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._before |= {address for address, _ in self._storages((args, kwargs or {})) if address not in self._made}
        out = func(*args, **(kwargs or {}))
        self._made = {address: made for address, made in self._made.items() if not made[0].expired()}
        for address, storage in self._storages(out):
            if address not in self._before:
                self._made[address] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, sum(size for _, size in self._made.values()))
        return out

    def _storages(self, tree: Any) -> list[tuple[int, torch.UntypedStorage]]:
        tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.numel()]
        return [(t.untyped_storage().data_ptr(), t.untyped_storage()) for t in tensors]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.runs)])
@pytest.mark.parametrize(("hidden", "vocab"), [(256, 48), (64, 5000)], ids=["wide", "of many words"])
async def test_a_step_of_an_engine_is_bounded(
    dtype: str, compiled: bool, temperature: float, hidden: int, vocab: int, monkeypatch: pytest.MonkeyPatch
):
    if not compiled:
        monkeypatch.setattr(library, "_found", lambda: Unavailable("switched off"))
    elif native() is None:
        pytest.skip("no C compiler")
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "vocab_size": vocab, "head_dim": 32}
    arch = Architecture.from_dict(SHAPE | FAMILIES["qwen3"] | sizes)
    settings = EngineSettings.model_validate({"dtype": dtype, "device": "cpu", "prefill_chunk": 400, "max_sequences": 32})
    decoder = Decoder(arch)
    decoder.initialise(torch.Generator().manual_seed(0))
    engine = NativeEngine(decoder, settings, receiver=None, version=Version(0), name="engine-0", eos_ids=())
    step, most = engine._step, 0

    def watched(cache: Any) -> None:
        nonlocal most
        with Alive() as alive:
            step(cache)
        most = max(most, alive.most)

    monkeypatch.setattr(engine, "_step", watched)
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=temperature)
    texts = [np.full(100, i, np.int32) for i in range(32)]
    await asyncio.gather(*(engine.generate(GenerateRequest(text, params, key=str(i))) for i, text in enumerate(texts)))
    await engine.close()
    monkeypatch.setattr(memory_model, "GATHER_BYTES", {"cpu": 1 << 20})  # so short rows and few have no more, nor such masks
    monkeypatch.setattr(memory_model, "MOST_PAIRS", 32 * 100 * 112)
    assert most <= memory_model.step_memory(settings, arch) <= (2 if compiled else 4) * most


def test_the_cache_takes_a_share_of_what_is_free():
    arch, settings = Architecture.from_dict(SHAPE | FAMILIES["qwen2"]), EngineSettings(device="cpu")
    full, short = cache_size.kv_pages(settings, arch, None), cache_size.kv_pages(settings, arch, free=4 << 20)
    assert full == (128 * 8 + 1, False) and short[1] and short[0] < full[0]
    assert of(memory_model.engine_memory(settings, arch, free=4 << 20))["KV cache"] <= 1 << 20


@pytest.mark.parametrize("follows", [False, True])
def test_a_trainer_holds_what_was_said(follows: bool):
    arch = Architecture.from_dict(SHAPE | FAMILIES["qwen2"])
    every = f"algorithm.reference.every={int(follows)}"
    config = recipe("algorithm.reference.kl=0.1", every, "trainer.serving_dtype=bfloat16")
    said = of(trainer_memory.trainer_memory(config, arch, arch))
    decoder, reference = empty_decoder(arch), empty_decoder(arch)
    decoder.initialise(torch.Generator())
    optimizer = Optimizer(decoder, config.trainer, updates=1)
    optimizer.apply(1.0)
    assert said["weights"] == said["gradients"] == said["reference"] == size(decoder.parameters())
    assert said["two moments"] == size(block.tensor for block in optimizer.state())
    taken = Snapshot.take(decoder, optimizer, [Reference(reference, every=int(follows))])
    copied = [block.tensor for block in [*taken.weights, *taken.optimizer]]
    assert said["copy while a checkpoint is written"] == size(copied)
    assert said["two versions on their way to engines"] == said["weights"]  # two of half the size
    assert "reference" not in of(trainer_memory.trainer_memory(recipe("placement.sync.transport=checkpoint"), arch, None))


def test_errors_of_sums_over_replicas_are_what_was_said():
    arch = Architecture.from_dict(SHAPE | FAMILIES["qwen2"])
    config = recipe("trainer.ranks=2", "trainer.shard=none", "trainer.reduce=int8")
    said, without = (of(memory_model.trainer_memory(each, arch, None)) for each in (config, recipe("trainer.ranks=2")))
    sums = ReplicaSums(dict(empty_decoder(arch).named_parameters()), "int8", None, 0, 2)
    held = size(block.tensor for block in sums.state())
    assert said["errors of sums over replicas"] == held and "errors of sums over replicas" not in without


@pytest.mark.parametrize("model", ["initial", "policy"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_critic_holds_what_was_said(model: str, tied: bool):
    arch = Architecture.from_dict(SHAPE | FAMILIES["qwen2"] | {"tie_word_embeddings": tied})
    config = recipe("algorithm=ppo", f"algorithm.critic.model={model}")
    said = of(trainer_memory.trainer_memory(config, arch, None, arch if model == "initial" else None))
    decoder = empty_decoder(arch)
    if model == "policy":
        assert not [what for what in said if what.startswith("critic")]  # a head is one row
        return
    critic = Critic(ValueModel(empty_decoder(replace(arch, tied=True))), config.trainer, 1)
    for each in critic.model.trained.parameters():
        torch.nn.init.zeros_(each)
    critic.apply(1.0)
    head = size(critic.model.head.parameters())
    held = said["critic"] + said["gradients of the critic"] + said["two moments of the critic"]
    assert held == 4 * size(critic.model.decoder.parameters()) == 4 * (size(critic.model.trained.parameters()) - head)
    optimizer = Optimizer(decoder, config.trainer, updates=1)
    optimizer.apply(1.0)
    taken = Snapshot.take(decoder, optimizer, [critic])
    copied = [block.tensor for block in [*taken.weights, *taken.optimizer]]
    assert said["copy while a checkpoint is written"] == size(copied) - 3 * head


def kept_by(decoder: Decoder, settings: TrainerSettings, lengths: list[int]) -> tuple[int, int]:
    """Bytes that the forward pass of these rows leaves for the backward pass, beside the weights; and of copies of these."""
    alive: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in decoder.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            alive[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens, attend = torch.zeros(sum(lengths), dtype=torch.long), packed_attention(lengths, decoder.arch.windows)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=settings.dtype == "bfloat16")
    with gathering(decoder):
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            with autocast:
                hidden = decoder(tokens, packed_positions(lengths), attend, checkpointing=settings.checkpointing)
            kept, _ = token_logprobs(decoder, hidden, tokens, entropy=True)
        seen = sum(alive.values())
        kept.sum().backward()
        matrices = [each.gathered for each in decoder.modules() if isinstance(each, Linear)]
        return seen, sum(copy.nbytes for each in matrices if each is not None for copy in each._copies.values())


@pytest.mark.parametrize("lengths", [[100] * 4, [100, 60, 33, 20, 90, 90]], ids=["even", "ragged"])
@pytest.mark.parametrize("checkpointing", [False, True, 0.5])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.runs)])
@pytest.mark.parametrize("family", FAMILIES)
def test_activations_are_bounded(family: str, dtype: str, checkpointing: float, lengths: list[int]):
    wide = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 6}
    arch = Architecture.from_dict(SHAPE | wide | FAMILIES[family])
    settings = TrainerSettings.model_validate({"dtype": dtype, "checkpointing": checkpointing, "device": "cpu"})
    plain = settings.model_copy(update={"checkpointing": False})

    def kept(layers: int, settings: TrainerSettings) -> tuple[int, int]:
        decoder = empty_decoder(replace(arch, layers=layers, windows=arch.windows[:layers]))
        decoder.initialise(torch.Generator())
        return kept_by(decoder, settings, lengths)

    alive = sum(kept(6, settings))
    if checkpointing:  # one layer at a time is run again in the backward pass
        alive += kept(2, plain)[0] - kept(1, plain)[0]
    said = trainer_memory.activations(arch, settings, sum(lengths))
    assert alive <= said <= 1.6 * alive


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.runs)])
def test_activations_beside_an_adapter_are_bounded(dtype: str, checkpointing: bool):
    wide = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 6}
    arch, lengths = Architecture.from_dict(SHAPE | wide | FAMILIES["qwen3"]), [100, 60, 33, 20, 90, 90]
    given = {"dtype": dtype, "checkpointing": checkpointing, "device": "cpu", "lora": {"rank": 32}}
    settings = TrainerSettings.model_validate(given)
    assert settings.lora is not None

    def kept(layers: int, settings: TrainerSettings) -> int:
        assert settings.lora is not None
        decoder = empty_decoder(replace(arch, layers=layers, windows=arch.windows[:layers]))
        decoder.initialise(torch.Generator())
        attach(decoder, settings.lora.config)
        return sum(kept_by(decoder, settings, lengths))

    alive = kept(6, settings)
    if checkpointing:
        plain = settings.model_copy(update={"checkpointing": False})
        alive += kept(2, plain) - kept(1, plain)
    said = trainer_memory.activations(arch, settings, sum(lengths))
    assert alive <= said <= 1.6 * alive, (alive, said)


@pytest.mark.parametrize(
    ("more", "lanes"),
    [
        ([], 1),
        (["placement.trainer_threads=4"], 4),
        (["placement.trainer_threads=4", "deterministic=true"], 1),
        (["placement.trainer_threads=4", "placement.kind=inline"], 1),
        (["placement.trainer_threads=4", "trainer.micro_batch_tokens=1100"], 2),  # of 512 tokens at least
        (["warmup.accuracy=0.5"], 8),  # which has all cores
    ],
)
def test_micro_batches_side_by_side_have_logits_of_their_own(monkeypatch: pytest.MonkeyPatch, more: list[str], lanes: int):
    monkeypatch.setattr(plan_module, "usable_cores", lambda: 16)
    arch = replace(Architecture.from_dict(SHAPE | FAMILIES["qwen3"]), vocab=100_000)
    config = recipe("trainer.device=cpu", "rollout.groups=1000", *more)
    budget = config.trainer.micro_batch_tokens
    (said,) = [h.bytes for h in trainer_memory.trainer_memory(config, arch, None) if h.what.startswith("activations")]
    one = trainer_memory.activations(arch, config.trainer, budget)
    chunk = chunk_rows(arch.vocab, "cpu")
    assert said - one == 3 * 4 * arch.vocab * (min(budget, lanes * chunk) - chunk)


def with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(cache_size, "memory_bytes", lambda: (free, free))


def test_what_cannot_fit_is_refused_with_what_to_change(monkeypatch: pytest.MonkeyPatch):
    arch = architecture_of("new:2m")
    assert arch is not None
    config = recipe("trainer.micro_batch_tokens=100000", "placement.engines=2", model="new:2m")
    needs = memory_model.processes(config, memory_model.Models.of(config, arch))
    needed = sum(p.count * sum(h.bytes for h in p.held if not h.lazy) for p in needs)
    with_free(monkeypatch, needed)
    memory_check.check_memory(config, arch)
    with_free(monkeypatch, needed - 1)
    with pytest.raises(
        ConfigError,
        match=r"the most is .* of the trainer: activ.*takes the most first: a lower trainer.micro_batch_tokens",
    ) as e:
        memory_check.check_memory(config, arch)
    assert "trainer.checkpointing = true" in str(e.value) and "KV" not in str(e.value)
    with_free(monkeypatch, 16 << 30)
    with pytest.raises(ConfigError, match=r"32,000,000 attempts under way.*first: fewer rollout.groups \(now 2,000,000\)"):
        memory_check.check_memory(recipe("rollout.groups=2000000", "rollout.group_size=8", "max_lag=1"), arch)
    memory_check.check_memory(recipe("trainer.micro_batch_tokens=4096", "placement.engines=2", model="new:2m"), arch)


def test_a_device_that_is_not_here_is_refused():
    arch = architecture_of("new:0.1m")
    assert arch is not None
    if torch.cuda.is_available():
        pytest.skip("it is here")
    for key in ("trainer", "engine"):
        with pytest.raises(ConfigError, match=f"^{key} on 'cuda': no such device is visible here; set trainer.device"):
            memory_check.check_memory(recipe(f"{key}.device=cuda"), arch)


def test_a_cache_counts_where_its_size_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    arch = architecture_of("new:0.1m")
    assert arch is not None
    with_free(monkeypatch, 1 << 30)
    memory_check.check_memory(recipe(), arch)
    with pytest.raises(ConfigError, match=r"first: a lower engine.kv_memory_mb \(now 2,000\)"):
        memory_check.check_memory(recipe("engine.kv_memory_mb=2000"), arch)


@pytest.mark.parametrize(
    ("overrides", "rows"),
    [
        (["rollout.groups=3", "rollout.group_size=5"], 15),
        (["rollout.groups=4", "rollout.group_size=5", "data.replay.share=0.5"], 30),
        (["rollout.groups=3", "rollout.group_size=5", "warmup.accuracy=0.5", "warmup.batch=20"], 20),
        (["env.kind=rows", "env.data=rows.jsonl", "rollout.groups=300", "algorithm=dpo"], 600),
        (
            ["env.kind=rows", "env.data=rows.jsonl", "rollout.groups=300", "algorithm=kto"],
            600,
        ),  # one of each task, and one mismatched
        (
            ["env.kind=rows", "env.data=rows.jsonl", "rollout.groups=3", "algorithm=sft"],
            256,
        ),  # held-out rows, run forward together
    ],
)
def test_no_more_tokens_count_than_a_call_can_have(overrides: list[str], rows: int):
    arch = architecture_of("new:0.1m")
    assert arch is not None
    for budget, tokens in ((10**9, 10 * rows), (70, 70)):
        config = recipe("engine.context=10", f"trainer.micro_batch_tokens={budget}", *overrides)
        held = [each.what for each in trainer_memory.trainer_memory(config, arch, None)]
        assert [what for what in held if "tokens" in what] == [f"activations of at most {tokens:,} tokens"]


@pytest.mark.parametrize(("budget", "tokens"), [(10**6, 3008), (10**6, 3000), (3001, 3001), (2999, 2999)])
def test_what_fills_a_micro_batch_up_counts(monkeypatch: pytest.MonkeyPatch, budget: int, tokens: int):
    monkeypatch.setattr(trained_linear, "_way", lambda: trained_linear.WIDENED if tokens == 3000 else None)
    arch = architecture_of("new:0.1m")
    assert arch is not None
    narrow = ["trainer.dtype=bfloat16", "trainer.device=cpu", f"trainer.micro_batch_tokens={budget}"]
    config = recipe("rollout.groups=50", "rollout.group_size=6", "engine.context=10", *narrow)
    assert f"activations of at most {tokens:,} tokens" in {
        each.what for each in trainer_memory.trainer_memory(config, arch, None)
    }


def test_a_row_beyond_the_budget_counts_whole():
    arch = architecture_of("new:0.1m")
    assert arch is not None
    config = recipe("trainer.micro_batch_tokens=100")
    usual, long = (of(trainer_memory.trainer_memory(config, arch, None, longest=n)) for n in (50, 400))
    assert long["activations of at most 400 tokens"] > 3 * usual["activations of at most 100 tokens"]


@pytest.mark.parametrize(
    ("overrides", "lever"),
    [
        (["rollout.max_tokens=390"], "a lower rollout.max_tokens (now 390), or trainer.checkpointing = true"),
        (["rollout.max_tokens=390", "trainer.checkpointing=true"], "a lower rollout.max_tokens (now 390)"),
        (["env.kind=rows", "env.data=rows.jsonl", "algorithm=sft"], "shorter rows, or trainer.checkpointing = true"),
    ],
)
def test_what_takes_less_than_a_row_beyond_the_budget_is_no_smaller_budget(overrides: list[str], lever: str):
    arch = architecture_of("new:0.1m")
    assert arch is not None
    config, sizes = recipe("trainer.micro_batch_tokens=100", *overrides), dict[int, memory_model.Held]()
    for longest in (100, 400):
        sizes[longest] = trainer_memory.trainer_memory(config, arch, None, longest=longest)[-1]
    assert sizes[400].lever == lever and sizes[100].lever.startswith("a lower trainer.micro_batch_tokens (now 100)")


def test_what_a_trainer_on_a_device_keeps_outside_of_it():
    """Snapshots, and versions on their way, are in the machine's own memory."""
    arch = Architecture.from_dict(SHAPE | FAMILIES["qwen3"])
    there, host, engine, *_ = memory_model.processes(
        recipe("trainer.device=cuda", "engine.device=cpu"), memory_model.Models(arch)
    )
    here, also, *_ = memory_model.processes(recipe("trainer.device=cpu", "engine.device=cpu"), memory_model.Models(arch))
    assert (there.devices, host.devices, engine.devices) == (("cuda",), ("cpu",), ("cpu",)) and also == engine
    kept = {"copy while a checkpoint is written", "two versions on their way to engines"}
    assert {h.what for h in host.held} == kept | {"Python itself"}
    assert not {h.what for h in host.held} & {h.what for h in there.held}
    assert {h.what for h in here.held} == {h.what for h in (*there.held, *host.held)}


def test_each_process_counts_for_itself(monkeypatch: pytest.MonkeyPatch):
    """However small the model is: thousands of engines do not fit."""
    arch = architecture_of("new:0.1m")
    assert arch is not None
    with_free(monkeypatch, 16 << 30)
    memory_check.check_memory(recipe("placement.engines=50"), arch)
    with pytest.raises(ConfigError, match=r"of 5,000 engines: Python itself.*first: fewer placement.engines \(now 5,000\)"):
        memory_check.check_memory(recipe("placement.engines=5000"), arch)
    with pytest.raises(ConfigError, match=r"first: fewer placement.environment.workers \(now 5,000\)"):
        memory_check.check_memory(recipe("placement.environment.workers=5000"), arch)
    given = [f"{name}.device=cuda" for name in ("trainer", "engine")] + ["placement.engines=3", "scoring.workers=5"]
    for kind, counts in (("local", [1, 3, 1, 5]), ("inline", [1, 5])):  # inline, only the controller and its workers are
        found = memory_model.processes(recipe(f"placement.kind={kind}", *given), memory_model.Models(arch))
        own = [
            (p.count, {*p.devices})
            for p in found
            for h in p.held
            if h.what == "Python itself" and h.bytes == memory_model.PYTHON
        ]
        assert own == [(count, {"cpu"}) for count in counts]


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system does not tell what is shared")
async def test_a_process_takes_what_is_counted_for_it(tmp_path: Path):
    """What it shares with no other, without its model: an engine that has begun to work, and one that judges."""
    arch = fresh_model(tmp_path / "model", alphabet="abcdef", **SIZES["0.1m"])
    config = recipe("engine.device=cpu", "engine.kv_memory_mb=1")
    model = sum(size for what, size in of(memory_model.engine_memory(config.engine, arch)).items() if "a step" not in what)
    async with start_engine(config, tmp_path / "model", tmp_path / "logs", 1) as engine:
        prompts = np.arange(48, dtype=np.int32).reshape(16, 3) % arch.vocab
        replies = (
            engine.generate(GenerateRequest(prompt, SamplingParams(max_tokens=8), key=str(prompt))) for prompt in prompts
        )
        await asyncio.gather(*replies)
        pool = RewardPool(workers=1)
        await pool.call("operator:eq", [1, 1])
        (scorer,) = map(psutil.Process, pool.pool.pids)
        taken = {psutil.Process((await engine.telemetry()).pid): model, scorer: 0}
        own = [process.memory_full_info().uss - held for process, held in taken.items()]
        await pool.close()
    assert all(0.5 * memory_model.PYTHON < each < 2 * memory_model.PYTHON for each in own), own


@pytest.mark.parametrize(("steps", "every", "beside"), [(9, 3, True), (9, 9, False), (9, 50, False), (9, 0, False)])
async def test_a_run_holds_what_it_will_use(tmp_path, monkeypatch, steps: int, every: int, beside: bool):
    """KV of no version from which nothing can be trained on any more, and a room for copies only where some are made."""

    class Started(Exception): ...

    given = dict[str, dict[str, Any]]()

    async def start(_: type, role: str, name: str, spec: dict[str, Any], *more: object) -> None:
        given[role] = spec
        raise Started

    config = recipe(f"steps={steps}", f"record.checkpoint_every={every}", "max_lag=3")
    folder, placement = SimpleNamespace(weights=tmp_path, profile=tmp_path, logs=tmp_path), SimpleNamespace(start=start)
    with pytest.raises(BaseExceptionGroup):
        async with start_cluster(plan_of(config), tmp_path, cast(Any, folder), cast(Any, placement), lambda *_: None):
            raise AssertionError("nothing was started")
    assert given["trainer"]["checkpoints"] is beside and given["engine"]["cached_versions"] == 4
