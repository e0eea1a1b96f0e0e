from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_cases import sample

from tidemill.models import trained_linear
from tidemill.trainer.micro_batches import Batch, by_attempt, pack, rows_of, split
from tidemill.trainer.training_pass import Compute

CPU = torch.device("cpu")
FLOAT32, BFLOAT16 = Compute(CPU, 512), Compute(CPU, 512, torch.bfloat16)
shapes = st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 12)), min_size=1, max_size=20)


def samples_of(shapes):
    rng = np.random.default_rng(0)
    prompts = {g: rng.integers(0, 23, 4 + g) for g in range(-1, 4)}
    return [sample(rng, prompts[group], n, group=group) for group, n in shapes]


def cut(rows, budget):
    return split(by_attempt(rows), budget)


@given(shapes=shapes, budget=st.integers(1, 80), seed=st.integers(0, 9))
def test_the_rows_of_an_attempt_are_never_parted(shapes, budget, seed):
    samples, rng = samples_of(shapes), np.random.default_rng(seed)
    for each in samples:
        each.attempt = int(rng.integers(0, 4))
    batches = cut(rows_of(samples), budget)
    assert sorted(row.index for rows in batches for row in rows) == list(range(len(samples)))
    names = [{row.attempt for row in rows} for rows in batches]
    assert sum(map(len, names)) == len(set.union(*names)), "an attempt in two micro-batches"
    for rows, inside in zip(batches, names, strict=True):
        assert len(inside) == 1 or sum(row.length - row.shared for row in rows) <= budget
        packed = pack(rows, CPU)
        of = np.repeat([hash(row.attempt) for row in rows], [len(row.where) for row in rows])
        pairs = set(zip(packed.sequence.tolist(), of.tolist(), strict=True))
        assert packed.attempts == len(inside) == len(pairs) == len({number for number, _ in pairs})


@given(shapes=shapes, budget=st.integers(1, 80))
def test_every_row_is_packed_once_within_the_budget(shapes, budget):
    samples = samples_of(shapes)
    batches = cut(rows_of(samples), budget)
    assert sorted(row.index for rows in batches for row in rows) == list(range(len(samples)))
    for rows in batches:
        packed = pack(rows, CPU)
        assert len(packed.tokens) <= budget or len(rows) == 1
        tokens, positions, families = packed.tokens.numpy(), packed.positions.numpy(), packed.families
        for i, row in enumerate(rows):
            own = families.of_sequence(i)
            np.testing.assert_array_equal(tokens[own], row.sample.tokens[: row.length])
            np.testing.assert_array_equal(positions[own], np.arange(row.length))
        assert len(families.places) == sum(row.length for row in rows) and families.tokens == len(tokens)
        np.testing.assert_array_equal(np.unique(families.places), np.arange(len(tokens)))


@given(shapes=shapes, budget=st.integers(1, 80))
def test_micro_batches_are_few_and_the_largest_is_as_small_as_may_be(shapes, budget):
    """Against every way to cut the rows, in order, into so many."""
    rows = [row for part in cut(rows_of(samples_of(shapes)), 10_000) for row in part]
    one = [len(pack([replace(row, shared=0)], CPU).tokens) for row in rows]
    least = {(0, 0): 0}  # (micro-batches, rows in them) -> tokens of the largest

    def tokens(begin, end):
        return one[begin] + sum(row.length - row.shared for row in rows[begin + 1 : end])

    for n in range(1, len(rows) + 1):
        for end in range(n, len(rows) + 1):
            least[n, end] = min(max(least[n - 1, i], tokens(i, end)) for i in range(n - 1, end) if (n - 1, i) in least)
    found = cut(rows_of(samples_of(shapes)), budget)
    allowed = max(budget, *one)
    fewest = next(n for n in range(1, len(rows) + 1) if least[n, len(rows)] <= allowed)
    sizes = [len(pack(part, CPU).tokens) for part in found]
    assert max(one) > budget or len(found) == fewest
    assert max(sizes) == least[len(found), len(rows)]


def test_no_rows_are_no_micro_batches():
    assert split([], 512) == []


def predicting(packed: Batch) -> np.ndarray:
    """[M] the packed token that predicts each target."""
    wanted = np.arange(len(packed.tokens)) if packed.wanted is None else packed.wanted.numpy()
    return wanted[packed.predictors.numpy()]


@given(shapes=shapes, budget=st.integers(1, 80))
def test_predictors_stand_right_before_their_targets(shapes, budget):
    for rows in cut(rows_of(samples_of(shapes)), budget):
        packed = pack(rows, CPU)
        where = np.concatenate([row.where for row in rows])
        at = predicting(packed)
        np.testing.assert_array_equal(packed.positions[at].numpy(), where - 1)
        own = [packed.families.of_sequence(i)[row.where - 1] for i, row in enumerate(rows)]
        np.testing.assert_array_equal(at, np.concatenate(own))
        assert packed.wanted is None or packed.wanted.tolist() == sorted(set(at.tolist())), (
            "what predicts nothing is left out"
        )
        np.testing.assert_array_equal(packed.targets.numpy(), np.concatenate([r.sample.tokens[r.where] for r in rows]))
        np.testing.assert_array_equal(packed.sequence.numpy(), np.repeat(np.arange(len(rows)), [len(r.where) for r in rows]))


def test_a_prompt_is_run_once_for_its_siblings():
    samples = samples_of([(2, 5), (2, 3), (2, 4)])  # a prompt of 6; the last sampled token is a target only
    [rows] = cut(rows_of(samples), 100)
    assert len(pack(rows, CPU).tokens) == 6 + 4 + 2 + 3


def test_groups_share_what_their_prompts_begin_with_and_equal_answers_are_run_once():
    rng = np.random.default_rng(0)
    system, questions = rng.integers(0, 9, 20), [np.array([10 + g, 11, 12]) for g in range(3)]
    samples = [sample(rng, np.concatenate([system, q]), 4, group=g) for g, q in enumerate(questions) for _ in range(2)]
    samples[1].tokens[:] = samples[0].tokens
    [rows] = cut(rows_of(samples), 500)
    assert len(pack(rows, CPU).tokens) == 20 + 3 * 3 + 5 * 3  # six answers of 3 that are run, two of which are one


def test_what_saves_too_little_is_not_shared():
    samples = samples_of([(0, 60), (0, 60)])
    assert (samples[0].tokens[:4] == samples[1].tokens[:4]).all()
    packed = pack(cut(rows_of(samples), 500)[0], CPU)
    assert len(packed.tokens) == sum(row.length for row in packed.rows) == len(packed.families.places)


def test_rows_are_cut_after_the_last_predicted_token():
    one = sample(np.random.default_rng(0), np.arange(3), 6)
    one.mask[5:] = False
    one.weights[5:] = 0
    [[row]] = cut(rows_of([one]), 100)
    assert row.length == 4


def test_reference_logprobs_that_some_rows_lack_are_loud():
    a, b = samples_of([(0, 2), (0, 2)])
    assert "reference" not in pack(cut(rows_of([a, b]), 99)[0], CPU).inputs
    a.ref_logprobs = a.logprobs
    [rows] = cut(rows_of([a, b]), 99)
    reference = pack(rows, CPU).inputs["reference"]
    assert torch.isnan(reference).tolist() == [missing for row in rows for missing in [row.index == 1] * 2]


@pytest.mark.parametrize("loss", ["policy", "other"])
def test_tokens_are_told_apart_by_loss(loss):
    a, b = samples_of([(-1, 2), (-1, 3)])
    b.loss = loss
    packed = pack(cut(rows_of([a, b]), 99)[0], CPU)
    owned = {name: None if own is None else own.tolist() for name, own in packed.losses.items()}
    other = [True, True, True, False, False]
    assert owned == ({"policy": None} if loss == "policy" else {"policy": [not o for o in other], "other": other})


@given(shapes=shapes, up_to=st.integers(1, 400))
def test_what_fills_a_micro_batch_up_belongs_to_no_row(shapes, up_to):
    [rows] = cut(rows_of(samples_of(shapes)), 10_000)
    plain, filled = pack(rows, CPU), pack(rows, CPU, up_to=up_to)
    n = len(plain.tokens)
    assert n <= len(filled.tokens) <= max(n, up_to) and len(filled.tokens) < n * 33 / 32 + 1
    assert len(filled.positions) == len(filled.tokens) == filled.families.tokens
    np.testing.assert_array_equal(filled.tokens[:n], plain.tokens)
    np.testing.assert_array_equal(predicting(filled), predicting(plain))
    if filled.wanted is not None:
        needed = len(set(predicting(filled).tolist()))
        assert needed <= len(filled.wanted) <= max(needed, up_to) and len(filled.wanted) < needed * 33 / 32 + 1
    own = np.concatenate([filled.families.of_sequence(i) for i in range(len(rows))])
    np.testing.assert_array_equal(own, plain.families.places)
    assert np.diff(filled.families.sequences).max() == max(row.length for row in rows)


def test_micro_batches_of_bfloat16_have_few_sizes(monkeypatch):
    monkeypatch.setattr(trained_linear, "_way", lambda: None)
    rng = np.random.default_rng(0)
    parts = [cut(rows_of([sample(rng, np.arange(5), int(n)) for n in rng.integers(8, 60, 64)]), 512) for _ in range(20)]
    exact, few = ({len(how.pack(rows).tokens) for part in parts for rows in part} for how in (FLOAT32, BFLOAT16))
    assert len(exact) > 40 and len(few) <= 32
