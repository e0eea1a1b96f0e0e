"""Turns the body of a request into the engine's sampling parameters."""

from __future__ import annotations

import numpy as np

from tidemill.core.seeding import derive_seed
from tidemill.core.token_extras import MODEL_LOGPROBS
from tidemill.core.types import SamplingParams
from tidemill.engine.server.choices import Asked
from tidemill.engine.server.prompts import Prompts
from tidemill.openai_api.requests import Body, ChatBody, CompletionBody

MOST_TOP_K = 1 << 30  # more than any vocabulary, and a machine integer
REPLY_TOKENS = 4096  # reply tokens of a chat that gives no limit


def check_ids(body: Body, prompts: Prompts) -> None:
    """Raise ApiError if parameters name tokens that the model does not know."""
    prompts.check_ids(body.stop_token_ids, "stop_token_ids", "stop_token_ids")
    prompts.check_ids([*body.logit_bias], "logit_bias", "logit_bias")


def limit_of(body: ChatBody, room: int, context: int, usual: int | None) -> int:
    """The most tokens of a chat's reply, within the `room` that its prompt leaves.

    A chat that gives no limit gets the model's `usual` one, or else 4096 and at most half the context: then a reply without
    an end stops, and the conversation can go on.
    """
    asked = body.limit
    if asked is None:
        asked = max(usual or min(REPLY_TOKENS, context // 2), body.min_tokens, 1)
    return min(asked, room)


def asked_of(
    body: CompletionBody | ChatBody, tokens: np.ndarray, limit: int, seed: int, index: int, *, begun: bool = False
) -> Asked:
    """Choice `index` of a prompt's choices."""
    params = SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=min(max(body.top_k, 0), MOST_TOP_K),
        min_p=body.min_p,
        max_tokens=max(limit, 1),
        stop_ids=tuple(dict.fromkeys(body.stop_token_ids)),
        ignore_eos=body.ignore_eos,
        seed=derive_seed(seed, "choice", index),
        top_logprobs=body.top_logprobs if isinstance(body, ChatBody) else body.logprobs or 0,
        min_tokens=body.min_tokens,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=tuple(body.logit_bias.items()),
    )
    stops, listed = tuple(body.stop), body.logprobs is not None and body.logprobs is not False
    extras = (MODEL_LOGPROBS.name,) if listed else ()
    return Asked(tokens, params, stops, begun, not body.skip_special_tokens, body.return_token_ids, extras)
