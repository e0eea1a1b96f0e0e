"""Probe of a server with `/v1/completions`: a few short requests that show what it can do.

A server may ignore a field that it does not know, so a feature counts only if its effect was seen.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tidemill.core.errors import ConfigError, EngineFailed
from tidemill.engine.remote.http_client import ServerClient
from tidemill.engine.remote.remote_engine import SHORT_S

ROUTE = "/v1/completions"
NEAR = 0.05  # nats between two computations of one logprob in low precision
PROBED = 8  # tokens


@dataclass(frozen=True, slots=True)
class ServerAbilities:
    """Abilities of a server. Its name for the model, and the fields that it takes, go into each request."""

    model: str
    context: int | None  # tokens of a sequence, where the server says so
    seeds: bool  # a seed repeats its tokens
    stops: bool  # it takes stop_token_ids
    ignores_eos: bool  # it takes ignore_eos
    tempered: bool  # logprobs are those at the temperature; else at temperature 1, whatever was asked
    scores: bool  # it gives the logprobs of a prompt, at temperature 1


async def probe(client: ServerClient, asked_model: str, vocab: int) -> ServerAbilities:
    """Ask the server. Raises ConfigError for one that does not return token ids with their logprobs."""
    model, context = await _model(client, asked_model)
    prompt = np.random.default_rng(0).integers(0, vocab, 4).tolist()

    async def sampled(**more: Any) -> tuple[list[int], list[float]]:
        body = {"model": model, "prompt": prompt, "max_tokens": PROBED, "seed": 1, "logprobs": 1, "return_token_ids": True}
        return read_choice(await client.post(ROUTE, body | more, SHORT_S), client.name)

    async def takes(**more: Any) -> tuple[list[int], list[float]] | None:
        try:
            return await sampled(**more)
        except ValueError:  # it refuses a field
            return None

    try:
        ids, logprobs = await sampled()
    except (ValueError, EngineFailed) as error:
        raise ConfigError(
            f"engine.kind = 'openai': {error}; expected a server whose {ROUTE} takes token ids as the prompt and "
            "returns the sampled token ids (return_token_ids) with their logprobs, such as `tidemill serve` or vLLM"
        ) from error
    again = await takes()
    seeds = again is not None and again[0] == ids and len(ids) > 1
    stopped = await takes(temperature=0, stop_token_ids=[(await sampled(temperature=0))[0][0]])
    free = await takes(ignore_eos=True, seed=2)
    scored = await score(client, model, [*prompt, *ids])
    scores = scored is not None and _near(scored[len(prompt) :], logprobs)
    tempered = False
    if scores and (warm := await takes(temperature=0.5, seed=3)) is not None:
        plain = await score(client, model, [*prompt, *warm[0]])
        tempered = plain is not None and not _near(plain[len(prompt) :], warm[1])
    return ServerAbilities(
        model, context, seeds, stopped is not None and len(stopped[0]) == 1, free is not None and len(free[0]) == PROBED,
        tempered, scores,
    )  # fmt: skip


async def score(client: ServerClient, model: str, tokens: list[int], deadline_s: float = SHORT_S) -> list[float] | None:
    """Logprobs of the tokens at temperature 1, 0 for the first one; None if the server does not give them."""
    body = {"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 1, "logprobs": 1, "echo": True}
    try:
        reply = await client.post(ROUTE, body, deadline_s)
        found = reply["choices"][0]["logprobs"]["token_logprobs"][: len(tokens)]
    except (ValueError, KeyError, TypeError, IndexError):
        return None
    usable = len(found) == len(tokens) and all(isinstance(each, int | float) for each in found[1:])
    return [0.0, *map(float, found[1:])] if usable else None


def read_choice(reply: Any, server: str) -> tuple[list[int], list[float]]:
    """The sampled tokens in a reply or in an event, and their logprobs. Raises ValueError where they are not there."""
    try:
        choice = reply["choices"][0]
        ids, logprobs = choice.get("token_ids") or [], (choice.get("logprobs") or {}).get("token_logprobs") or []
    except (KeyError, TypeError, IndexError, AttributeError):
        raise ValueError(f"{server} returned no choice: {str(reply)[:200]}") from None
    if "token_ids" not in choice:
        raise ValueError(f"{server} returned no token_ids")
    if len(ids) != len(logprobs) or not all(isinstance(each, int | float) and math.isfinite(each) for each in logprobs):
        raise ValueError(f"{server} returned {len(ids)} token ids and {len(logprobs)} logprobs: expected a number for each")
    return ids, logprobs


async def _model(client: ServerClient, asked: str) -> tuple[str, int | None]:
    """(name, context) of the model that the server has, or of the one that was asked for."""
    async with asyncio.timeout(2 * SHORT_S):
        reply = await client.get("/v1/models", SHORT_S)
    try:
        listed = {each["id"]: each for each in reply["data"]}
    except (KeyError, TypeError):
        raise ConfigError(f"engine.kind = 'openai': {client.name} does not list its models at /v1/models") from None
    if (asked or len(listed) != 1) and asked not in listed:
        names = ", ".join(map(repr, listed)) or "none"
        raise ConfigError(f"engine.served_model = {asked!r}: {client.name} has {names}; name one of them")
    model = listed[asked or next(iter(listed))]
    context = model.get("max_model_len")
    return model["id"], context if isinstance(context, int) else None


def _near(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and bool(np.abs(np.subtract(one, other)).max(initial=0) < NEAR)
