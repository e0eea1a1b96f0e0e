"""The native trainer, with a count of the bytes that each rank sends. A kind of trainer for `rank_step.py`.

A ring of n ranks sends (n - 1) / n of what is gathered or scattered from each, and twice that of what is summed on all.
"""

from __future__ import annotations

from typing import Any, Literal

from tidemill.trainer.build_native_trainer import build as build_native
from tidemill.trainer.trainer_kinds import TrainerSettings


class CountedSettings(TrainerSettings):
    kind: Literal["counted"] = "counted"  # type: ignore[assignment]


def build(spec: Any, *parts: Any) -> Any:
    trainer = build_native(spec, *parts)
    if spec.trainer.ranks > 1:
        import torch.distributed as dist

        for name, argument, times in (
            ("all_gather_single", "output_tensor", 1),  # FSDP2's, by their names in PyTorch 2.13
            ("reduce_scatter_single", "input", 1),
            ("all_reduce", "tensor", 2),
        ):
            _count(dist, name, argument, times, trainer)
    return trainer


def _count(dist: Any, name: str, argument: str, times: int, trainer: Any) -> None:
    call, place = getattr(dist, name), 0 if name != "reduce_scatter_single" else 1

    def counted(*given: Any, **named: Any) -> Any:
        tensor = named[argument] if argument in named else given[place]
        ranks = dist.get_world_size(named.get("group"))
        trainer._recorder.count("sent_bytes", times * (ranks - 1) / ranks * tensor.nbytes)
        return call(*given, **named)

    setattr(dist, name, counted)
