"""The split rule: how many devices train and how many sample, so that a step takes least time.

After LlamaRL, section 7 (arXiv 2505.24034), derived anew. G devices compute steps of B samples. A role needs eta(b)
device-seconds for a sample when a device works on b of them at a time; eta never rises with b. Memory limits b.

*Taking turns*, every device holds both roles, so b_t and b_g share one memory, and a step takes
B/G * [eta_t(b_t) + eta_g(b_g)]. *At the same time*, a share theta of the devices samples and the rest trains. Each role has
its devices' memory to itself, and a step takes max{ B eta_t / ((1 - theta) G), B eta_g / (theta G) }. The first term rises
with theta and the second one falls, so the best theta makes them equal:

    theta* = eta_g / (eta_t + eta_g),   where a step takes   B/G * (eta_t + eta_g).

*Theorem.* The best step at the same time never takes longer than the best one in turns. They are equal if and only if some
pair of batches that is best for each role alone fits on one device together. *Proof.* Both are B/G times a sum. In turns the
sum is minimised over pairs that fit together. At the same time each term is minimised over all batches that fit alone, which
include the members of those pairs. So the second minimum is no larger, and equals the first one only where a pair attains
both. Where both rates fall strictly, each role's best batch is its largest, so the step is strictly shorter wherever memory
does not hold both largest batches together. Where no limit binds, or larger batches make no role faster, both are equal.

Assumed: work is divided evenly and nothing else takes time; samples of earlier versions may be trained on, so that both
roles always have work (`overlaps`); what a role holds on a device does not depend on how many devices the role has. The last
one fails where ranks divide the trainer's state among them, as in turns all devices would. `split` counts that exactly for
each whole number (`Role.held`), but the theorem does not cover it.

Devices come in whole numbers: `split` takes the number whose step is shortest. While rates do not depend on it, it is one
of the two beside theta* G; no step is shorter than B/G * (eta_t + eta_g), and the best is at most G / (G - 2) times as long.
So on few devices rounding may cost more than room for larger batches gains.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Role:
    """One role's cost on devices of its own. A batch is what one device works on at a time, in units of the role's own."""

    seconds: Callable[[float], float]  # device-seconds a sample, by batch; never rise with it
    most: float = math.inf  # the largest batch that a device is given
    least: float = 0.0  # the smallest batch that a device can work with, if there is as much
    under_way: float = math.inf  # units there are at a time, which the role's devices divide
    batch_bytes: float = 0.0  # of each unit of a batch
    held: Callable[[int], float] = lambda _: 0.0  # other bytes on each device, by the number of the role's devices

    def batch(self, devices: int, memory: float) -> float | None:
        """The largest batch of each of so many devices with `memory` bytes; None: the role does not fit."""
        room = memory - self.held(devices)
        if room < 0:
            return None
        asked = self.asked(devices)
        fits = min(asked, room / self.batch_bytes if self.batch_bytes else math.inf)
        return fits if fits > 0 and fits >= min(self.least, asked) else None

    def asked(self, devices: int) -> float:
        """The batch of each of so many devices if memory had no end."""
        return min(self.most, self.under_way / devices)

    def cost(self, devices: int, memory: float) -> float:
        """Device-seconds a sample on so many devices; infinite where the role does not fit."""
        batch = self.batch(devices, memory)
        return math.inf if batch is None else self.seconds(batch)

    def fewest(self, most: int, memory: float) -> int | None:
        """The fewest devices that hold the role, or None if `most` do not."""
        return next((n for n in range(1, most + 1) if self.batch(n, memory) is not None), None)


@dataclass(frozen=True, slots=True)
class Split:
    """Devices of each role, and what a step costs."""

    train: int
    sample: int
    train_s: float  # device-seconds of a step's training; infinite: it does not fit
    sample_s: float
    overlaps: bool  # both work at the same time; else they take turns

    @property
    def theta(self) -> float:
        """The share of devices that would sample if devices could be divided: theta*, at the rates of this split."""
        if not self.fits:
            return math.nan
        if self.overlaps:
            return self.sample_s / (self.train_s + self.sample_s)
        return math.sqrt(self.sample_s) / (math.sqrt(self.train_s) + math.sqrt(self.sample_s))

    @property
    def fits(self) -> bool:
        return math.isfinite(self.train_s + self.sample_s)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        join = max if self.overlaps else sum
        return join((self.train_s / self.train, self.sample_s / self.sample))

    @property
    def bound_s(self) -> float:
        """Seconds of a step if devices could be divided, at the rates of this split: no split is faster."""
        devices = self.train + self.sample
        if self.overlaps:
            return (self.train_s + self.sample_s) / devices
        return (math.sqrt(self.train_s) + math.sqrt(self.sample_s)) ** 2 / devices


def split(
    devices: int,
    trainer: Role,
    engine: Role,
    *,
    memory: float,
    samples: float = 1.0,
    overlaps: bool = True,
    train: int | None = None,
    sample: int | None = None,
) -> Split:
    """The split of `devices` with the shortest step; of equal ones that with the fewest trainer devices.

    memory: bytes of a device. samples: of a step. overlaps: False where a step waits for samples of its own version, so that
    roles on devices of their own take turns; a step then takes the sum of both times, and theta* has square roots. train,
    sample: a number that is settled already. If nothing fits, `Split.fits` is False.
    """
    assert devices >= 2 and (train or 1) + (sample or 1) <= devices
    choices = range(1, devices) if sample is None else (devices - sample,)
    found = []
    for n in choices if train is None else (train,):
        others = devices - n if sample is None else sample
        costs = (samples * trainer.cost(n, memory), samples * engine.cost(others, memory))
        found.append(Split(n, others, *costs, overlaps))
    return min(found, key=lambda each: each.step_s)
