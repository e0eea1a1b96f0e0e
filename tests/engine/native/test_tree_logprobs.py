"""Trees sampled by the native engine: recorded logprobs are those that it scores the same rows with."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from envs.random_agents import Agent

from tidemill.cli.logprob_sources import engine_of
from tidemill.core.types import Completion, GenerateRequest, Score, Trajectory
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.models.hf_weights import load_folder
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.models.tokenizer import Tokenizer, load_tokenizer

ALPHABET = "abcdefghijklmnopqrstuvwxyz 12<>/:\n"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}: "
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('a')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}"
    "\n{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)  # what a reply says up to its last "a" is taken out of history, as thinking is


class Watched:
    """The engine, with a count of the prompt tokens that it found in its cache."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine, self.cached, self.asked = engine, 0, 0

    async def generate(self, request: GenerateRequest) -> Completion:
        reply = await self.engine.generate(request)
        self.cached += reply.cached_tokens
        self.asked += len(request.tokens)
        return reply

    async def score(self, tokens, policy, temperature, top_k):
        return await self.engine.score(tokens, policy, temperature, top_k)

    async def abort(self, key: str) -> None:
        await self.engine.abort(key)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    fresh_model(folder, alphabet=ALPHABET, context=1024, **SIZES["0.1m"])
    return folder


@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["no template", "strips"])
@pytest.mark.runs
async def test_each_row_has_the_logprobs_that_the_engine_scores_it_with(model: Path, template: str | None) -> None:
    tokenizer: Tokenizer = load_tokenizer(model)
    tokenizer.chat_template = template
    rows, branches = list[Trajectory](), 0
    async with engine_of(load_folder(model), EngineSettings(device="cpu", max_sequences=8, page_size=4)) as engine:
        watched = Watched(engine)
        for seed in range(12):
            agent = Agent(tokenizer, random.Random(seed), watched, context=900)
            own = await agent.play()
            branches += sum(row.parent is not None for row in own)
            assert own[-1].outcome == Score(1.0)
            rows += own
        for row in rows:
            scored = await engine.score(row.tokens, "policy", 1.0, 0)
            np.testing.assert_allclose(row.logprobs[row.mask], scored.logprobs[row.mask], atol=1e-4)
    assert branches > 5 and watched.cached > 0.3 * watched.asked, "branches do not share what stands before them"
