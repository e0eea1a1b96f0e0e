"""Delivery of a weight update to members of the pool: read where it lies, or received while the trainer sends.

    stored   each member's update, side by side
    live     one rendezvous -> the trainer's send and the members' updates at the same time, under one limit

One rule for what fails: a member whose engine or process failed is lost. Any other keeps what it serves and is told again,
alone, so that it is not the victim of another one; if that fails `AGAIN` times, it is lost, too. When one fails, the
trainer's send ends or is ended, which ends the others' receiving. A process group is never used again after a failure, nor
once other members are to meet. A member that lacks the base of a change is brought the full version in the same publication.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol, TypeVar

from tidemill.core.errors import BaseMissing, EngineFailed, PeerLost, PolicyMismatch, RemoteError, TransferFailed
from tidemill.core.interfaces import Capabilities, Engine, Trainer
from tidemill.core.types import Version
from tidemill.core.weight_update import Rendezvous, WeightUpdate

LOST = (PeerLost, EngineFailed, RemoteError)  # the engine is lost: another one repeats its work
AGAIN = 2
LIMIT_S = 120.0  # of one transfer of live weights
LONGEST_S = 7200.0  # of an update with all that follows; the calls have shorter deadlines
SETTLE_S = 1.0  # for the trainer to notice by itself that an engine failed


class Receiving(Protocol):
    """A member of the pool."""

    @property
    def name(self) -> str: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def can(self) -> Capabilities: ...


M = TypeVar("M", bound=Receiving)
Lose = Callable[[M, Exception], None]


class SenderLost(Exception):
    """The trainer was lost while it sent, which is no fault of an engine. Its error is the cause."""


class Delivery:
    """Brings updates to members."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._group: tuple[list[Engine], str] = ([], "")  # the engines that met last, and the name of their group

    async def bring(
        self, update: WeightUpdate, members: Sequence[M], trainer: Trainer | None, lose: Lose[M]
    ) -> WeightUpdate:
        """Have members commit an update. Returns when each has done so, or is lost.

        The result is the update to bring to later members: if one lacked the base of a change, the full version that it was
        sent instead. lose: takes a member out, or raises the error. Raises what an update raises else, and SenderLost;
        WeightsMoved if the trainer cannot send this version any more.
        """
        lacking = list[M]()
        if update.live:
            assert trainer is not None, "a live update comes from a trainer that sends it"
            await self._live(update, members, trainer, lose, lacking)
        else:
            await asyncio.gather(*(_alone(member, update, lose, lacking) for member in members))
        if not lacking:
            return update
        assert trainer is not None and update.kind != "full", "only a change has a base, and it comes from a trainer"
        return await self.bring(await _whole(update, trainer), lacking, trainer, lose)

    async def _live(
        self, update: WeightUpdate, members: Sequence[M], trainer: Trainer, lose: Lose[M], lacking: list[M]
    ) -> None:
        failed = await self._together(update, members, trainer, lose, lacking) if members else {}
        for member in [each for each in members if each.name in failed]:
            left, why = AGAIN, failed
            while left and (why := await self._together(update, [member], trainer, lose, lacking)):
                left -= 1
            if why:
                lose(member, EngineFailed(f"received no weights, with others and {AGAIN} times alone: {why[member.name]}"))

    async def _together(
        self, update: WeightUpdate, members: Sequence[M], trainer: Trainer, lose: Lose[M], lacking: list[M]
    ) -> dict[str, str]:
        """Let the trainer send to these members. Returns why by name, for those that are to be told again.

        lacking: those that lack the base are added to it.
        """
        failed = dict[str, str]()
        told = self._addressed(update, members)
        sending = asyncio.ensure_future(trainer.send(told[0]))

        async def receive(member: M, its: WeightUpdate) -> None:
            try:
                expect(member, await member.engine.update(its), update)
            except BaseException as error:
                no_base = isinstance(error, BaseMissing)
                self._group = ([], "")
                await asyncio.wait({sending}, timeout=0 if no_base else SETTLE_S)  # it may have failed first, and say why
                sending.cancel()  # the others' receiving ends with it
                if no_base:
                    lacking.append(member)
                elif isinstance(error, LOST):
                    lose(member, error)
                elif isinstance(error, TransferFailed):
                    failed[member.name] = str(error)
                else:
                    raise

        receiving = [asyncio.ensure_future(receive(member, its)) for member, its in zip(members, told, strict=True)]
        try:
            async with asyncio.timeout(LONGEST_S):
                await asyncio.wait({sending, *receiving}, return_when=asyncio.FIRST_EXCEPTION)
            if sending.done() or all(each.done() for each in receiving):
                await _sent(sending, self._limit_s)
            for each in receiving:
                if each.done():
                    each.result()
        except BaseException:
            self._group = ([], "")
            raise
        finally:
            for each in (sending, *receiving):
                each.cancel()
            await asyncio.gather(sending, *receiving, return_exceptions=True)
        return failed

    def _addressed(self, update: WeightUpdate, members: Sequence[M]) -> list[WeightUpdate]:
        """The update as each member is given it. The trainer takes any of them."""
        engines = [member.engine for member in members]
        if len(engines) != len(self._group[0]) or any(a is not b for a, b in zip(engines, self._group[0], strict=True)):
            self._group = engines, secrets.token_hex(8)
        told, first, total = list[WeightUpdate](), 1, sum(member.can.receivers for member in members)
        for member in members:
            told.append(replace(update, rendezvous=Rendezvous(self._group[1], first, total, self._limit_s)))
            first += member.can.receivers
        return told


async def _alone(member: M, update: WeightUpdate, lose: Lose[M], lacking: list[M]) -> None:
    try:
        expect(member, await member.engine.update(update), update)
    except LOST as loss:
        lose(member, loss)
    except BaseMissing:
        lacking.append(member)


async def _whole(update: WeightUpdate, trainer: Trainer) -> WeightUpdate:
    """The version of an update, published in full. Raises SenderLost, and WeightsMoved."""
    try:
        full = await trainer.publish(update.version, full=True)
    except (PeerLost, TimeoutError) as lost:
        raise SenderLost(str(lost)) from lost
    if (full.kind, full.version) != ("full", update.version):
        raise PolicyMismatch(f"asked for all weights of {update.version.exact}, the trainer published {full.version.exact}")
    return full


async def _sent(sending: asyncio.Future[str], limit_s: float) -> None:
    """Wait for the trainer's send, whose failures the engines tell. Raises SenderLost, and what the send raises else."""
    await asyncio.wait({sending}, timeout=limit_s)
    try:
        with suppress(asyncio.CancelledError, asyncio.InvalidStateError, TransferFailed):
            sending.result()
    except (PeerLost, TimeoutError) as lost:
        raise SenderLost(str(lost)) from lost


def expect(member: Receiving, served: Version, published: WeightUpdate) -> None:
    """Raise PolicyMismatch unless a member serves what was published."""
    if served != published.version:
        raise PolicyMismatch(
            f"{member.name} serves {served} ({served.fingerprint}), published was {published.version} "
            f"({published.version.fingerprint})"
        )
