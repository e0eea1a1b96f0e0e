"""Trainer whose process can be replaced by a new one, while those who call it keep what they hold."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from tidemill.core.errors import PeerDied
from tidemill.core.interfaces import Trainer
from tidemill.runtime.placement import Handle


class ReplaceableTrainer:
    """`interfaces.Trainer` of the present process: each call goes there, and raises PeerLost once that has ended."""

    def __init__(self, handle: Handle[Trainer], start: Callable[[], Awaitable[Handle[Trainer]]]) -> None:
        """start: starts another one, with the weights that the run began with."""
        self.handle, self._start = handle, start

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handle.proxy, name)

    async def ends(self) -> NoReturn:
        """Raise PeerLost when the present process ends."""
        handle = self.handle
        raise PeerDied(handle.name, await handle.wait())  # bounded: it watches, for as long as the run goes on

    async def replace(self) -> None:
        """End what is left of the present process, and start another one."""
        self.handle.kill("is replaced")
        await self.handle.stop()
        self.handle = await self._start()
