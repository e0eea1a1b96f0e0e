"""A chat whose policy is a script, and a check that all it said is recorded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from envs.scripted_engine import ScriptedEngine
from envs.test_conversations_with_tools import HERMES, chat_tokenizer

from tidemill.core.types import SamplingParams
from tidemill.envs.chat import EpisodeChat, rollout_seeds


def scripted_policy(say: Callable[[str], str]) -> tuple[EpisodeChat, ScriptedEngine]:
    """A chat whose policy says `say(prompt)`, letter by letter; no tokenizer would encode it so."""
    tokenizer = chat_tokenizer(HERMES)

    def answer(tokens: np.ndarray, params: SamplingParams) -> list[int]:
        text = say(tokenizer.decode(tokens.tolist(), skip_special_tokens=False))
        ids = [i for letter in text for i in tokenizer.encode(letter, add_special_tokens=False)]
        return [*ids, tokenizer.eos_token_id]

    engine = ScriptedEngine(answer)
    params = SamplingParams(stop_ids=(tokenizer.eos_token_id,), max_tokens=400)
    return EpisodeChat(engine, tokenizer, params, context=20_000, key="k", seeds=rollout_seeds(0, 0, 0)), engine


def all_recorded(chat: EpisodeChat, engine: ScriptedEngine, turns: int) -> bool:
    """True if each token that was sampled is in the record once, and a row has so many turns."""
    made = [token for each in engine.completions for token in each.tokens.tolist()]
    kept = [token for row in chat.rows() for token in row.tokens[row.mask].tolist()]
    return made == kept and max(row.turns for row in chat.rows()) == turns
