"""Builder of engines that are vLLM servers: a spec in, an engine out whose server is starting."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path

import torch

from tidemill.core.weight_update import UpdateSupport
from tidemill.engine.engine_kinds import EngineSpec
from tidemill.engine.remote.http_client import ServerClient
from tidemill.engine.remote.server_key import key_of
from tidemill.engine.remote.server_process import ServerProcess, free_port
from tidemill.engine.vllm.server_command import check_model, find_python, server_command, server_environment
from tidemill.engine.vllm.vllm_engine import VllmEngine
from tidemill.engine.vllm.vllm_settings import VllmSettings
from tidemill.models.architecture import Architecture
from tidemill.models.tokenizer import generation_config, stop_ids
from tidemill.models.weight_slices import Receiver
from tidemill.runtime.cpu_sharing import Cores

TAKES = UpdateSupport(several_parts=True)


def build(spec: EngineSpec, receiver: Receiver | None, cores: Cores) -> VllmEngine:
    """Start a server, or connect to one. Its ranks have receivers of their own; `receiver` says what the transport takes."""
    settings = spec.engine
    assert isinstance(settings, VllmSettings)
    takes = UpdateSupport(()) if receiver is None else TAKES.both(receiver.takes)
    if receiver is not None:
        receiver.close()
    arch = Architecture.from_folder(spec.model)
    process, url, key = None, settings.url, ""
    if settings.url:
        key = key_of(settings.key_variable)
    else:
        process, url = _started(spec, settings, arch)
    return VllmEngine(
        ServerClient(url, name=f"the vLLM server of {spec.name}", key=key),
        settings,
        process=process,
        version=spec.version,
        transport=spec.transport,
        takes=takes,
        eos_ids=stop_ids(None, arch, generation_config(spec.model)),
        vocab=arch.vocab,
        context=settings.context_of(arch.context),
        name=spec.name,
    )


def _started(spec: EngineSpec, settings: VllmSettings, arch: Architecture) -> tuple[ServerProcess, str]:
    """(a server's process, its address)."""
    on_cpu = settings.device == "cpu" or (settings.device == "auto" and not torch.cuda.is_available())
    check_model(settings, arch, on_cpu)
    port = free_port()
    command = server_command(
        find_python(settings),
        settings,
        spec.model,
        arch,
        port=port,
        name=f"{spec.name}-{secrets.token_hex(4)}",
        on_cpu=on_cpu,
    )
    log = (spec.logs or Path(tempfile.gettempdir())) / f"{spec.name}-server.log"
    environment = server_environment(torch.get_num_threads(), settings.tensor_parallel)
    process = ServerProcess(command, name=f"the vLLM server of {spec.name}", log=log, env=environment)
    return process, f"http://127.0.0.1:{port}"
