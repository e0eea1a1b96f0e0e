from dataclasses import replace

import numpy as np
import pytest

from tidemill.algorithms.algorithm_settings import AlgorithmSettings
from tidemill.algorithms.prepare_step import ConfiguredAlgorithm
from tidemill.core.types import GREEDY, Finish, Group, InfraError, Score, Task, Trajectory, Unscorable

GRPO = AlgorithmSettings.preset("grpo")
LONGEST = 10
STEP = 6  # of the step that is prepared: what `trajectory` makes is two versions old


def prepare(groups, settings, logprobs=None, step=STEP):
    algorithm = ConfiguredAlgorithm(settings, LONGEST)
    rows = algorithm.rows(groups, step)
    known = {who: [row.logprobs + delta * row.mask for row in rows] for who, delta in (logprobs or {}).items()}
    assert set(known) == set(algorithm.asks)
    return algorithm.prepare(groups, step, rows, known)


def has_signal(group, settings):
    return ConfiguredAlgorithm(settings, LONGEST).drop_reason(group)


def trajectory(outcome, sampled=3, prompt=2, finish=Finish.STOP, **more):
    n = prompt + sampled
    mask = np.arange(n) >= prompt
    return Trajectory(
        tokens=np.arange(n, dtype=np.int32),
        mask=mask,
        logprobs=np.where(mask, np.float32(-0.5), np.float32(0)),
        versions=np.where(mask, 4, -1).astype(np.int32),
        finish=finish,
        outcome=Score(outcome) if isinstance(outcome, float) else outcome,
        **more,
    )


def group(*trajectories, id=1):
    rows = [t if isinstance(t, Trajectory) else trajectory(t) for t in trajectories]
    for place, row in enumerate(rows):  # attempts of one row each, unless they say otherwise
        row.sample = row.sample or place
    return Group(id, Task("t", "p"), rows)


def test_advantages_and_weights_lie_on_the_sampled_tokens_only():
    g = group(trajectory(1.0, 3, sample=0), trajectory(0.0, 5, sample=1), id=9)
    prepared = prepare([g], GRPO)
    a = np.array([0.5, -0.5]) / (np.sqrt(0.5) + 1e-6)
    for i, (sample, source) in enumerate(zip(prepared.samples, g.trajectories, strict=True)):
        np.testing.assert_allclose(sample.advantages, np.where(source.mask, a[i], 0), rtol=1e-6)
        np.testing.assert_allclose(sample.weights, np.where(source.mask, 1 / source.sampled, 0), rtol=1e-6)
        assert sample.advantages.dtype == sample.weights.dtype == np.float32
        assert (sample.group, sample.attempt, sample.loss) == (9, i, "policy")
        assert sample.tokens is source.tokens and sample.logprobs is source.logprobs
    assert prepared.updates[0].scale == 0.5
    assert prepared.losses["policy"].name == "ppo_clip"


@pytest.mark.parametrize(
    "other",
    [
        Unscorable("no gold answer"),
        InfraError("verifier died"),
        None,
        trajectory(5.0, finish=Finish.CANCELLED),
        trajectory(5.0, 0),
    ],
)
def test_what_has_no_score_is_as_if_it_were_not_there(other):
    with_it = prepare([group(1.0, other, 0.0)], GRPO)
    without = prepare([group(1.0, 0.0)], GRPO)
    assert len(with_it.samples) == 2 and with_it.updates[0].scale == without.updates[0].scale
    for a, b in zip(with_it.samples, without.samples, strict=True):
        np.testing.assert_array_equal(a.advantages, b.advantages)
        np.testing.assert_array_equal(a.weights, b.weights)
    assert with_it.metrics["unscored"] == 1 and with_it.metrics["reward"] == 0.5


def test_reasons_to_drop_a_group():
    dapo = AlgorithmSettings.preset("dapo")
    assert has_signal(group(1.0, 0.0), dapo) is None
    assert has_signal(group(1.0, 1.0), dapo) == "zero-variance"
    assert has_signal(group(1.0, None), dapo) == "zero-variance"
    assert has_signal(group(1.0, 1.0), GRPO) is None  # kept: it dilutes
    for settings in (dapo, GRPO):
        assert has_signal(group(None, InfraError("x")), settings) == "unscored"
        assert has_signal(group(), settings) == "unscored"


def test_kept_zero_variance_groups_dilute():
    """The same gradient sum over more samples: the scale halves."""
    one, two = (prepare([group(1.0, 0.0), *extra], GRPO) for extra in ([], [group(1.0, 1.0, id=2)]))
    assert one.updates[0].scale == 2 * two.updates[0].scale
    assert two.metrics["zero_variance_groups"] == 1
    assert not any(s.advantages.any() for s in two.samples[2:]) and two.samples[2].weights.any()


def seated(*attempts):
    """A group of attempts with a row for each seat: (reward, rewards of the seats), the seats taking turns."""
    rows = [
        trajectory(Score(value, seats=seats) if seat == len(seats) - 1 else None, sample=i, seat=seat)
        for seat in (0, 1)
        for i, (value, seats) in enumerate(attempts)
        if seat < len(seats)
    ]
    return Group(1, Task("t", "p"), rows)


def test_the_seats_of_an_attempt_share_its_reward():
    samples = prepare([seated((1.0, (0.0, 9.0)), (0.0, (5.0, 7.0)))], AlgorithmSettings.preset("dr_grpo", fixed_length=8))
    assert advantages(samples) == [0.5, 0.5, -0.5, -0.5]


def test_attempts_of_one_number_are_not_taken_for_rows_of_one():
    groups = [Group(1, Task("t", ""), [replace(t, sample=0) for t in group(1.0, 0.0).trajectories])]
    with pytest.raises(ValueError, match="give each attempt a `sample` number of its own"):
        prepare(groups, AlgorithmSettings.preset("grpo"))


def test_seats_are_compared_with_those_they_played_with():
    """Each with the others of its own attempt: not with the siblings in its seat."""
    scores = [(1.0, (1.0, 0.0)), (1.0, (0.25, 0.75)), (0.0, (0.5, 0.5))]
    s = AlgorithmSettings.preset("dr_grpo", advantage="leave_one_out_seats", fixed_length=8)
    assert advantages(prepare([seated(*scores)], s)) == [1.0, -1.0, -0.5, 0.5, 0.0, 0.0]
    drop = AlgorithmSettings.preset("dr_grpo", advantage="leave_one_out_seats", zero_variance="drop")
    assert has_signal(seated(*scores), drop) is None and has_signal(seated(scores[2]), drop) == "zero-variance"
    alike = seated((1.0, (1.0, 1.0)), (0.0, (0.0, 0.0)))
    assert has_signal(alike, drop) == "zero-variance", "siblings differ, and nobody from whom it plays with"
    lost = seated(*scores)
    next(t for t in lost.trajectories if (t.sample, t.seat) == (0, 1)).outcome = InfraError("x")
    assert advantages(prepare([lost], s)) == [-0.5, 0.5, 0.0, 0.0], "an attempt without a score has none for any seat"
    assert advantages(prepare([seated((1.0, (3.0,)))], s)) == [0.0], "nobody is there to be compared with"
    with pytest.raises(ValueError, match="compares the seats of an attempt, and a score of group 1 rewards 0 of 1"):
        has_signal(group(1.0, 0.0), drop)
    with pytest.raises(ValueError, match="use an environment that scores several seats"):
        prepare([group(1.0, 0.0)], s)


def test_reduction_spans_the_whole_step():
    groups = [group(trajectory(1.0, 2), trajectory(0.0, 6), id=1), group(trajectory(1.0, 1), trajectory(0.0, 1), id=2)]
    assert prepare(groups, AlgorithmSettings.preset("dapo")).updates[0].scale == 1 / 10
    by_prompt = prepare(groups, AlgorithmSettings.preset("dapo", reduction="prompt"))
    assert by_prompt.updates[0].scale == 1 / 2
    assert [s.weights[-1] for s in by_prompt.samples] == [0.125, 0.125, 0.5, 0.5]


def test_metrics():
    scored = trajectory(Score(1.0, {"format": 1.0}), 4, finish=Finish.LENGTH)
    metrics = prepare([group(scored, trajectory(Score(0.0, {"format": 0.0}), 2))], GRPO).metrics
    assert metrics["reward"] == 0.5 and metrics["reward/format"] == 0.5 and metrics["truncated"] == 0.5
    assert metrics["completion_tokens"] == 3 and metrics["completion_tokens_max"] == 4


def test_greedy_samples_are_refused():
    with pytest.raises(ValueError, match="temperature > 0"):
        prepare([group(trajectory(1.0, temperature=0.0), 0.0)], GRPO)


def test_the_fixed_length_is_the_longest_completion():
    assert prepare([group(1.0, 0.0)], AlgorithmSettings.preset("dr_grpo")).updates[0].scale == 1 / (2 * LONGEST)
    assert prepare([group(1.0, 0.0)], AlgorithmSettings.preset("dr_grpo", fixed_length=4)).updates[0].scale == 1 / 8


def test_an_empty_step():
    prepared = prepare([], GRPO)
    assert prepared.samples == [] and prepared.updates[0].scale == 0 and np.isfinite(list(prepared.metrics.values())).all()


def advantages(prepared):
    return [float(s.advantages[s.mask][0]) for s in prepared.samples]


def test_corrections_are_factors_on_the_advantages_and_change_no_denominator():
    plain = AlgorithmSettings.preset("dr_grpo", old_logprobs="recompute")
    tis = AlgorithmSettings.preset("dr_grpo", old_logprobs="recompute", corrections=["tis"])
    before, after = (prepare([group(1.0, 0.0)], s, {"policy": 0.1}) for s in (plain, tis))
    np.testing.assert_allclose(advantages(after), np.exp(0.1) * np.array(advantages(before)), rtol=1e-6)
    dropped = prepare([group(1.0, 0.0)], tis.model_copy(update={"corrections": tis.corrections}), {"policy": 3.0})
    assert advantages(dropped) == pytest.approx([2 * a for a in advantages(before)]), "the cap"
    none = AlgorithmSettings.preset("dr_grpo", old_logprobs="recompute", corrections=[{"name": "icepop", "high": 1.05}])
    masked = prepare([group(1.0, 0.0)], none, {"policy": 0.1})
    assert (
        advantages(masked) == [0.0, 0.0]
        and masked.updates[0].scale == before.updates[0].scale
        and masked.metrics["correction/dropped"] == 1
    )
    np.testing.assert_array_equal(masked.samples[0].weights, before.samples[0].weights)
    assert masked.samples[0].old_logprobs[-1] == pytest.approx(-0.4)


def test_age_weighs_by_the_oldest_token():
    s = AlgorithmSettings.preset("dr_grpo", corrections={"name": "age", "half_life": 2})
    old = trajectory(1.0)
    old.versions[2] = 2  # four behind, the others two
    assert advantages(prepare([group(old, 0.0)], s)) == pytest.approx([0.5 * 0.25, -0.5 * 0.5])


def test_kl_in_the_loss_and_in_the_reward():
    s = AlgorithmSettings.preset("dr_grpo", reference={"kl": 0.1})
    prepared = prepare([group(1.0, 0.0)], s, {"reference": -0.2})
    assert [(e.name, e.weight) for e in prepared.losses["policy"].also] == [("kl_k3", 0.1)]
    assert advantages(prepared) == [0.5, -0.5] and prepared.metrics["log_reference_ratio"] == pytest.approx(0.2)
    assert prepared.samples[0].ref_logprobs[-1] == pytest.approx(-0.7)
    s = AlgorithmSettings.preset("dr_grpo", reference={"kl": 0.1, "into": "reward"})
    prepared = prepare([group(trajectory(1.0, 2), trajectory(1.0, 4))], s, {"reference": -0.2})
    assert not prepared.losses["policy"].also
    assert advantages(prepared) == pytest.approx([0.02, -0.02]), "-0.1 * 0.2 * 2 tokens against 4"
    at_tokens = AlgorithmSettings.preset("reinforce_pp", reference={"kl": 0.1, "into": "reward"}, eps=1e9)
    a = prepare([group(trajectory(1.0, 3), trajectory(0.0, 1))], at_tokens, {"reference": -0.2}).samples[0].advantages
    steps = np.diff(a[2:])
    assert (steps > 0).all(), "the return to go has fewer penalties before it"


def test_distillation_is_each_tokens_own_reward():
    s = AlgorithmSettings.preset("opd", reference="teacher/")
    prepared = prepare([group(1.0, 1.0)], s, {"policy": 0.0, "reference": 0.3})
    assert advantages(prepared) == pytest.approx([0.3, 0.3])
    assert prepared.metrics["zero_variance_groups"] == 0, "it has a gradient all the same"
    assert has_signal(group(1.0, 1.0), s) is None


def test_a_pair_is_the_best_and_the_worst_attempt():
    s = AlgorithmSettings.preset("online_dpo")
    prepared = prepare([group(0.5, 1.0, 0.0)], s, {"policy": 0.0, "reference": 0.0})
    assert advantages(prepared) == pytest.approx([0.0, 2 * 0.1 * 0.5, -2 * 0.1 * 0.5])
    assert [bool(x.weights.any()) for x in prepared.samples] == [False, True, True] and prepared.updates[0].scale == 0.5
    assert prepared.metrics["preference_loss"] == pytest.approx(np.log(2)) and prepared.metrics["pairs"] == 1
    assert has_signal(group(1.0, 1.0), s) == "zero-variance"


def test_attempts_that_were_cut_off():
    cut = trajectory(1.0, 4, finish=Finish.LENGTH)
    rows = [group(cut, 1.0, 0.0)]
    ways = ("keep", "filter", "mask", "penalty")
    kinds = {way: prepare(rows, AlgorithmSettings.preset("dr_grpo", overlong=way)) for way in ways}
    assert advantages(kinds["keep"]) == pytest.approx([1 / 3, 1 / 3, -2 / 3])
    assert advantages(kinds["filter"]) == [0.5, -0.5]
    assert advantages(kinds["mask"]) == pytest.approx([1 / 3, 1 / 3, -2 / 3])
    assert not kinds["mask"].samples[0].weights.any() and kinds["mask"].updates[0].scale == 1 / (2 * LONGEST)
    assert advantages(kinds["penalty"]) == advantages(kinds["keep"]), "4 of 10 tokens are not near the limit"
    long = prepare([group(trajectory(1.0, 9), 1.0)], AlgorithmSettings.preset("dr_grpo", overlong="penalty"))
    assert advantages(long) == pytest.approx([-0.25, 0.25]), "over the last 2 of 10 tokens the penalty grows to 1"


def test_the_penalty_is_of_the_longest_reply():
    """Not of the episode: three replies of 4 tokens are far from a limit of 10 for each, as is what a tool said."""

    def played(*lengths):
        t = trajectory(1.0, sum(lengths) + 20 * (len(lengths) - 1))
        at = 2
        for length in lengths[:-1]:
            t.mask[at + length : at + length + 20] = False
            at += length + 20
        t.versions[~t.mask], t.logprobs[~t.mask] = -1, 0
        assert t.sampled == sum(lengths)
        return t

    s = AlgorithmSettings.preset("dr_grpo", overlong="penalty", advantage="reinforce")
    found = advantages(prepare([group(played(4, 4, 4), played(9), played(2, 9, 1), played(3, 10), played(8, 8))], s))
    assert found == [1.0, 0.5, 0.5, 0.0, 1.0]


def test_who_drops_for_an_advantage_of_their_own_says_that_it_compares(tmp_path):
    (tmp_path / "own.py").write_text("def best(x):\n    return x.spread(x.rewards - x.rewards.max())\n")
    own = {"advantage": f"{tmp_path / 'own.py'}:best"}
    drop, keep = (AlgorithmSettings.preset("grpo", **own, zero_variance=way) for way in ("drop", "keep"))
    assert has_signal(group(1.0, 1.0), drop) == "zero-variance" and has_signal(group(1.0, 0.0), drop) is None
    assert has_signal(group(1.0, 1.0), keep) is None
    turns = group(trajectory(Score(1.0, turns=(0.5,))), trajectory(Score(1.0, turns=(0.1,))))
    assert has_signal(turns, drop) is None, "turns tell them apart"
    assert prepare([group(1.0, 1.0)], keep).metrics["zero_variance_groups"] == 0


def test_a_correction_of_ones_own_needs_p_hat_only_where_it_reads_it(tmp_path):
    (tmp_path / "own.py").write_text(
        "import numpy as np\n"
        "def fresh(x):\n    return (x.lags <= 1) * 1.0\n"
        "def rare(x):\n    return np.where(x.behaviour < -9, 0.5, 1.0)\n"
        "def ratio(x):\n    return np.exp(x.log_k)\n"
    )
    for name, expected in (("fresh", [0.0, 0.0]), ("rare", [0.5, -0.5])):
        s = AlgorithmSettings.preset("dr_grpo", corrections=[f"{tmp_path / 'own.py'}:{name}"])
        assert advantages(prepare([group(1.0, 0.0)], s)) == expected
    reads = f"{tmp_path / 'own.py'}:ratio"
    with pytest.raises(ValueError, match="reads p_hat, which this run does not compute: set old_logprobs = 'recompute'"):
        prepare([group(1.0, 0.0)], AlgorithmSettings.preset("dr_grpo", corrections=[reads]))
    recomputed = AlgorithmSettings.preset("dr_grpo", corrections=[reads], old_logprobs="recompute")
    assert advantages(prepare([group(1.0, 0.0)], recomputed, {"policy": 0.0})) == [0.5, -0.5]


def test_turns_are_rewarded_at_their_last_tokens():
    def played(value, turns):
        t = trajectory(Score(value, turns=turns), 6)
        t.mask[4:6] = False  # a tool's answer between two turns of two tokens
        t.versions[4:6], t.logprobs[4:6] = -1, 0
        return t

    s = AlgorithmSettings.preset("dr_grpo", advantage="process")
    a = prepare([group(played(1.0, (0.5, 0.25)), played(0.0, ()))], s).samples[0].advantages
    np.testing.assert_allclose(a, [0, 0, 1.75 - 0.875, 1.75 - 0.875, 0, 0, 1.25 - 0.875, 1.25 - 0.875], rtol=1e-6)
    drop = AlgorithmSettings.preset("dr_grpo", advantage="process", zero_variance="drop")
    assert has_signal(group(played(1.0, (0.5,)), played(1.0, ())), drop) is None, "the same outcome, other turns"


def test_a_recorded_score_of_more_turns_than_replies_is_left_out_and_told_once():
    """As ledgers of older versions hold it; an algorithm that reads no turns uses its value."""
    misfit, fits, told = trajectory(Score(1.0, turns=(1.0, 1.0))), trajectory(Score(0.5, turns=(0.5,))), list[str]()
    algorithm = ConfiguredAlgorithm(AlgorithmSettings.preset("dr_grpo", advantage="process"), 8)
    algorithm.recall(lambda _: {}, told.append)
    assert algorithm.drop_reason(group(misfit)) == "unscored" and algorithm.drop_reason(group(misfit, fits)) is None
    for groups, trained in (([group(misfit, fits)], 1), ([group(misfit)], 0)):
        prepared = algorithm.prepare(groups, 0, algorithm.rows(groups, 0), {})
        assert (len(prepared.samples), prepared.metrics["unscored"]) == (trained, 1)
    (sentence,) = told
    assert "an attempt of group 1 is not trained on" in sentence and "2 turns of an attempt with 1 reply" in sentence
    assert len(prepare([group(misfit, fits)], AlgorithmSettings.preset("dr_grpo")).samples) == 2


def test_the_greedy_attempt_is_a_baseline_and_not_trained_on():
    s = AlgorithmSettings.preset("grpo", advantage="remax")
    baseline = trajectory(0.25, sample=GREEDY, temperature=0.0)
    prepared = prepare([group(1.0, 0.0, baseline)], s)
    assert advantages(prepared) == [0.75, -0.25]
    unscored = trajectory(InfraError("x"), sample=GREEDY, temperature=0.0)
    assert has_signal(group(1.0, 0.0, unscored), s) == "unscored"
    assert has_signal(group(1.0, 0.0, baseline), s) is None


def test_lags_go_to_the_loss_that_reads_them():
    assert prepare([group(1.0, 0.0)], GRPO).samples[0].lags is None
    lags = prepare([group(1.0, 0.0)], AlgorithmSettings.preset("a3po")).samples[0].lags
    np.testing.assert_array_equal(lags, [0, 0, 2, 2, 2])


def test_a_step_may_be_several_updates():
    groups = [group(trajectory(1.0, n), trajectory(0.0, n), id=n) for n in (1, 2, 3, 4, 5)]
    s = AlgorithmSettings.preset("rloo", old_logprobs="recompute", updates={"minibatches": 2, "epochs": 3})
    prepared = prepare(groups, s, {"policy": 0.0})
    assert [[x.group for x in u.samples] for u in prepared.updates] == [[1, 1, 2, 2, 3, 3], [4, 4, 5, 5]] * 3
    assert [u.scale for u in prepared.updates] == [1 / 12, 1 / 18] * 3, "a mean over each update's own tokens"
    assert [id(x) for u in prepared.updates[:2] for x in u.samples] == [id(x) for x in prepared.samples]
    whole = prepare(groups, AlgorithmSettings.preset("rloo", old_logprobs="recompute"), {"policy": 0.0})
    assert advantages(prepared) == advantages(whole), "advantages are of the whole step"
    few = prepare(groups[:1], s, {"policy": 0.0})
    assert len(few.updates) == 3


def test_a_critic_gives_values_to_gae_and_gets_returns():
    """Two attempts, one of them with a tool's tokens in its middle: GAE written out over the sampled tokens."""
    gamma, lam, of_critic = 0.9, 0.7, 0.5
    whole = {"name": "ppo", "gamma": gamma, "lam": lam, "whiten": 0, "critic": {"lam": of_critic, "clip": 0.2}}
    algorithm = ConfiguredAlgorithm(AlgorithmSettings.model_validate(whole), LONGEST)
    first, second = trajectory(1.0, 4), trajectory(0.25, 2)
    first.mask[3:5] = False
    groups = [group(first, second)]
    assert algorithm.asks == ("critic",)
    rows = algorithm.rows(groups, STEP)
    rng = np.random.default_rng(0)
    values = [np.where(row.mask, rng.normal(size=row.mask.shape), 0).astype(np.float32) for row in rows]
    prepared = algorithm.prepare(groups, STEP, rows, {"critic": values})
    for row, sample, v, reward in zip(rows, prepared.samples, values, (1.0, 0.25), strict=True):
        v = v[row.mask].astype(np.float64)
        delta = np.append(gamma * v[1:], reward) - v
        for found, factor, base in ((sample.advantages, lam, 0), (sample.returns, of_critic, v)):
            expected = [sum((gamma * factor) ** (s - t) * delta[s] for s in range(t, len(v))) for t in range(len(v))]
            np.testing.assert_allclose(found[row.mask], np.array(expected) + base, rtol=1e-5)
            assert (found[~row.mask] == 0).all()
        assert sample.values is not None and (sample.values[row.mask] == v.astype(np.float32)).all()
    target = np.concatenate([s.returns[s.mask] for s in prepared.samples])
    before = np.concatenate([v[row.mask] for row, v in zip(rows, values, strict=True)])
    explained = 1 - np.var(target - before) / np.var(target)
    assert prepared.metrics["value/explained_variance"] == pytest.approx(explained, rel=1e-5)
    assert prepared.metrics["value/mean"] == pytest.approx(before.mean(), rel=1e-5)


def test_a_critic_may_learn_for_a_while_before_the_policy_does():
    settings = AlgorithmSettings.model_validate({"name": "ppo", "critic": {"warmup": STEP + 1}})
    algorithm = ConfiguredAlgorithm(settings, LONGEST)
    groups = [group(1.0, 0.0)]
    rows = algorithm.rows(groups, STEP)
    for step, moves in ((STEP, False), (STEP + 1, True)):
        found = algorithm.prepare(groups, step, rows, {"critic": [np.zeros(5, np.float32)] * 2}).samples
        assert all((s.advantages != 0).any() == moves and s.weights.any() and s.returns is not None for s in found)
