"""Builder of engines that are SGLang servers: a spec in, an engine out whose server is starting."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from tidemill.engine.engine_kinds import EngineSpec
from tidemill.engine.native.cache_size import device_of
from tidemill.engine.remote.server_command import find_python
from tidemill.engine.remote.server_of_engine import server_of
from tidemill.engine.sglang.group_hand_over import GroupHandOver
from tidemill.engine.sglang.hand_over import FolderHandOver
from tidemill.engine.sglang.sglang_command import server_command, server_environment
from tidemill.engine.sglang.sglang_engine import SglangEngine
from tidemill.engine.sglang.sglang_routes import SglangRoutes
from tidemill.engine.sglang.sglang_settings import BUILD, ENVIRONMENT, SglangSettings
from tidemill.models.adapted_base import AdaptedBase
from tidemill.models.architecture import Architecture
from tidemill.models.weight_slices import Receiver
from tidemill.runtime.cpu_sharing import Cores


def build(spec: EngineSpec, receiver: Receiver | None, cores: Cores) -> SglangEngine:
    """Start a server, or connect to one. The engine receives updates itself, by any transport, and hands them over."""
    settings = spec.engine
    assert isinstance(settings, SglangSettings)
    takes = spec.takes(None if receiver is None else receiver.takes)
    dtype = getattr(torch, settings.dtype)
    base = AdaptedBase.of_folder(spec.model, spec.base_dtype, dtype) if spec.adapter_rank else None
    client, process = server_of(spec, "SGLang", lambda port: _command(spec, settings, port))
    routes = SglangRoutes(client)
    if settings.load == "collective":
        hand_over = GroupHandOver(routes, client.address)
    else:
        folder = Path(process.folder) if process is not None else spec.logs or Path(tempfile.gettempdir())
        hand_over = FolderHandOver(routes, folder, spec.name)
    return SglangEngine(client, spec, process, receiver, takes, routes, hand_over, base)


def _command(spec: EngineSpec, settings: SglangSettings, port: int) -> tuple[list[str], dict[str, str]]:
    arch, on_cpu = Architecture.from_folder(spec.model), device_of(settings.device) == "cpu"
    python = find_python(settings, ENVIRONMENT, BUILD)
    command = server_command(python, settings, spec.model, arch, port=port, on_cpu=on_cpu)
    return command, server_environment(torch.get_num_threads(), settings.tensor_parallel, on_cpu)
