"""Attempts as trees: what diverges becomes a branch, and each sampled token is recorded once, after its own prompt."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from random_agents import LETTERS, TOKENIZERS, Agent, RandomEngine, check_record, check_text, said, user
from random_clients import WITH_TOOLS, CallingEngine, Client, check_shown
from scripted_engine import ScriptedEngine, says

from tidemill.core.errors import ContextFull
from tidemill.core.serialization import encode
from tidemill.core.types import Finish, GenerateRequest, SamplingParams, Score
from tidemill.envs.attempt_tree import common
from tidemill.envs.chat import EpisodeChat, rollout_seeds
from tidemill.gateway.gateway import serve_chat
from tidemill.models.tokenizer import Tokenizer


@pytest.mark.parametrize("name", TOKENIZERS)
async def test_random_trees_record_each_sampled_token_once(name: str) -> None:
    forks = 0
    for seed in range(75):
        tokenizer, rng = TOKENIZERS[name], random.Random(seed)
        engine = RandomEngine(tokenizer, rng)
        rows = await Agent(tokenizer, rng, engine).play()
        check_record(rows, engine.calls)
        check_text(tokenizer, engine)
        forks += sum(row.parent is not None for row in rows)
    assert forks > 30, "hardly anything was forked"


@pytest.mark.parametrize("number", [5, pytest.param(50, marks=pytest.mark.runs)])
@pytest.mark.parametrize("name", [*TOKENIZERS, *WITH_TOOLS])
async def test_random_trees_of_clients_that_try_again(name: str, number: int) -> None:
    """By HTTP, with tools where the template shows them: a request that is sent again is one call, and one sample."""
    forks, sent = 0, Counter[str]()
    async with serve_chat(chat_with(None, LETTERS)):  # the server stays from tree to tree
        for seed in range(number):
            tokenizer, rng = (TOKENIZERS | WITH_TOOLS)[name], random.Random(seed)
            engine = CallingEngine(tokenizer, rng, name in WITH_TOOLS)
            client = Client(tokenizer, rng, engine)
            rows = await client.play()
            check_record(rows, engine.calls)
            check_shown(tokenizer, engine)
            counts = client.model.counts
            assert len(engine.calls) == len(client.asked) == counts["calls"], "a retry was sampled anew"
            assert counts["retries"] >= counts["calls"] - client.sent["once"] and not counts["abandoned"]
            forks += sum(row.parent is not None for row in rows)
            sent += client.sent
    assert forks > number / 3 and min(sent[how] for how in ("once", "told", "beside", "left")) > number / 2, (forks, sent)


def chat_with(engine: Any, tokenizer: Tokenizer, context: int = 1000) -> EpisodeChat:
    params = SamplingParams(stop_ids=(tokenizer.eos_token_id,))
    return EpisodeChat(engine, tokenizer, params, context=context, key="k", seeds=rollout_seeds(1, 7, 0))


async def test_a_conversation_that_only_grows_is_one_row_with_the_seeds_of_its_turns() -> None:
    tokenizer = TOKENIZERS["appends"]
    engine, turns = (
        ScriptedEngine(says(tokenizer, "one", "two", "three")),
        ScriptedEngine(says(tokenizer, "one", "two", "three")),
    )
    chat, by_turn, messages = chat_with(engine, tokenizer), chat_with(turns, tokenizer), [user("a")]
    for place, text in enumerate(("one", "two", "three")):
        assert (await chat.complete(messages)).text == await by_turn.reply(messages[-1]["content"]) == text
        messages += [said(f" {text}\n"), user(f"more {place}")]  # clients trim and pad
    (row,), (expected,) = chat.rows(Score(1.0)), by_turn.rows(Score(1.0))
    assert encode(row) == encode(expected) and row.turns == 3
    assert [params.seed for params in engine.params] == [params.seed for params in turns.params]


async def test_a_second_answer_begins_a_branch_where_the_first_one_begins() -> None:
    tokenizer = TOKENIZERS["appends"]
    engine = ScriptedEngine(says(tokenizer, "one", "two", "other", "end"))
    chat = chat_with(engine, tokenizer)
    before = [user("a")]
    first = [*before, said((await chat.complete(before)).text), user("b")]
    second = [*first, said((await chat.complete(first)).text), user("c")]
    assert (await chat.complete(first)).text == "other"
    trunk, branch = chat.rows()
    assert branch.parent == (0, len(engine.prompts[1]) - len(chat_tail(engine, 1))) and branch.text == "other"
    assert (await chat.complete(second)).text == "end"
    rows = chat.rows(Score(1.0))
    check_record(rows, list(zip(asked(engine), engine.completions, strict=True)))
    assert [row.text for row in rows] == ["two", "other", "end"], "the latest reply is not the end of the attempt"
    assert rows[0].tokens.tolist() == trunk.tokens.tolist() and rows[2].parent == (0, len(trunk.tokens))
    assert [[each.text for each in row.said] for row in rows] == [["a", "one", "b", "two"], ["b", "other"], ["c", "end"]]


def chat_tail(engine: ScriptedEngine, call: int) -> np.ndarray:
    """The tokens that were given between a call's prompt and the reply before it."""
    return engine.prompts[call][len(engine.prompts[call - 1]) + len(engine.completions[call - 1].tokens) :]


def asked(engine: ScriptedEngine) -> list[GenerateRequest]:
    return [GenerateRequest(tokens, params) for tokens, params in zip(engine.prompts, engine.params, strict=True)]


async def test_a_compacted_history_keeps_what_it_begins_with() -> None:
    tokenizer = TOKENIZERS["appends"]
    engine = ScriptedEngine(says(tokenizer, "one", "two", "three", "four"))
    chat = chat_with(engine, tokenizer)
    first = [user("a")]
    one = [*first, said((await chat.complete(first)).text), user("b")]
    two = [*one, said((await chat.complete(one)).text), user("c")]
    assert len(two) == 5
    await chat.complete([*one[:2], user("in short: b, c")])
    trunk, branch = chat.rows(Score(0.0))
    end = len(engine.prompts[0]) + len(engine.completions[0].tokens)
    assert branch.parent is not None and branch.parent[0] == 0 and branch.parent[1] == end, "the first exchange stays"
    assert trunk.turns == 2 and branch.turns == 1 and branch.sampled == len(engine.completions[2].tokens)
    await chat.complete([user("all in short")])
    assert chat.rows()[-1].parent is None, "it has nothing in common with any row"


async def test_a_full_conversation_is_compacted_and_goes_on() -> None:
    tokenizer = TOKENIZERS["appends"]
    engine = ScriptedEngine(says(tokenizer, "one", "two"), context=60)
    chat = chat_with(engine, tokenizer, context=60)
    first = [user("a")]
    whole = [*first, said((await chat.complete(first)).text), user("b" * 60)]
    with pytest.raises(ContextFull, match="the conversation is"):
        await chat.complete(whole)
    assert (await chat.complete([user("in short")])).text == "two"
    rows = chat.rows(Score(1.0))
    assert rows[-1].finish is Finish.ENV_DONE and rows[-1].text == "two", "it did not end where it was full"


async def test_what_cannot_be_answered_is_refused() -> None:
    tokenizer = TOKENIZERS["appends"]
    chat = chat_with(ScriptedEngine(says(tokenizer, "one")), tokenizer, context=60)
    with pytest.raises(ValueError, match=r"the prompt is .* tokens, and the context holds 60"):
        await chat.complete([user("b" * 80)])
    with pytest.raises(ValueError, match="expected a text, or a list of messages"):
        await chat.complete([])
    text = (await chat.complete([user("a")])).text
    with pytest.raises(ValueError, match="ends with the policy's own reply: add the message that it is to answer"):
        await chat.complete([user("a"), said(text)])


async def test_replies_go_on_from_the_latest_one() -> None:
    tokenizer = TOKENIZERS["appends"]
    engine = ScriptedEngine(says(tokenizer, "one", "two", "three"))
    chat = chat_with(engine, tokenizer)
    await chat.reply("a")
    await chat.complete([user("other")])
    await chat.reply("b")
    shown = tokenizer.decode(engine.prompts[2])
    assert "other" in shown and "<|im_start|>user\nb" in shown
    assert [row.turns for row in chat.rows()] == [1, 2]


def test_common_beginnings() -> None:
    rng = random.Random(0)
    for _ in range(300):
        a, b = ("".join(rng.choice("ab") for _ in range(rng.randint(0, 12))) for _ in range(2))
        found = common(a, b)
        assert a[:found] == b[:found] and (found == min(len(a), len(b)) or a[found] != b[found])
