"""Rows and trainers for the tests of DeepSpeed, made alike by the test and by the processes that it starts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from trainer_cases import LOSSES, batch, decoder, value_model

from tidemill.controller.trainer_group import deal
from tidemill.core.types import LossSpec
from tidemill.trainer.companions import Critic, Reference
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.optimizer import Optimizer
from tidemill.weight_sync.shared_memory_transport import SharedMemorySender


def dealt_rows(name, ranks):
    """The rows of each rank. "NUMBER": of that seed; "one": all in the first rank; "few": one row; "none"."""
    rows = [] if name == "none" else batch(int(name) if name.isdigit() else 0)
    rng = np.random.default_rng(0)
    for row in rows:
        row.values, row.returns = (
            np.where(row.mask, rng.normal(size=row.mask.shape), 0).astype(np.float32) for _ in range(2)
        )
    if name == "few":
        rows = rows[:1]
    if name == "one":
        return [rows, *[[] for _ in range(ranks - 1)]]
    return [[rows[i] for i in each] for each in deal(rows, ranks)]


def losses_of(case):
    """The losses of a case; a critic has one of its own."""
    return LOSSES | {"policy": replace(LOSSES["policy"], also=(LossSpec("value"),))} if case.get("companions") else LOSSES


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
