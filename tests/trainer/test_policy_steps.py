"""Whole steps of several policies, from groups to weights: each has the weights that a run of its own would give it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_mixture_gradients import AT, LONGEST, groups
from test_policy_trainers import STEPS, expect_same, mixed, rows_of, step
from trainer_cases import decoder

from tidemill.algorithms.algorithm_settings import AlgorithmSettings, ReferenceSettings
from tidemill.algorithms.mixture import COMMON, algorithm_of
from tidemill.algorithms.policy_algorithms import algorithm_of_policies
from tidemill.controller.train_step import train_on
from tidemill.core.types import Group, Metrics, Version
from tidemill.models.adapter_config import AdapterConfig
from tidemill.models.hf_weights import save_folder
from tidemill.models.lora import attach
from tidemill.run.roles import build_role
from tidemill.runtime.cpu_sharing import Cores
from tidemill.trainer.build_native_trainer import build
from tidemill.trainer.companions import Reference
from tidemill.trainer.native_trainer import NativeTrainer, inline
from tidemill.trainer.policy_trainers import PolicyTrainers, sharing
from tidemill.trainer.telemetry import Recorder
from tidemill.trainer.trainer_kinds import LoraSettings, PolicySpec, TrainerSettings, TrainerSpec
from tidemill.weight_sync.sync_settings import SyncSettings
from tidemill.weight_sync.transport import make_sender

POLICY_OF = {"a": "speller", "b": "adder", "c": "adder"}
DAPO, GSPO = AlgorithmSettings.preset("dapo"), AlgorithmSettings.preset("gspo", entropy=0.01)
HELD = AlgorithmSettings.preset("grpo", reference={"kl": 0.3}, old_logprobs="recompute")
HALVES = AlgorithmSettings.preset("dapo", updates={"minibatches": 2}, old_logprobs="recompute")
THRICE = AlgorithmSettings.preset("gspo", updates={"epochs": 3}, old_logprobs="recompute")
CASES = {
    "a mixture beside one algorithm": {"speller": {COMMON: DAPO}, "adder": {"b": GSPO, "c": HELD}},
    "several updates beside a mixture": {"speller": {"a": HALVES}, "adder": {"b": GSPO, "c": HELD}},
    "unequal numbers of updates": {"speller": {COMMON: HALVES}, "adder": {COMMON: THRICE}},
}


def played(only: str = "abc") -> list[Group]:
    """Groups of three environments, sampled by their environments' policies."""
    found = [group for group in groups() if group.task.env in only]
    for group in found:
        for row in group.trajectories:
            row.sources = (Version(4, policy=POLICY_OF[group.task.env]),)
    return found


def trainer_of(policy: str, model: Any, **more: Any) -> NativeTrainer:
    """A trainer in float64, in which what is rounded otherwise shows in no digit that is compared."""
    attach(model, AdapterConfig(rank=3 if policy == "speller" else 2), torch.Generator().manual_seed(0))
    how = TrainerSettings(device="cpu", lr=1e-2, max_grad_norm=0.05, micro_batch_tokens=60)
    return NativeTrainer(model, how, steps=99, policy=policy, reference=Reference(model, without_adapter=True), **more)


def together(names: list[str]) -> PolicyTrainers:
    base, recorder = decoder(torch.float64), Recorder("trainer")
    return PolicyTrainers({name: trainer_of(name, sharing(base), recorder=recorder) for name in names}, recorder)


@pytest.mark.parametrize("case", CASES)
async def test_each_policys_weights_are_those_of_a_run_of_its_own(case: str) -> None:
    """Over steps in all of which, in some, and in none of which a policy has groups."""
    settings = CASES[case]
    own, lone = together(list(settings)), {name: trainer_of(name, decoder(torch.float64)) for name in settings}
    algorithm = algorithm_of_policies(settings, POLICY_OF, LONGEST)
    by_itself = {name: algorithm_of(settings[name], LONGEST) for name in settings}
    for number, envs in enumerate(("abc", "a", "bc", "ac", "abc")):
        prepared, result, metrics = await train_on(own, algorithm, played(envs), [], AT + number)
        assert [len(each) for each in result.logprobs] == [len(each.tokens) for each in prepared.samples]
        for name, alone in lone.items():
            if not (its := played("".join(env for env in envs if POLICY_OF[env] == name))):
                assert f"{name}/grad_norm" not in metrics
                continue
            _, theirs, applied = await train_on(alone, by_itself[name], its, [], AT + number)
            assert metrics[f"{name}/grad_norm"] == pytest.approx(applied["grad_norm"], rel=1e-9)
            mine = [each for each, row in zip(result.logprobs, prepared.samples, strict=True) if row.policy == name]
            for found, expected in zip(mine, theirs.logprobs, strict=True):
                np.testing.assert_allclose(found, expected, rtol=1e-6)
        for name, alone in lone.items():
            expect_close(own.trainers[name], alone)
    assert all(each.updates > 3 for each in own.trainers.values())


def expect_close(ours: NativeTrainer, theirs: NativeTrainer) -> None:
    assert ours.updates == theirs.updates
    for (name, one), other in zip(ours.decoder.named_parameters(), theirs.decoder.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8, msg=lambda said, name=name: f"{name}: {said}")


async def test_one_policys_algorithm_is_felt_by_no_other() -> None:
    """The test above would not notice a difference that is too small: here it is made on purpose."""
    steps = dict[str, tuple[PolicyTrainers, Metrics]]()
    for case, own in {"as before": DAPO, "another": AlgorithmSettings.preset("rloo")}.items():
        algorithm = algorithm_of_policies({"speller": {COMMON: own}, "adder": {COMMON: GSPO}}, POLICY_OF, LONGEST)
        trainers = together(["speller", "adder"])
        steps[case] = trainers, (await train_on(trainers, algorithm, played(), [], AT))[2]
    (one, first), (other, second) = steps.values()
    expect_close(one.trainers["adder"], other.trainers["adder"])
    assert first["adder/grad_norm"] == pytest.approx(second["adder/grad_norm"], rel=1e-9)
    with pytest.raises(AssertionError):
        expect_close(one.trainers["speller"], other.trainers["speller"])


def spec_of(folder: Path, **more: Any) -> TrainerSpec:
    save_folder(decoder(), folder / "model", tokenizer_from=None, dtype=torch.float32)
    (folder / "model" / "tokenizer.json").write_text("{}")  # an export copies it
    policies = {
        "speller": PolicySpec(lr=1e-2, lora=LoraSettings(rank=3), steps=STEPS["speller"]),
        "adder": PolicySpec(lr=3e-3, lora=LoraSettings(rank=2, targets=["q_proj", "down_proj"]), steps=STEPS["adder"]),
    }
    given = {"trainer": TrainerSettings(device="cpu", schedule="linear", lora=LoraSettings()), "steps": 5, "seed": 3}
    given |= {"sync": SyncSettings(), "folder": folder / "weights", "reference": ReferenceSettings(), "policies": policies}
    return TrainerSpec(model=folder / "model", **(given | more))


async def test_a_spec_of_several_policies_builds_what_specs_of_one_do(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    own, protocol = build_role(spec.model_dump(mode="json"))
    assert isinstance(own, PolicyTrainers) and isinstance(own, protocol) and list(own.trainers) == ["speller", "adder"]
    first = await own.publish(Version(0, policy="adder"))
    for seed in range(2):
        await step(own, mixed(seed))
    assert not np.array_equal((await own.forward(mixed()))[0], (await own.forward(mixed(), "reference"))[0])
    for name, each in spec.policies.items():
        settings = spec.trainer.model_copy(update={"lr": each.lr, "lora": each.lora})
        single = spec.model_copy(update={"policies": {}, "trainer": settings, "steps": each.steps})
        alone = build(single, make_sender(spec.sync, tmp_path / name), Cores(), inline)
        if name == "adder":
            version = (await alone.publish(Version(0))).version
            assert version.fingerprint == first.version.fingerprint, "they begin alike"
        for seed in range(2):
            await step(alone, [row_of_policy(row) for row in rows_of(name, seed)])
        expect_same(own.trainers[name], alone)
        await alone.close()
    await own.close()


def row_of_policy(row: Any) -> Any:
    row.policy = "policy"
    return row


async def test_a_policy_goes_on_from_an_adapter_of_its_own(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    first, _ = build_role(spec.model_dump(mode="json"))
    await step(first, mixed())
    await first.export(str(tmp_path / "final"))
    started = LoraSettings(start=str(tmp_path / "final" / "adder-adapter"))
    policies = {**spec.policies, "adder": PolicySpec(lr=3e-3, lora=started, steps=3)}
    second, _ = build_role(spec.model_copy(update={"policies": policies}).model_dump(mode="json"))
    rows = rows_of("adder")
    for found, expected in zip(await second.forward(rows), await first.forward(rows), strict=True):
        np.testing.assert_array_equal(found, expected)
    await first.close()
    await second.close()
