"""Builder of engines that are vLLM servers: a spec in, an engine out whose server is starting."""

from __future__ import annotations

import secrets

import torch

from tidemill.engine.engine_kinds import EngineSpec
from tidemill.engine.native.cache_size import device_of
from tidemill.engine.remote.server_command import find_python
from tidemill.engine.remote.server_of_engine import server_of
from tidemill.engine.vllm.vllm_command import check_model, server_command, server_environment
from tidemill.engine.vllm.vllm_engine import VllmEngine
from tidemill.engine.vllm.vllm_settings import BUILD, ENVIRONMENT, VllmSettings
from tidemill.models.architecture import Architecture
from tidemill.models.weight_slices import Receiver
from tidemill.runtime.cpu_sharing import Cores


def build(spec: EngineSpec, receiver: Receiver | None, cores: Cores) -> VllmEngine:
    """Start a server, or connect to one. Its ranks have receivers of their own; `receiver` says what the transport takes."""
    takes = spec.takes(None if receiver is None else receiver.takes)
    if receiver is not None:
        receiver.close()
    client, process = server_of(spec, "vLLM", lambda port: _command(spec, port))
    return VllmEngine(client, spec, takes, process)


def _command(spec: EngineSpec, port: int) -> tuple[list[str], dict[str, str]]:
    settings, arch = spec.engine, Architecture.from_folder(spec.model)
    assert isinstance(settings, VllmSettings)
    on_cpu = device_of(settings.device) == "cpu"
    check_model(settings, arch, on_cpu)
    name, python = f"{spec.name}-{secrets.token_hex(4)}", find_python(settings, ENVIRONMENT, BUILD)
    command = server_command(python, settings, spec.model, arch, port=port, name=name, on_cpu=on_cpu)
    return command, server_environment(torch.get_num_threads(), settings.tensor_parallel)
