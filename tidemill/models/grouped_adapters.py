"""Adapters of several policies on one decoder, unmerged: each row of a step is given to its own policy's adapter.

    attach_grouped(decoder) -> SideAdapters: none yet          placing(...) -> PlacedAdapter, beside those in use
    begin(policies of the rows) -> the decoder's pass: rows sorted by policy -> `lora.Adapter` of each -> back in their order

What is added is computed as a trainer computes it. A row costs what its own adapter costs, however many policies there are;
a policy that has no adapter, or none at a matrix, adds nothing. Nothing is ever written to an adapter that is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from tidemill.core.errors import PolicyMismatch
from tidemill.core.types import Version
from tidemill.models.adapter_config import AdapterConfig
from tidemill.models.adapter_update import ReceivedAdapter, config_block, factors_of
from tidemill.models.decoder import Decoder, Layer
from tidemill.models.fingerprint import Fingerprint
from tidemill.models.hf_weights import stacked_modules
from tidemill.models.kernels.cuda.transfers import Uploads
from tidemill.models.lora import A, Adapter, B, Factor
from tidemill.models.piecewise import Work, by_rows
from tidemill.models.weight_slices import Slice


@dataclass(frozen=True, slots=True, eq=False)
class PlacedAdapter:
    """One version's adapter in the dtype and on the device of the decoder."""

    version: Version
    config: AdapterConfig
    matrices: tuple[Adapter | None, ...]  # in the order of `stacked_modules`
    fingerprint: str  # of what was received, in that dtype: for A and B that came in it, the version's own

    def verifying(self) -> Work[None]:
        """Raise PolicyMismatch unless A, B and scales are those that were received."""
        factors = [factor for adapter in filter(None, self.matrices) for factor in adapter.factors]
        if other := next((f for f in factors if self.config.of(f.module) != (f.rank, f.scale)), None):
            raise PolicyMismatch(f"{self.version}: the adapter of {other.module} has another rank or scale than came")
        found = yield from _summing(self.config, self._tensors())
        if found != self.fingerprint:
            raise PolicyMismatch(
                f"{self.version} was staged and committed, but another adapter is served: its fingerprint is {found}, "
                f"expected {self.fingerprint}"
            )

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for adapter in filter(None, self.matrices):
            for factor, a, b in zip(adapter.factors, adapter.a, adapter.b, strict=True):
                yield f"{factor.module}.{A}", a
                yield f"{factor.module}.{B}", b


def placing(
    decoder: Decoder, received: ReceivedAdapter, version: Version, uploads: Uploads | None = None
) -> Work[PlacedAdapter]:
    """Copy an adapter to where steps of the decoder can read it. `uploads`, if given, copies.

    Raises PolicyMismatch if it is not one of this model, or holds a number that is not finite.
    """
    beside = decoder.embed.weight
    found, matrices = factors_of(decoder, received), list[Adapter | None]()
    expected = yield from _summing(received.config, received.tensors.items(), beside.dtype)
    for linear, projections in stacked_modules(decoder):
        own = [(place, found[name]) for place in projections if (name := f"{place[0]}.weight") in found]
        factors = [Factor(*place, len(a), scale) for place, (a, _, scale) in own]
        matrices.append(Adapter(factors, linear.in_features, beside).requires_grad_(False) if own else None)
        if (adapter := matrices[-1]) is None:
            continue
        for (place, (a, b, _)), to_a, to_b in zip(own, adapter.a, adapter.b, strict=True):
            yield from _copying(to_a, a, f"{place[0]}.{A}", uploads)
            yield from _copying(to_b, b, f"{place[0]}.{B}", uploads)
    return PlacedAdapter(version, received.config, tuple(matrices), expected)


def _copying(into: Tensor, given: Tensor, name: str, uploads: Uploads | None) -> Work[None]:
    for rows, new in by_rows(into, given):
        if not bool(torch.isfinite(new).all()):
            raise PolicyMismatch(f"{name} holds a number that is not finite")
        if uploads is None:
            rows.copy_(new)
        else:
            uploads.copy(rows, new)
        yield


def _summing(config: AdapterConfig, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> Work[str]:
    """The fingerprint of an adapter with its configuration. dtype: to which A and B are cast; None: their own."""
    total = Fingerprint()
    total.add(config_block(config))
    for name, tensor in tensors:
        at = 0
        for (rows,) in by_rows(tensor):
            total.add(Slice(name, tuple(tensor.shape), (at, 0), rows if dtype is None else rows.to(dtype)))
            at += len(rows)
            yield
    return total.hexdigest()


class RowGroups:
    """Rows that go through a matrix together, and the adapter of each."""

    def __init__(
        self,
        policies: np.ndarray,
        adapters: Sequence[PlacedAdapter | None],
        tensor: Callable[[np.ndarray], Tensor],
    ) -> None:
        """policies: [n] numbers of the rows' policies. adapters: by policy. tensor: moves indices to the device."""
        found, counts = np.unique(policies, return_counts=True)
        self._rows, self._counts = len(policies), counts.tolist()
        self._adapters = [adapters[policy] for policy in found]
        if len(found) > 1:
            order = np.argsort(policies, kind="stable")
            self._order, self._back = tensor(order), tensor(np.argsort(order, kind="stable"))

    def added(self, matrix: int, x: Tensor, out: Tensor) -> Tensor:
        """out [n, N] plus what each row's adapter of a matrix adds for x [n, K]."""
        assert len(x) == self._rows, f"{len(x)} rows came to a matrix, and the step has {self._rows}"
        own = [None if each is None else each.matrices[matrix] for each in self._adapters]
        if all(adapter is None for adapter in own):
            return out
        if len(own) == 1:
            return _applied(own[0], x, out)
        parts = (rows.index_select(0, self._order).split(self._counts) for rows in (x, out))
        done = torch.cat([_applied(adapter, *part) for adapter, *part in zip(own, *parts, strict=True)])
        return done.index_select(0, self._back)


def _applied(adapter: Adapter | None, x: Tensor, out: Tensor) -> Tensor:
    return out if adapter is None else adapter(x, out)


class StepRows:
    """The rows of the pass under way, as all matrices of a decoder see them."""

    def __init__(self) -> None:
        none = RowGroups(np.zeros(0, np.int64), (), torch.from_numpy)
        self.every = none  # those that come to most matrices
        self.late = none  # those that the end of the last layer computes, see `Decoder.forward`


class GroupedAdapter(nn.Module):
    """The adapters at one matrix: it hangs in `Linear.adapter`, and owns none of them."""

    def __init__(self, matrix: int, rows: StepRows, late: bool) -> None:
        super().__init__()
        self.matrix, self.rows, self.late = matrix, rows, late

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        """out [n, N] plus what the adapters add for x [n, K]."""
        return (self.rows.late if self.late else self.rows.every).added(self.matrix, x, out)


@dataclass(frozen=True, slots=True, eq=False)
class SideAdapters:
    """The adapters that steps add to one decoder, by the policy's number."""

    rows: StepRows
    by_policy: tuple[PlacedAdapter | None, ...]  # None: it has none yet, and is the decoder alone

    def begin(self, policies: np.ndarray, wanted: np.ndarray | None, tensor: Callable[[np.ndarray], Tensor]) -> None:
        """Prepare the decoder's next pass.

        policies: [N] numbers of the rows' policies. wanted: [P] rows that the last layer goes on with; None: all.
        tensor: moves indices to the device.
        """
        self.rows.every = every = RowGroups(policies, self.by_policy, tensor)
        self.rows.late = every if wanted is None else RowGroups(policies[wanted], self.by_policy, tensor)

    def having(self, policy: int, adapter: PlacedAdapter) -> SideAdapters:
        """These adapters, with another one of a policy."""
        return replace(self, by_policy=(*self.by_policy[:policy], adapter, *self.by_policy[policy + 1 :]))

    def added_to(self, decoder: Decoder) -> bool:
        """True if every matrix of the decoder adds them."""
        found = [linear.adapter for linear, _ in stacked_modules(decoder)]
        return all(
            isinstance(each, GroupedAdapter) and each.matrix == number and each.rows is self.rows
            for number, each in enumerate(found)
        )


def attach_grouped(decoder: Decoder, policies: int) -> SideAdapters:
    """Let the decoder's matrices add adapters of so many policies; none of these has one yet."""
    rows, end = StepRows(), decoder.layers[-1]
    assert isinstance(end, Layer)
    for number, (linear, _) in enumerate(stacked_modules(decoder)):
        linear.adapter = GroupedAdapter(number, rows, linear in (end.o, end.gate_up, end.down))
    return SideAdapters(rows, (None,) * policies)
