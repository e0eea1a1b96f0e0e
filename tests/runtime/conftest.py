"""A temporary folder that must be empty again afterwards, and processes that are all gone then."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from echo_worker import WORKER, Echo, Start

from tidemill.runtime.local import Local, LocalProcess
from tidemill.runtime.placement import Resources


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this process and its children put temporary files. Fails the test when something of ours is left in it.
    `tmp_path` comes first, since pytest puts the folder of all of them where temporary files go."""
    with tempfile.TemporaryDirectory(prefix="tm") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
        assert list(Path(folder).iterdir()) == []


@pytest_asyncio.fixture
async def start(tmp_path: Path, temporary: Path) -> AsyncIterator[Start]:
    """start(spec, name=, command=, threads=, device=, deadlines=, start_deadline=, liveness=): an echo in its own process.

    Those with the same command and liveness share a placement. Afterwards there is no process left.
    """
    placements: dict[str, Local] = {}

    async def begin(
        spec=None,
        name="engine-0",
        command=WORKER,
        threads=None,
        device="",
        deadlines=None,
        start_deadline=60.0,
        liveness=None,
    ):
        placement = placements.setdefault(f"{command} {liveness}", Local(tmp_path / "logs", command, liveness=liveness))
        placement._start_deadline = start_deadline
        resources = Resources(threads, device)
        handle: LocalProcess[Echo] = await placement.start(Echo, "engine", name, spec or {}, resources, deadlines)
        return handle

    before = set(psutil.Process().children())
    try:
        yield begin
    finally:
        for placement in placements.values():
            await placement.close()
    assert set(psutil.Process().children()) <= before
