"""The server of an engine: one that is started, or the one at its address."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tidemill.engine.engine_kinds import EngineSpec
from tidemill.engine.remote.http_client import ServerClient
from tidemill.engine.remote.server_key import key_of
from tidemill.engine.remote.server_process import ServerProcess, free_port
from tidemill.engine.remote.server_settings import ServerSettings

Command = Callable[[int], tuple[Sequence[str], Mapping[str, str]]]


def server_of(spec: EngineSpec, kind: str, command: Command) -> tuple[ServerClient, ServerProcess | None]:
    """(a client of the engine's server, its process if it was started here).

    kind: names the server in errors. command: (command line, additions to the environment) of one that listens at a port.
    """
    settings, name = spec.engine, f"the {kind} server of {spec.name}"
    assert isinstance(settings, ServerSettings)
    if settings.url:
        url = settings.url_of(spec.name, updated=spec.transport is not None)
        return ServerClient(url, name=name, key=key_of(settings.key_variable)), None
    port = free_port()
    words, environment = command(port)
    log = (spec.logs or Path(tempfile.gettempdir())) / f"{spec.name}-server.log"
    return ServerClient(f"http://127.0.0.1:{port}", name=name), ServerProcess(words, name=name, log=log, env=environment)
