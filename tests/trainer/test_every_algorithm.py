"""I6 for every algorithm: one gradient of a step, whatever its micro-batches, its packing, its order and its ranks."""

import numpy as np
import pytest
import torch
from algorithm_cases import LONGEST, as_given, forked, functions, logprobs_of, played, prepared, presets, settings
from trainer_cases import TOLERANCE, assert_same, decoder, gradients, parameters, value_model

from tidemill.algorithms.advantages import ACROSS_SEATS
from tidemill.algorithms.corrections import CORRECTIONS, Ratios
from tidemill.algorithms.prepare_step import ConfiguredAlgorithm
from tidemill.core.attempt_checks import check_attempts
from tidemill.core.types import Group

WHOLE, ONE_ROW = 10_000, 1  # tokens of a micro-batch
SPLITS = {  # tokens of a micro-batch, ranks, whether rows are exchanged
    "micro-batches": (40, 1, False),
    "one row at a time": (ONE_ROW, 1, False),
    "another order": (40, 1, True),
    "two ranks": (WHOLE, 2, False),
    "two ranks in another order": (25, 2, True),
    "four ranks in another order": (40, 4, True),
}
EVERY = presets() | functions()
HARDEST = ("one row at a time", "four ranks in another order")


def added(samples, losses, model, budget=WHOLE, ranks=1, exchanged=False, seed=0, critic=None):
    """Each rank's own gradient sums, added as a collective adds them: what the step's one scale is then applied to."""
    order = np.random.default_rng(seed).permutation(len(samples)) if exchanged else np.arange(len(samples))
    attempts = list(dict.fromkeys((samples[i].group, samples[i].attempt) for i in order))  # no rank has half of one
    total = {name: torch.zeros_like(p) for name, p in parameters(model, critic).items()}
    for rank in range(ranks):
        mine = [samples[i] for i in order if (samples[i].group, samples[i].attempt) in attempts[rank::ranks]]
        for name, gradient in gradients(mine, model, budget, losses, critic)[0].items():
            total[name] += gradient
    return total


def critic_for(chosen, dtype):
    return None if chosen.critic is None else value_model(dtype=dtype)


def check(chosen, dtype, splits, **changes):
    model, critic = decoder(torch.float64, **changes), critic_for(chosen, dtype)
    groups = played(model, seats=2 if chosen.advantage in ACROSS_SEATS else 1)
    groups = as_given(groups, chosen.given) if chosen.given else groups
    ready = prepared(ConfiguredAlgorithm(chosen, LONGEST), groups, logprobs_of(groups, model))
    model = model.to(dtype)
    assert len({id(u.samples[0]) for u in ready.updates}) == chosen.updates.minibatches
    for update in ready.updates[: chosen.updates.minibatches]:
        expected = added(update.samples, ready.losses, model, critic=critic)
        assert max(float(g.abs().max()) for g in expected.values()) * update.scale > 1e-6
        for split in splits:
            found = added(update.samples, ready.losses, model, *SPLITS[split], critic=critic)
            assert_same(found, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("name", presets())
def test_every_preset_has_one_gradient(name):
    check(presets()[name], torch.float64, HARDEST)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", presets())
def test_every_preset_has_one_gradient_in_each_split(name, dtype):
    check(presets()[name], dtype, SPLITS if dtype is torch.float64 else HARDEST)


@pytest.mark.runs
@pytest.mark.parametrize("name", functions())
def test_every_function_has_one_gradient(name):
    check(functions()[name], torch.float64, HARDEST[1:], num_hidden_layers=1)


@pytest.mark.runs
@pytest.mark.parametrize("name", EVERY)
def test_rows_of_an_attempt_split_at_its_turns_have_the_gradient_of_the_whole(name):
    """Advantages, sums over a sequence, reductions and denominators are those of the attempt, and no token counts twice."""
    chosen = EVERY[name]
    model, critic = decoder(torch.float64, num_hidden_layers=1), critic_for(chosen, torch.float64)
    groups = played(model, seats=2 if chosen.advantage in ACROSS_SEATS else 1)
    groups = as_given(groups, chosen.given) if chosen.given else groups
    known = logprobs_of(groups, model)
    parts = forked(groups)
    for group, split in zip(groups, parts, strict=True):
        check_attempts(split)
        for rows, own in zip(group.attempts, split.attempts, strict=True):
            assert sum(int(t.learnt.sum()) for t in own) == sum(int(t.learnt.sum()) for t in rows)
            for part in own:
                whole = next(t for t in rows if np.array_equal(t.tokens[: len(part.tokens)], part.tokens))
                known[id(part.tokens)] = {who: v[: len(part.tokens)] for who, v in known[id(whole.tokens)].items()}
    whole, split = (prepared(ConfiguredAlgorithm(chosen, LONGEST), each, known) for each in (groups, parts))
    assert split.metrics == pytest.approx(whole.metrics, rel=1e-12)
    assert chosen.scores or len(split.samples) > len(whole.samples)
    for one, other in zip(whole.updates, split.updates, strict=True):
        assert other.scale == one.scale
        expected = added(one.samples, whole.losses, model, critic=critic)
        assert max(float(g.abs().max()) for g in expected.values()) * one.scale > 1e-6
        for budget in (WHOLE, ONE_ROW):
            assert_same(added(other.samples, split.losses, model, budget, critic=critic), expected, 1e-10)


def disordered(groups, seed):
    rng = np.random.default_rng(seed)
    each = [Group(g.id, g.task, [t for i in rng.permutation(len(g.attempts)) for t in g.attempts[i]]) for g in groups]
    return [each[i] for i in rng.permutation(len(each))]


@pytest.mark.runs
@pytest.mark.parametrize("name", [name for name in presets() if name != "kto"])  # whose baseline pairs neighbours
def test_neither_groups_nor_siblings_have_an_order(name):
    """What is trained does not follow from who arrived first: advantages, pairs, what a correction leaves out."""
    model = decoder(torch.float64)
    chosen = presets()[name]
    groups, algorithm = played(model), ConfiguredAlgorithm(chosen, LONGEST)
    groups = as_given(groups, chosen.given) if chosen.given else groups
    critic = critic_for(chosen, torch.float64)
    known = logprobs_of(groups, model)
    ready = prepared(algorithm, groups, known)
    expected = added(ready.samples, ready.losses, model, critic=critic)
    for seed in range(3):
        again = prepared(algorithm, disordered(groups, seed), known)
        assert again.updates[0].scale == ready.updates[0].scale
        assert_same(added(again.samples, again.losses, model, critic=critic), expected, TOLERANCE[torch.float64])


def test_m2po_selects_over_the_whole_step():
    """Not over an update's groups, and not over a micro-batch: a token's fate follows from all that the step has."""
    model = decoder(torch.float64)
    groups = played(model)
    known = logprobs_of(groups, model)
    two = settings("m2po", updates={"minibatches": 2})
    ready, plain = (
        prepared(ConfiguredAlgorithm(each, LONGEST), groups, known).samples for each in (two, replace_corrections(two))
    )
    kept = [s.advantages[s.mask] != 0 for s in ready]
    own = [s.advantages[s.mask].astype(np.float64) for s in plain]

    def select(rows):
        old, mu = (np.concatenate([values(plain[i]) for i in rows]).astype(np.float64) for values in (_old, _mu))
        x = Ratios(old, mu, np.concatenate([own[i] for i in rows]), np.array([len(own[i]) for i in rows]), np.zeros(len(mu)))
        return np.split(CORRECTIONS["m2po"](x) * x.advantages != 0, np.cumsum(x.lengths)[:-1])

    everything = range(len(plain))
    assert all((a == b).all() for a, b in zip(kept, select(everything), strict=True))
    one_by_one = [select([i])[0] for i in everything]
    assert any((a != b).any() for a, b in zip(kept, one_by_one, strict=True)), "these rows would not tell the two apart"


def replace_corrections(chosen):
    return chosen.model_copy(update={"corrections": ()})


def _old(sample):
    return sample.old_logprobs[sample.mask]


def _mu(sample):
    return sample.logprobs[sample.mask]
