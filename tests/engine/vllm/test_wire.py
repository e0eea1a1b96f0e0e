"""Bodies of a vLLM server's routes: no vLLM is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tidemill.core.errors import EngineFailed, PolicyMismatch
from tidemill.core.types import Finish, GenerateRequest, SamplingParams, Version
from tidemill.engine.vllm.server_routes import Served, served_sums
from tidemill.engine.vllm.wire import check_params, completion_of, generate_body, scored_of

OLD, NEW = Version(3, fingerprint="a"), Version(4, fingerprint="b")
LABELS = {"policy@v3": OLD, "policy@v4": NEW}
REQUEST = GenerateRequest(np.array([5, 6], np.int32), SamplingParams(max_tokens=3, seed=2**63 + 5, stop_ids=(9,)))


def reply(spans: list[tuple[str, int, int]], finish: str = "length", tokens: tuple[int, ...] = (1, 2, 3)) -> dict[str, Any]:
    content = [{"token_id": token, "logprob": -0.5 * token} for token in tokens]
    versions = [{"version": label, "start": start, "end": end} for label, start, end in spans]
    choice = {
        "token_ids": list(tokens),
        "logprobs": {"content": content},
        "finish_reason": finish,
        "weight_versions": versions,
    }
    return {"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 1}}}


def test_a_request_asks_for_the_logprob_of_what_was_sampled_and_stops_at_our_ids() -> None:
    body = generate_body(REQUEST, model="m", name="n", salt="s", room=2, eos=(7,))
    sampling = body["sampling_params"]
    assert (body["token_ids"], body["request_id"], body["cache_salt"], body["model"]) == ([5, 6], "n", "s", "m")
    assert (sampling["max_tokens"], sampling["logprobs"], sampling["seed"]) == (2, 0, 5), "the room, one logprob, 63 bits"
    assert sampling["stop_token_ids"] == [7, 9] and sampling["ignore_eos"], "vLLM's own end of text is another setting"
    free = replace(REQUEST, params=replace(REQUEST.params, ignore_eos=True))
    assert generate_body(free, model="m", name="n", salt="s", room=9, eos=(7,))["sampling_params"]["stop_token_ids"] == [9]


def test_spans_of_weights_become_the_versions_of_tokens() -> None:
    done = completion_of(reply([("policy@v3", 0, 1), ("policy@v4", 1, 3)]), REQUEST, LABELS, OLD, "engine-0")
    assert done.tokens.tolist() == [1, 2, 3] and done.logprobs.tolist() == [-0.5, -1.0, -1.5]
    assert done.versions.tolist() == [3, 4, 4] and done.sources == (OLD, NEW)
    assert (done.finish, done.prompt_tokens, done.cached_tokens) == (Finish.LENGTH, 2, 1)


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [("policy@v3", 0, 2)],
        [("policy@v3", 1, 3)],
        [("policy@v3", 0, 1), ("policy@v4", 2, 3)],
        [("default", 0, 3)],
    ],
    ids=["none", "short", "late", "gap", "unknown"],
)
def test_tokens_of_unknown_weights_are_refused(spans: list[tuple[str, int, int]]) -> None:
    with pytest.raises(PolicyMismatch, match="engine-0"):
        completion_of(reply(spans), REQUEST, LABELS, OLD, "engine-0")


@pytest.mark.parametrize(
    ("finish", "tokens", "most", "expected"),
    [
        ("stop", (1, 9), 3, Finish.STOP),
        ("length", (1, 2, 3), 3, Finish.LENGTH),
        ("length", (1, 2), 3, Finish.CONTEXT),  # the room ended it
        ("abort", (1,), 3, Finish.CANCELLED),
        ("abort", (), 3, Finish.CANCELLED),
    ],
)
def test_the_reason_of_the_end(finish: str, tokens: tuple[int, ...], most: int, expected: Finish) -> None:
    request = replace(REQUEST, params=replace(REQUEST.params, max_tokens=most))
    spans = [("policy@v3", 0, len(tokens))] if tokens else []
    done = completion_of(reply(spans, finish, tokens), request, LABELS, OLD, "engine-0")
    assert done.finish is expected and len(done.tokens) == len(tokens) and done.sources == (OLD,)


def test_a_reply_that_contradicts_itself_fails_the_engine() -> None:
    wrong = reply([("policy@v3", 0, 3)])
    wrong["choices"][0]["logprobs"]["content"].pop()
    for answer in (wrong, reply([("policy@v3", 0, 3)], "error"), {"choices": []}, None):
        with pytest.raises(EngineFailed, match="engine-0"):
            completion_of(answer, REQUEST, LABELS, OLD, "engine-0")


def test_a_greedy_choice_is_certain() -> None:
    greedy = replace(REQUEST, params=replace(REQUEST.params, temperature=0.0))
    assert not completion_of(reply([("policy@v3", 0, 3)]), greedy, LABELS, OLD, "engine-0").logprobs.any()


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"top_p": 0.9}, "top_p: engine e cannot say which tokens each one was chosen from"),
        ({"top_k": 4}, "top_k: engine e cannot say"),
        ({"min_p": 0.1}, "min_p: engine e cannot say"),
        ({"top_logprobs": 2}, "top_logprobs: engine e does not return"),
        ({"presence_penalty": 1.0}, "penalties and logit_bias: engine e"),
        ({"temperature": 0.005}, "temperature=0.005: vLLM samples at 0.01"),
    ],
)
def test_what_a_server_cannot_sample_exactly_is_refused_by_name(params: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_params(SamplingParams(**params), "e")
    check_params(SamplingParams(temperature=0.0, top_p=0.9), "e")  # greedy: nothing is cut off


def test_scores_are_aligned_with_their_tokens() -> None:
    rows = [
        None,
        {"6": {"logprob": -2.0, "rank": 3}, "1": {"logprob": -0.1, "rank": 1}},
        {"7": {"logprob": -0.3, "rank": 1}},
    ]
    found = scored_of({"prompt_logprobs": rows}, np.array([5, 6, 7], np.int32), 1, OLD, "engine-0")
    assert found.logprobs.tolist() == pytest.approx([0.0, -2.0, -0.3])
    assert found.top_ids is not None and found.top_ids.tolist() == [[-1], [1], [7]]
    with pytest.raises(EngineFailed, match="the logprobs of 3 of 2 tokens"):
        scored_of({"prompt_logprobs": rows}, np.array([5, 6], np.int32), 0, OLD, "engine-0")


def block(name: str, at: int, rows: int, total: int) -> Served:
    return Served(name, "float32", (4, 2), (at, 0), (rows, 2), str(total))


def test_sums_of_ranks_add_up() -> None:
    halves = [block("a", 0, 2, 2**64 - 1), block("a", 2, 2, 3), block("b", 0, 4, 5), block("b", 0, 4, 5)]
    assert served_sums(halves, "engine-0") == {"a": 2, "b": 5}


@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        ([block("a", 0, 2, 1)], "4 of the 8 elements of a"),
        ([block("a", 0, 4, 1), block("a", 0, 4, 2)], "two different copies of a"),
    ],
)
def test_ranks_that_lack_elements_or_disagree_are_refused(blocks: list[Served], says: str) -> None:
    with pytest.raises(PolicyMismatch, match=says):
        served_sums(blocks, "engine-0")
