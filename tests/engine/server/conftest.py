from collections.abc import Iterator

import pytest
from serving_cases import Running, character_model, chat_model


@pytest.fixture(scope="session")
def characters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model with character tokens and no chat template."""
    with Running(character_model(tmp_path_factory.mktemp("serving") / "letters")) as running:
        yield running


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model with byte tokens and a chat template."""
    with Running(chat_model(tmp_path_factory.mktemp("serving") / "bytes")) as running:
        yield running
