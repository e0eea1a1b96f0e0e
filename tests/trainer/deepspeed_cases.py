"""Rows and trainers for the tests of DeepSpeed, made alike by the test and by the processes that it starts."""

from pathlib import Path

from trainer_cases import batch, decoder, value_model

from tidemill.controller.trainer_group import deal
from tidemill.trainer.companions import Critic, Reference
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.optimizer import Optimizer
from tidemill.weight_sync.shared_memory_transport import SharedMemorySender


def dealt_rows(name, ranks):
    """The rows of each rank. "NUMBER": of that seed; "one": all in the first rank; "few": one row; "none"."""
    rows = [] if name == "none" else batch(int(name) if name.isdigit() else 0)
    if name == "few":
        rows = rows[:1]
    if name == "one":
        return [rows, *[[] for _ in range(ranks - 1)]]
    return [[rows[i] for i in each] for each in deal(rows, ranks)]


def trainer_on(settings, case, ranks=None, optimizer=Optimizer):
    """A trainer of a tiny model, with critic and moving reference where the case has them."""
    tied = {"tie_word_embeddings": case.get("tied", True)}
    model = decoder(**tied)
    more = {}
    if case.get("folder"):
        more["sender"] = SharedMemorySender(Path(case["folder"]), partial=settings.ranks > 1)
    if case.get("companions"):
        more["reference"] = Reference(decoder(seed=3, **tied), every=1, decay=0.9)
        more["critic"] = Critic(value_model(), settings, 9)
    return NativeTrainer(model, settings, steps=9, ranks=ranks, optimizer=optimizer, **more)
