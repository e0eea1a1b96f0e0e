"""`tidemill explain`: every number is held against the part that it is about; nothing is started or written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tidemill.algorithms.algorithm_settings import AlgorithmSettings
from tidemill.algorithms.presets import PRESETS
from tidemill.algorithms.reductions import REDUCTIONS, reduction
from tidemill.cli.commands import plan_sections as sizing
from tidemill.cli.commands.explain import differing, p_hat, parts_of
from tidemill.controller.admission_buffer import Buffer
from tidemill.core.config import load
from tidemill.core.types import Sample
from tidemill.run.planner.plan import plan_of
from tidemill.run.recipe import RunConfig
from tidemill.trainer import parallel_micro_batches
from tidemill.trainer.micro_batches import BatchRow, rows_of, split
from tidemill.trainer.parallel_micro_batches import Lanes
from tidemill.trainer.training_pass import Compute

pytestmark = pytest.mark.runs


def recipe(*overrides: str, model: str = "new:0.1m", env: str = "guess") -> RunConfig:
    return load(RunConfig, [], overrides, {"run_dir": "runs/x", "model": model, "env": env, "algorithm": "grpo"})


@pytest.mark.parametrize("seed", range(40))
def test_no_step_has_more_micro_batches(monkeypatch: pytest.MonkeyPatch, seed: int):
    draw = np.random.default_rng(seed)
    threads = int(draw.integers(1, 5))
    monkeypatch.setattr(parallel_micro_batches, "LEAST", 1)
    groups, group_size, context = int(draw.integers(1, 6)), int(draw.integers(2, 6)), int(draw.integers(4, 60))
    budget = int(draw.integers(1, 150))
    given = (f"trainer.micro_batch_tokens={budget}", f"placement.trainer_threads={threads}", "trainer.device=cpu")
    config = recipe(f"rollout.groups={groups}", f"rollout.group_size={group_size}", *given)
    said = sizing.step_size(plan_of(config), context)
    samples = [sample(draw, int(draw.integers(2, context + 1))) for _ in range(said.sequences)]
    rows = rows_of(samples)
    assert max(row.length for row in rows) <= (said.row_tokens or 0)
    compute = Compute(torch.device("cpu"), budget, lanes=Lanes(threads))

    def parts(rows: list[BatchRow]) -> int:
        found, at_a_time = compute.split([[row] for row in rows])
        assert at_a_time <= said.lanes <= threads
        held = max((sum(row.length - row.shared for row in part) for part in found), default=0)
        assert at_a_time * held <= budget or at_a_time == 1
        return len(found)

    assert parts(rows) <= said.forward_micro_batches
    moving = draw.random(len(rows)) < draw.random()
    with_gradient, without = ([row for row, m in zip(rows, moving, strict=True) if m is want] for want in (True, False))
    assert parts(with_gradient) + parts(without) <= said.train_micro_batches


@pytest.mark.parametrize(("budget", "batches"), [(64, 8), (63, 16), (20, 16), (1000, 1)])
def test_rows_of_full_length_need_as_many(budget: int, batches: int):
    config = recipe("rollout.groups=4", "rollout.group_size=4", f"trainer.micro_batch_tokens={budget}")
    said = sizing.step_size(plan_of(config), context=33)
    rows = rows_of([sample(np.random.default_rng(i), 33) for i in range(16)])
    assert len(split([[row] for row in rows], budget)) == said.forward_micro_batches == batches
    assert said.train_micro_batches == min(16, batches + 1)


def sample(draw: np.random.Generator, length: int) -> Sample:
    tokens, nothing = draw.integers(0, 1 << 20, length).astype(np.int32), np.zeros(length, np.float32)
    mask = np.arange(length) > 0
    return Sample(tokens, mask, nothing, np.zeros(length, np.int32), nothing, mask.astype(np.float32))


@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("minibatches", [1, 3])
def test_the_denominator_is_that_of_the_reduction(kind: str, minibatches: int):
    extra = [f"algorithm.updates.minibatches={minibatches}", "algorithm.old_logprobs=recompute"] if minibatches > 1 else []
    config = recipe(f"algorithm.reduction={kind}", "rollout.max_tokens=10", "rollout.groups=7", *extra)
    said = sizing.step_size(plan_of(config), context=31)
    assert said.replies == 5 and said.sampled_tokens == 7 * 8 * 30  # the context is shorter than five replies
    groups = 7 if minibatches == 1 else 3
    _, scale = reduction(kind, np.full(groups * 8, 30), np.repeat(np.arange(groups), 8), 10)
    assert said.denominator == round(1 / scale)
    if kind == "token":
        assert sizing.step_size(plan_of(config), context=None).denominator == groups * 8 * 50


def test_a_pair_is_two_attempts():
    assert sizing.step_size(plan_of(recipe("algorithm=online_dpo")), context=64).denominator == 2 * 16


def test_what_a_conversation_samples_is_bounded_by_the_context(trained: Path, tmp_path: Path):
    (tmp_path / "own.py").write_text("tasks = []\ndef score(completion, answer): return 0.0\n")
    chat, once = recipe(env=f"{trained.parent / 'env.py'}:checksum"), recipe(env=f"{tmp_path / 'own.py'}:score")
    assert (
        sizing.step_size(plan_of(chat), 64).sampled_tokens == 128 * 63
        and sizing.step_size(plan_of(chat), None).sampled_tokens is None
    )
    assert sizing.step_size(plan_of(once), 512).sampled_tokens == 128 * 256


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_does_not_differ_from_itself(name: str):
    needs = {"opd": {"reference": {"model": "teacher"}}}.get(name, {})
    found = differing(AlgorithmSettings.preset(name, **needs))
    assert found == ({"reference.model": {"value": "teacher", "preset": "initial"}} if needs else {})


def test_what_differs_is_named():
    own = AlgorithmSettings.preset(
        "decoupled_ppo", corrections=["tis"], clip_high=0.3, reference={"kl": 0.1}, overlong="mask"
    )
    assert differing(own) == {
        "corrections": {
            "value": [{"name": "tis", "constants": {}}],
            "preset": [{"name": "icepop", "constants": {"low": 0.0, "high": 5.0}}],
        },
        "overlong.treat": {"value": "mask", "preset": "keep"},
        "reference.model": {"value": "initial", "preset": None},
        "reference.kl": {"value": 0.1, "preset": 0.0},
        "clip_high": {"value": 0.3, "preset": 0.2},
    }
    other = differing(AlgorithmSettings.preset("dapo", loss="aipo", cap=4))
    assert other == {"loss": {"value": "aipo", "preset": "ppo_clip"}, "cap": {"value": 4.0, "preset": 5.0}}


def test_the_parts_are_those_that_act():
    own = {"reference": {"model": "t", "kl": 0.1, "distil": 0.5}, "overlong": "penalty", "entropy": 0.01, "clip_high": 0.3}
    settings = AlgorithmSettings.preset("decoupled_ppo", **own).with_longest(50)
    found = [(part.role, part.name, part.weight) for part in parts_of(settings, 50)]
    assert found == [
        *(("reward", "overlong", None), ("advantage", "grpo", None), ("advantage", "distilled", 0.5)),
        *(("correction", "icepop", None), ("loss", "ppo_clip", None), ("term", "kl_k3", 0.1), ("term", "entropy", 0.01)),
        ("reduction", "token", None),
    ]
    constants = {part.name: part.constants for part in parts_of(settings, 50)}
    assert constants["overlong"] == {"limit": 50, "cache": 10} and constants["icepop"] == {"low": 0.0, "high": 5.0}
    assert constants["ppo_clip"] == {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 0.0}
    into = AlgorithmSettings.preset("grpo", reference={"kl": 0.1, "into": "reward"}, reduction="fixed").with_longest(7)
    first, last = parts_of(into, 7)[0], parts_of(into, 7)[-1]
    assert (first.name, first.weight) == ("KL", 0.1) and "summed over each attempt" in first.formula
    assert last.constants == {"fixed_length": 7}
    preferred = [part.name for part in parts_of(AlgorithmSettings.preset("online_dpo"), 7)]
    assert preferred == ["dpo", "reinforce", "attempt"]


def test_what_p_hat_is_decides_what_a_bound_does():
    assert "r = rho, and what the loss does" in p_hat(AlgorithmSettings.preset("grpo"))
    assert p_hat(AlgorithmSettings.preset("aipo")) == "mu stands in for it: k = 1"
    assert "constants of ppo_clip do nothing" in p_hat(AlgorithmSettings.preset("decoupled_ppo"))
    assert "do nothing" not in p_hat(AlgorithmSettings.preset("m2po"))
    assert "r moves" in p_hat(AlgorithmSettings.preset("decoupled_ppo", updates={"epochs": 2}))


def explained(tidemill, tmp_path: Path, *given: object) -> dict[str, Any]:
    (tmp_path / "recipe.toml").write_text('model = "new:0.1m"\nenv = "guess"\nalgorithm = "grpo"\nrollout.max_tokens = 6\n')
    said = tidemill("explain", tmp_path / "recipe.toml", *given, "--json")
    assert said.code == 0, said.out
    return json.loads(said.out)


def all_of(memory) -> int:
    return sum(each["count"] * size for each in memory["processes"].values() for size in each["bytes"].values())


def test_it_tells_all_in_json(tidemill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    given = ("max_lag=3", "rollout.window=5", "algorithm=dapo", "placement.engines=2", "steps=10")
    about = explained(tidemill, tmp_path, *given)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]  # no run folder, no model
    assert (about["preset"], about["differs"], about["passes"]) == (
        "dapo",
        {},
        {"policy": 1, "p_hat": 0, "reference": 0, "critic": 0},
    )
    assert about["slots"] == Buffer(batch=16, max_lag=3, window=5).slots and about["samples"] == 10 * 16 * 8
    assert [part["role"] for part in about["parts"]] == ["advantage", "loss", "reduction"]
    assert (
        about["parts"][0]["formula"].startswith("(R - mean) / (std + eps)") and "2402.03300" in about["parts"][0]["source"]
    )
    memory = about["memory"]
    assert memory["processes"]["engine"]["count"] == 2 and memory["devices"]["cpu"]["free"] > 0
    assert memory["devices"]["cpu"]["total"] == all_of(memory)
    assert about["step"]["sampled_tokens"] == 128 * 30
    asked = explained(tidemill, tmp_path, "algorithm=online_dpo")
    assert asked["passes"] == {"policy": 1, "p_hat": 1, "reference": 1, "critic": 0}
    served = explained(tidemill, tmp_path, "algorithm=online_dpo", "placement.reference_engines=2")["memory"]
    kept, found = asked["memory"]["processes"], {name: p["bytes"] for name, p in served["processes"].items()}
    engine, reference = found["engine"], found["reference engine"]
    assert "reference engine" not in kept and served["processes"]["reference engine"]["count"] == 2
    own = kept["trainer"]["bytes"]
    assert own.items() - found["trainer"].items() == {("reference", own["weights"])}
    assert "spare for the next version" not in reference and reference["weights"] == engine["weights"]
    assert served["devices"]["cpu"]["total"] == all_of(served)
    said = tidemill("explain", tmp_path / "recipe.toml", "algorithm=online_dpo", "placement.reference_engines=2").out
    assert re.search(r"^  reference engine +2 ", said, re.M)


def test_it_tells_people(tidemill, tmp_path: Path):
    explained(tidemill, tmp_path)
    path = tmp_path / "recipe.toml"
    said = tidemill("explain", path, "algorithm.loss=aipo", "algorithm.cap=4", "algorithm.zero_variance=drop").out
    for line in (
        "differs        loss = aipo, not ppo_clip",
        "loss           aipo   cap = 4",
        "-sg[min(rho, cap)] A log pi, rho = pi / mu",
        "at most 3,840 tokens: 6 a reply, at most 5 replies an attempt",
        "16 groups × 8 = 128",
        "each attempt's tokens, then 128 attempts",
        "more are sampled",
        "(1 + 1) × 16 = 32 groups",
        "103,424 parameters",
    ):
        assert line in said, said
    absent = tidemill("explain", path, "model=nowhere", "max_lag=0")
    assert absent.code == 0 and "nowhere is no folder here" in absent.out and "synchronous" in absent.out
    assert "exceptions" not in absent.out
    narrow = tidemill("explain", path, "trainer.ranks=2", "trainer.shard=none", "trainer.reduce=int8").out
    assert "exceptions     trainer.reduce = 'int8': replicas round gradients and sums" in narrow
    teacher = tidemill("explain", path, "algorithm.name=opd", "algorithm.reference.model=nowhere").out
    assert "the reference, whose folder is not here" in teacher and "distilled × 1" in teacher


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("stepz=3", "did you mean 'steps'"),
        ("algorithm=grop", "did you mean 'grpo'"),
        ("algorithm.cap=3", "cap does not apply"),
        ("model=new:3m", "expected new:0.1m"),
        ("algorithm.loss=nowhere.py:f", "nowhere.py' does not exist"),
        ("algorithm.advantage=nowhere.py:f", "nowhere.py' does not exist"),
        ("env=nowhere.py:f", "nowhere.py' does not exist"),
        ("rollout.group_size=1", "use at least 2 samples"),
    ],
)
def test_a_recipe_that_would_not_run_is_refused_in_a_sentence(tidemill, tmp_path: Path, given: str, says: str):
    explained(tidemill, tmp_path)
    said = tidemill("explain", tmp_path / "recipe.toml", given)
    assert said.code == 2 and says in said.out and "\n" not in said.out


def test_a_model_that_cannot_be_computed_is_refused(tidemill, tmp_path: Path):
    explained(tidemill, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    said = tidemill("explain", tmp_path / "recipe.toml", f"model={tmp_path}")
    assert said.code == 2 and "'gpt2' is not one of llama" in said.out


def test_a_function_of_ones_own_says_what_its_docstring_says(tidemill, tmp_path: Path):
    (tmp_path / "own.py").write_text('def mine(x, *, strength=2.0):\n    """-A log pi, twice."""\n')
    about = explained(tidemill, tmp_path, f"algorithm.loss={tmp_path / 'own.py'}:mine", "algorithm.strength=3")
    mine = about["parts"][1]
    assert (mine["formula"], mine["constants"], mine["source"]) == ("-A log pi, twice", {"strength": 3.0}, "")
    said = tidemill("explain", tmp_path / "recipe.toml", f"algorithm.loss={tmp_path / 'own.py'}:mine", "algorithm.x=3")
    assert said.code == 2 and "has no constant x" in said.out


def test_what_is_trained_once_more_is_counted(tidemill, tmp_path: Path):
    plain, more = (explained(tidemill, tmp_path, *given)["step"] for given in ((), ("data.replay.share=0.25",)))
    assert (plain["replayed"], more["replayed"], more["sequences"]) == (0, 4, plain["sequences"])
    assert more["denominator"] == plain["denominator"] * 20 // 16 and more["sampled_tokens"] == plain["sampled_tokens"]
    assert more["forward_micro_batches"] > plain["forward_micro_batches"]
    said = " ".join(tidemill("explain", tmp_path / "recipe.toml", "data.replay.share=0.25").out.split())
    assert "at most 4 groups of the 16 steps before are trained once more" in said


def test_several_environments_and_an_order(tidemill, tmp_path: Path):
    (tmp_path / "recipe.toml").write_text(
        'model = "new:0.1m"\nalgorithm = "dr_grpo"\nrollout.max_tokens = 6\ndata = { order = "frontier", retire = 0.9 }\n'
        'env = [{ kind = "guess", name = "long", turns = 7, weight = 3,'
        ' algorithm = { name = "dapo", old_logprobs = "recompute" } },'
        ' { kind = "reasoning_gym", dataset = "gcd", name = "sums" }]\n'
    )
    path = tmp_path / "recipe.toml"
    about = json.loads(tidemill("explain", path, "--json").out)
    assert about["tasks"]["order"] == "frontier" and about["tasks"]["retire"] == 0.9
    assert [(e["name"], e["share"], e["algorithm"]) for e in about["tasks"]["environments"]] == [
        ("long", 0.75, "dapo"),
        ("sums", 0.25, "dr_grpo"),
    ]
    assert {name: each["preset"] for name, each in about["tasks"]["algorithms"].items()} == {"": "dr_grpo", "long": "dapo"}
    assert about["passes"]["p_hat"] == 1 and about["step"]["replies"] == 7
    said = " ".join(tidemill("explain", path).out.split())
    for line in (
        "75.0 % of the groups, guess, dapo",
        "25.0 % of the groups, reasoning_gym, dr_grpo",
        "recipe.toml, long",
        "recipe.toml, the other environments",
        "one turn of 4 is shuffled",
        "passed at 0.9 or more does not come again",
        "each counts by its share of the step's groups",
        "more are sampled",
    ):
        assert line in said, (line, said)


def test_what_cannot_fit_is_said_and_train_refuses_it(tidemill, tmp_path: Path):
    budget, groups, path = "trainer.micro_batch_tokens=1000000000", "rollout.groups=100000", tmp_path / "recipe.toml"
    for fitting in ((), (budget,), (groups,)):  # a budget that no step can fill takes nothing
        assert explained(tidemill, tmp_path, *fitting)["memory"]["refused"] == ""
    refused = explained(tidemill, tmp_path, budget, groups)["memory"]["refused"]
    assert "a lower trainer.micro_batch_tokens (now 1,000,000,000)" in refused
    assert "would be refused" in tidemill("explain", path, budget, groups).out
    ended = tidemill("train", path, budget, groups, f"run_dir={tmp_path / 'run'}")
    assert ended.code == 2 and "a lower trainer.micro_batch_tokens" in ended.out
    assert not list((tmp_path / "run").glob("**/trainer*.log"))
