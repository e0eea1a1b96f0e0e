"""Token truth (I7): the record is what was sent and what was sampled, in order, and nothing is encoded twice."""

from __future__ import annotations

import asyncio
import re
import threading

import numpy as np
import pytest
from scripted_engine import CHATML, FORGETS, TRIMS, ScriptedEngine, chat_tokenizer, says

from tidemill.core.chat_interface import Chat
from tidemill.core.errors import ConfigError, ContextFull, EpisodeOver
from tidemill.core.seeding import derive_seed
from tidemill.core.serialization import decode, encode
from tidemill.core.types import Finish, SamplingParams, Score, Task, Trajectory
from tidemill.envs.chat import HERE, EpisodeChat, rollout_seeds
from tidemill.models.chat_template import as_messages
from tidemill.models.conversations import check_prompts, prompt_tokens, renderer
from tidemill.models.tokenizer import character_tokenizer

TOKENIZER = chat_tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
LETTERS = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 \n")
FIRST, SECOND = "what is the answer?", "two, what?"


def chat_with(engine, tokenizer=TOKENIZER, *, context=10_000, **params) -> EpisodeChat:
    params = SamplingParams(**{"stop_ids": (tokenizer.eos_token_id,), **params})
    return EpisodeChat(engine, tokenizer, params, context=context, key="g7/0", seeds=rollout_seeds(1, 7, 0))


def check_truth(engine: ScriptedEngine, chat: EpisodeChat) -> None:
    """The masked positions are exactly the engine's tokens; each call was sent the record up to it."""
    record = chat.rows()[-1]
    for column in ("tokens", "logprobs", "versions"):
        sampled = np.concatenate([getattr(c, column) for c in engine.completions])
        np.testing.assert_array_equal(getattr(record, column)[record.mask], sampled)
    for prompt, completion in zip(engine.prompts, engine.completions, strict=True):
        np.testing.assert_array_equal(prompt, record.tokens[: len(prompt)])
        assert not record.mask[len(prompt) - 1]
        assert record.mask[len(prompt) : len(prompt) + len(completion.tokens)].all()
    assert (record.logprobs[~record.mask] == 0).all()
    assert (record.versions[~record.mask] == -1).all()
    assert record.tokens.dtype == record.versions.dtype == np.int32
    assert record.logprobs.dtype == np.float32


async def test_one_turn():
    engine = ScriptedEngine(says(TOKENIZER, "forty two"))
    chat: Chat = chat_with(engine)
    assert await chat.reply(FIRST) == "forty two"
    record = chat.rows()[-1]
    check_truth(engine, chat)
    rendered = TOKENIZER.apply_chat_template([{"role": "user", "content": FIRST}], tokenize=True, add_generation_prompt=True)
    np.testing.assert_array_equal(engine.prompts[0], rendered["input_ids"])
    np.testing.assert_array_equal(engine.prompts[0], prompt_tokens(TOKENIZER, FIRST))
    assert record.tokens[-1] == END
    assert (record.text, record.finish, record.turns) == ("forty two", Finish.STOP, 1)
    assert [v.step for v in record.sources] == [0, 1]
    assert record.info == {"queued_s": 0.0, "prompt_tokens": float(len(engine.prompts[0])), "cached_tokens": 3.0}


async def test_a_token_that_stops_is_no_part_of_the_reply():
    """Also one that is no special token, which decoding would not leave out."""
    reply, stop = "forty two", TOKENIZER.encode("!", add_special_tokens=False)
    said = [*TOKENIZER.encode(reply, add_special_tokens=False), *stop]
    chat = chat_with(ScriptedEngine(lambda tokens, params: said), stop_ids=tuple(stop))
    assert await chat.reply(FIRST) == reply
    assert chat.rows()[-1].tokens[-1] == stop[0], "it was sampled, so it is trained"


async def test_two_turns_are_the_rendering_of_the_conversation():
    engine = ScriptedEngine(says(TOKENIZER, "forty two", "two"), support=True)
    chat = chat_with(engine, top_p=0.9)
    await chat.reply(FIRST)
    await chat.reply([{"role": "user", "content": SECOND}])
    check_truth(engine, chat)
    roles = ("user", "assistant", "user", "assistant")
    texts = (FIRST, "forty two", SECOND, "two")
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
    whole = TOKENIZER.encode(TOKENIZER.apply_chat_template(messages, tokenize=False).rstrip("\n"), add_special_tokens=False)
    record = chat.rows(Score(1.0))[-1]
    np.testing.assert_array_equal(record.tokens, whole)
    assert (record.turns, record.finish, record.outcome) == (2, Finish.ENV_DONE, Score(1.0))
    assert [v.step for v in record.sources] == [0, 1, 2, 3]
    assert record.support is not None
    assert len(record.support.offsets) == record.sampled + 1
    ends = record.support.offsets[1:] - 1  # the scripted support lists the sampled token last
    np.testing.assert_array_equal(record.support.ids[ends], record.tokens[record.mask])


async def test_what_was_sampled_is_never_encoded_again():
    letters = [i for letter in "forty" for i in TOKENIZER.encode(letter, add_special_tokens=False)]
    assert letters != TOKENIZER.encode("forty", add_special_tokens=False)
    engine = ScriptedEngine(lambda tokens, params: [*letters, END])
    chat = chat_with(engine)
    assert await chat.reply(FIRST) == "forty"
    await chat.reply(SECOND)
    check_truth(engine, chat)


@pytest.mark.parametrize("template", [CHATML, TRIMS])
@pytest.mark.parametrize("stop", [True, False])
async def test_a_turn_closes_the_one_before_exactly_once(template, stop):
    tokenizer = chat_tokenizer(template)
    engine = ScriptedEngine(says(tokenizer, " two \n", "", stop=stop))
    chat = chat_with(engine, tokenizer)
    assert await chat.reply(FIRST) == " two \n"
    await chat.reply(SECOND)
    check_truth(engine, chat)
    text = tokenizer.decode(engine.prompts[1])
    assert text.endswith(f" two \n<|im_end|>\n<|im_start|>user\n{SECOND}<|im_end|>\n<|im_start|>assistant\n")
    assert text.count("<|im_end|>") == 3


async def test_a_system_prompt_and_several_messages():
    engine = ScriptedEngine(says(TOKENIZER, "two", "two"))
    chat = chat_with(engine)
    await chat.reply([{"role": "system", "content": "hello"}, {"role": "user", "content": FIRST}])
    await chat.reply([{"role": "tool", "content": "42"}, {"role": "user", "content": SECOND}])
    check_truth(engine, chat)
    assert "<|im_start|>tool\n42<|im_end|>\n<|im_start|>user\n" in TOKENIZER.decode(engine.prompts[1])


async def test_a_template_that_rewrites_history_makes_branches():
    tokenizer = chat_tokenizer(FORGETS)
    engine = ScriptedEngine(says(tokenizer, "<think>hm</think>two", "two", "two"))
    chat = chat_with(engine, tokenizer)
    await chat.reply(FIRST)
    await chat.reply(SECOND)
    first, second = chat.rows(Score(1.0))
    shown = [
        {"role": "user", "content": FIRST},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": SECOND},
    ]
    assert tokenizer.decode(engine.prompts[1]) == tokenizer.apply_chat_template(
        shown, tokenize=False, add_generation_prompt=True
    )
    assert second.parent is None and first.outcome is None, (
        "nothing that was sampled stayed, so it is no branch of the first"
    )
    assert (first.sampled, second.sampled) == tuple(len(each.tokens) for each in engine.completions)
    assert second.outcome == Score(1.0) and [each.turns for each in (first, second)] == [1, 1]


async def test_a_template_that_changes_what_stands_before_the_reply_makes_a_branch():
    tokenizer = chat_tokenizer("{{ messages | length }} messages\n" + CHATML)
    engine = ScriptedEngine(says(tokenizer, "", "two"))
    chat = chat_with(engine, tokenizer)
    assert await chat.reply(FIRST) == ""
    assert await chat.reply(SECOND) == "two"
    assert tokenizer.decode(engine.prompts[1]).startswith("3 messages\n")
    assert [row.parent for row in chat.rows()] == [None, None]


async def test_a_template_that_refuses_a_role():
    tokenizer = chat_tokenizer(
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    )
    chat = chat_with(ScriptedEngine(says(tokenizer, "x")), tokenizer)
    with pytest.raises(ConfigError, match="refuses roles system: no system"):
        await chat.reply([{"role": "system", "content": "hello"}])


@pytest.mark.parametrize("stop", [True, False])
async def test_plain_text_without_a_template(stop):
    engine = ScriptedEngine(says(LETTERS, "12", "21", stop=stop))
    chat = chat_with(engine, LETTERS)
    assert await chat.reply("guess") == "12"
    assert await chat.reply("lower") == "21"
    check_truth(engine, chat)
    end = "<eos>" if stop else ""
    between = "" if stop else "\n"
    assert LETTERS.decode(chat.rows()[-1].tokens) == f"guess\n12{end}{between}lower\n21{end}"


async def test_plain_text_begins_with_bos_where_the_tokenizer_says_so():
    from tokenizers.processors import TemplateProcessing

    tokenizer = character_tokenizer("abc\n")
    tokenizer.bos_token = "<unk>"
    core = tokenizer.backend_tokenizer
    core.post_processor = TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 2)])
    assert prompt_tokens(tokenizer, "ab").tolist() == [2, 3, 4, 6]
    assert prompt_tokens(character_tokenizer("abc\n"), "ab").tolist() == [3, 4, 6]


async def test_seeds_and_limits_of_each_turn():
    engine = ScriptedEngine(says(LETTERS, "1", "2", "3"))
    chat = chat_with(engine, LETTERS, max_tokens=9, temperature=0.7)
    await chat.reply("a")
    await chat.reply("b", max_tokens=4)
    await chat.reply("c", last=True)
    assert [p.seed for p in engine.params] == [derive_seed(1, "rollout", 7, 0, 0, turn) for turn in range(3)]
    assert [p.max_tokens for p in engine.params] == [9, 4, 9]
    assert [p.last for p in engine.params] == [False, False, True]
    assert chat.rows()[-1].temperature == 0.7
    assert engine.keys == {"g7/0"}


async def test_length_is_kept_as_the_finish():
    chat = chat_with(ScriptedEngine(says(LETTERS, "123456"), context=99), LETTERS, max_tokens=3)
    assert await chat.reply("a") == "123"
    assert chat.rows(Score(0.0))[-1].finish is Finish.LENGTH


async def test_a_prompt_longer_than_the_context_is_an_error_with_both_lengths():
    chat = chat_with(ScriptedEngine(says(LETTERS, "1")), LETTERS, context=8)
    with pytest.raises(ValueError, match="the prompt is 8 tokens, and the context holds 8"):
        await chat.reply("abcdefg")
    assert chat.rows()[-1].tokens.size == 0
    tasks = [Task("short", "ab"), Task("long", "abcdefg")]
    assert check_prompts(tasks, LETTERS, 9) == 8
    with pytest.raises(ConfigError, match="prompt of task long is 8 tokens, and the context holds 8"):
        check_prompts(tasks, LETTERS, 8)


async def test_a_conversation_that_fills_the_context_ends():
    engine = ScriptedEngine(says(LETTERS, "12", "34"), context=8)
    chat = chat_with(engine, LETTERS, context=8)
    await chat.reply("a")
    with pytest.raises(ContextFull, match="the conversation is 8 tokens"):
        await chat.reply("bc")
    with pytest.raises(ContextFull):
        await chat.reply("b")
    record = chat.rows()[-1]
    assert (record.finish, record.turns, len(record.tokens)) == (Finish.CONTEXT, 1, 5)
    check_truth(engine, chat)


async def test_a_reply_that_fills_the_context_is_given_and_is_the_last():
    engine = ScriptedEngine(says(LETTERS, "123456789"), context=8)
    chat = chat_with(engine, LETTERS, context=8)
    assert await chat.reply("a") == "123456"
    with pytest.raises(ContextFull):
        await chat.reply("b")
    assert chat.rows(Score(1.0))[-1].finish is Finish.CONTEXT


async def test_a_cancelled_episode():
    engine = ScriptedEngine(says(LETTERS, "12", stop=False))
    chat = chat_with(engine, LETTERS)
    generate = engine.generate

    async def cancelled(*args):
        completion = await generate(*args)
        completion.finish = Finish.CANCELLED
        return completion

    engine.generate = cancelled
    with pytest.raises(EpisodeOver):
        await chat.reply("a")
    assert chat.rows()[-1].finish is Finish.CANCELLED


async def test_one_reply_at_a_time():
    gate = asyncio.Event()
    engine = ScriptedEngine(says(LETTERS, "1", "2"))
    generate = engine.generate

    async def slow(*args):
        await gate.wait()
        return await generate(*args)

    engine.generate = slow
    chat = chat_with(engine, LETTERS)
    first = asyncio.ensure_future(chat.reply("a"))
    await asyncio.sleep(0)
    with pytest.raises(AssertionError, match="one reply at a time"):
        await chat.reply("b")
    gate.set()
    assert await first == "1"


@pytest.mark.parametrize("last, told", [(re.match("a", "a"), True), (None, False), (np.True_, True)])
async def test_what_is_no_bool_does_not_reach_the_engine(last, told):
    """It would fail there, and an engine's failure is not this episode's alone."""
    engine = ScriptedEngine(says(LETTERS, "1"))
    await chat_with(engine, LETTERS).reply("a", last=last)
    assert engine.params[0].last is told


@pytest.mark.parametrize("max_tokens", [2.5, "many", -1, 0])
async def test_a_limit_that_is_no_count_does_not_reach_the_engine(max_tokens):
    engine = ScriptedEngine(says(LETTERS, "1"))
    chat = chat_with(engine, LETTERS)
    with pytest.raises(ValueError, match=r"max_tokens(=| is a ).*: expected a whole number"):
        await chat.reply("a", max_tokens=max_tokens)
    assert not engine.params and chat.failure is None
    assert await chat.reply("a", max_tokens=np.int64(2)) == "1" and type(engine.params[0].max_tokens) is int


async def test_a_message_that_is_none():
    chat = chat_with(ScriptedEngine(says(LETTERS, "1")), LETTERS)
    for message in ([], [{"content": "x"}]):
        with pytest.raises(ValueError, match="expected a text, or a list of messages"):
            await chat.reply(message)


async def test_the_conversation_is_recorded_as_people_read_it_with_the_limit_that_cut_it():
    chat = chat_with(ScriptedEngine(says(LETTERS, "abcdef", "ghijkl")), LETTERS, max_tokens=4)
    await chat.reply([{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "ann"}])
    assert chat.rows()[-1].info["cut_at"] == 4 and not chat.rows()[-1].info["own_limit"]
    await chat.reply([{"role": "tool", "content": "t"}], max_tokens=3)
    record = chat.rows()[-1]
    assert [(said.role, said.text, said.policy) for said in record.said] == [
        *(("system", "s", False), ("user", 'u {"name": "ann"}', False), ("assistant", "abcd", True)),
        *(("tool", "t", False), ("assistant", "ghi", True)),
    ]
    assert (record.info["cut_at"], record.info["own_limit"]) == (3, 1)
    assert decode(encode(record), Trajectory).said == record.said


class Watched:
    """A tokenizer that says what it encodes, and where."""

    def __init__(self, tokenizer):
        self._tokenizer, self.encoded, self.threads = tokenizer, [], []

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __len__(self):
        return len(self._tokenizer)

    def encode(self, text, **how):
        self.encoded.append(len(text))
        self.threads.append(threading.get_ident())
        return self._tokenizer.encode(text, **how)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, LETTERS], ids=["template", "plain"])
@pytest.mark.parametrize("turn", [1, 2])
async def test_a_message_that_cannot_fit_is_never_encoded(tokenizer, turn):
    watched = Watched(tokenizer)
    chat = chat_with(ScriptedEngine(lambda tokens, params: [*tokenizer.encode("two"), tokenizer.eos_token_id]), watched)
    if turn == 2:
        await chat.reply("what")
    before = chat.length
    with pytest.raises(
        ContextFull if turn == 2 else ValueError, match=r"is at least \d+ tokens, and the context holds 10000"
    ):
        await chat.reply("a b " * 1_000_000)
    assert max(watched.encoded, default=0) < 1000 and chat.length == before
    if turn == 2:
        record = chat.rows(Score(0.0))[-1]
        assert record.finish is Finish.CONTEXT and record.turns == 1


@pytest.mark.parametrize("tokenizer", [TOKENIZER, LETTERS], ids=["template", "plain"])
@pytest.mark.parametrize("size", [HERE // 4, HERE * 2])
async def test_a_large_message_is_encoded_beside_the_loop_and_to_the_same_tokens(tokenizer, size):
    watched, context = Watched(tokenizer), HERE * 10
    reply = [*tokenizer.encode("two"), tokenizer.eos_token_id]
    engine = ScriptedEngine(lambda tokens, params: reply, context=context)
    chat, plain = chat_with(engine, watched, context=context), renderer(tokenizer)
    given = ["a b " * (size // 4), "c d " * (size // 4)]
    for text in given:
        await chat.reply(text)
    own = plain.begin(as_messages(given[0]))
    np.testing.assert_array_equal(engine.prompts[0], own)
    said = engine.completions[0].tokens
    tail = plain.follow("two", int(said[-1]), as_messages(given[1]), said)
    np.testing.assert_array_equal(engine.prompts[1], np.concatenate([own, said, tail]))
    large = {thread for thread, length in zip(watched.threads, watched.encoded, strict=True) if length >= size}
    assert large and (large == {threading.get_ident()}) == (size < HERE)
