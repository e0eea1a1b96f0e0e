"""Algorithms of several policies in one step: what each prepares is what it would alone, in as many updates as it takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_mixture import DAPO, DR, GRPO, factor, of, step
from test_prepare import LONGEST, STEP, group, trajectory

from tidemill.algorithms.algorithm_settings import AlgorithmSettings
from tidemill.algorithms.mixture import COMMON, algorithm_of
from tidemill.algorithms.policy_algorithms import algorithm_of_policies, check_policies
from tidemill.algorithms.prepare_step import ConfiguredAlgorithm
from tidemill.core.types import Finish, Group, PreparedStep, Version

POLICY_OF = {"words": "speller", "sums": "adder", "dates": "adder"}
MINIBATCHES = AlgorithmSettings.preset("grpo", updates={"minibatches": 2}, old_logprobs="recompute")
EPOCHS = AlgorithmSettings.preset("dr_grpo", updates={"epochs": 3}, old_logprobs="recompute")


def sampled(env: str, *trajectories: Any, id: int) -> Group:
    """A group that its environment's policy sampled."""
    made = of(env, *trajectories, id=id)
    for row in made.trajectories:
        row.sources = (Version(4, policy=POLICY_OF[env]),)
    return made


def played() -> list[Group]:
    """Of all environments in turns, each in another number and of other lengths."""
    groups, number = list[Group](), iter(range(99))
    for count in range(4):
        groups.append(sampled("words", trajectory(1.0, 2 + count, sample=0), trajectory(0.0, 5, sample=1), id=next(number)))
        if count % 2:
            groups.append(sampled("sums", trajectory(1.0, 3, sample=0), trajectory(0.0, 4, sample=1), id=next(number)))
        if count == 2:
            rewards = enumerate((1.0, 1.0, 0.0))
            groups.append(sampled("dates", *(trajectory(r, 1 + i, sample=i) for i, r in rewards), id=next(number)))
    return groups


def own_of(policy: str, groups: list[Group]) -> list[Group]:
    return [each for each in groups if POLICY_OF[each.task.env] == policy]


def expect_alone(whole: PreparedStep, alone: dict[str, PreparedStep]) -> None:
    """Every policy has its own samples, advantages, weights and factors in every update of its own, and in no other."""
    assert len(whole.updates) == max(len(each.updates) for each in alone.values())
    for number, update in enumerate(whole.updates):
        having = {policy: each.updates[number] for policy, each in alone.items() if number < len(each.updates)}
        assert update.scale == max(each.scale for each in having.values())
        assert [s.group for s in update.samples] == [s.group for each in having.values() for s in each.samples]
        rows = iter(update.samples)
        for policy, each in having.items():
            for theirs, ours in zip(each.samples, rows, strict=False):
                np.testing.assert_array_equal(ours.advantages, theirs.advantages)
                np.testing.assert_array_equal(ours.weights, theirs.weights)
                spec, expected = whole.losses[ours.loss], alone[policy].losses[theirs.loss]
                assert (spec.name, spec.params, spec.also) == (expected.name, expected.params, expected.also)
                got = update.scale * spec.weight * ours.weights.astype(np.float64)
                wanted = each.scale * expected.weight * theirs.weights.astype(np.float64)
                np.testing.assert_allclose(got, wanted, rtol=1e-15)
                if each.scale == update.scale:
                    assert spec.weight == expected.weight, "then it is the same to the bit"


CASES = {
    "one update each": ({"speller": {COMMON: DAPO}, "adder": {COMMON: DR}}),
    "a mixture in one": ({"speller": {COMMON: DAPO}, "adder": {"sums": GRPO, "dates": DR}}),
    "a policy of the recipe's algorithm in a mixture": ({"speller": {"words": DR}, "adder": {COMMON: DAPO, "dates": DR}}),
    "two updates and one": ({"speller": {COMMON: MINIBATCHES}, "adder": {COMMON: DR}}),
    "one update and three": ({"speller": {"words": DAPO}, "adder": {COMMON: EPOCHS}}),
    "two updates and three": ({"speller": {COMMON: MINIBATCHES}, "adder": {COMMON: EPOCHS}}),
    "two updates and a mixture": ({"speller": {COMMON: MINIBATCHES}, "adder": {"sums": DR, "dates": DAPO}}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("there", ["speller adder", "speller", "adder"])
def test_each_policy_is_trained_as_if_it_were_alone(case: str, there: str) -> None:
    settings = CASES[case]
    groups = [group for group in played() if POLICY_OF[group.task.env] in there.split()]
    algorithm = algorithm_of_policies(settings, POLICY_OF, LONGEST)
    whole = step(algorithm, groups, **dict.fromkeys(algorithm.asks, -0.25))
    alone = dict[str, PreparedStep]()
    for policy in there.split():
        by_itself = algorithm_of(settings[policy], LONGEST)
        alone[policy] = step(by_itself, own_of(policy, groups), **dict.fromkeys(by_itself.asks, -0.25))
    expect_alone(whole, alone)
    rows = algorithm.rows(groups, STEP)
    assert [(s.group, s.attempt) for s in whole.samples] == [(s.group, s.attempt) for s in rows], "logprobs come by row"
    assert all(sample.policy == POLICY_OF[groups_of(groups)[sample.group].task.env] for sample in whole.samples)
    assert {sample.loss for update in whole.updates for sample in update.samples} == set(whole.losses)
    assert {sample.loss for sample in whole.samples} <= set(whole.losses)


def groups_of(groups: list[Group]) -> dict[int, Group]:
    return {each.id: each for each in groups}


def test_the_order_of_the_groups_changes_no_factor() -> None:
    settings = CASES["a mixture in one"]
    forth, back = (step(algorithm_of_policies(settings, POLICY_OF, LONGEST), each) for each in (played(), played()[::-1]))
    by_row = {(s.group, s.attempt): factor(back, s) for s in back.samples}
    for sample in forth.samples:
        np.testing.assert_array_equal(factor(forth, sample), by_row[sample.group, sample.attempt])


def test_a_policy_without_a_trained_token_takes_nothing_from_another() -> None:
    masked = AlgorithmSettings.preset("grpo", overlong="mask")
    cut = [trajectory(1.0, finish=Finish.LENGTH, sample=0), trajectory(0.0, finish=Finish.LENGTH, sample=1)]
    groups = [sampled("words", *cut, id=0), sampled("sums", 1.0, 0.0, id=1)]
    algorithm = algorithm_of_policies({"speller": {COMMON: masked}, "adder": {COMMON: GRPO}}, POLICY_OF, LONGEST)
    both = step(algorithm, groups)
    assert both.updates[0].scale == step(ConfiguredAlgorithm(GRPO, LONGEST), groups[1:]).updates[0].scale > 0
    assert (both.losses["speller/policy"].weight, both.losses["adder/policy"].weight) == (0.0, 1.0)
    assert step(algorithm, groups[:1]).updates[0].scale == 0.0


def test_groups_are_dropped_by_their_own_policys_algorithm() -> None:
    algorithm = algorithm_of_policies({"speller": {COMMON: DAPO}, "adder": {COMMON: GRPO}}, POLICY_OF, LONGEST)
    assert algorithm.drop_reason(sampled("words", 1.0, 1.0, id=0)) == "zero-variance"
    assert algorithm.drop_reason(sampled("sums", 1.0, 1.0, id=0)) is None


def test_logprobs_go_to_those_who_ask_for_them() -> None:
    held = AlgorithmSettings.preset("grpo", reference={"kl": 0.1})
    algorithm = algorithm_of_policies({"speller": {COMMON: MINIBATCHES}, "adder": {COMMON: held}}, POLICY_OF, LONGEST)
    assert algorithm.asks == ("policy", "reference")
    whole = step(algorithm, played(), policy=-0.25, reference=-1.0)
    for sample in whole.samples:
        asked = (sample.old_logprobs is not None, sample.ref_logprobs is not None)
        assert asked == ((True, False) if sample.policy == "speller" else (False, True))


def test_figures_are_of_the_step_of_each_policy_and_of_its_environments() -> None:
    groups = played()
    settings = {"speller": {COMMON: DAPO}, "adder": {"sums": GRPO, "dates": DR}}
    metrics = step(algorithm_of_policies(settings, POLICY_OF, LONGEST), groups).metrics
    alone = {name: step(algorithm_of(settings[name], LONGEST), own_of(name, groups)).metrics for name in settings}
    for policy, own in alone.items():
        assert {key.removeprefix(f"{policy}/"): v for key, v in metrics.items() if key.startswith(f"{policy}/")} == own
    assert metrics["groups"] == len(groups) and metrics["samples"] == 8 + 7
    assert metrics["reward"] == pytest.approx((4 + 2 + 2) / 15)
    assert metrics["adder/dates/reward"] == metrics["dates/reward"] == pytest.approx(2 / 3)
    assert not any(key.startswith("/") for key in metrics)


def test_only_a_lone_policy_is_trained_while_its_step_is_sampled() -> None:
    assert algorithm_of_policies({"speller": {COMMON: GRPO}}, {"words": "speller"}, LONGEST).by_group
    assert not algorithm_of_policies({"speller": {COMMON: MINIBATCHES}}, {"words": "speller"}, LONGEST).by_group
    assert not algorithm_of_policies({"speller": {COMMON: GRPO}, "adder": {COMMON: GRPO}}, POLICY_OF, LONGEST).by_group


def test_a_lone_policy_has_the_groups_of_an_environment_that_tasks_do_not_name() -> None:
    algorithm = algorithm_of_policies({"speller": {"words": GRPO}}, {"words": "speller"}, LONGEST)
    groups = own_of("speller", played())
    for each in groups:
        each.task.env = ""
    expect_alone(step(algorithm, groups), {"speller": step(ConfiguredAlgorithm(GRPO, LONGEST), groups)})


def test_an_entropy_follows_the_steps_of_its_own_policy() -> None:
    """Also over steps without a group of it, and in a process that goes on from what the ledger has."""
    settings = AlgorithmSettings.preset("grpo", entropy={"target": 0.6, "change": 0.25})
    own = {"speller": {COMMON: settings}, "adder": {COMMON: AlgorithmSettings.preset("grpo")}}
    trained, nats = [True, True, False, True, False, False, True, True], [0.5, 0.4, 0.1, 0.75, 0.2, 0.2, 0.5, 0.3]
    alone, numbers = ConfiguredAlgorithm(settings, LONGEST), iter(range(99))
    expected = {at: weight_at(alone, next(numbers), nats[at], "words") for at in range(8) if trained[at]}
    recorded, whole = dict[int, dict[str, float]](), algorithm_of_policies(own, POLICY_OF, LONGEST)
    whole.recall(lambda number: recorded.get(number, {}))
    for at in range(8):
        weight, recorded[at] = weight_at(whole, at, nats[at], "words" if trained[at] else "sums")
        assert not trained[at] or weight == expected[at][0]
        again = algorithm_of_policies(own, POLICY_OF, LONGEST)
        again.recall(lambda number, at=at: recorded[number] if number < at else {})
        assert weight_at(again, at, nats[at], "words" if trained[at] else "sums")[0] == weight
    assert len({weight for weight, _ in expected.values()}) > 2


def weight_at(algorithm: Any, number: int, nats: float, env: str) -> tuple[float, dict[str, float]]:
    """The weight of the entropy's term in a step of one group with a mean logprob of -nats, and the step's metrics."""
    rows = [trajectory(reward, 3, sample=i) for i, reward in enumerate((1.0, 0.0))]
    for row in rows:
        row.logprobs[row.mask] = -nats
    groups = [sampled(env, *rows, id=number)]
    prepared = algorithm.prepare(groups, number, algorithm.rows(groups, number), {})
    terms = [each for spec in prepared.losses.values() for each in spec.also if each.name == "entropy"]
    return sum(each.weight for each in terms), prepared.metrics


def test_what_belongs_to_no_policy_is_refused_by_name() -> None:
    algorithm = algorithm_of_policies({"speller": {COMMON: GRPO}, "adder": {COMMON: GRPO}}, POLICY_OF, LONGEST)
    with pytest.raises(ValueError, match=r"group 7 is of environment 'maps', which trains no policy; .* 'words', 'sums'"):
        algorithm.drop_reason(of("maps", 1.0, 0.0, id=7))
    strange = sampled("sums", 1.0, 0.0, id=8)
    strange.task.env = "words"
    with pytest.raises(ValueError, match=r"group 8 was sampled by the policy 'adder', and its environment trains 'speller'"):
        algorithm.rows([strange], STEP)


def test_what_policies_cannot_have_apart_is_refused() -> None:
    check_policies({"speller": {COMMON: MINIBATCHES}, "adder": {"sums": DR, "dates": DAPO}})
    one, other = (AlgorithmSettings.preset("grpo", reference={"model": model, "kl": 0.1}) for model in ("initial", "x"))
    with pytest.raises(ValueError, match=r"'adder' in environment 'sums' asks for another reference .* of policy 'speller'"):
        check_policies({"speller": {COMMON: one}, "adder": {"sums": other, "dates": DR}})
    with pytest.raises(ValueError, match="asks for a greedy attempt at each task, or none"):
        check_policies({"speller": {COMMON: GRPO}, "adder": {COMMON: AlgorithmSettings.preset("remax")}})
    with pytest.raises(ValueError, match="'sums' takes 2 updates a step: environments with different algorithms share"):
        check_policies({"speller": {COMMON: GRPO}, "adder": {"sums": MINIBATCHES, "dates": DR}})
    with pytest.raises(ValueError, match="'speller' trains the policy 'adder', and another policy is called 'speller'"):
        check_policies({"speller": {COMMON: GRPO}, "adder": {"speller": GRPO}})


def test_a_lone_environments_own_algorithm_is_the_runs() -> None:
    """Its tasks do not name it, and it may take several updates a step."""
    algorithm = algorithm_of({"words": MINIBATCHES}, LONGEST)
    groups = [group(trajectory(1.0, 2, sample=0), trajectory(0.0, 3, sample=1), id=i) for i in range(2)]
    prepared = step(algorithm, groups, policy=-0.25)
    assert len(prepared.updates) == 2 and set(prepared.losses) == {"policy"} and algorithm.drop_reason(groups[0]) is None
