"""A gateway before a chat that records, and OpenAI's client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from gateway.recording_chat import RecordingChat
from openai import AsyncOpenAI

from tidemill.gateway.gateway import Gateway, serve_chat


@pytest.fixture
def chat() -> RecordingChat:
    return RecordingChat()


@pytest.fixture
async def model(chat: RecordingChat) -> AsyncIterator[Gateway]:
    async with serve_chat(chat) as model:
        yield model


@pytest.fixture
async def client(model: Gateway) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=model.url, api_key=model.key, max_retries=0, timeout=60) as client:
        yield client
