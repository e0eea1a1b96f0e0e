"""`tidemill serve`: serves a model by OpenAI's API, until Ctrl-C."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
from pathlib import Path

from tidemill.cli.commands.run_state import model_of
from tidemill.core.config import build
from tidemill.core.errors import ConfigError
from tidemill.core.hub import shown
from tidemill.core.memory import share_one_arena
from tidemill.core.token_extras import MODEL_LOGPROBS
from tidemill.core.types import Version
from tidemill.engine.native.engine_settings import EngineSettings

KEY_VARIABLE = "TIDEMILL_API_KEY"
MOST_KEY = 4096  # bytes of a key file that are read


def serve(
    model: Path, host: str, port: int, api_key: str | None, context: int | None, dtype: str, threads: int | None
) -> int:
    """Serve a model. Returns 0 after Ctrl-C. Raises ConfigError."""
    if missing := [name for name in ("starlette", "uvicorn", "prometheus_client") if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"serving needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip()):
        raise ConfigError(
            "the API key is empty or holds more than ASCII letters, digits and signs: clients could not send it"
        )
    settings = build(EngineSettings, {"dtype": dtype, "context": context})
    folder = model_of(model)
    from tidemill.web_server.http_server import bind

    share_one_arena()
    sock = bind(host, port, api_key=api_key)  # first, so that a port in use is found before minutes of loading
    try:
        asyncio.run(_serve(folder, sock, api_key, settings, threads))
    except KeyboardInterrupt:
        pass  # the usual end of a server
    finally:
        sock.close()
    return 0


async def _serve(
    model: Path, sock: socket.socket, api_key: str | None, settings: EngineSettings, threads: int | None
) -> None:
    import torch

    from tidemill.api_formats.vocabulary import Vocabulary
    from tidemill.engine.native.native_engine import NativeEngine
    from tidemill.engine.server.app import make_app
    from tidemill.engine.server.service import Service
    from tidemill.models.hf_weights import load_folder
    from tidemill.models.tokenizer import generation_config
    from tidemill.run.storage.model_folder import ModelFolder
    from tidemill.web_server.http_server import HttpServer, address_of

    if threads is not None:
        torch.set_num_threads(threads)
    folder = ModelFolder.open(model)
    if (settings.context or 0) > folder.architecture.context:
        raise ConfigError(f"--context {settings.context}: this model's context is {folder.architecture.context}")
    decoder = load_folder(model, dtype=getattr(torch, settings.dtype))
    engine = NativeEngine(
        decoder,
        settings,
        receiver=None,
        version=Version(0),
        name="engine",
        eos_ids=folder.stop_ids,
        spelling=lambda: Vocabulary(folder.tokenizer).spelling(folder.architecture.vocab),
    )
    able = await engine.capabilities()
    context = able.context
    name = served_name(model)
    usual = generation_config(model).get("max_new_tokens")
    service = Service(
        engine,
        folder.tokenizer,
        name,
        context=context,
        vocab=folder.architecture.vocab,
        reply_tokens=usual if isinstance(usual, int) and usual > 0 else None,
        model_logprobs=MODEL_LOGPROBS in able.extras,
    )
    about = f"serving {name} at {address_of(sock)}/v1  (context {context}, {settings.dtype}; Ctrl-C stops)"
    await HttpServer(make_app(service, api_key), about).serve([sock])


def served_name(model: Path) -> str:
    """The model's name: its folder's, NAME-final for `runs/NAME/final`, or its name on the hub."""
    path = model.resolve()
    if (name := shown(path)) != str(path):
        return name.partition("@")[0]
    return f"{path.parent.name}-{path.name}" if path.name in ("final", "initial") else path.name


def key_of(given: str | None, file: Path | None) -> str | None:
    """The API key from the command line, a file's first line, or the environment, in this order."""
    if given is not None and file is not None:
        raise ConfigError("--api-key and --api-key-file were both given: give one of them")
    if file is None:
        return given if given is not None else os.environ.get(KEY_VARIABLE)
    try:
        with open(file, "rb") as lines:
            first = lines.readline(MOST_KEY)
    except OSError as error:
        raise ConfigError(f"--api-key-file {str(file)!r} cannot be read: {error.strerror}") from None
    return first.decode(errors="replace").strip()
