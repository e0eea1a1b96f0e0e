"""Tiny models to serve, and a server in a thread of the test's process."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from openai import AsyncOpenAI, OpenAI

from tidemill.api_formats.vocabulary import Vocabulary
from tidemill.core.types import Completion, GenerateRequest, SamplingParams, Scored, Version
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.engine.server.app import make_app
from tidemill.engine.server.service import Service
from tidemill.models.architecture import Architecture
from tidemill.models.hf_weights import empty_decoder, load_folder, save_folder
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.models.tokenizer import byte_tokenizer as bytewise
from tidemill.run.storage.model_folder import ModelFolder
from tidemill.web_server.http_server import HttpServer, address_of, bind

ALPHABET = "abcdefghijklmnopqrstuvwxyz \n"
CONTEXT = 2048
CHATML = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def character_model(folder: Path) -> Path:
    """Character tokens, no template."""
    fresh_model(folder, alphabet=ALPHABET, **SIZES["0.1m"], context=CONTEXT)
    return folder


def byte_tokenizer() -> Any:
    """One token a byte, after three special ones; with a chat template."""
    tokenizer = bytewise("<pad>", "<|im_start|>", "<|im_end|>")
    tokenizer.chat_template = CHATML
    return tokenizer


def chat_model(folder: Path, context: int = 256) -> Path:
    """Byte tokens and a template; half its mass on few tokens, so that texts repeat and completions end."""
    tokenizer = byte_tokenizer()
    raw = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": False,
    }
    decoder = empty_decoder(Architecture.from_dict(raw))
    decoder.initialise(torch.Generator().manual_seed(1), std=0.3)
    with tempfile.TemporaryDirectory() as companions:
        tokenizer.save_pretrained(companions)
        settings = Path(companions) / "tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))
        save_folder(decoder, folder, tokenizer_from=companions, dtype=torch.float32)
    return folder


def make_engine(folder: Path) -> NativeEngine:
    settings = EngineSettings(device="cpu", max_sequences=64, kv_memory_mb=32)
    model = ModelFolder.open(folder)
    return NativeEngine(
        load_folder(folder),
        settings,
        receiver=None,
        version=Version(0),
        name="engine",
        eos_ids=model.stop_ids,
        spelling=lambda: Vocabulary(model.tokenizer).spelling(model.architecture.vocab),
    )


def generate(folder: Path, tokens: Any, params: SamplingParams) -> Completion:
    """What an engine of its own says."""

    async def run() -> Completion:
        engine = make_engine(folder)
        try:
            asked = GenerateRequest(np.asarray(tokens, np.int32), params, extras=("model_logprobs",))
            return await engine.generate(asked)
        finally:
            await engine.close()

    return asyncio.run(run())


def score(folder: Path, tokens: Any, top_k: int) -> Scored:
    async def run() -> Scored:
        engine = make_engine(folder)
        try:
            return await engine.score(np.asarray(tokens, np.int32), "policy", 1.0, top_k)
        finally:
            await engine.close()

    return asyncio.run(run())


class ReadyServer(HttpServer):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


class Running:
    """A server on an ephemeral port. Use as a context."""

    def __init__(self, folder: Path, api_key: str | None = None) -> None:
        model = ModelFolder.open(folder)
        self.folder, self.tokenizer = folder, model.tokenizer
        self.engine = make_engine(folder)
        context = asyncio.run(self.engine.capabilities()).context
        self.name = folder.name
        service = Service(self.engine, model.tokenizer, self.name, context=context, vocab=model.architecture.vocab)
        self._socket = bind("127.0.0.1", 0, api_key=api_key)
        self.url = address_of(self._socket)
        self._server = ReadyServer(make_app(service, api_key), "ready")
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._loop: asyncio.AbstractEventLoop | None = None
        self.client = self.openai(api_key or "none")

    def openai(self, key: str) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def asynchronous(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def call(self, coroutine: Any) -> Any:
        """Run it in the server's loop."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def requests(self) -> int:
        """How many are being answered."""
        return len(self._server.server_state.tasks)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve([self._socket])

    def __enter__(self) -> Running:
        self._thread.start()
        assert self._server.ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()
