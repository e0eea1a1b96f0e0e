"""What vLLM's clients know besides OpenAI's interface: tokens, figures, penalties, the template's options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from serving_cases import CHATML, Running, byte_tokenizer, chat_model

from tidemill.core.types import GenerateRequest, SamplingParams
from tidemill.engine.server.reader_process import chat_tokens

HELLO = [{"role": "user", "content": "hello"}]


def ask(running: Running, path: str, body: dict[str, Any], status: int = 200) -> Any:
    reply = httpx.post(f"{running.url}/{path}", json=body, timeout=30)
    assert reply.status_code == status, reply.text
    return reply.json()


def chat(running: Running, status: int = 200, **more: Any) -> Any:
    return ask(running, "v1/chat/completions", {"model": running.name, "messages": HELLO, "seed": 3, **more}, status)


def complete(running: Running, **more: Any) -> Any:
    return ask(running, "v1/completions", {"model": running.name, "prompt": "the tide", "seed": 3, "max_tokens": 40, **more})


@pytest.fixture(scope="module")
def picky(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A template that knows no developer, says what it is given, and fails on some words; one token has no embedding."""
    folder = chat_model(tmp_path_factory.mktemp("features") / "picky")
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|new|>"]})
    tokenizer.chat_template = (
        "{{ mood | default('calm') }}{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
        "{{ '<|im_start|>' + m.role + (' ' + m.name if m.name else '') + '\n' + m.content }}"
        "{% if m.content == 'sum' %}{{ 1 + m.content }}{% endif %}"
        "{% if m.content == 'no' %}{{ raise_exception('not that') }}{% endif %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    with Running(folder) as running:
        yield running


def test_tokens_of_texts_and_chats(chats: Running) -> None:
    tokenizer = chats.tokenizer
    for text in ("the tide", "<|im_start|>é", ""):
        found = ask(chats, "tokenize", {"model": chats.name, "prompt": text, "return_token_strs": True})
        ids = tokenizer.encode(text)
        names = tokenizer.convert_ids_to_tokens(ids)
        assert found == {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": names}
        assert ask(chats, "detokenize", {"tokens": ids}) == {"prompt": text}
    for options in ({}, {"add_generation_prompt": False}, {"add_generation_prompt": False, "continue_final_message": True}):
        found = ask(chats, "tokenize", {"messages": HELLO, **options})
        expected = tokenizer.apply_chat_template(HELLO, **{"add_generation_prompt": True, **options})["input_ids"]
        assert found["tokens"] == expected and found["token_strs"] is None
    long = ask(chats, "tokenize", {"prompt": "a" * 3000})
    assert long["count"] == 3000, "it need not fit the context"
    info = httpx.get(f"{chats.url}/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>" and info["chat_template"] == CHATML and "bos_token" not in info
    for path, body, words in (
        ("tokenize", {"text": "a"}, "'prompt' is required"),
        ("tokenize", {"prompt": 5}, "prompt = 5"),
        ("detokenize", {"tokens": [259]}, "knows 0 to 258"),
        ("detokenize", {"tokens": [-1]}, "token id -1"),
        ("detokenize", {"tokens": ["a"]}, "tokens"),
        ("detokenize", {"tokens": [5] * 70_000}, "70000 tokens, expected at most 65536"),
        ("tokenize", {"prompt": "a" * 70_000}, "70000 tokens, expected at most 65536"),
        ("tokenize", {"prompt": "a" * (1 << 21)}, "characters"),
    ):
        assert words in ask(chats, path, body, 400)["error"]["message"]
    assert "not served" in ask(chats, "tokenize", {"model": "other", "prompt": "a"}, 404)["error"]["message"]


def figures(running: Running) -> dict[str, float]:
    reply = httpx.get(f"{running.url}/metrics")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = (line.rpartition(" ") for line in reply.text.splitlines() if not line.startswith("#"))
    return {name.replace(f'model_name="{running.name}"', "").replace("{}", ""): float(value) for name, _, value in lines}


def test_figures_for_prometheus(chats: Running) -> None:
    assert httpx.get(f"{chats.url}/health").status_code == 200
    before = figures(chats)
    reply = complete(chats, n=2, logit_bias={"2": -100}, ignore_eos=True)
    list(chats.client.completions.create(model=chats.name, prompt="the tide", max_tokens=5, stream=True))
    complete(chats, stop=["zzz"], max_tokens=3)
    httpx.post(f"{chats.url}/v1/completions", json={})
    httpx.get(f"{chats.url}/nothing/like/it")
    after = figures(chats)
    grown = {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}
    route = 'tidemill:http_requests_total{method="%s",route="%s",status="%s"}'
    assert grown[route % ("POST", "/v1/completions", 200)] == 3
    assert grown[route % ("POST", "/v1/completions", 400)] == 1
    assert grown[route % ("GET", "other", 404)] == 1
    tokens = len(chats.tokenizer.encode("the tide"))
    assert grown["tidemill:prompt_tokens_total"] == grown["tidemill:prefix_cache_queries_total"] == 4 * tokens
    assert 80 < grown["tidemill:generation_tokens_total"] <= 88 and reply["usage"]["completion_tokens"] == 80
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert grown[f"tidemill:{name}_count"] == 4 and grown[f"tidemill:{name}_sum"] > 0
    assert grown["tidemill:time_to_first_token_seconds_sum"] < grown["tidemill:e2e_request_latency_seconds_sum"]
    assert 2 <= grown["tidemill:request_time_per_output_token_seconds_count"] <= 4
    ended = [value for name, value in grown.items() if name.startswith("tidemill:request_success_total")]
    assert sum(ended) == 4
    assert after["tidemill:num_requests_running"] == after["tidemill:num_requests_waiting"] == 0
    assert after["tidemill:kv_pages"] == chats.engine.pages and after["tidemill:kv_pages_used"] == 0


def test_health_needs_no_key_and_figures_do(chats: Running) -> None:
    with Running(chats.folder, api_key="sesame") as running:
        assert httpx.get(f"{running.url}/health").status_code == 200
        for path in ("metrics", "tokenizer_info", "health/", "v1/models"):
            assert httpx.get(f"{running.url}/{path}").status_code == 401, path
        running.call(running.engine.close())
        assert httpx.get(f"{running.url}/health").status_code == 503


def test_token_ids_as_vllm_lists_them(chats: Running) -> None:
    asked = {"return_token_ids": True, "logprobs": 1, "stop": ["e"], "n": 2, "max_tokens": 30}
    choices = complete(chats, **asked)["choices"]
    for choice in choices:
        assert choice["prompt_token_ids"] == chats.tokenizer.encode("the tide")
        assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]), "logprobs and ids are of the same tokens"
        text = chats.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
        assert text.startswith(choice["text"]) and choice["finish_reason"] in ("stop", "length")
    with httpx.stream(
        "POST",
        f"{chats.url}/v1/completions",
        json={"model": chats.name, "prompt": "the tide", "seed": 3, "stream": True, **asked},
    ) as reply:
        chunks = [
            c
            for line in reply.iter_lines()
            if line[6:7] == "{"
            for c in httpx.Response(200, text=line[6:]).json()["choices"]
        ]
    for i, choice in enumerate(choices):
        own = [c for c in chunks if c["index"] == i]
        assert [t for c in own for t in c["token_ids"]] == choice["token_ids"]
        assert [c["prompt_token_ids"] for c in own if "prompt_token_ids" in c] == [choice["prompt_token_ids"]]
    told = chat(chats, return_token_ids=True, max_tokens=8)
    assert told["prompt_token_ids"] == chats.tokenizer.apply_chat_template(HELLO, add_generation_prompt=True)["input_ids"]
    assert len(told["choices"][0]["token_ids"]) == told["usage"]["completion_tokens"]
    plain = chat(chats, max_tokens=8)
    assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]
    named = complete(chats, logprobs=2, max_tokens=4, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert all(re.fullmatch(r"token_id:\d+", name) for name in [*named["tokens"], *named["top_logprobs"][0]])


def test_sampling_is_the_engines(chats: Running) -> None:
    """Each parameter gets there: the same seed and parameters in an engine give the same tokens."""
    from tidemill.core.seeding import derive_seed

    prompt = chats.tokenizer.encode("the tide")
    plain = complete(chats, return_token_ids=True)["choices"][0]["token_ids"]
    for name, value in (
        ("presence_penalty", 2.0),
        ("frequency_penalty", -2.0),
        ("repetition_penalty", 4.0),
        ("min_tokens", 40),
        ("logit_bias", ((plain[0], -100.0),)),
        ("stop_ids", (plain[3],)),
    ):
        params = SamplingParams(max_tokens=40, seed=derive_seed(3, "choice", 0), **{name: value})
        given = {"stop_ids": "stop_token_ids"}.get(name, name)
        found = complete(chats, return_token_ids=True, **{given: dict(value) if name == "logit_bias" else value})
        expected = chats.call(chats.engine.generate(GenerateRequest(np.array(prompt, np.int32), params))).tokens.tolist()
        assert found["choices"][0]["token_ids"] == expected != plain, name
    of_all, of_more = (complete(chats, top_k=most)["choices"] for most in (259, 10**25))
    assert of_all == of_more, "no number is too large"
    stopped = complete(chats, stop_token_ids=[plain[3]], logprobs=0)["choices"][0]
    assert stopped["finish_reason"] == "stop" and stopped["text"] == chats.tokenizer.decode(plain[: plain.index(plain[3])])


def test_special_tokens_may_be_shown(chats: Running) -> None:
    for seed in range(20):
        asked = {"seed": seed, "max_tokens": 60, "logit_bias": {"1": 4}, "return_token_ids": True}
        choice = complete(chats, skip_special_tokens=False, **asked)["choices"][0]
        ids = [token for token in choice["token_ids"] if token != chats.tokenizer.eos_token_id]
        assert choice["text"] == chats.tokenizer.decode(ids)
        if "<|im_start|>" in choice["text"]:
            assert "<|im_start|>" not in complete(chats, **asked)["choices"][0]["text"]
            return
    pytest.fail("no special token was sampled: choose other seeds")


NEUTRAL: dict[str, Any] = {
    "tool_choice": "none",
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "use_beam_search": False,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "priority": 0,
    "min_tokens": 0,
    "stop_token_ids": [],
    "bad_words": [],
    "allowed_token_ids": None,
    "prompt_logprobs": None,
    "guided_json": None,
    "request_id": "mine",
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "logit_bias": None,
    "logprobs": None,
    "stream_options": None,
}


def test_neutral_values_ask_for_nothing(chats: Running) -> None:
    assert complete(chats, **NEUTRAL)["choices"] == complete(chats)["choices"]
    of_chats = {"echo": False, "add_special_tokens": False, "documents": [], "include_reasoning": True, "tools": []}
    of_chats |= {
        "add_generation_prompt": True,
        "continue_final_message": False,
        "chat_template_kwargs": {},
        "max_tokens": 20,
    }
    assert chat(chats, **NEUTRAL, **of_chats)["choices"] == chat(chats, max_tokens=20)["choices"]


def rendered(running: Running, messages: list[dict[str, Any]], **options: Any) -> str:
    return running.tokenizer.decode(ask(running, "tokenize", {"messages": messages, **options})["tokens"])


def test_the_template_and_its_options(picky: Running, chats: Running) -> None:
    told = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi", "name": "ann", "type": "text"}]
    text = "calm<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user ann\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert rendered(picky, told) == text
    assert "<|im_start|>developer\nbe brief" in rendered(chats, told), "a template that knows the role keeps it"
    assert rendered(picky, told, chat_template_kwargs={"mood": "wild"}) == text.replace("calm", "wild", 1)
    asked = {"max_tokens": 4, "return_token_ids": True, "chat_template_kwargs": {"mood": "wild"}}
    ids = chat(picky, **asked)["prompt_token_ids"]
    assert ids == chat_tokens(picky.tokenizer, HELLO, {"mood": "wild"}).tolist()
    begun = [*HELLO, {"role": "assistant", "content": "well,"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert rendered(picky, begun, **options).endswith("assistant\nwell,")


def test_refusals_name_their_place(picky: Running) -> None:
    for messages, words in (
        ([{"role": "user", "content": "sum"}], "the chat template failed: TypeError: "),
        ([{"role": "user", "content": "no"}], "not that"),
        ([*HELLO, {"role": "user", "content": "a<|new|>"}], "messages[1]: its token"),
    ):
        error = chat(picky, 400, messages=messages)["error"]
        assert words in error["message"] and error["param"] == "messages"
    for prompt, words in (
        ("a<|new|>b", "prompt: its token 1 is '<|new|>', id 259"),
        (["a", "b<|new|>"], "prompt[1]: its token 1"),
        ([[5], [5, 259]], "prompt[1]: token id 259"),
    ):
        body = {"model": picky.name, "prompt": prompt, "max_tokens": 2}
        assert words in ask(picky, "v1/completions", body, 400)["error"]["message"]
    assert ask(picky, "detokenize", {"tokens": [259]}) == {"prompt": "<|new|>"}, "the tokenizer knows it"


def test_a_folder_says_how_long_replies_are(chats: Running, tmp_path: Path) -> None:
    from tidemill.api_formats.requests import ChatBody
    from tidemill.engine.server.service import limit_of

    body = ChatBody(model="m", messages=HELLO)
    assert limit_of(body, 30_000, 32_768, None) == 4096 and limit_of(body, 900, 1024, None) == 512
    assert limit_of(body, 100, 1024, None) == 100 and limit_of(body, 900, 1024, 20) == 20
    assert limit_of(body.model_copy(update={"min_tokens": 600}), 900, 1024, None) == 600
    assert limit_of(body.model_copy(update={"max_tokens": 900}), 950, 1024, 20) == 900
