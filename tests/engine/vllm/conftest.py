"""One real vLLM server for all tests that need one; its weights are set back before each test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract_base import Reference
from vllm_server import HEAD_DIM, started

from tidemill.core.errors import ConfigError
from tidemill.engine.remote.server_command import find_python
from tidemill.engine.vllm.vllm_settings import BUILD, ENVIRONMENT, VllmSettings

ROOT = Path(__file__).parents[3]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        find_python(VllmSettings(), ENVIRONMENT, BUILD)
    except ConfigError as error:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(str(error)))


@pytest.fixture(scope="session", autouse=True)
def own_code() -> Iterator[None]:
    """Servers import the code that is tested, whichever their environment holds."""
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(ROOT), str(ROOT / "vllm_plugin"), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        yield


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the one server, of one rank."""
    folder = tmp_path_factory.mktemp("vllm")
    model = Reference.make(folder / "model", 0, HEAD_DIM).folder
    with started(VllmSettings(kv_memory_mb=32), model, folder) as url:
        yield url
