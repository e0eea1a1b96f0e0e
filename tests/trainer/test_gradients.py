"""I6: one gradient, whatever the packing; and it is that of a plain loop over rows, written here without the trainer."""

import numpy as np
import pytest
import torch
from trainer_cases import CPU, LOSSES, TOLERANCE, VOCAB, assert_same, batch, decoder, gradients, sample

from tidemill.core.types import LossSpec
from tidemill.models.kernels.cuda.launchers import Gpu
from tidemill.trainer import training_pass


def plain_attend(layer, q, k, v):
    """Causal attention of one sequence, from its definition."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("ihe,jhe->hij", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("hij,jhe->ihe", scores.softmax(-1), v)


def plain_logprobs(model, s):
    tokens = torch.tensor(s.tokens).long()
    logits = model.logits(model(tokens, torch.arange(len(tokens)), plain_attend)) / s.temperature
    return logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]  # of tokens 1 ..


def plain_loss(model, s):
    """sum over tokens of weight * term, with PPO and cross-entropy written out."""
    pi = plain_logprobs(model, s)
    weight, a, mu = (torch.tensor(x[1:]).to(pi.dtype) for x in (s.weights, s.advantages, s.logprobs))
    if s.loss == "supervised":
        return -(weight * pi).sum()
    old = mu if s.old_logprobs is None else torch.tensor(s.old_logprobs[1:]).to(pi.dtype)
    r = (pi - old).exp()
    return -(weight * torch.minimum(r * a, r.clamp(0.8, 1.28) * a)).sum()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "model_type": "llama"}])
def test_gradient_is_that_of_a_plain_loop_over_rows(dtype, changes):
    model, samples, scale = decoder(dtype, **changes), batch(), 1 / 37
    loss = scale * sum(plain_loss(model, s) for s in samples)
    names, parameters = zip(*model.named_parameters(), strict=True)
    expected = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    sums, result = gradients(samples, model)
    assert_same({n: scale * g for n, g in sums.items()}, expected, TOLERANCE[dtype])
    assert result.metrics["loss"] * scale == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("budget", [10_000, 1])
def test_a_sequence_is_all_rows_of_an_attempt(budget):
    """GSPO's ratio over two rows, from its formula; one of them has no advantage, and still moves the ratio."""
    model, rng = decoder(torch.float64), np.random.default_rng(2)
    first = sample(rng, np.arange(4), 5, group=0, attempt=7)
    second = sample(rng, first.tokens[:6], 3, group=0, attempt=7, advantages=np.zeros(9, np.float32))
    other = sample(rng, np.arange(4), 4, group=0)

    def loss(*rows):
        pi, mu = (torch.cat([x[torch.tensor(s.mask[1:])] for s, x in zip(rows, each, strict=True)]) for each in values(rows))
        a, weight = (torch.tensor(np.concatenate([x[s.mask] for s, x in each])) for each in parts(rows))
        s = (pi - mu).mean().exp()
        return -(weight * torch.minimum(s * a, s.clamp(0.8, 1.2) * a)).sum()

    def values(rows):
        return [plain_logprobs(model, s) for s in rows], [torch.tensor(s.logprobs[1:]) for s in rows]

    def parts(rows):
        return [(s, s.advantages) for s in rows], [(s, s.weights) for s in rows]

    names, parameters = zip(*model.named_parameters(), strict=True)
    total = loss(first, second) + loss(other)
    expected = dict(zip(names, torch.autograd.grad(total, parameters), strict=True))
    losses = {"policy": LossSpec("gspo", {"clip_low": 0.2, "clip_high": 0.2})}
    assert_same(gradients([second, other, first], model, budget, losses)[0], expected, 1e-10)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("budget", [10_000, 60, 35, 1])
def test_micro_batches_do_not_matter(dtype, budget):
    model, samples = decoder(dtype), batch()
    expected, whole = gradients(samples, model)
    actual, parts = gradients(samples, model, budget)
    assert_same(actual, expected, TOLERANCE[dtype])
    assert parts.metrics == pytest.approx(whole.metrics, rel=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_what_fills_a_micro_batch_up_moves_nothing(dtype, monkeypatch):
    model, samples = decoder(dtype), batch()
    expected, plain = gradients(samples, model)
    monkeypatch.setattr("tidemill.trainer.micro_batches._filling", lambda *_: [3, 2])
    actual, result = gradients(samples, model)
    assert_same(actual, expected, TOLERANCE[dtype])
    assert result.metrics == pytest.approx(plain.metrics, rel=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("count", [2, 7])
def test_calls_add_up(dtype, count):
    model, samples = decoder(dtype), batch()
    expected, whole = gradients(samples, model)
    model.zero_grad()
    results = [
        training_pass.forward_backward(model, samples[i::count], LOSSES, training_pass.Compute(CPU, 50))
        for i in range(count)
    ]
    assert_same({n: p.grad for n, p in model.named_parameters()}, expected, TOLERANCE[dtype])
    assert sum(r.metrics["loss"] for r in results) == pytest.approx(whole.metrics["loss"], rel=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_row_order_and_shared_prompts_do_not_matter(dtype):
    model, samples = decoder(dtype), batch()
    expected, _ = gradients(samples, model)
    shuffled = [samples[i] for i in np.random.default_rng(3).permutation(len(samples))]
    assert_same(gradients(shuffled, model)[0], expected, TOLERANCE[dtype])
    for s in samples:
        s.group = -1  # nothing says any longer that prompts may be shared
    assert_same(gradients(samples, model)[0], expected, TOLERANCE[dtype])
    for s in samples:
        s.group = 4  # and rows that share nothing may claim to be siblings
    assert_same(gradients(samples, model)[0], expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_two_ranks_sum_to_one(dtype):
    samples = batch()
    expected, _ = gradients(samples, decoder(dtype))
    ranks = [gradients(half, decoder(dtype), 40)[0] for half in (samples[: len(samples) // 2], samples[len(samples) // 2 :])]
    assert_same({n: ranks[0][n] + ranks[1][n] for n in expected}, expected, TOLERANCE[dtype])


def test_sliding_windows_survive_sharing():
    changes = {"model_type": "mistral", "sliding_window": 3}
    model, samples = decoder(torch.float64, **changes), batch()
    shared, _ = gradients(samples, model)
    for s in samples:
        s.group = -1
    assert_same(gradients(samples, model, 1)[0], shared, 1e-10)


def test_logprobs_come_back_in_the_order_given():
    model, samples = decoder(torch.float64), batch()
    for seen in (
        gradients(samples, model, 40)[1].logprobs,
        training_pass.forward(model, samples, training_pass.Compute(CPU, 40)),
    ):
        for logprobs, s in zip(seen, samples, strict=True):
            asked = s.mask | (s.weights != 0)
            expected = np.concatenate([[0], plain_logprobs(model, s).detach().numpy()])
            np.testing.assert_allclose(logprobs, np.where(asked, expected, 0), rtol=1e-5)
            assert logprobs.dtype == np.float32


def test_rows_without_gradient_are_not_run_backward(monkeypatch):
    """A zero advantage adds nothing under PPO: no backward pass, yet logprobs and metrics as if there had been one."""
    model, rng = decoder(), np.random.default_rng(0)
    rows = [sample(rng, np.arange(4), n) for n in (3, 5)]
    flat = [sample(rng, np.arange(4), n, advantages=np.zeros(4 + n, np.float32)) for n in (4, 6)]
    alone, _ = gradients(rows, model)
    both, result = gradients(rows + flat, model)
    assert_same(both, alone, 1e-6)
    assert result.metrics["tokens"] == 18 and all(p[-1] < 0 for p in result.logprobs)
    nothing, result = gradients(flat, model)
    assert nothing == {} and result.metrics["tokens"] == 10 and result.metrics["entropy"] > 0


def test_rows_whose_gradient_reaches_no_weight_are_loud():
    """A model that was frozen by mistake would train on nothing, in silence."""
    model = decoder().requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradients(batch(), model)


@pytest.mark.parametrize("term", [LossSpec("kl_k3", {"importance": 1.0}, weight=0.3), LossSpec("entropy", weight=0.2)])
def test_rows_without_advantage_still_have_the_gradient_of_what_is_added(term):
    """A KL penalty or an entropy bonus moves them, by as much as it does alone."""
    model, rng = decoder(), np.random.default_rng(0)
    flat = [sample(rng, np.arange(4), n, advantages=np.zeros(4 + n, np.float32)) for n in (4, 6)]
    for each in flat:
        each.ref_logprobs = each.logprobs + np.float32(0.5) * each.mask
    expected, _ = gradients(flat, model, losses={"policy": term})
    assert max(float(g.abs().max()) for g in expected.values()) > 1e-4
    added = LossSpec("ppo_clip", {"clip_low": 0.2, "clip_high": 0.28}, also=(term,))
    assert_same(gradients(flat, model, losses={"policy": added})[0], expected, 1e-5)


def test_a_users_loss_is_always_run_backward(tmp_path):
    """Nothing is known about it: a zero advantage may still have a gradient, here that of an entropy bonus."""
    (tmp_path / "mine.py").write_text(
        "from tidemill.algorithms.losses import Loss\ndef bonus(x):\n    return Loss(-x.entropy + 0 * x.logprobs)\n"
    )
    rng = np.random.default_rng(0)
    flat = [sample(rng, np.arange(4), 5, advantages=np.zeros(9, np.float32))]
    found, _ = gradients(flat, decoder(), losses={"policy": LossSpec(f"{tmp_path}/mine.py:bonus")})
    assert max(float(g.abs().max()) for g in found.values()) > 1e-4


def test_garbage_where_nothing_is_trained_changes_nothing():
    model, samples = decoder(), batch()
    expected, result = gradients(samples, model)
    for s in samples:
        free = s.weights == 0
        s.logprobs, s.advantages = np.where(free, -np.inf, s.logprobs), np.where(free, np.nan, s.advantages)
    actual, dirty = gradients(samples, model)
    assert all(torch.equal(actual[n], expected[n]) for n in expected)
    assert dirty.metrics == result.metrics


def test_metrics_are_sums_over_trained_tokens():
    model, samples = decoder(torch.float64), [s for s in batch() if s.loss == "policy"]
    _, result = gradients(samples, model, 30)
    clipped, ratios, tokens = 0, 0.0, 0
    for s in samples:
        on = s.weights[1:] != 0
        old = s.logprobs if s.old_logprobs is None else s.old_logprobs
        r, a = np.exp(plain_logprobs(model, s).detach().numpy() - old[1:])[on], s.advantages[1:][on]
        clipped += (((a > 0) & (r > 1.28)) | ((a < 0) & (r < 0.8))).sum()
        ratios, tokens = ratios + r.sum(), tokens + on.sum()
    assert result.metrics["tokens"] == tokens and result.metrics["clipped"] == clipped > 0
    assert result.metrics["ratio"] == pytest.approx(ratios)
    assert 0 < result.metrics["entropy"] < tokens * np.log(VOCAB)


def test_checkpointing_changes_nothing():
    expected, _ = gradients(batch(), decoder())
    assert_same(gradients(batch(), decoder(), checkpointing=True)[0], expected, 1e-6)


def test_bfloat16_autocast_is_close_and_leaves_weights_alone():
    model = decoder()
    expected, exact = gradients(batch(), model)
    found, result = gradients(batch(), model, autocast=torch.bfloat16)
    assert all(g.dtype == torch.float32 for g in found.values())
    flat, reference = (torch.cat([g[n].flatten() for n in expected]) for g in (found, expected))
    assert torch.nn.functional.cosine_similarity(flat, reference, dim=0) > 0.99
    assert not torch.equal(flat, reference)  # it was bfloat16
    for a, b in zip(result.logprobs, exact.logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=0.1)


def test_nothing_to_train():
    for samples in ([], [s for s in batch() if not s.mask.any() and not s.weights.any()]):
        found, result = gradients(samples, decoder())
        assert found == {} and result.metrics == {"loss": 0.0, "tokens": 0.0} and len(result.logprobs) == len(samples)


def test_what_cannot_be_trained_is_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="samples ask for the loss value; given were policy, supervised"):
        gradients([sample(rng, np.arange(3), 2, loss="value")], decoder())
    with pytest.raises(ValueError, match="first token"):
        gradients([sample(rng, np.zeros(0), 2)], decoder())


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "model_type": "llama"}])
def test_the_same_on_cuda_in_bfloat16(changes, checkpointing, monkeypatch):
    """Through the kernels for it, attention inside packed sequences too."""
    changes = {"head_dim": 16, **changes}
    samples, sees, seen = batch(), Gpu.see, []
    monkeypatch.setattr(Gpu, "see", lambda *args: seen.append(1) or sees(*args))
    expected, reference = gradients(samples, decoder(**changes))
    device = torch.device("cuda")
    model = decoder(**changes).to(device)
    compute = training_pass.Compute(device, 40, autocast=torch.bfloat16, checkpointing=checkpointing)
    result = training_pass.forward_backward(model, samples, LOSSES, compute)
    assert seen
    for name, parameter in model.named_parameters():
        wrong = float((parameter.grad.cpu() - expected[name]).norm() / expected[name].norm())
        assert wrong < 0.08, f"{name}: {wrong}"
    for a, b in zip(result.logprobs, reference.logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=0.1)
    again = training_pass.forward(model, samples, compute)
    for a, b in zip(again, result.logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.gpu
def test_the_same_on_cuda():
    samples = batch()
    expected, reference = gradients(samples, decoder())
    device = torch.device("cuda")
    model = decoder().to(device)
    result = training_pass.forward_backward(model, samples, LOSSES, training_pass.Compute(device, 40))
    assert_same({n: p.grad.cpu() for n, p in model.named_parameters()}, expected, 2e-3)
    assert result.metrics["tokens"] == reference.metrics["tokens"]
    for a, b in zip(result.logprobs, reference.logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)
