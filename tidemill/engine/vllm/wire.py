"""Bodies of vLLM's routes: requests from ours, and completions from its replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tidemill.core.errors import EngineFailed
from tidemill.core.types import Completion, Finish, GenerateRequest, SamplingParams, Scored, Version
from tidemill.engine.remote.version_spans import spans_of
from tidemill.engine.request_refusals import check_exact

GENERATE = "/inference/v1/generate"
PREFIX = "generate-tokens-"  # vLLM puts it before the ids of requests that come by that route
LEAST_TEMPERATURE = 0.01  # vLLM samples at this one where a lower one is asked for


def check_params(params: SamplingParams, engine: str) -> None:
    """Raise ValueError for parameters whose distribution the server cannot sample or report."""
    check_exact(params, engine)
    if 0 < params.temperature < LEAST_TEMPERATURE:
        raise ValueError(
            f"temperature={params.temperature!r}: vLLM samples at {LEAST_TEMPERATURE} where less is asked for; expected "
            "0 or at least that"
        )


def generate_body(
    request: GenerateRequest, *, model: str, name: str, salt: str, room: int, eos: Sequence[int]
) -> dict[str, Any]:
    """The body of a request. name: its id. room: tokens that the context has beyond the prompt."""
    params = request.params
    stops = params.stop_ids if params.ignore_eos else (*params.stop_ids, *eos)
    sampling = {
        "max_tokens": min(params.max_tokens, room),
        "temperature": params.temperature,
        "seed": params.seed & (2**63 - 1),
        "logprobs": 0,  # of the sampled token alone
        "stop_token_ids": sorted({*stops}),
        "ignore_eos": True,  # all ids that end a reply are among the stops
        "detokenize": False,
    }
    body = {"model": model, "token_ids": request.tokens.tolist(), "request_id": name, "sampling_params": sampling}
    return body | {"cache_salt": salt}


def score_body(tokens: np.ndarray, top_k: int, *, model: str, name: str, salt: str) -> dict[str, Any]:
    """The body of a request for the logprobs of a prompt, which come with one sampled token."""
    sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top_k, "ignore_eos": True, "detokenize": False}
    body = {"model": model, "token_ids": tokens.tolist(), "request_id": name, "sampling_params": sampling}
    return body | {"cache_salt": salt}


def choice_of(reply: Any, server: str) -> Mapping[str, Any]:
    """The one choice of a reply. Raises EngineFailed if there is none."""
    try:
        (choice,) = reply["choices"]
        return choice
    except (KeyError, TypeError, ValueError):
        raise EngineFailed(f"{server} answered {GENERATE} with no choice: {str(reply)[:200]}") from None


def completion_of(
    reply: Mapping[str, Any], request: GenerateRequest, labels: Mapping[str, Version], oldest: Version, server: str
) -> Completion:
    """The completion in a reply. oldest: the version that was served when the request was sent."""
    choice, params, prompt = choice_of(reply, server), request.params, len(request.tokens)
    tokens = np.array(choice.get("token_ids") or (), np.int32)
    content = (choice.get("logprobs") or {}).get("content") or ()
    if [entry["token_id"] for entry in content] != tokens.tolist():
        raise EngineFailed(f"{server} returned {len(tokens)} tokens and the logprobs of {len(content)} others")
    logprobs = np.array([entry["logprob"] for entry in content], np.float32)
    spans = spans_of(choice.get("weight_versions"), len(tokens), labels, server)
    ended = {"stop": Finish.STOP, "abort": Finish.CANCELLED, "length": Finish.CONTEXT}.get(choice.get("finish_reason") or "")
    if ended is None:
        raise EngineFailed(f"{server} ended a reply with finish_reason {choice.get('finish_reason')!r}")
    if ended is Finish.CONTEXT and len(tokens) == params.max_tokens:
        ended = Finish.LENGTH
    cached = ((reply.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Completion(
        tokens=tokens,
        logprobs=logprobs if params.temperature > 0 else np.zeros_like(logprobs),  # a greedy choice is certain
        versions=np.repeat([version.step for version, _ in spans], [count for _, count in spans]).astype(np.int32),
        sources=tuple(dict.fromkeys(version for version, _ in spans)) or (oldest,),
        finish=ended,
        prompt_tokens=prompt,
        cached_tokens=min(cached, prompt),
        engine=server,
    )


def scored_of(reply: Mapping[str, Any], tokens: np.ndarray, top_k: int, version: Version, server: str) -> Scored:
    """The logprobs of a prompt, with `top_k` alternatives."""
    rows: Any = reply.get("prompt_logprobs") or ()
    if len(rows) != len(tokens):
        raise EngineFailed(f"{server} returned the logprobs of {len(rows)} of {len(tokens)} tokens")
    logprobs = np.zeros(len(tokens), np.float32)
    top_ids, top = np.full((len(tokens), top_k), -1, np.int32), np.zeros((len(tokens), top_k), np.float32)
    for t, row in enumerate(rows[1:], 1):
        logprobs[t] = row[str(tokens[t])]["logprob"]
        best = sorted((entry["rank"], int(token), entry["logprob"]) for token, entry in row.items())[:top_k]
        for k, (_, token, logprob) in enumerate(best):
            top_ids[t, k], top[t, k] = token, logprob
    return Scored(logprobs, version, top_ids if top_k else None, top if top_k else None)
