"""Adapters as they travel and are received: A and B in float32, and the configuration as one more tensor, of bytes.

    trainer   adapter_blocks + config_block -> a transport            the update names the base by its fingerprint
    engine    received_adapter: fingerprint, then the configuration   -> factors_of: one pair for each matrix it names

The fingerprint covers the configuration too, since another scale is another policy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tidemill.core.errors import PolicyMismatch, UnsupportedModel
from tidemill.core.types import Version
from tidemill.core.weight_update import WeightUpdate
from tidemill.models.adapter_config import ADAPTER_CONFIG, AdapterConfig
from tidemill.models.adapter_files import read_tensors
from tidemill.models.decoder import Decoder
from tidemill.models.fingerprint import fingerprint
from tidemill.models.hf_weights import stacked_modules
from tidemill.models.lora import A, B, Factors
from tidemill.models.weight_slices import Slice, whole_tensors

MOST_CONFIG = 1 << 20  # bytes of a configuration


def base_version(fingerprint: str) -> Version:
    """The name of the frozen weights that adapters are added to."""
    return Version(0, policy="base", fingerprint=fingerprint)


def config_block(config: AdapterConfig, whole: bool = True) -> Slice:
    """The configuration as a tensor of bytes. whole: False gives an empty block of it, as ranks do that do not send it.

    It leaves out what only training reads: the base's path on the trainer's machine, and the dropout.
    """
    text = replace(config, base="", dropout=0.0).to_json().encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Slice(ADAPTER_CONFIG, (len(data),), (0,), data if whole else data[:0])


def folder_fingerprint(folder: str | Path) -> str:
    """The fingerprint under which the adapter of a folder is published. Raises UnsupportedModel if there is none."""
    return adapter_of_folder(folder).fingerprint


@dataclass(frozen=True, slots=True)
class ReceivedAdapter:
    """One version's adapter, verified."""

    config: AdapterConfig
    tensors: dict[str, Tensor]  # A and B by their names, whole

    @property
    def fingerprint(self) -> str:
        """The fingerprint under which it is published."""
        return fingerprint([config_block(self.config), *(Slice.whole(name, each) for name, each in self.tensors.items())])


def adapter_of_folder(folder: str | Path) -> ReceivedAdapter:
    """The adapter of a PEFT folder. Raises UnsupportedModel if there is none."""
    return ReceivedAdapter(AdapterConfig.from_folder(folder), read_tensors(Path(folder)))


def received_adapter(slices: Iterable[Slice], update: WeightUpdate, engine: str) -> ReceivedAdapter:
    """The adapter of an update, copied. Raises PolicyMismatch if it is not the one that was published. Blocking."""
    tensors = whole_tensors(slices)
    found = fingerprint(Slice.whole(name, whole) for name, whole in tensors.items())
    if not update.version.fingerprint or found != update.version.fingerprint:
        raise PolicyMismatch(f"{engine} received an adapter of the fingerprint {found}, not {update.version.exact}")
    text = tensors.pop(ADAPTER_CONFIG, None)
    if text is None or text.dtype != torch.uint8 or text.ndim != 1 or len(text) > MOST_CONFIG:
        raise PolicyMismatch(f"{update.version}: no {ADAPTER_CONFIG} came with the adapter")
    try:
        config = AdapterConfig.from_json(text.numpy().tobytes(), ADAPTER_CONFIG)
    except UnsupportedModel as error:
        raise PolicyMismatch(f"{update.version}: {error}") from None
    return ReceivedAdapter(config, tensors)


def factors_of(decoder: Decoder, adapter: ReceivedAdapter) -> Factors:
    """The adapter by the matrices of this model. Raises PolicyMismatch unless it is an adapter of this model, and whole."""
    left, found = dict(adapter.tensors), Factors()
    for linear, projections in stacked_modules(decoder):
        for module, _, rows in projections:
            if (shape := adapter.config.of(module)) is None:
                continue
            rank, scale = shape
            a, b = (
                _taken(left, f"{module}.{name}", size) for name, size in ((A, (rank, linear.in_features)), (B, (rows, rank)))
            )
            found[f"{module}.weight"] = a, b, scale
    if left:
        raise PolicyMismatch(f"{min(left)} belongs to no matrix of this model that the adapter's configuration names")
    if not found:
        raise PolicyMismatch("the adapter's configuration names no matrix of this model")
    return found


def _taken(left: dict[str, Tensor], name: str, size: tuple[int, ...]) -> Tensor:
    tensor = left.pop(name, None)
    if tensor is None:
        raise PolicyMismatch(f"{name} is missing, which the adapter's configuration names")
    if tuple(tensor.shape) != size:
        raise PolicyMismatch(f"{name} is {list(tensor.shape)}, expected {list(size)}")
    return tensor
