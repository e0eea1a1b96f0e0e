"""Sums of gradients over replicas in few bits: what they send, what they owe, and what a checkpoint keeps of it."""

import math

import pytest
import torch
import torch.distributed as dist
from replicas_in_threads import Replicas, groups, together
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from trainer_cases import LOSSES, batch, decoder

from tidemill.core.errors import CheckpointError, TrainingDiverged
from tidemill.core.types import LossSpec
from tidemill.trainer import replica_sums
from tidemill.trainer.replica_sums import ReplicaSums
from tidemill.trainer.trainer_kinds import TrainerSettings

SHAPES = {"matrix": (70, 31), "vector": (5,), "one": (1,), "none": (0, 4), "whole": (2, 256)}
NARROW = ("int8", "bfloat16")
SUPERVISED = LossSpec("cross_entropy")
HALF_STEP = {"int8": 1 / 254, "bfloat16": 1 / 256}  # of a block's largest magnitude


class Sums:
    """Replicas of some parameters without a trainer."""

    def __init__(self, kind, count, shapes=SHAPES):
        self.parameters = [{n: nn.Parameter(torch.zeros(s)) for n, s in shapes.items()} for _ in range(count)]
        self.sums = [ReplicaSums(self.parameters[i], kind, group, i, count) for i, group in enumerate(groups(count))]

    def add_up(self, gradients, scale=1.0):
        """The sums that all replicas have, and the bytes that each sent. gradients: by name, of each replica."""
        for parameters, each in zip(self.parameters, gradients, strict=True):
            for name, parameter in parameters.items():
                parameter.grad = each[name].clone() if name in each else None
        sent = together(lambda i: self.sums[i].add_up(scale), len(self.sums))
        found = [{name: p.grad for name, p in parameters.items()} for parameters in self.parameters]
        for other in found[1:]:
            assert all(torch.equal(bits(other[name]), bits(grad)) for name, grad in found[0].items())
        return found[0], sent

    def owed(self):
        """The errors of each replica, by name."""
        return [{b.name.split(".", 2)[2]: b.tensor.clone() for b in each.state()} for each in self.sums]


def bits(tensor):
    return tensor.view(torch.int32)


def drawn(count, seed, shapes=SHAPES):
    made = torch.Generator().manual_seed(seed)
    return [
        {n: torch.randn(s, generator=made) * 10.0 ** torch.randint(-3, 3, s, generator=made) for n, s in shapes.items()}
        for _ in range(count)
    ]


def added(tensors):
    return {name: sum(each[name].double() for each in tensors) for name in tensors[0]}


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("kind", NARROW)
@pytest.mark.parametrize("bucket", [1, 1000, 8 << 20])
def test_what_was_applied_and_what_is_owed_are_all_gradients(kind, count, bucket, monkeypatch):
    """Over updates of different scales; and what is owed does not grow with their number."""
    monkeypatch.setattr(replica_sums, "BUCKET", bucket)
    replicas = Sums(kind, count)
    wanted = applied = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step, scale in enumerate((0.5, 0.01, 2.0, 1.0, 0.3, 1.0)):
        gradients = drawn(count, step)
        found, _ = replicas.add_up(gradients, scale)
        wanted = {name: wanted[name] + scale * total for name, total in added(gradients).items()}
        applied = {name: applied[name] + scale * total.double() for name, total in found.items()}
    owed = added(replicas.owed())
    for name, total in wanted.items():
        if total.numel():
            largest = 4e3 * count  # of any gradient and any sum: six powers of ten, and four deviations
            assert (applied[name] + owed[name] - total).abs().max() <= 1e-6 * largest, name
            assert (applied[name] - total).abs().max() <= 2 * HALF_STEP[kind] * largest, name


def test_a_component_below_the_resolution_is_applied_over_time():
    replicas, steps = Sums("int8", 2, {"p": (256,)}), 150
    gradient = torch.full((256,), 1e-3)
    gradient[0] = 1.0
    total = sum(replicas.add_up([{"p": gradient}] * 2)[0]["p"] for _ in range(steps))
    assert (total[1:] / (steps * 2e-3) - 1).abs().max() < 0.06


@pytest.mark.parametrize("kind", NARROW)
def test_the_first_sum_is_near_the_true_one(kind):
    gradients = drawn(4, 0)
    found, _ = Sums(kind, 4).add_up(gradients)
    for name, total in added(gradients).items():
        most = sum(float(each[name].abs().max()) for each in gradients) if total.numel() else 0.0
        assert not total.numel() or (found[name] - total).abs().max() <= 2.02 * HALF_STEP[kind] * most, name


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_bytes_are_those_of_the_tensors_that_collectives_get(count, monkeypatch):
    """Counted where they are handed over: of float32 2 (N - 1) / N a number, of int8 at most 0.27 of it."""
    shapes, counted = {"a": (300, 257), "b": (256,)}, []

    def counts(name, bytes_sent):
        real = getattr(dist, name)

        def counting(*given, **named):
            counted.append(bytes_sent(*given))
            return real(*given, **named)

        monkeypatch.setattr(dist, name, counting)

    counts("all_reduce", lambda tensor: 2 * (count - 1) * tensor.numel() * tensor.itemsize // count)
    counts("all_to_all_single", lambda output, input: (count - 1) * input.numel() * input.itemsize // count)
    counts("all_gather", lambda outputs, input: (count - 1) * input.numel() * input.itemsize)
    sent = {}
    for kind in ("float32", *NARROW):
        counted.clear()
        _, each = Sums(kind, count, shapes).add_up(drawn(count, 0, shapes))
        assert sum(each) == sum(counted) and len(set(each)) == 1
        sent[kind] = each[0]
    assert sent["float32"] == 2 * (count - 1) * 4 * (300 * 257 + 256) // count
    assert sent["int8"] <= 0.27 * sent["float32"] and sent["bfloat16"] <= 0.51 * sent["float32"]


@pytest.mark.parametrize("kind", ("float32", *NARROW))
@pytest.mark.parametrize("broken", [math.inf, math.nan])
@pytest.mark.parametrize("at", [0, -1])  # of the first part, and of the last
def test_what_is_not_finite_is_seen_by_all_and_is_not_owed(kind, broken, at):
    replicas = Sums(kind, 2)
    gradients = drawn(2, 0)
    gradients[1]["matrix" if at == 0 else "whole"].view(-1)[at] = broken
    found, _ = replicas.add_up(gradients)
    assert not found["matrix" if at == 0 else "whole"].view(-1)[at].isfinite()
    again, _ = replicas.add_up(drawn(2, 1))
    assert all(each.isfinite().all() for each in again.values())


def test_an_update_without_gradient_leaves_what_is_owed():
    replicas = Sums("int8", 2)
    replicas.add_up(drawn(2, 0))
    before = replicas.owed()
    replicas.add_up(drawn(2, 1), scale=0.0)
    assert all(torch.equal(a[name], b[name]) for a, b in zip(before, replicas.owed(), strict=True) for name in a)


def test_a_parameter_without_gradient_has_a_zero_one():
    found, _ = Sums("int8", 2).add_up([{}, {"vector": torch.ones(5)}])
    assert (found["vector"] - 1).abs().max() < 0.01 and not found["matrix"].any()


# a trainer of several replicas


def settings(kind, **changes):
    return TrainerSettings(lr=0.01, device="cpu", ranks=2, shard="none", reduce=kind, **changes)


def replicas(kind="int8", count=2, seed=0):
    chosen = settings(kind) if kind != "float32" else TrainerSettings(lr=0.01, device="cpu")
    return Replicas(count, chosen, lambda: decoder(seed=seed))


async def steps(them, *seeds, scale=1 / 50):
    for seed in seeds:
        await them.all(lambda i, trainer, seed=seed: trainer.forward_backward(batch(10 * seed + i), LOSSES))
        await them.all(lambda i, trainer: trainer.apply(scale))


def weights(them):
    return [dict(trainer.decoder.state_dict()) for trainer in them.trainers]


def owed(them):
    return [{b.name.split(".", 2)[2]: b.tensor.clone() for b in t._sums.state()} for t in them.trainers]


def same(a, b):
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("kind", NARROW)
async def test_equal_replicas_resume_to_the_bit(kind, tmp_path):
    them = replicas(kind)
    await steps(them, 1, 2)
    await them.save(tmp_path / "c")
    kept = owed(them)
    await steps(them, 3, 4)
    again = replicas(kind, seed=5)
    await steps(again, 6)
    await again.load(tmp_path / "c")
    assert same(owed(again), kept) and any(error.any() for error in kept[1].values())
    await steps(again, 3, 4)
    assert same(weights(again), weights(them)) and same(owed(again), owed(them))
    assert same(weights(them)[:1], weights(them)[1:])


@pytest.mark.parametrize("kind, count", [("int8", 4), ("int8", 3), ("float32", 2), ("float32", 1)])
async def test_other_replicas_owe_the_same_in_all(kind, count, tmp_path):
    them = replicas()
    await steps(them, 1, 2)
    await them.save(tmp_path / "c")
    total = added(owed(them))
    others = replicas(kind, count, seed=5)
    await others.load(tmp_path / "c")
    first, *rest = owed(others)
    assert all((first[name] - each).abs().max() <= 1e-6 * each.abs().max() + 1e-12 for name, each in total.items())
    assert not any(error.any() for each in rest for error in each.values())
    await others.save(tmp_path / "d")  # before any update, too
    await others.load(tmp_path / "d")
    assert same(owed(others), [first, *rest])
    if kind == "float32":
        with_it = await next_gradient(others)
        assert not any(owed(others)), "it is paid"
        await others.load(tmp_path / "d")
        for trainer in others.trainers:
            trainer._sums.restore([])
        without = await next_gradient(others)
        for name, each in total.items():
            assert (with_it[name] - without[name] - 50 * each).abs().max() <= 1e-5 * without[name].abs().max(), name


async def next_gradient(them, scale=1 / 50):
    await them.all(lambda i, trainer: trainer.forward_backward(batch(i), LOSSES))
    await them.all(lambda i, trainer: them._offload(lambda: trainer._sums.add_up(scale)))
    return {name: p.grad.clone() for name, p in them.trainers[0].decoder.named_parameters()}


async def test_a_checkpoint_without_errors_owes_nothing(tmp_path):
    them = replicas("float32")
    await steps(them, 1)
    await them.save(tmp_path / "c")
    assert not any("feedback" in name for file in tmp_path.rglob("opt*") for name in load_file(file))
    others = replicas("int8")
    await steps(others, 2)
    await others.load(tmp_path / "c")
    assert not any(error.any() for each in owed(others) for error in each.values())
    await steps(others, 3)
    assert any(error.any() for error in owed(others)[1].values())


def rewrite(file, change):
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata)


DAMAGE = {
    "missing": (lambda t: t.pop("feedback.1.norm.weight"), "1 tensors are missing, among them feedback.1.norm.weight"),
    "surplus": (lambda t: t.update({"feedback.1.x": torch.zeros(1)}), "do not belong here, among them feedback.1.x"),
    "no replica": (lambda t: t.update({"feedback.x": torch.zeros(1)}), "are missing, among them feedback.2"),
    "shape": (lambda t: t.update({"feedback.1.norm.weight": torch.zeros(3)}), r"\(3,\) torch.float32, this trainer has"),
    "dtype": (lambda t: t.update({"feedback.1.norm.weight": torch.zeros(16).double()}), "float64, this trainer has"),
}


@pytest.mark.parametrize("damage", DAMAGE)
async def test_damaged_errors_are_found_before_anything_changes(damage, tmp_path):
    them, (change, message) = replicas(), DAMAGE[damage]
    await steps(them, 1)
    await them.save(tmp_path / "c")
    await steps(them, 2)
    before = weights(them), owed(them)
    rewrite(tmp_path / "c" / "optimizer-rank-2-of-2.safetensors", change)
    with pytest.raises(CheckpointError, match=message):
        await them.load(tmp_path / "c")
    assert same(weights(them), before[0]) and same(owed(them), before[1])


@pytest.mark.parametrize("kind", NARROW)
async def test_two_runs_have_the_same_bits_and_a_broken_gradient_ends_both_replicas(kind):
    one, other = replicas(kind), replicas(kind)
    for them in (one, other):
        await steps(them, 1, 2, 3)
    assert same(weights(one), weights(other)) and same(owed(one), owed(other))
    next(one.trainers[1].decoder.parameters()).grad = torch.full_like(next(one.trainers[1].decoder.parameters()), math.inf)
    ended = await one.all(lambda i, trainer: result_or_error(trainer.apply(1.0)))
    assert [type(each) for each in ended] == [TrainingDiverged] * 2
    assert (await one.trainers[0].telemetry()).counters["reduced_bytes"] > 0


async def result_or_error(call):
    try:
        return await call
    except Exception as error:
        return error


@pytest.mark.slow
async def test_narrow_sums_learn_as_exact_ones_do():
    losses = {}
    for kind in ("float32", *NARROW):
        them, found = replicas(kind), []
        for _ in range(30):
            results = await them.all(
                lambda i, trainer: trainer.forward_backward(batch(i), {"policy": SUPERVISED, "supervised": SUPERVISED})
            )
            found.append(sum(each.metrics["loss"] for each in results))
            await them.all(lambda i, trainer: trainer.apply(1 / 50))
        losses[kind] = found
    for kind in NARROW:
        assert losses[kind][-1] < 0.7 * losses[kind][0]
        assert abs(losses[kind][-1] - losses["float32"][-1]) < 0.02 * losses["float32"][0]


@pytest.mark.parametrize(
    "given", [{"shard": "zero2"}, {"shard": "zero3"}, {"ranks": 1, "shard": "none"}, {"ranks": 1, "shard": "hsdp"}]
)
def test_what_has_no_replicas_is_refused(given):
    with pytest.raises(ValueError, match="narrows sums over replicas only; give at least 2 ranks"):
        TrainerSettings(**{"ranks": 4, "reduce": "int8"} | given)
    assert TrainerSettings(ranks=4, shard="hsdp", reduce="int8").reduce == "int8"
