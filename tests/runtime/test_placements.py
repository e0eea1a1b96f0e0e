"""One contract for every placement: callers cannot tell them apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from echo_worker import WORKER, Echo, Other, build

from tidemill.core.errors import ConfigError, PolicyMismatch, StartFailed
from tidemill.core.types import SamplingParams
from tidemill.runtime.local import Local
from tidemill.runtime.placement import Inline, Placement


@pytest_asyncio.fixture(params=["inline", "local"])
async def placement(request: pytest.FixtureRequest, tmp_path: Path, temporary: Path) -> AsyncIterator[Placement]:
    made = Inline(build) if request.param == "inline" else Local(tmp_path / "logs", WORKER, start_deadline=60)
    made.begin()
    try:
        yield made
    finally:
        await made.close()
        await made.close()  # which may be repeated


async def until(condition, seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.005)


async def test_calls(placement: Placement) -> None:
    handle = await placement.start(Echo, "engine", "engine-0", {"limit": float("inf")})
    echo = handle.proxy
    for array in (np.arange(7, dtype=np.int32), np.zeros((0, 3), np.float32), np.array(2.5), np.array([True, False])):
        back = await echo.echo(array)
        assert back.dtype == array.dtype
        assert back.shape == array.shape
        assert np.array_equal(back, array)
    params = SamplingParams(max_tokens=9)
    expected = {"name": "abab", "max_tokens": "9", "role": "engine", "as": "engine-0", "limit": "inf"}
    assert await echo.describe("ab", params) == expected
    assert await echo.describe(params=params, name="ab", times=1) == expected | {"name": "ab"}
    with pytest.raises(TypeError):
        await echo.describe("ab")  # type: ignore[call-arg]
    await handle.stop()


async def test_errors_keep_their_type(placement: Placement) -> None:
    handle = await placement.start(Echo, "engine", "engine-0", {})
    kinds = {
        "value": ValueError,
        "odd": ValueError,
        "policy": PolicyMismatch,
        "config": ConfigError,
        "timeout": TimeoutError,
    }
    for kind, expected in kinds.items():
        with pytest.raises(expected) as caught:
            await handle.proxy.fail(kind)
        assert str(caught.value) == str(caught.value).strip() != ""
    with pytest.raises(Exception, match="by zero"):
        await handle.proxy.fail("other")
    assert (await handle.proxy.echo(np.arange(3))).tolist() == [0, 1, 2]  # it serves on
    await handle.stop()


async def test_many_calls_in_flight_and_out_of_order(placement: Placement) -> None:
    handle = await placement.start(Echo, "engine", "engine-0", {})
    keys = [f"{i:03d}" for i in range(100)]
    held = {key: asyncio.create_task(handle.proxy.hold(key)) for key in keys}

    async def all_there() -> bool:
        return await handle.proxy.held() == keys

    await until(all_there)
    for key in reversed(keys):
        assert await handle.proxy.release(key) == key
        await held[key]
    await handle.stop()


async def test_cancelling_a_call_cancels_the_task_behind_it(placement: Placement) -> None:
    handle = await placement.start(Echo, "engine", "engine-0", {})
    task = asyncio.create_task(handle.proxy.hold("x"))

    async def there() -> bool:
        return await handle.proxy.held() == ["x"]

    async def gone() -> bool:
        return await handle.proxy.cancelled() == ["x"]

    await until(there)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(gone)
    assert await handle.proxy.held() == []
    await handle.stop()


async def test_stop_ends_it_and_may_be_repeated(placement: Placement) -> None:
    handle = await placement.start(Echo, "engine", "engine-0", {})
    waiting = asyncio.create_task(handle.wait())
    assert await handle.stop() == "was stopped"
    assert await handle.stop() == "was stopped"
    assert await waiting == "was stopped"


async def test_stop_is_bounded_when_close_hangs(placement: Placement) -> None:
    handle = await placement.start(Echo, "engine", "engine-0", {"close": "hangs"})
    async with asyncio.timeout(10):
        await handle.stop(deadline=0.4)


async def test_stop_says_when_close_failed(placement: Placement) -> None:
    handle = await placement.start(Echo, "engine", "engine-0", {"close": "fails"})
    assert await handle.stop(deadline=20) == "was stopped; its close() failed: cannot close"


async def test_start_says_what_is_wrong(placement: Placement) -> None:
    with pytest.raises(ConfigError, match="model='nope': expected a folder"):
        await placement.start(Echo, "engine", "engine-0", {"start": "value"})
    with pytest.raises(StartFailed, match=r"^engine-0 did not start: ZeroDivisionError: by zero"):
        await placement.start(Echo, "engine", "engine-0", {"start": "other"})
    with pytest.raises(ValueError, match="does not serve nothing_of_the_kind"):
        await placement.start(Other, "engine", "engine-0", {})
    with pytest.raises(ValueError, match=r"deadlines for \['nothing'\]"):
        await placement.start(Echo, "engine", "engine-0", {}, deadlines={"nothing": 1.0})
