import numpy as np
import pytest

from tidemill.algorithms.advantages import grpo
from tidemill.algorithms.prepare import Algorithm, has_signal, prepare, supervised
from tidemill.algorithms.settings import AlgorithmSettings
from tidemill.types import Finish, Group, InfraError, Score, Task, Trajectory, Unscorable

GRPO = AlgorithmSettings.preset("grpo")


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
    return Group(id, Task("t", "p"), rows)


def test_advantages_and_weights_lie_on_the_sampled_tokens_only():
    g = group(trajectory(1.0, 3, sample=0), trajectory(0.0, 5, sample=1), id=9)
    prepared = prepare([g], GRPO)
    a = grpo(np.array([1.0, 0.0]))
    for i, (sample, source) in enumerate(zip(prepared.samples, g.trajectories, strict=True)):
        np.testing.assert_allclose(sample.advantages, np.where(source.mask, a[i], 0), rtol=1e-6)
        np.testing.assert_allclose(sample.weights, np.where(source.mask, 1 / source.sampled, 0), rtol=1e-6)
        assert sample.advantages.dtype == sample.weights.dtype == np.float32
        assert (sample.group, sample.sample, sample.loss) == (9, i, "policy")
        assert sample.tokens is source.tokens and sample.logprobs is source.logprobs
    assert prepared.scale == 0.5
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
    assert len(with_it.samples) == 2 and with_it.scale == without.scale
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
    assert Algorithm(dapo).drop_reason(group(1.0, 1.0)) == "zero-variance"


def test_kept_zero_variance_groups_dilute():
    """The same gradient sum over more samples: the scale halves."""
    one, two = (prepare([group(1.0, 0.0), *extra], GRPO) for extra in ([], [group(1.0, 1.0, id=2)]))
    assert one.scale == 2 * two.scale
    assert two.metrics["zero_variance_groups"] == 1
    assert not any(s.advantages.any() for s in two.samples[2:]) and two.samples[2].weights.any()


def test_seats_are_compared_with_their_own_kind():
    rows = [trajectory(r, seat=seat) for r, seat in [(1.0, 0), (10.0, 1), (0.0, 0), (20.0, 1)]]
    samples = prepare([group(*rows)], AlgorithmSettings.preset("dr_grpo", fixed_length=8)).samples
    assert [s.advantages[-1] for s in samples] == [0.5, -5.0, -0.5, 5.0]


def test_reduction_spans_the_whole_step():
    groups = [group(trajectory(1.0, 2), trajectory(0.0, 6), id=1), group(trajectory(1.0, 1), trajectory(0.0, 1), id=2)]
    assert prepare(groups, AlgorithmSettings.preset("dapo")).scale == 1 / 10
    by_prompt = prepare(groups, AlgorithmSettings.preset("dapo", reduction="prompt"))
    assert by_prompt.scale == 1 / 2
    assert [s.weights[-1] for s in by_prompt.samples] == [0.125, 0.125, 0.5, 0.5]


def test_metrics():
    scored = trajectory(Score(1.0, {"format": 1.0}), 4, finish=Finish.LENGTH)
    metrics = prepare([group(scored, trajectory(Score(0.0, {"format": 0.0}), 2))], GRPO).metrics
    assert metrics["reward"] == 0.5 and metrics["reward/format"] == 0.5 and metrics["truncated"] == 0.5
    assert metrics["completion_tokens"] == 3 and metrics["completion_tokens_max"] == 4


def test_greedy_samples_and_open_lengths_are_refused():
    with pytest.raises(ValueError, match="temperature > 0"):
        prepare([group(trajectory(1.0, temperature=0.0), 0.0)], GRPO)
    with pytest.raises(ValueError, match="'fixed' with length None"):
        prepare([group(1.0, 0.0)], AlgorithmSettings.preset("dr_grpo"))


def test_an_empty_step():
    prepared = Algorithm(GRPO).prepare([])
    assert prepared.samples == [] and prepared.scale == 0 and np.isfinite(list(prepared.metrics.values())).all()


def test_supervised_rows_are_a_mean_over_loss_tokens():
    rows = [(np.arange(4), np.array([0, 0, 1, 1])), (np.arange(3), np.array([0, 1, 0]))]
    samples, losses, scale = supervised(rows)
    assert scale == 1 / 3 and losses["supervised"].name == "cross_entropy"
    assert not any(s.mask.any() for s in samples) and all((s.versions == -1).all() for s in samples)
    np.testing.assert_array_equal(samples[0].weights, [0, 0, 1, 1])
    assert {s.loss for s in samples} == {"supervised"}
    with pytest.raises(ValueError, match=r"loss_mask\[0\]"):
        supervised([(np.arange(2), np.array([1, 1]))])
    with pytest.raises(ValueError, match="one flag a token"):
        supervised([(np.arange(2), np.array([1]))])
