"""Inline placement: every role in this process, so that `breakpoint()` works everywhere.

The proxy is the object itself. There is no wire, hence no deadline on calls: a peer in the same process cannot die alone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any, Generic, TypeVar, cast

from tidemill.core.errors import StartFailed
from tidemill.runtime.placement import Factory, Vitals
from tidemill.runtime.rpc import check_deadlines
from tidemill.runtime.wire_format import keeps_its_type, methods_of

T = TypeVar("T")


class InlineHandle(Generic[T]):
    """Handle of a role in this process; its proxy is the object itself."""

    def __init__(self, name: str, proxy: T, closable: bool) -> None:
        self.name, self.proxy, self._closable = name, proxy, closable
        self._closed = False
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def wait(self) -> str:
        return await asyncio.shield(self._ended)  # bounded: until `stop`, for those who want to know

    def vitals(self) -> Vitals:
        return Vitals(self.name, os.getpid(), not self._ended.done(), 0.0, 0.0, [])

    def kill(self, why: str) -> None:
        if not self._ended.done():
            self._ended.set_result(why)

    async def stop(self, deadline: float = 10.0) -> str:
        how = "was stopped"
        if self._closable and not self._closed:
            self._closed = True
            try:
                async with asyncio.timeout(deadline):
                    await cast(Any, self.proxy).close()
            except TimeoutError:
                how = f"did not close within {deadline:g} s"
            except Exception as error:  # it has ended all the same, but say so
                how = f"was stopped; its close() failed: {error}"
        self.kill(how)
        return self._ended.result()


class Inline:
    """Placement that builds every role in this process."""

    def __init__(self, build: Factory) -> None:
        self._build = build

    async def start(
        self,
        protocol: type[T],
        role: str,
        name: str,
        spec: dict[str, Any],
        threads: int | None = None,  # ignored: the threads of this process are not changed
        deadlines: Mapping[str, float] | None = None,  # checked, then not needed
    ) -> InlineHandle[T]:
        """Build the role. Raises ValueErrors of its construction as they are, else StartFailed."""
        check_deadlines(protocol, deadlines)
        try:
            target, served = self._build(spec | {"role": role, "name": name})
        except Exception as error:  # fail as a role in its own process does
            if keeps_its_type(error):
                raise
            raise StartFailed(f"{name} did not start: {type(error).__name__}: {error}") from error
        if missing := set(methods_of(protocol)) - set(methods_of(served)):
            raise ValueError(f"{name} does not serve {', '.join(sorted(missing))}")
        return InlineHandle(name, cast(T, target), "close" in methods_of(protocol))

    def begin(self) -> None: ...

    async def close(self) -> None: ...
