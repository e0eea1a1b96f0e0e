"""Bodies of SGLang's route for tokens: requests from ours, and what its replies hold. Fields are those of SGLang 0.5.23."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tidemill.core.errors import EngineFailed
from tidemill.core.types import Finish, GenerateRequest, Scored, Version
from tidemill.engine.remote.remote_engine import RemoteCall
from tidemill.engine.remote.version_spans import spans_of

GENERATE = "/generate"
TOKENS = 16  # between two events of a stream


def generate_body(request: GenerateRequest, *, name: str, salt: str, most: int, ends: Sequence[int]) -> dict[str, Any]:
    """The body of a request for at most `most` tokens. name: its id. ends: the ids that end it.

    With `ignore_eos` SGLang ignores stop ids, too, so those of such a request are looked for here: see `end_of`.
    """
    params = request.params
    sampling: dict[str, Any] = {"max_new_tokens": most, "temperature": params.temperature, "stream_interval": TOKENS}
    sampling |= {"sampling_seed": params.seed & (2**63 - 1), "ignore_eos": params.ignore_eos}
    sampling |= {} if params.ignore_eos else {"stop_token_ids": sorted({*ends})}
    body = {"rid": name, "input_ids": request.tokens.tolist(), "sampling_params": sampling, "extra_key": salt}
    return body | {"return_logprob": True, "stream": True}


def score_body(tokens: np.ndarray, top_k: int, *, name: str, salt: str) -> dict[str, Any]:
    """The body of a request for the logprobs of a prompt, which come with one sampled token."""
    body = {"rid": name, "input_ids": tokens.tolist(), "extra_key": salt, "return_logprob": True, "logprob_start_len": 0}
    return body | {"sampling_params": {"max_new_tokens": 1, "ignore_eos": True}, "top_logprobs_num": top_k}


def add_event(call: RemoteCall, event: Any, server: str) -> Mapping[str, Any]:
    """Add the new tokens of a streamed event to a call, and return the event's `meta_info`.

    An event holds the tokens since the one before, or all of them; one that was aborted in the queue repeats its last. So
    only as many are taken as the count says.
    """
    try:
        meta, ids = event["meta_info"], event["output_ids"]
        new = meta["completion_tokens"] - len(call.tokens)
        if new > 0:
            told = meta["output_token_logprobs"][-new:]
            if [entry[1] for entry in told] != ids[-new:] or len(told) != new:
                raise EngineFailed(f"{server} returned {len(ids)} tokens and the logprobs of others")
            call.tokens += ids[-new:]
            call.logprobs += [float(entry[0]) for entry in told]
        call.cached = meta.get("cached_tokens", call.cached)
        return meta
    except (KeyError, TypeError, IndexError):
        raise EngineFailed(f"{server} answered {GENERATE} with no tokens: {str(event)[:200]}") from None


def end_of(call: RemoteCall, ends: Sequence[int]) -> int:
    """The number of tokens up to the first of `ends`; 0 if there is none."""
    return next((count for count, token in enumerate(call.tokens, 1) if token in ends), 0)


def finish_of(
    call: RemoteCall, meta: Mapping[str, Any], ended: int, labels: Mapping[str, Version], server: str
) -> tuple[Finish, str]:
    """Give a call's tokens their versions, and return (its end, why the server refused it or failed: "" if it did not).

    ended: the tokens up to an end that the server did not know of; what follows is dropped.
    """
    spans = spans_of(meta.get("weight_versions"), len(call.tokens), labels, server)
    call.versions = [version for version, count in spans for _ in range(count)]
    reason = meta["finish_reason"]
    if reason["type"] == "abort" and reason.get("status_code"):
        return Finish.CANCELLED, str(reason.get("message"))
    if ended:
        del call.tokens[ended:], call.logprobs[ended:], call.versions[ended:]
        return Finish.STOP, ""
    kinds = {"stop": Finish.STOP, "abort": Finish.CANCELLED, "length": Finish.CONTEXT}
    if (finish := kinds.get(reason["type"])) is None:
        raise EngineFailed(f"{server} ended a reply with finish_reason {reason!r}")
    full = len(call.tokens) == call.request.params.max_tokens
    return Finish.LENGTH if finish is Finish.CONTEXT and full else finish, ""


def scored_of(meta: Mapping[str, Any], tokens: np.ndarray, top_k: int, version: Version, vocab: int, server: str) -> Scored:
    """The logprobs of a prompt, with `top_k` alternatives.

    SGLang may name the last token of the vocabulary 0: from there on it takes ids for parts of images.
    """
    rows: Any = meta.get("input_token_logprobs") or ()
    renamed = np.where(tokens == vocab - 1, 0, tokens)
    if [entry[1] for entry in rows] not in (tokens.tolist(), renamed.tolist()):
        raise EngineFailed(f"{server} returned the logprobs of {len(rows)} other tokens than the {len(tokens)} given ones")
    logprobs = np.array([0.0, *(entry[0] for entry in rows[1:])], np.float32)
    if not top_k:
        return Scored(logprobs, version)
    top_ids, top = np.full((len(tokens), top_k), -1, np.int32), np.zeros((len(tokens), top_k), np.float32)
    for t, row in enumerate(meta["input_top_logprobs"][1:], 1):
        for k, (logprob, token, _) in enumerate(row):
            top_ids[t, k], top[t, k] = token, logprob
    return Scored(logprobs, version, top_ids, top)
