"""Recipes with several policies: what follows from the table, and one sentence for each thing that does not go with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tidemill.algorithms.mixture import COMMON
from tidemill.core.config import build, dump
from tidemill.core.errors import ConfigError
from tidemill.core.interfaces import Capabilities
from tidemill.core.types import Version
from tidemill.core.weight_update import UpdateSupport
from tidemill.engine.engine_kinds import EngineSpec
from tidemill.models.adapter_config import AdapterConfig
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.run.capability_check import check_engine
from tidemill.run.cluster import engine_specs, trainer_spec
from tidemill.run.planner.device_plan import DevicePlan, given_in
from tidemill.run.planner.plan import plan_of, warm_up_plan
from tidemill.run.recipe import RunConfig, load_recipe
from tidemill.run.recipe_files import check_same_run
from tidemill.run.storage.run_folder import RunFolder

ENV = [{"kind": "guess", "name": "words", "policy": "speller"}, {"kind": "guess", "name": "sums", "policy": "adder"}]
BASE: dict[str, Any] = {
    "run_dir": "runs/x",
    "model": "new:0.1m",
    "env": ENV,
    "policies": {"speller": {}, "adder": {}},
    "trainer": {"lora": {"rank": 4}, "lr": 2e-4},
}


def recipe(*overrides: str, **tables: Any) -> RunConfig:
    return load_recipe([], overrides, BASE | tables)


def frozen(folder: Path, **about: Any) -> str:
    folder.mkdir(exist_ok=True)
    AdapterConfig(**about).write(folder)
    return str(folder)


def test_a_table_of_policies_says_who_plays_what_and_learns_how(tmp_path: Path):
    judge = frozen(tmp_path / "judge")
    policies = {
        "speller": {"lr": 1e-3, "algorithm": {"name": "rloo"}, "lora": {"rank": 8}},
        "adder": {},
        "judge": {"frozen": judge},
    }
    env = [*ENV, {"kind": "guess", "name": "more", "policy": "adder", "algorithm": "dapo"}]
    config = recipe(policies=policies, env=env, algorithm="gspo", steps=7)
    assert config.trained_policies == ("speller", "adder") and config.frozen_policies == {"judge": judge}
    assert config.policy_of == {"words": "speller", "sums": "adder", "more": "adder"}
    found = {name: {env: each.name for env, each in own.items()} for name, own in config.policy_algorithms.items()}
    assert found == {"speller": {COMMON: "rloo"}, "adder": {COMMON: "gspo", "more": "dapo"}}
    assert {name: each.name for name, each in config.algorithms.items()} == {
        "speller": "rloo",
        "adder": "gspo",
        "adder/more": "dapo",
    }
    assert {name: each.rank for name, each in config.adapters.items()} == {"speller": 8, "adder": 4}
    assert config.adapter_rank == 8
    assert load_recipe([], (), dump(config)) == config


def test_a_run_without_the_table_is_of_one_policy_as_before():
    config = load_recipe([], (), {"run_dir": "a", "model": "new:0.1m", "env": "guess"})
    assert config.trained_policies == ("policy",) and not config.frozen_policies and config.policy_of == {"": "policy"}
    assert config.policy_algorithms == {"policy": config.algorithms} and [*config.algorithms] == [COMMON]


def test_the_only_trained_policy_plays_what_names_none(tmp_path: Path):
    policies = {"solver": {}, "judge": {"frozen": frozen(tmp_path / "judge")}}
    for env in ("guess", {"kind": "guess", "policy": "solver"}):
        config = recipe(policies=policies, env=env)
        assert config.policy_of == {"": "solver"} and config.trained_policies == ("solver",)
    env = [{"kind": "guess", "name": "a"}, {"kind": "guess", "name": "b"}]
    assert recipe(policies=policies, env=env).policy_of == {"a": "solver", "b": "solver"}


def test_specs_name_the_policies_and_a_warm_up_knows_one(tmp_path: Path):
    judge = frozen(tmp_path / "judge")
    twice = {"name": "grpo", "updates": {"minibatches": 2}, "old_logprobs": "recompute"}
    policies = {
        "speller": {"lr": 1e-3, "algorithm": twice, "lora": {"rank": 8}},
        "adder": {},
        "judge": {"frozen": judge},
    }
    config = recipe("steps=7", policies=policies)
    plan, folder = plan_of(config), RunFolder(tmp_path)
    spec = trainer_spec(plan, tmp_path, folder)
    assert {name: (each.lr, each.lora.rank, each.steps) for name, each in spec.policies.items()} == {
        "speller": (1e-3, 8, 14),
        "adder": (2e-4, 4, 7),
    }
    engine = engine_specs(plan, tmp_path, folder)["engine"]
    assert engine.policies == ("speller", "adder") and engine.frozen == {"judge": Path(judge)} and engine.adapter_rank == 8

    for trainer in (BASE["trainer"], {}):
        warm = warm_up_plan(recipe("warmup.accuracy=0.5", trainer=trainer))
        spec, (engine,) = trainer_spec(warm, tmp_path, folder), engine_specs(warm, tmp_path, folder).values()
        assert not spec.policies and not engine.policies and not engine.frozen and engine.adapter_rank == 0
        assert (engine.role, engine.serves) == ("engine", "policy")
        assert warm.config.policy_of == {"words": "policy", "sums": "policy"} and warm.config.algorithms


def a_model(folder: Path) -> Path:
    fresh_model(folder, alphabet="ab\n", context=64, **SIZES["0.1m"])
    return folder


def test_policies_without_adapters_are_whole_models_with_engines_of_their_own(tmp_path: Path):
    judge, hint = a_model(tmp_path / "judge"), frozen(tmp_path / "hint")
    policies = {"speller": {"lr": 1e-3}, "adder": {}, "judge": {"frozen": str(judge)}, "hint": {"frozen": hint}}
    config = recipe(policies=policies, trainer={"lr": 2e-4}, engine={"batch_invariant": False})
    assert not config.adapters and config.adapter_rank == 0 and config.engine_pools == 4
    assert config.side_by_side == ("hint",) and config.whole_policies == ("speller", "adder", "judge")
    plan, folder = plan_of(config), RunFolder(tmp_path / "run")
    spec = trainer_spec(plan, tmp_path, folder)
    assert {name: (each.lr, each.lora) for name, each in spec.policies.items()} == {
        "speller": (1e-3, None),
        "adder": (2e-4, None),
    }
    specs = engine_specs(plan, tmp_path, folder)
    assert [*specs] == ["engine", "engine-speller", "engine-adder", "engine-judge"]
    for role, each in specs.items():
        assert each.role == role
        assert build(EngineSpec, each.model_dump(mode="json")) == each, "it does not travel"
    assert specs["engine"].frozen == {"hint": Path(hint)} and specs["engine"].transport is None
    for name in ("speller", "adder"):
        own = specs[f"engine-{name}"]
        assert own.version == Version(-1, policy=name) and own.model == tmp_path and own.transport and not own.proves
        assert not own.adapters and not own.side_by_side
    own = specs["engine-judge"]
    assert own.version == Version(0, policy="judge") and own.model == judge and own.transport is None and own.proves


def test_a_frozen_model_stands_beside_adapters(tmp_path: Path):
    judge = a_model(tmp_path / "judge")
    policies = {"speller": {}, "adder": {}, "judge": {"frozen": str(judge)}}
    config = recipe(policies=policies, warmup={"accuracy": 0.5})  # which does not change what it is
    assert config.side_by_side == ("speller", "adder") and config.whole_policies == ("judge",) and config.engine_pools == 2
    specs = engine_specs(plan_of(config), tmp_path, RunFolder(tmp_path / "run"))
    assert [*specs] == ["engine", "engine-judge"] and specs["engine"].policies == ("speller", "adder")
    assert not specs["engine"].frozen and specs["engine"].adapter_rank == 4 and specs["engine-judge"].adapter_rank == 0


def test_a_warm_up_and_an_adapter_of_one_policy_that_exists(tmp_path: Path):
    policies = {"speller": {"lora": {"start": frozen(tmp_path / "start")}}, "adder": {}}
    with pytest.raises(ConfigError, match=r"trainer.lora.start = .* of the policy 'speller' with warmup.accuracy = 0.5"):
        recipe(policies=policies, warmup={"accuracy": 0.5})


def test_equal_bits_go_with_whole_models():
    assert recipe(trainer={}, engine={"batch_invariant": True}).whole_policies == ("speller", "adder")


def test_on_one_device_engines_of_several_policies_keep_their_weights():
    shared = DevicePlan(("cuda:0",), ("cuda:0",), shared=True)
    assert plan_of(load_recipe([], (), {"run_dir": "a", "model": "new:0.1m", "env": "guess"}), None, shared).takes_turns
    assert not plan_of(recipe(), None, shared).takes_turns
    assert given_in(recipe()).ranks == 1, "the split rule may not give them several"


SOLVER: dict[str, Any] = {"policies": {"solver": {}}, "env": "guess"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"policies": {}}, "environment 'words': policy = 'speller' and there is no table policies: give policies = { speller"),
    (SOLVER | {"policies": {}, "env": {"kind": "guess", "policy": "a"}}, "env.policy = 'a' and there is no table policies"),
    (
        {"trainer": {}, "policies": {"speller": {"lora": {"rank": 2}}, "adder": {}}},
        "policies.speller.lora without trainer.lora: all policies are adapters, or all are whole models; set trainer.lora",
    ),
    ({"trainer": {"kind": "deepspeed"}}, "trainer.kind = 'deepspeed' with policies: it trains one policy; set trainer.kind"),
    ({"trainer": {"lora": {"publish": "merged"}}}, "policies with trainer.lora.publish = 'merged': engines serve them"),
    ({"engine": {"kind": "transformers"}}, "engine.kind = 'transformers' with policies: only the engine of kind 'native'"),
    ({"engine": {"batch_invariant": True}}, "engine.batch_invariant = true with policies: its kernels serve one adapter"),
    ({"trainer": {"lora": {}, "ranks": 2}}, "trainer.ranks = 2 with policies: one process trains them all"),
    ({"deterministic": True}, "deterministic = true with policies: their bits depend on which of them sample together"),
    ({"placement": {"share": "sleep"}}, "placement.share = 'sleep' with policies: engines do not give back the weights"),
    ({"algorithm": "ppo"}, "the algorithm of policy 'speller' (ppo) has a critic: a trainer of several policies has none"),
    ({"policies": {"speller": {"algorithm": "ppo"}, "adder": {}}}, "the algorithm of policy 'speller' (ppo) has a critic"),
    ({"algorithm": "sft"}, "the algorithm of policy 'speller' (sft) learns the tasks' own replies (given = 'answers')"),
    (
        {"algorithm": {"name": "grpo", "reference": {"kl": 0.1, "every": 3}}},
        "the algorithm of policy 'speller' (grpo) has reference.every = 3: the reference of several policies is the model "
        "that they began as",
    ),
    (
        {"algorithm": {"name": "grpo", "reference": {"kl": 0.1, "model": "new:2m"}}},
        "the algorithm of policy 'speller' (grpo) has reference.model = 'new:2m': the reference of several policies",
    ),
    (
        {"policies": {"speller": {}, "adder": {}, "third": {}}},
        "policies.third plays no environment, so it would never be trained: give an environment policy = 'third'",
    ),
    ({"env": [ENV[0], ENV[1] | {"policy": "addr"}]}, "environment 'sums': policy = 'addr': the table policies has no such"),
    (
        {"env": [ENV[0], {"kind": "guess", "name": "sums"}]},
        "environment 'sums': policy is not given, and 2 policies are trained: give policy = 'speller' or 'adder'",
    ),
    ({"env": "guess"}, "env.policy is not given, and 2 policies are trained"),
    (
        {"policies": {"speller": {}, "adder": {}, "a b": {}}},
        "policies names 'a b': expected a name of letters, digits, _ and -",
    ),
    (SOLVER | {"policies": {"reference": {}}}, "policies names 'reference': expected a name of letters"),
    (SOLVER | {"policies": {"policy": {}}}, "none of policy, reference, base, mean"),
    ({"policies": {"speller": {}, "speller-adapter": {}}}, "an adapter of the first is exported as 'speller-adapter'"),
    (
        {"policies": {"speller": {"lora": {"base_dtype": "nf4"}}, "adder": {}}},
        "policies.speller.lora.base_dtype = 'nf4' and trainer.lora.base_dtype = 'float32': all policies are adapters on one",
    ),
    (
        {"policies": {"speller": {"lora": {"publish": "merged"}}, "adder": {}}},
        "policies.speller.lora.publish = 'merged' and trainer.lora.publish = 'adapter'",
    ),
    (
        {"policies": {"speller": {"lora": {"dropout": 0.1}}, "adder": {}}},
        "trainer.lora.dropout = 0.1 of the policy 'speller' with algorithm.old_logprobs = 'behaviour'",
    ),
    (
        {"policies": {"speller": {"algorithm": "remax"}, "adder": {}}},
        "asks for a greedy attempt at each task, or none, unlike",
    ),
    (
        {"env": [each | {"algorithm": "rloo"} for each in ENV], "algorithm": "gspo"},
        "algorithm = 'gspo' applies to no group: every environment has its own",
    ),
    (
        {"policies": {"speller": {"algorithm": "gspo"}, "adder": {}}, "env": [ENV[0] | {"algorithm": "rloo"}, ENV[1]]},
        "policies.speller.algorithm = 'gspo' applies to no group: each of its environments has its own",
    ),
    (
        {"policies": {"speller": {"algorithm": "gspo"}, "adder": {"algorithm": "rloo"}}, "algorithm": "dapo"},
        "algorithm = 'dapo' applies to no group",
    ),
    (
        {"policies": {"speller": {"lrr": 1}, "adder": {}}},
        "unknown key 'policies.speller.lrr'; did you mean 'policies.speller.lr'",
    ),
    ({"policies": {"speller": {"lr": 0}, "adder": {}}}, "policies.speller.lr = 0"),
    ({"policies": {"speller": {"lora": {"rank": 0}}, "adder": {}}}, "policies.speller.lora: rank = 0"),
    ({"policies": {"speller": {"algorithm": "grop"}, "adder": {}}}, "policies.speller.algorithm: "),
]


@pytest.mark.parametrize(("tables", "sentence"), REFUSED, ids=[sentence[:60] for _, sentence in REFUSED])
def test_what_does_not_go_together_is_one_sentence(tables: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError, match=re.escape(sentence)) as refused:
        recipe(**tables)
    assert "\n" not in str(refused.value)


def test_a_frozen_policy_is_an_adapter_of_this_model_and_nothing_else(tmp_path: Path):
    judge = frozen(tmp_path / "judge")
    both = {"speller": {}, "adder": {}}
    for tables, sentence in (
        ({"policies": {"judge": {"frozen": judge}}}, "policies names only frozen ones, so there is nothing to train"),
        ({"policies": both | {"judge": {"frozen": judge, "lr": 1.0}}}, f"frozen = {judge!r} with lr: a frozen policy is"),
        ({"policies": both | {"judge": {"frozen": str(tmp_path)}}}, "no adapter_config.json there"),
        (
            {"policies": both | {"judge": {"frozen": frozen(tmp_path / "few bits", base_dtype="nf4")}}},
            "was trained on a base in nf4, and trainer.lora.base_dtype = 'float32': set trainer.lora.base_dtype = 'nf4'",
        ),
        (
            {"policies": both | {"judge": {"frozen": judge}}, "warmup": {"accuracy": 0.5}},
            "with warmup.accuracy = 0.5: the warm-up changes the model that this adapter was trained on",
        ),
        (
            {"policies": both | {"judge": {"frozen": judge}}, "env": [ENV[0], ENV[1] | {"policy": "judge"}]},
            "environment 'sums': policy = 'judge' is frozen, and what it samples could train nothing",
        ),
    ):
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            recipe(**tables)


def test_a_run_that_goes_on_keeps_its_policies(tmp_path: Path):
    old = dump(recipe())
    with pytest.raises(ConfigError, match=re.escape("policies.speller.lr was None and is 0.5")):
        check_same_run(old, dump(recipe("policies.speller.lr=0.5")), tmp_path)
    with pytest.raises(ConfigError, match="env was "):
        swapped = [ENV[0] | {"policy": "adder"}, ENV[1] | {"policy": "speller"}]
        check_same_run(old, dump(recipe(env=swapped)), tmp_path)


def test_an_engine_that_serves_one_policy_is_refused_by_its_capabilities():
    can = Capabilities(64, updates=UpdateSupport(("adapter",)))
    with pytest.raises(ConfigError, match="lacks the capability 'policies', to serve several side by side"):
        check_engine("native", can, recipe(), "engine")
    one = build(RunConfig, BASE | {"policies": {}, "env": "guess"})
    check_engine("native", can, one, "engine")
    check_engine("native", Capabilities(64, updates=UpdateSupport(("adapter",)), policies=True), recipe(), "engine")
    whole = recipe(trainer={})
    check_engine("native", Capabilities(64, updates=UpdateSupport(("full",))), whole, "engine-speller")
    with pytest.raises(ConfigError, match="cannot take full weight updates"):
        check_engine("native", Capabilities(64, updates=UpdateSupport(())), whole, "engine-speller")
    check_engine("native", Capabilities(64, updates=UpdateSupport(())), whole, "engine-judge", updated=False)
