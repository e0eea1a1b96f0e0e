"""Training pass: runs samples as micro-batches through the decoder and sums up loss gradients.

    samples -> split -> pack -> decoder -> logprobs of the predicted tokens only -> weights * terms -> backward
                                        -> values, where there is a critic    ->

Nothing is divided here (I6): the samples carry the weights of the reduction, and `apply` gets the scale of the step.
Attempts whose gradient is known to be zero (no weight, or no advantage and a loss proportional to it) run forward only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from tidemill.algorithms.losses import PROPORTIONAL, evaluate, loss_by_name
from tidemill.core.types import Array, LossSpec, Sample, TrainResult
from tidemill.models.adapter_dropout import Dropout, DroppedRows, Dropping
from tidemill.models.attention import packed_attention
from tidemill.models.decoder import Decoder
from tidemill.models.logprobs import token_logprobs
from tidemill.models.served_linear import gathering
from tidemill.models.trained_linear import prepares_sizes
from tidemill.models.value_model import ValueModel
from tidemill.trainer.micro_batches import Batch, BatchRow, Unit, by_attempt, pack, prefixes, rows_of, split
from tidemill.trainer.parallel_micro_batches import Lanes, lanes_for
from tidemill.trainer.ranks import Ranks

Split = tuple[list[list[BatchRow]], int]
"""Micro-batches, and the number of them to run in parallel."""


def _idle_row() -> list[BatchRow]:
    """A row of one token that predicts one, for passes without a sample."""
    tokens, none = np.zeros(2, np.int32), np.zeros(2, np.float32)
    sample = Sample(tokens, np.array([False, True]), none, np.full(2, -1, np.int32), none, none)
    return rows_of([sample])


IDLE = _idle_row()  # the micro-batch of a rank that has none left


@dataclass(frozen=True, slots=True)
class Compute:
    """Computation settings of a pass: device, token budget, dtype, checkpointing, parallel lanes."""

    device: torch.device
    budget: int  # tokens of all micro-batches that run at the same time
    autocast: torch.dtype | None = None  # None: the weights' own dtype
    checkpointing: float = False  # share of the layers
    lanes: Lanes = field(default_factory=Lanes)
    ranks: Ranks = field(default_factory=Ranks)

    def split(self, units: Sequence[Unit]) -> Split:
        """Split units of rows into micro-batches; returns them and the number to run in parallel."""
        sizes = [sum(row.length for row in unit) for unit in units]
        tokens = min(self.budget, sum(sizes))
        lanes = lanes_for(self.lanes.threads, tokens, max(sizes, default=0))
        return split(units, self.budget if lanes == 1 else tokens // lanes), lanes

    def each(
        self, run: Callable[[list[BatchRow]], None], split: Split, modules: Sequence[nn.Module], gradient: bool
    ) -> None:
        """Call `run` with each micro-batch, and with `IDLE` where other ranks have more of them."""
        parts, lanes = split
        for portion in self.ranks.rounds(parts, IDLE, modules, gradient):
            self.lanes.each(run, portion, lanes)

    def gathering(self, *modules: nn.Module) -> AbstractContextManager[None]:
        return gathering(*modules, keeps=self.ranks.keeps_copies) if self.ranks.gathers else nullcontext()

    def pack(self, rows: list[BatchRow]) -> Batch:
        """Pack rows, padded to one of few sizes where matrix products keep something for each size."""
        keeps = prepares_sizes(self.device.type, self.autocast is not None)
        return pack(rows, self.device, up_to=self.budget if keeps else 0)

    def hidden(self, decoder: Decoder, batch: Batch, dropped: DroppedRows | None = None) -> Tensor:
        """The hidden states [M, D] that the batch's M target tokens are predicted from.

        dropped: rows of which adapters drop inputs; None: they drop nothing.
        """
        self.lanes.take()
        attend = packed_attention(batch.families, decoder.arch.windows, batch.tokens.device)
        autocast = torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None)
        with autocast, Dropping(dropped):
            checkpointing = self.checkpointing if torch.is_grad_enabled() else 0.0
            hidden = decoder(batch.tokens, batch.positions, attend, batch.wanted, checkpointing=checkpointing)
        return hidden.index_select(0, batch.predictors)

    def logprobs(self, decoder: Decoder, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logprobs [M] of the batch's target tokens, and entropies [M] at their positions."""
        logprobs, entropy = token_logprobs(
            decoder, hidden, batch.targets, batch.temperature, entropy=True, support=batch.support, dtype=self.autocast
        )
        assert entropy is not None
        return logprobs, entropy


def _added_up(found: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Sum up the metrics of all micro-batches, and fetch them from the device at once."""
    sums: dict[str, Tensor] = {}
    for metrics in found:
        for name, value in metrics.items():
            sums[name] = sums[name] + value if name in sums else value
    values = torch.stack([v.double() for v in sums.values()]).tolist()
    return dict(zip(sums, values, strict=True))


def forward(model: Decoder | ValueModel, samples: Sequence[Sample], compute: Compute) -> list[Array]:
    """Logprobs of each sample's tokens at its temperature, or a critic's values: [T] float32 each.

    Tokens that were not sampled and have no weight get 0.
    """
    found = [np.zeros(len(s.tokens), np.float32) for s in samples]
    modules = [model.decoder, model.head] if isinstance(model, ValueModel) else [model]

    @torch.no_grad()
    def run(part: list[BatchRow]) -> None:
        batch = compute.pack(part)
        if isinstance(model, ValueModel):
            numbers = model.values(compute.hidden(model.decoder, batch))
        else:
            numbers, _ = compute.logprobs(model, batch, compute.hidden(model, batch))
        if part is not IDLE:
            _scatter(found, batch, numbers)

    with compute.gathering(*modules):
        compute.each(run, compute.split([[row] for row in rows_of(samples)]), modules, gradient=False)
    return found


def forward_backward(
    decoder: Decoder,
    samples: Sequence[Sample],
    losses: Mapping[str, LossSpec],
    compute: Compute,
    at_peak: Callable[[], object] | None = None,
    critic: ValueModel | None = None,
    dropout: Dropout | None = None,
) -> TrainResult:
    """Add the gradient of the sum of weight * loss over tokens to the parameters' `.grad`.

    A critic's parameters are included. at_peak: called once, when the activations of the largest micro-batch are in memory.
    dropout: of adapters' inputs; None: nothing is dropped. Raises ValueError when a sample names a loss that is not in
    `losses`.
    """
    if unknown := sorted({s.loss for s in samples} - set(losses)):
        raise ValueError(f"samples ask for the loss {', '.join(unknown)}; given were {', '.join(losses) or 'none'}")
    functions = {name: loss_by_name(spec) for name, spec in losses.items()}
    proportional = {name for name, spec in losses.items() if spec.name in PROPORTIONAL and not spec.also}
    units = by_attempt(rows_of(samples))
    moving = [any(_has_gradient(row.sample, proportional) for row in unit) for unit in units]
    logprobs = [np.zeros(len(s.tokens), np.float32) for s in samples]
    found = [{name: torch.zeros((), device=compute.device) for name in ("loss", "tokens")}]  # metrics, by micro-batch

    def run(part: list[BatchRow], with_gradient: bool, largest: list[BatchRow] | None) -> None:
        """Run one micro-batch in a function, so that its tensors are freed before the next one."""
        with torch.set_grad_enabled(with_gradient):
            batch = compute.pack(part)
            dropped = dropout and dropout.of(prefixes(batch), batch.wanted)
            hidden = compute.hidden(decoder, batch, dropped)
            live, entropy = compute.logprobs(decoder, batch, hidden)
            values = None
            if critic is not None:
                own = hidden if critic.decoder is decoder else compute.hidden(critic.decoder, batch, dropped)
                values = critic.values(own)
            total = 0 * (live.sum() if values is None else live.sum() + values.sum()) if part is IDLE else live.new_zeros(())
            for name in batch.losses if part is not IDLE else ():
                value, metrics = evaluate(functions[name], *batch.loss_input(name, live, entropy, values))
                found.append(metrics)
                total = total + value
        if with_gradient:
            if at_peak is not None and part is largest:
                at_peak()
            compute.lanes.take()
            compute.ranks.backward(total)
        if part is not IDLE:
            _scatter(logprobs, batch, live.detach())

    modules = [decoder] if critic is None else [decoder, critic.decoder, critic.head]
    with compute.gathering(*modules):
        for with_gradient in (True, False):
            chosen = [unit for unit, moves in zip(units, moving, strict=True) if moves is with_gradient]
            parts, lanes = compute.split(chosen)
            largest = max(parts, key=lambda part: sum(row.length - row.shared for row in part), default=None)
            work = partial(run, with_gradient=with_gradient, largest=largest)
            compute.each(work, (parts, lanes), modules, with_gradient)
    return TrainResult(_added_up(found), logprobs, drops=dropout is not None)


def _has_gradient(sample: Sample, proportional: set[str]) -> bool:
    trained = sample.weights != 0
    if sample.loss in proportional:
        trained &= sample.advantages != 0
    return bool(trained.any())


def _scatter(into: list[Array], batch: Batch, logprobs: Tensor) -> None:
    values = logprobs.float().cpu().numpy()
    end = 0
    for row in batch.rows:
        start, end = end, end + len(row.where)
        into[row.index][row.where] = values[start:end]
