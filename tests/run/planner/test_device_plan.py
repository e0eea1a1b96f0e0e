"""Which device does what: eight faked devices are placed as rule and recipe say, up to where CUDA is needed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tidemill.cli.commands.check import check
from tidemill.cli.commands.explain import explain
from tidemill.core.errors import ConfigError
from tidemill.models.architecture import Architecture
from tidemill.models.new_model import SIZES, architecture
from tidemill.run.cluster import start_cluster
from tidemill.run.planner import device_rates
from tidemill.run.planner.device_plan import DevicePlan, Given, given_in, place, resolved
from tidemill.run.planner.device_rates import engine_role, measured, planned_devices, trainer_role
from tidemill.run.planner.held_memory import Held
from tidemill.run.planner.memory_check import refusal
from tidemill.run.planner.memory_model import Models, demands, processes
from tidemill.run.planner.plan import plan_of, warm_up_plan
from tidemill.run.preflight.probe_process import Preparation
from tidemill.run.recipe import RunConfig, load_recipe
from tidemill.run.storage.model_folder import resolve_model
from tidemill.runtime.placement import Resources

GIB = 1 << 30
BASE = {"run_dir": "runs/x", "model": "new:0.1m", "env": "guess"}


def recipe(*overrides: str) -> RunConfig:
    return load_recipe([], overrides, BASE)


def fake_devices(monkeypatch: pytest.MonkeyPatch, count: int, free: int = 80 * GIB) -> None:
    """Let torch see `count` CUDA devices with `free` bytes each; whatever computes on them still fails."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, free))


def three_and_the_rest(devices: int, given: Given) -> tuple[int, int, str]:
    """A rule: three train where nothing else is given."""
    train = given.ranks or (devices - given.engines if given.engines else min(3, devices - 1))
    return train, given.engines or devices - train, "a rule"


def numbers(devices: tuple[str, ...]) -> str:
    return " ".join(each.removeprefix("cuda:") or "-" for each in devices)


def placed(visible: int, *overrides: str, ranks: int | None = None) -> DevicePlan:
    """The plan of a recipe. ranks: as if `trainer.ranks` was given."""
    config = recipe(*overrides)
    return place(config, Given(ranks, given_in(config).engines), visible, three_and_the_rest)


@pytest.mark.parametrize(
    ("visible", "overrides", "ranks", "trainer", "engines"),
    [
        (0, (), None, "-", "-"),
        (0, ("placement.engines=2",), None, "-", "- -"),
        (1, (), None, "0", "0"),
        (1, ("placement.engines=2",), None, "0", "0 0"),
        (2, (), None, "0", "1"),
        (8, (), None, "0 1 2", "3 4 5 6 7"),
        (8, ("placement.engines=2",), None, "0 1 2 3 4 5", "6 7"),
        (8, ("placement.engines=1",), None, "0 1 2 3 4 5 6", "7"),  # given, although it is the default
        (8, (), 1, "0", "1 2 3 4 5 6 7"),
        (8, ("placement.engines=2",), 2, "0 1", "2 3"),
        (8, ("placement.devices={trainer=[6, 1], engines=[0, 3]}",), None, "6 1", "0 3"),
        (8, ("placement.devices={trainer=[0], engines=[0, 1]}",), 1, "0", "0 1"),
        (8, ("placement.devices={trainer=[6, 1]}",), None, "6 1", "0 2 3 4 5 7"),
        (8, ("placement.devices.engines=[0, 1]", "placement.engines=2"), 3, "2 3 4", "0 1"),
        (2, ("trainer.device=cuda:1",), None, "1", "0"),
        (8, ("trainer.device=cuda:1", "placement.engines=2"), None, "1", "0 2"),
        (8, ("trainer.device=cpu",), 1, "-", "0"),
        (8, ("trainer.device=cpu", "placement.engines=3"), 1, "-", "0 1 2"),
        (1, ("trainer.device=cpu", "placement.engines=3"), 1, "-", "0 0 0"),
        (8, ("engine.device=cpu",), 2, "0 1", "-"),
        (8, ("trainer.device=cpu", "engine.device=cpu", "placement.engines=2"), 1, "-", "- -"),
        (8, ("deterministic=true",), 1, "-", "-"),
        (8, ("placement=inline",), 1, "-", "-"),
    ],
)
def test_devices_follow_from_rule_and_recipe(
    visible: int, overrides: tuple[str, ...], ranks: int, trainer: str, engines: str
):
    found = placed(visible, *overrides, ranks=ranks)
    assert (numbers(found.trainer), numbers(found.engines)) == (trainer, engines)
    own = {*found.trainer} & {*found.engines} - {""}
    assert found.shared is (bool(own) or (visible > 0 and "placement=inline" in overrides))


REFERENCE = ('algorithm={name="grpo", reference={kl=0.1}}',)


@pytest.mark.parametrize(
    ("visible", "overrides", "reference"),
    [
        (8, ("placement.reference_engines=2",), "6 7"),
        (3, ("placement.reference_engines=2",), "2 2"),
        (2, ("placement.reference_engines=1",), "1"),  # there are no more
        (1, ("placement.reference_engines=2",), "0 0"),
        (8, ("placement.reference_engines=2", "placement.devices={trainer=[0], engines=[1, 7]}"), "2 3"),
        (3, ("placement.reference_engines=3", "placement.devices={trainer=[0], engines=[2, 1]}"), "2 1 2"),
        (8, ("placement.reference_engines=2", "engine.device=cpu"), "- -"),
        (0, ("placement.reference_engines=2",), "- -"),
    ],
)
def test_engines_of_the_reference_have_what_is_left(visible: int, overrides: tuple[str, ...], reference: str):
    found = placed(visible, *REFERENCE, *overrides)
    assert numbers(found.reference) == reference
    assert not {*found.reference} & {*found.trainer} - {""} or visible == 1


EIGHT = "8 CUDA devices are visible here"


@pytest.mark.parametrize(
    ("visible", "overrides", "ranks", "sentence"),
    [
        (
            8,
            ("placement.devices.engines=[1, 8]",),
            None,
            f"placement.devices.engines = [1, 8]: {EIGHT}, counted from 0 to 7",
        ),
        (1, ("placement.devices.trainer=[1]",), None, "1 CUDA device is visible here, counted from 0 to 0"),
        (8, ("trainer.device=cuda:9",), None, f"trainer.device = 'cuda:9': {EIGHT}, counted from 0 to 7: name one of those"),
        (0, ("placement.devices.trainer=[0]",), None, "= [0]: no CUDA device is visible here: leave placement.devices out"),
        (
            8,
            ("placement.devices.trainer=[0, 1]",),
            3,
            "trainer = [0, 1] does not go with trainer.ranks = 3: name one device",
        ),
        (8, ("trainer.device=cuda:1",), 2, "trainer.device = 'cuda:1' does not go with trainer.ranks = 2"),
        (
            8,
            ("placement.devices.engines=[0]", "placement.engines=2"),
            None,
            "with placement.engines = 2: name one device for",
        ),
        (
            8,
            ("placement.devices.trainer=[0]", "trainer.device=cpu"),
            None,
            "= [0] does not go with trainer.device = 'cpu': lea",
        ),
        (8, ("placement.devices.engines=[0]", "engine.device=cpu"), None, "= [0] does not go with engine.device = 'cpu'"),
        (8, ("placement.devices.trainer=[0]", "trainer.device=cuda:1"), None, "does not go with trainer.device = 'cuda:1'"),
        (
            8,
            ("placement.engines=8",),
            None,
            "placement.engines = 8: 9 devices are needed, one for each rank of the trainer an",
        ),
        (8, ("placement.engines=5",), 4, "trainer.ranks = 4 and placement.engines = 5: 9 devices are needed, one for"),
        (8, (), 8, "trainer.ranks = 8: 9 devices are needed"),
        (1, (), 2, "trainer.ranks = 2: each rank of the trainer has a device of its own, and 1 CUDA device is visible here"),
        (2, ("engine.device=cpu",), 3, "trainer.ranks = 3: each rank of the trainer has a device of its own, and 2 CUDA"),
        (
            2,
            ("trainer.device=cpu", "placement.engines=3"),
            1,
            "placement.engines = 3: each engine has a device of its own, and",
        ),
        (
            2,
            ("placement.devices.trainer=[1, 0]",),
            None,
            "placement.devices.trainer = [1, 0] leaves 0 devices to the engines",
        ),
        (
            8,
            ("placement.devices.engines=[1, 0]",),
            7,
            "trainer.ranks = 7: placement.devices.engines = [1, 0] leaves 6 devices",
        ),
        (8, ("placement.devices.engines=[1]", "placement=inline"), 1, "placement.devices is for placement.kind = 'local'"),
    ],
)
def test_numbers_that_do_not_go_together_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, visible: int, overrides: tuple[str, ...], ranks: int | None, sentence: str
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match=re.escape(sentence)) as error:
        placed(visible, *overrides, ranks=ranks)
    assert "\n" not in str(error.value) and ". " not in str(error.value)


def test_errors_say_which_devices_are_visible(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    with pytest.raises(
        ConfigError, match=re.escape("2 CUDA devices are visible here (CUDA_VISIBLE_DEVICES = 4,7), counted")
    ):
        placed(2, "placement.devices.trainer=[7]")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("all", "placement.devices: 'all' was given, and 'auto' or { trainer = [0], engines = [1, 2] }"),
        ("[0, 1]", "placement.devices: [0, 1] was given, and 'auto' or"),
        ("3", "placement.devices: 3 was given, and"),
        ("{engine=[0]}", "placement.devices: {'engine': [0]} was given, and"),
        ("{trainer=0}", "placement.devices: {'trainer': 0} was given, and"),
        ('{trainer=["cuda:0"]}', "placement.devices: {'trainer': ['cuda:0']} was given, and"),
        ("{trainer=[true]}", "placement.devices: {'trainer': [True]} was given, and"),
        ("{trainer=[-1]}", "placement.devices: {'trainer': [-1]} was given, and"),
        ("{engines=[1, 1]}", "engines = [1, 1] names a device twice: name one for each engine, or leave engines out"),
        ("{trainer=[]}", "trainer = [] names none: name one for each rank of the trainer, or leave trainer out"),
    ],
)
def test_what_names_no_devices_is_one_sentence(given: str, sentence: str):
    with pytest.raises(ConfigError, match=re.escape(sentence)) as error:
        recipe(f"placement.devices={given}")
    assert str(error.value).count("placement.devices") == 1 and "\n" not in str(error.value)


def test_a_recipe_that_travelled_is_resolved_by_what_was_given():
    config = recipe("placement.engines=1")
    assert (
        given_in(config).engines == 1
        and given_in(recipe()).engines is None
        and given_in(recipe("placement=local")).engines is None
    )
    assert given_in(recipe()).ranks is None and given_in(recipe("trainer.ranks=1")).ranks == 1
    found = resolved(recipe("trainer.device=cuda:3"), DevicePlan(("cuda:3",), ("cuda:0", "cuda:1")))
    assert (found.trainer.device, found.engine.device, found.placement.engines) == ("cuda", "cuda", 2)
    cpu = recipe("trainer.device=cpu")
    assert (
        resolved(cpu, DevicePlan(("",), ("cuda:0",))).trainer.device == "cpu"
        and resolved(cpu, DevicePlan(("",), ("",))) is cpu
    )


class Started(Exception): ...


class Recording:
    """A placement that keeps what each process would be started with."""

    def __init__(self) -> None:
        self.started = dict[str, tuple[dict[str, Any], Resources]]()

    async def start(self, protocol: type, role: str, name: str, spec: dict[str, Any], resources: Resources, _: Any) -> Any:
        self.started[name] = spec, resources
        return SimpleNamespace(name=name, proxy=self, stop=self.stop, kill=lambda why: None)

    async def start_group(self, protocol: type, role: str, specs: dict, resources: list[Resources], _: Any) -> Any:
        each = [
            await self.start(protocol, role, name, specs[name], own, _) for name, own in zip(specs, resources, strict=True)
        ]
        return SimpleNamespace(handles=each, stop=self.stop, kill=lambda why: None)

    async def capabilities(self) -> Any:
        raise Started  # here CUDA would be needed

    async def stop(self) -> None: ...


async def start(tmp_path: Path, *overrides: str, warm_up: bool = False) -> dict[str, tuple[dict[str, Any], Resources]]:
    """What the processes of a run are started with, as the session starts them."""
    config, placement = load_recipe([], overrides, BASE), Recording()
    model = resolve_model("new:0.1m", tmp_path, seed=0)
    preparation = Preparation(RunConfig.model_validate(json.loads(config.model_dump_json())), inline)
    devices = await preparation.place(str(model), given_in(config))
    plan = warm_up_plan(config, devices) if warm_up else plan_of(config, Architecture.from_folder(model), devices)
    folder = cast(Any, SimpleNamespace(weights=tmp_path, profile=tmp_path, logs=tmp_path))
    with pytest.raises(BaseExceptionGroup):
        async with start_cluster(plan, model, folder, cast(Any, placement), lambda *_: None):
            raise AssertionError("no process can have answered")
    return placement.started


async def inline(function: Any) -> Any:
    return function()


async def test_eight_devices_are_placed_as_the_rule_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake_devices(monkeypatch, 8)
    monkeypatch.setattr(device_rates, "_by_rule", lambda config, models, devices, given: three_and_the_rest(devices, given))
    started = await start(tmp_path)
    assert [*started] == ["trainer", "trainer-1", "trainer-2", *(f"engine-{n}" for n in range(5))]
    assert [resources.device for _, resources in started.values()] == [f"cuda:{n}" for n in range(8)]
    assert {spec[role]["device"] for spec, _ in started.values() for role in ("trainer", "engine") if role in spec} == {
        "cuda"
    }


async def test_a_warm_up_trains_where_the_run_does_and_samples_on_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake_devices(monkeypatch, 4)
    asked = ("warmup.accuracy=0.5", "placement.devices={trainer=[3], engines=[2, 0]}")
    started = await start(tmp_path, *asked, warm_up=True)
    assert {name: resources.device for name, (_, resources) in started.items()} == {
        "trainer": "cuda:3",
        "engine-0": "cuda:2",
    }


@pytest.mark.parametrize("overrides", [(), ("placement.engines=2", "deterministic=true"), ("placement=inline",)])
async def test_without_a_device_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]):
    fake_devices(monkeypatch, 0)
    config = recipe(*overrides)
    for name, (spec, resources) in (await start(tmp_path, *overrides)).items():
        given = config.trainer if name == "trainer" else config.engine
        assert resources.device == "" and spec[name.partition("-")[0]]["device"] == given.device
    plan = plan_of(config)
    assert plan.config is config and plan == plan_of(config, devices=planned(config))


def planned(config: RunConfig) -> DevicePlan:
    return planned_devices(config, given_in(config), Models(architecture(SIZES["0.1m"], vocab=48, context=512, ends={})))


def test_an_engine_that_joins_later_shares_a_device():
    found = DevicePlan(("cuda:0",), ("cuda:1", "cuda:2"), ("cuda:3",))
    assert [found.of("engine", f"engine-{n}") for n in range(4)] == ["cuda:1", "cuda:2", "cuda:1", "cuda:2"]
    assert found.of("reference", "reference-0") == "cuda:3"


def test_a_trainer_on_devices_of_its_own_begins_early_and_on_a_shared_one_takes_turns(monkeypatch: pytest.MonkeyPatch):
    config = recipe("placement.engines=3", "placement.trainer_threads=2", "placement.engine_threads=64")
    for count, streams, turns in ((0, False, False), (1, False, True), (8, True, False)):
        fake_devices(monkeypatch, count)
        plan = plan_of(config, devices=planned(config))
        assert (plan.streams, plan.takes_turns) == (streams, turns)
    fake_devices(monkeypatch, 1)
    for override, turns in (("placement.share=beside", False), ("placement=inline", True)):
        config = recipe(override)
        assert plan_of(config, devices=planned(config)).takes_turns is turns


@pytest.mark.parametrize(("key", "value"), [("transport", "direct"), ("full_every", 4)])
def test_engines_that_wake_must_be_able_to_read_their_weights_again(key: str, value: str | int):
    assert plan_of(recipe("placement.share=sleep")).takes_turns
    with pytest.raises(ConfigError, match=f"placement.sync.{key} = {value!r} with trainer and engines that take turns"):
        plan_of(recipe("placement.share=sleep", f"placement.sync.{key}={value}"))


# -- memory, and what the commands say ---------------------------------------------------------------------------------


def test_each_device_holds_its_own_process(monkeypatch: pytest.MonkeyPatch):
    """One engine a device fits where all of them on one do not."""
    fake_devices(monkeypatch, 4)
    config, arch = (
        recipe("placement.engines=3", "engine.kv_memory_mb=600"),
        architecture(SIZES["2m"], vocab=48, context=512, ends={}),
    )
    found = processes(config, Models(arch), 0, planned(config))
    by_device = demands(found)
    engine = next(p for p in found if p.name == "engine")
    assert engine.devices == ("cuda:1", "cuda:2", "cuda:3") and engine.count == 3
    assert {by_device[device].needed for device in engine.devices} == {engine.bytes}
    assert by_device["cuda:0"].total == next(p for p in found if p.name == "trainer").bytes
    fake_devices(monkeypatch, 4, free=engine.bytes)
    assert refusal(processes(config, Models(arch), 0, planned(config))) is None
    fake_devices(monkeypatch, 1, free=2 * engine.bytes)
    refused = refusal(processes(config, Models(arch), 0, planned(config)))
    assert refused is not None and "on cuda:0" in str(refused) and "of 3 engines: KV cache" in str(refused)


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text("\n".join(['run_dir = "x"', 'model = "new:2m"', 'env = "guess"', *lines]))
    return path


@pytest.mark.parametrize(
    ("count", "overrides", "row"),
    [
        (
            8,
            (),
            r"devices cuda:0( to cuda:\d)? trains?, cuda:\d to cuda:7 sample: theta\* = 0\.\d\d of the devices would sample",
        ),
        (2, (), r"devices cuda:0 trains, cuda:1 samples: theta\* = "),
        (1, (), r"devices cuda:0 trains, cuda:0 samples: all share the only one"),
        (8, ("max_lag=0",), r"s to sample, in turns as max_lag = 0; \d and \d take "),
        (
            8,
            ("placement.devices={trainer=[5], engines=[2, 7]}",),
            r"cuda:5 trains, cuda:2 and cuda:7 sample: as the recipe names",
        ),
        (8, ("placement.devices={engines=[2, 7]}",), r"placement.devices.engines = \[2, 7\], and the trainer ha"),
    ],
)
def test_check_and_explain_say_the_split_and_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    count: int,
    overrides: tuple[str, ...],
    row: str,
):
    fake_devices(monkeypatch, count)
    assert check(written(tmp_path), overrides, as_json=False) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(row, said), said
    assert explain(written(tmp_path), overrides, as_json=True) == 0
    devices = json.loads(capsys.readouterr().out)["devices"]
    assert devices["said"] in said and len({*devices["trainer"], *devices["engines"]}) >= min(count, 2)


def test_without_a_device_there_is_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    fake_devices(monkeypatch, 0)
    assert check(written(tmp_path), (), as_json=False) == 0
    assert "devices " not in capsys.readouterr().out


def test_check_refuses_a_device_that_is_not_there_and_explain_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    fake_devices(monkeypatch, 2)
    recipe, wrong = written(tmp_path), ["trainer.device=cuda:5"]
    with pytest.raises(ConfigError, match=r"trainer\.device = 'cuda:5': 2 CUDA devices are visible here"):
        check(recipe, wrong, as_json=False)
    assert explain(recipe, wrong, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"]["refused"].startswith("trainer.device = 'cuda:5'") and found["memory"]["parameters"] > 0


# -- the estimates -----------------------------------------------------------------------------------------------------

QWEN3 = {"0.6B": (1024, 28, 16, 3072, True), "1.7B": (2048, 28, 16, 6144, True), "8B": (4096, 36, 32, 12288, False)}


def qwen3(size: str) -> Architecture:
    hidden, layers, heads, intermediate, tied = QWEN3[size]
    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "tie_word_embeddings": tied}
    more = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
    return Architecture.from_dict({"model_type": "qwen3", "intermediate_size": intermediate, **shape, **more})


NARROW = ("engine.dtype=bfloat16", "trainer.dtype=bfloat16", "rollout.max_tokens=384", "rollout.group_size=16")


@pytest.mark.parametrize(("size", "decode_ms"), [("0.6B", 3.34), ("1.7B", 4.05), ("8B", 10.3)])
def test_the_estimate_of_an_engine_is_that_of_the_benchmarks(size: str, decode_ms: float):
    engine = engine_role(recipe(*NARROW), qwen3(size), 139 * GIB)
    assert engine.seconds(256) * 256 / 384 * 1e3 == pytest.approx(decode_ms, rel=0.2)


@pytest.mark.parametrize(("size", "seconds"), [("0.6B", 0.77), ("1.7B", 1.57)])
def test_the_estimate_of_a_trainer_is_that_of_the_benchmarks(size: str, seconds: float):
    """256 rows of 128 + 256 tokens, in groups of 16, whose prompts are computed once."""
    trainer = trainer_role(recipe(*NARROW, "trainer.micro_batch_tokens=16384"), Models(qwen3(size)))
    computed = (16 * 128 + 256 * 256) / (256 * 384)
    assert trainer.seconds(16384) * 256 * computed == pytest.approx(seconds, rel=0.2)


@pytest.mark.parametrize(
    ("overrides", "factor"),
    [
        (("trainer.checkpointing=true",), 8 / 6),
        (("trainer.checkpointing=0.5",), 7 / 6),
        (("algorithm.old_logprobs=recompute",), 8 / 6),
        (REFERENCE, 8 / 6),
        ((*REFERENCE, "placement.reference_engines=1"), 1),
        (("algorithm={name='grpo', updates={epochs=3}, old_logprobs='recompute'}",), 20 / 6),
        (("algorithm={name='ppo', old_logprobs='behaviour'}",), 14 / 6),
        (("data.replay.share=0.5",), 1.5),
    ],
)
def test_training_costs_what_its_passes_compute(overrides: tuple[str, ...], factor: float):
    arch = qwen3("8B")
    plain, more = (
        trainer_role(recipe(*NARROW, *given), Models(arch, arch if "kl" in str(given) else None))
        for given in ((), overrides)
    )
    assert more.seconds(4096) / plain.seconds(4096) == pytest.approx(factor, rel=0.02)


def test_rates_never_rise_with_the_batch_and_memory_binds_where_it_is_short():
    config, arch = recipe(*NARROW, "engine.max_sequences=512", "rollout.max_tokens=4096", "rollout.groups=64"), qwen3("8B")
    for role in (trainer_role(config, Models(arch)), engine_role(config, arch, 80 * GIB)):
        costs = [role.seconds(float(batch)) for batch in range(1, 600)]
        assert costs == sorted(costs, reverse=True) and costs[0] > costs[-1] > 0
    wide, short = (engine_role(config, arch, memory).batch(1, memory) for memory in (900 * GIB, 80 * GIB))
    assert wide == 512 and short is not None and 10 < short < 100
    assert engine_role(config, arch, 20 * GIB).batch(1, 20 * GIB) is None
    kv = config.engine.model_copy(update={"kv_memory_mb": 5 * 4096 * 36 * 8 * 2 * 128 * 2 >> 20})
    assert engine_role(config.model_copy(update={"engine": kv}), arch, 900 * GIB).batch(1, 900 * GIB) == pytest.approx(
        5, abs=0.01
    )


def test_a_trainer_has_as_many_devices_as_hold_its_state(monkeypatch: pytest.MonkeyPatch):
    """Whatever the memory model says of so many ranks counts; theta* alone would have one train here."""
    fake_devices(monkeypatch, 8)
    config = recipe()
    assert len(planned(config).trainer) == 1

    def held(config: RunConfig, *_: object) -> list[Held]:
        return [Held("state", 10 * GIB + 200 * GIB // config.trainer.ranks), Held("copy", 900 * GIB, host=True)]

    monkeypatch.setattr(device_rates, "trainer_memory", held)
    found = planned(config)
    assert len(found.trainer) == 3 and found.why.endswith("the trainer's memory needs 3 of them")
    assert planned(recipe("trainer.ranks=2")).why == "the trainer does not fit beside engines"


def test_what_does_not_fit_is_divided_as_if_it_did(monkeypatch: pytest.MonkeyPatch):
    """So that the check of memory names what would help at these numbers."""
    fake_devices(monkeypatch, 8, free=40 * GIB)
    config, models = recipe(*NARROW), Models(qwen3("8B"))
    found = planned_devices(config, given_in(config), models)
    assert found.why == "the trainer does not fit beside engines" and len(found.trainer) > 1
    refused = refusal(processes(config, models, 0, found))
    assert refused is not None and "trainer.shard = 'zero3'" in refused.helps


def records(run_dir: Path, *records: dict[str, Any] | str) -> None:
    run_dir.mkdir(exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")


def took(wall: float, train: float, *generate: float, devices: int = 2) -> dict[str, Any]:
    engines = {f"time/engine-{n}/generate": share for n, share in enumerate(generate)}
    waits = {
        "time/engine-0/wait for trainer": 0.5,
        "time/reference-0/score": 0.9,
        "time/controller/train": 0.1,
        "time/train": 0.4,
    }
    return {"time/step_s": wall, "time/trainer/train": train, "devices/train": devices, **engines, **waits}


def test_a_run_that_goes_on_divides_devices_by_what_its_steps_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert measured(tmp_path / "none") is None
    on_cpu = {key: value for key, value in took(9, 1, 1).items() if key != "devices/train"}
    records(tmp_path, on_cpu, '{"time/step_s": 1, "dev', took(float("nan"), 1, 1) | {"time/step_s": None})
    assert measured(tmp_path) is None
    older = [took(100, 1, 1)] * 60
    records(tmp_path, *older, *[took(10, 0.5, 0.25, 0.75)] * 25, *[took(30, 0.1, 0.5, 0.5)] * 25)
    assert measured(tmp_path) == pytest.approx(((10 * 2 * 0.5 + 30 * 2 * 0.1) / 2, (10 * 1 + 30 * 1) / 2))
    fake_devices(monkeypatch, 8)
    records(tmp_path, took(10, 0.9, 0.3, 0.3))
    found = planned(recipe(f"run_dir={tmp_path}"))
    assert (len(found.trainer), len(found.engines)) == (6, 2)
    assert (
        "theta* = 0.25" in found.why and "a step took 18 s to train on one and 6 s to sample; 6 and 2 take 3 s" in found.why
    )


def test_each_step_records_its_devices():
    assert DevicePlan(("cuda:0", "cuda:2"), ("cuda:1",)).metrics() == {"devices/train": 2, "devices/sample": 1}
    assert DevicePlan(("",), ("",)).metrics() == {}


def test_learning_given_replies_leaves_one_engine_for_evaluations(monkeypatch: pytest.MonkeyPatch):
    fake_devices(monkeypatch, 8)
    config = load_recipe([], ["env.kind=rows", "env.data=a.jsonl", "algorithm=sft"], {**BASE, "env": {}})
    found = planned(config)
    assert len(found.engines) == 1 and "samples nothing" in found.why
