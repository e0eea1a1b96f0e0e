"""Program of one rank for `test_ranks.py`: computes gradients with others and compares them with those of one rank.

python rank_program.py MEETING RANK SIZE      cases as JSON lines on stdin, for each a JSON line with the largest error
"""

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
import torch.distributed
from algorithm_cases import LONGEST, as_given, logprobs_of, played, prepared, settings
from test_critic import PPO
from test_critic import rows as rows_of_critic
from trainer_cases import LOSSES, batch, decoder, gradients, parameters, value_model

from tidemill.algorithms.prepare_step import ConfiguredAlgorithm
from tidemill.controller.trainer_group import deal
from tidemill.core.types import Version
from tidemill.models.adapter_config import AdapterConfig
from tidemill.models.adapter_dropout import Dropout
from tidemill.models.local_shards import first_row, local
from tidemill.models.lora import adapters, attach
from tidemill.models.quantised_base import quantise_base
from tidemill.trainer.companions import Critic, Reference
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.ranks import Ranks, ShardedRanks
from tidemill.trainer.trainer_kinds import TrainerSettings
from tidemill.weight_sync.shared_memory_transport import SharedMemorySender

PRESETS = {
    "grpo": settings("grpo", reference={"kl": 0.3, "estimator": "k3"}, entropy=0.1),
    "gspo": settings("gspo"),
    "ppo": settings("ppo"),
    "dpo": settings("dpo"),
    "sft": settings("sft"),
}
DTYPES = {"float64": torch.float64, "float32": torch.float32}


def rows_for(name):
    """(samples, losses) of a preset; "ragged": rows of every kind, one of them longer than all others together."""
    if name in ("ragged", "one row"):
        rows = batch()
        if name == "one row":
            return rows[:1], LOSSES
        longest = max(range(len(rows)), key=lambda i: len(rows[i].tokens))
        row = rows[longest]
        grown = {
            key: np.concatenate([value] * 12)[:300]
            for key in ("tokens", "mask", "logprobs", "versions", "advantages", "weights")
            if (value := getattr(row, key)) is not None
        }
        grown["mask"][0], grown["weights"][0] = False, 0
        return [*rows, replace(row, **grown, old_logprobs=None)], LOSSES
    model = decoder(torch.float64)
    groups = played(model)
    chosen = PRESETS[name]
    groups = as_given(groups, chosen.given) if chosen.given else groups
    ready = prepared(ConfiguredAlgorithm(chosen, LONGEST), groups, logprobs_of(groups, model))
    return ready.updates[0].samples, ready.losses


LORA = AdapterConfig(rank=3, alpha=5, rank_pattern={"v_proj": 1, "down_proj": 7}, base="a model")


def adapt(policy, dropout=0.0):
    """An adapter of some matrices, with ranks that ranks do not divide, and nothing in it 0."""
    generator = torch.Generator().manual_seed(5)
    attach(policy, replace(LORA, dropout=dropout), generator)
    with torch.no_grad():
        for _, adapter in adapters(policy):
            for b in adapter.b:
                b.normal_(0.0, 0.3, generator=generator)


def run(case, made):
    samples, losses = rows_for(case["rows"])
    dtype = DTYPES[case["dtype"]]
    with_critic = case["rows"] == "ppo"

    def models():
        policy = decoder(dtype, **case.get("model", {}))
        if case.get("base"):
            quantise_base(policy, case["base"])
        if case.get("lora"):
            adapt(policy, case.get("dropout", 0.0))
        critic = value_model(policy if case.get("head") else None, dtype=dtype) if with_critic else None
        if critic is not None and case.get("lora") and not critic.shared:
            adapt(critic.decoder, case.get("dropout", 0.0))
        return policy, critic

    policy, critic = models()
    dropout = Dropout(seed=3, update=2) if case.get("dropout") else None
    expected, alone = gradients(samples, policy, losses=losses, critic=critic, dropout=dropout)
    ranks = made(case["shard"], case.get("replicas", 2))
    policy, critic = models()
    modules = [] if critic is None else [critic.head] if critic.shared else [critic.decoder, critic.head]
    ranks.shard(policy, *modules)
    mine = [samples[i] for i in deal(samples, ranks.size)[ranks.rank]]
    how = {"checkpointing": case.get("checkpointing", False), "ranks": ranks}
    _, result = gradients(mine, policy, budget=40, losses=losses, critic=critic, dropout=dropout, **how)
    trained = {name: p for name, p in parameters(policy, critic).items() if p.requires_grad}
    ranks.replica_sums(trained, case.get("reduce", "float32")).add_up(1.0)
    found = {name: p.grad for name, p in trained.items()}
    assert not [name for name, p in parameters(policy, critic).items() if p.grad is not None and not p.requires_grad]
    named, worst, where, missed, size = parameters(policy, critic), 0.0, "", 0.0, 0.0
    for name, whole in expected.items():
        rows = local(found[name])
        first = first_row(named[name])
        own = whole[first : first + len(rows)]
        missed, size = missed + float((rows - own).double().square().sum()), size + float(whole.double().square().sum())
        error = float((rows - own).norm() / (whole.norm() + 1e-30))
        worst, where = max((worst, where), (error, name))
    assert set(found) == set(expected), set(found) ^ set(expected)
    totals = ranks.sums([round(result.metrics["tokens"])])
    assert totals == [round(alone.metrics["tokens"])], (totals, alone.metrics)
    return {"error": (missed / size) ** 0.5, "worst": worst, "where": where, "rows": len(mine)}


def resumed(case, made, folder):
    """The largest difference of what ranks owe in all, saved by `shard` and loaded by `then`; and whether it moved."""
    kind = {"lr": 0.01, "device": "cpu", "reduce": "int8"}

    def trainer(shard):
        ranks = made(shard, 2)
        return NativeTrainer(decoder(), TrainerSettings(**kind, shard=shard, ranks=ranks.size), steps=4, ranks=ranks)

    async def step(trainer):
        await trainer.forward_backward(batch(trainer._ranks.rank), LOSSES)
        await trainer.apply(1 / 50)

    async def both():
        before, after = trainer(case["shard"]), trainer(case["then"])
        await step(before)
        await before.snapshot()
        torch.distributed.barrier()
        await before.save(str(folder))
        torch.distributed.barrier()
        await after.load(str(folder))
        owed, found = _owed(before), _owed(after)
        error = max(float((found[name] - each).abs().max() / each.abs().max()) for name, each in owed.items())
        pairs = zip(before._sums.state(), after._sums.state(), strict=True)
        same = all(a.name == b.name and torch.equal(a.tensor, b.tensor) for a, b in pairs)
        await step(after)  # it goes on
        return {"error": error, "same": same}

    return asyncio.run(both())


def _owed(trainer):
    """What all ranks owe, by parameter."""
    found = {}
    for block in trainer._sums.state():
        whole, first = torch.zeros(block.shape), block.offset[0]
        whole[first : first + len(block.tensor)] = block.tensor
        torch.distributed.all_reduce(whole)
        found[block.name.split(".", 2)[2]] = whole
    return found


def act(case, made, size):
    """The metrics of what a trainer, one of several ranks or the only one, does in turn."""
    ranks = made(case["shard"], case.get("replicas", 2)) if size > 1 else None
    settings = TrainerSettings(lr=0.01, weight_decay=0.1, micro_batch_tokens=60, device="cpu", ranks=size)
    model = decoder(seed=case.get("seed", 0), tie_word_embeddings=case.get("tied", True))
    reference, critic = Reference(decoder(seed=3), every=1, decay=0.9), Critic(value_model(), settings, 9)
    rows, losses, lora = batch, LOSSES, LORA if case.get("lora") else None
    if lora is not None:
        rows, losses, reference = rows_of_critic, PPO, Reference(model, without_adapter=True)
        adapt(model)
        adapt(critic.model.decoder)
    sender = SharedMemorySender(Path(case["folder"]), partial=size > 1)
    parts = {"reference": reference, "critic": critic, "sender": sender, "ranks": ranks, "lora": lora}
    trainer = NativeTrainer(model, settings, steps=9, **parts)
    answers = []

    async def everything():
        for verb, what in case["do"]:
            if verb == "step":
                mine = deal(samples := rows(what), size)[ranks.rank if ranks else 0]
                result = await trainer.forward_backward([samples[i] for i in mine], losses)
                answers.append({"tokens": result.metrics["tokens"], **await trainer.apply(1 / 50)})
            elif verb == "save":
                await trainer.snapshot()
                await trainer.save(what)
            elif verb == "load":
                await trainer.load(what)
            elif verb == "export":
                await trainer.export(what)
            elif verb == "publish":
                update = await trainer.publish(Version(what))
                answers.append({"fingerprint": update.version.fingerprint, "bytes": update.bytes})
            elif verb == "held":
                kept = [*trainer.decoder.parameters(), *reference.decoder.parameters(), *critic.parameters.values()]
                moments = [block.tensor for part in (trainer._optimizer, critic._optimizer) for block in part.state()]
                answers.append({"bytes": sum(local(each).nbytes for each in [*kept, *moments])})

    asyncio.run(everything())
    trainer._ranks = Ranks()  # the next case's trainer meets the others, too
    asyncio.run(trainer.close())
    return {"answers": answers}


def main():
    torch.set_num_threads(1)
    meeting, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    known = {}

    def made(shard, replicas):
        if (shard, replicas) not in known:
            known[shard, replicas] = ShardedRanks(rank, size, shard, replicas, torch.device("cpu"), meeting)
        return known[shard, replicas]

    for line in sys.stdin:
        case = json.loads(line)
        if "do" in case:
            answer = act(case, made, size)
        elif "then" in case:
            answer = resumed(case, made, Path(meeting).parent / "-".join(case.values()))
        else:
            answer = run(case, made)
        print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
