"""A server whose engine does not know the model's logprobs: replies come without them, and who wants them is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving_cases import chat_model, make_engine

from tidemill.core.types import Completion, GenerateRequest
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.engine.server.app import make_app
from tidemill.engine.server.service import Service
from tidemill.run.storage.model_folder import ModelFolder


@pytest.fixture
async def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    generate = NativeEngine.generate

    async def unknown(self: NativeEngine, request: GenerateRequest) -> Completion:
        assert not request.extras, "a reply without logprobs needs none"
        return await generate(self, request)

    monkeypatch.setattr(NativeEngine, "generate", unknown)
    folder = chat_model(tmp_path / "chat", 64)
    model = ModelFolder.open(folder)
    vocab = model.architecture.vocab
    service = Service(make_engine(folder), model.tokenizer, "m", context=64, vocab=vocab, model_logprobs=False)
    transport = httpx.ASGITransport(make_app(service, None))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as found:
        yield found
    await service.close()


CALLS: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "ab"},
    "chat/completions": {"messages": [{"role": "user", "content": "ab"}]},
}


@pytest.mark.parametrize("route", CALLS)
async def test_replies_come_without_logprobs_and_requests_for_them_are_refused(client: httpx.AsyncClient, route: str):
    body = {"model": "m", "max_tokens": 4, "ignore_eos": True, "return_token_ids": True} | CALLS[route]
    choice = (await client.post(f"/v1/{route}", json=body)).json()["choices"][0]
    assert choice["logprobs"] is None and len(choice["token_ids"]) == 4
    refused = await client.post(f"/v1/{route}", json=body | {"logprobs": 1 if route == "completions" else True})
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "logprobs"
    assert "does not report the model's logprobs: leave logprobs out" in error["message"]
