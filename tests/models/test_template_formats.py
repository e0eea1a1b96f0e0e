"""Random conversations in public chat formats: `transformers` renders and encodes the whole, and that decides.

Known ones: the ids are those of `apply_chat_template(tokenize=True)`, and what is learnt is each reply with its end. Sampled
ones, mostly in other ids than their text would have: they stay, and what is appended has the ids that the template's text
has there.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from chat_formats import FORMATS, TOKENIZERS, Messages, conversation_of, split_again, tokenizer_of
from envs.scripted_engine import ScriptedEngine
from transformers import PreTrainedTokenizerFast, tokenization_utils_base

from tidemill.core.errors import ConfigError
from tidemill.core.types import SamplingParams
from tidemill.envs.chat import EpisodeChat, rollout_seeds
from tidemill.models.conversations import conversation

FEW, ALL = 3, 1000


def rendered(tokenizer: PreTrainedTokenizerFast, messages: Messages, ask: bool = False) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)


def encoded(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def turns_of(messages: Messages) -> list[tuple[Messages, Any]]:
    turns, heard = [], []
    for message in messages:
        if message["role"] == "assistant":
            turns.append((heard, message if len(message) > 2 else message["content"]))
            heard = []
        else:
            heard.append(message)
    return turns


def spoken(name: str, messages: Messages, place: int) -> str:
    """What the format shows of a reply, written here once more from its description."""
    message, content = messages[place], messages[place]["content"]
    call = message["tool_calls"][0]["function"] if "tool_calls" in message else None
    if name in ("ChatML", "Zephyr"):
        return content
    if name == "Gemma":
        return content.strip()
    if name == "Llama 3":
        shown = f'{{"name": "add", "parameters": {{"a": {call["arguments"]["a"]}}}}}' if call else content.strip()
        return shown
    if name == "Mistral":
        a = call and call["arguments"]["a"]
        return f'[TOOL_CALLS] [{{"name": "add", "arguments": {{"a": {a}}}}}]' if call else " " + content.strip()
    thought = message.get("reasoning_content", "")
    if not thought and "</think>" in content:
        before, _, _ = content.partition("</think>")
        thought, content = before.split("<think>")[-1].strip("\n"), content.split("</think>")[-1].lstrip("\n")
    last_query = max(i for i, m in enumerate(messages) if m["role"] == "user")
    shown = content
    if place > last_query and (place == len(messages) - 1 or thought):
        shown = f"<think>\n{thought.strip(chr(10))}\n</think>\n\n" + content.lstrip("\n")
    if call:
        shown += ("\n" if content else "") + '<tool_call>\n{"name": "add", "arguments": {"a": '
        shown += f"{call['arguments']['a']}}}}}\n</tool_call>"
    return shown


def check_known(name: str, kind: str, seed: int) -> str:
    """How one conversation that is known to its end came out."""
    form, tokenizer = FORMATS[name], tokenizer_of(kind, name)
    messages = conversation_of(random.Random(seed), form)
    try:
        whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    except Exception:
        with pytest.raises(ConfigError, match=f"the chat template of '{name}' refuses roles"):
            conversation(tokenizer, turns_of(messages))
        return "refused"
    tokens, learnt = conversation(tokenizer, turns_of(messages))
    ids = tokens.tolist()
    assert ids == whole[: len(ids)], (name, kind, seed)
    assert not tokenizer.decode(whole[len(ids) :]).strip(), (name, kind, seed)
    runs = [[ids[i] for i, _ in run] for own, run in groupby(enumerate(learnt.tolist()), lambda each: each[1]) if own]
    said = [spoken(name, messages, i) for i, m in enumerate(messages) if m["role"] == "assistant"]
    # a token may hold the last line break of the header and the first of the reply; and decoding alone takes a space away
    found = [tokenizer.decode(run).lstrip() for run in runs]
    known = [tokenizer.decode(encoded(tokenizer, "." + each + form.end))[1:].lstrip() for each in said]
    assert found == known, (name, kind, seed)
    return "exact"


class Policy:
    """Samples what is prepared, mostly in other ids than the text has; notes what it was asked and what it said."""

    def __init__(self, name: str, kind: str, rng: random.Random) -> None:
        self.form, self.tokenizer, self.rng = FORMATS[name], tokenizer_of(kind, name), rng
        self.end = self.tokenizer.convert_tokens_to_ids(self.form.end)
        self.engine = ScriptedEngine(lambda tokens, params: self.next)
        stops = (self.end, self.tokenizer.eos_token_id)
        params = SamplingParams(stop_ids=stops, max_tokens=9000)
        self.chat = EpisodeChat(self.engine, self.tokenizer, params, context=10_000, key="k", seeds=rollout_seeds(0, 0, 0))
        self.next: list[int] = []

    def prepare(self, messages: Messages, content: str) -> None:
        """Say `content`, or what the template would show of it as the last message; now and then cut off."""
        sent = rendered(self.tokenizer, messages, ask=True)
        full = rendered(self.tokenizer, [*messages, {"role": "assistant", "content": content}])
        shown = full.removeprefix(sent).rpartition(self.form.end)[0] if full.startswith(sent) else content
        text = shown if self.rng.random() < 0.6 else content
        found = self.tokenizer(sent + text, add_special_tokens=False, return_offsets_mapping=True)
        pairs = zip(found["input_ids"], found["offset_mapping"], strict=True)
        begins = [(i, begin) for i, (begin, _) in pairs if begin >= len(sent)]
        if begins and begins[0][1] > len(sent):  # a token lies on both sides
            begins = [(i, 0) for i in encoded(self.tokenizer, "<s>" + text)[1:]]
        ids = [i for i, _ in begins if i not in (self.end, self.tokenizer.eos_token_id)]
        ids = split_again(self.tokenizer, ids, self.rng) if self.rng.random() < 0.8 else ids
        self.next = [*ids, self.end] if self.rng.random() < 0.85 or not ids else ids


async def check_sampled(name: str, kind: str, seed: int) -> str:
    """How one conversation came out whose replies were sampled."""
    rng = random.Random(seed)
    policy = Policy(name, kind, rng)
    messages = [{"role": m["role"], "content": m["content"]} for m in conversation_of(rng, policy.form)]
    told: Messages = []
    for heard, content in turns_of(messages):
        told += heard
        policy.prepare(told, content)
        said = await policy.chat.reply(heard)
        if len(policy.chat.rows()) > 1:
            check_rewritten(policy, told)
            return "branched"
        assert said == policy.tokenizer.decode(policy.next[: len(policy.next) - stopped(policy)], skip_special_tokens=True)
        told.append({"role": "assistant", "content": in_place(policy)})
    check_record(policy, told, (name, kind, seed))
    return "differs" if policy.chat.rows()[-1].info.get("text_differs") else "exact"


def stopped(policy: Policy) -> bool:
    return bool(policy.next) and policy.next[-1] == policy.end


def in_place(policy: Policy) -> str:
    """The text of the latest reply where it stands in the record."""
    before = policy.engine.prompts[-1].tolist()
    spoken = policy.next[:-1] if stopped(policy) else policy.next
    return policy.tokenizer.decode([*before, *spoken]).removeprefix(policy.tokenizer.decode(before))


def check_record(policy: Policy, told: Messages, where: Any) -> None:
    """The sampled ids are there as they were sampled; the rest is what the template's text is encoded as in its place."""
    tokenizer, record = policy.tokenizer, policy.chat.rows()[-1]
    np.testing.assert_array_equal(record.tokens[record.mask], np.concatenate([c.tokens for c in policy.engine.completions]))
    first = told.index(next(m for m in told if m["role"] == "assistant"))
    prompt = tokenizer.apply_chat_template(told[:first], tokenize=True, return_dict=False, add_generation_prompt=True)
    assert policy.engine.prompts[0].tolist() == prompt, where
    asked = told[: len(told) - 1]
    marks = iter(range(len(told)))
    marked = [{**m, "content": f"MARK{next(marks)};"} if m["role"] == "assistant" else m for m in asked]
    text = rendered(tokenizer, marked, ask=True)
    length = len(prompt)
    for turn, (completion, prompt) in enumerate(zip(policy.engine.completions, policy.engine.prompts[1:], strict=False)):
        own = prompt.tolist()[length + len(completion.tokens) :]
        length = len(prompt)
        between = text.partition(f"MARK{turn};")[2]
        between = between.partition(f"MARK{turn + 1};")[0] if f"MARK{turn + 1};" in between else between
        if turn < len(policy.engine.prompts) - 2:  # the space that a template puts before the next reply is the reply's
            between = between.rstrip(" ")
        expected = encoded(tokenizer, between)
        ended = int(completion.tokens[-1]) == policy.end if len(completion.tokens) else False
        assert own == (expected[1:] if ended else expected), (where, turn, tokenizer.decode(own), between)
    if not record.info.get("text_differs"):
        full = rendered(tokenizer, asked, ask=True)
        assert tokenizer.decode(policy.engine.prompts[-1].tolist()) == tokenizer.decode(encoded(tokenizer, full)), where


def check_rewritten(policy: Policy, told: Messages) -> None:
    """The template does render an earlier turn otherwise, by more than outer white space."""
    last = max(i for i, m in enumerate(told) if m["role"] == "assistant")
    sent = rendered(policy.tokenizer, told[:last], ask=True)
    full = rendered(policy.tokenizer, told, ask=True)
    bare = ["".join(each.split()) for each in (full, sent + told[last]["content"])]
    assert not bare[0].startswith(bare[1])
    tokenizer, branch = policy.tokenizer, policy.chat.rows()[-1]
    asked = policy.engine.prompts[-1]
    assert tokenizer.decode(asked) == tokenizer.decode(encoded(tokenizer, full)), (
        "the branch is not what the template renders"
    )
    np.testing.assert_array_equal(branch.tokens[: len(asked)], asked)
    assert not branch.mask[: len(asked)].any() and branch.sampled == len(policy.engine.completions[-1].tokens)
    if branch.parent is None:
        assert asked.tolist() == encoded(tokenizer, full), "nothing that was sampled stayed"


def append_only(name: str, seed: int) -> bool:
    """Whether this format only appends, at least in this conversation."""
    form = FORMATS[name]
    system = conversation_of(random.Random(seed), form)[0]["role"] == "system"
    return not form.forgets and not (form.system_moves and system)


@pytest.mark.parametrize("name", FORMATS)
async def test_conversations_are_the_template_s(name: str) -> None:
    for number, kind in enumerate(TOKENIZERS):
        for seed in range(number, FEW * len(TOKENIZERS), len(TOKENIZERS)):
            assert check_known(name, kind, seed) == "exact"
            how = await check_sampled(name, kind, seed)
            assert how != "branched" or not append_only(name, seed), (name, kind, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
async def test_a_thousand_conversations(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prints the rows of the table in docs/writing_an_environment.md."""
    render, kept = tokenization_utils_base.render_jinja_template, dict[str, Any]()

    def once(**how: Any) -> Any:  # most of the time goes into rendering, and eight tokenizers render the same
        key = repr(how)
        if key not in kept:
            kept[key] = render(**how)
        return kept[key]

    monkeypatch.setattr(tokenization_utils_base, "render_jinja_template", once)
    known, sampled = {kind: Counter[str]() for kind in TOKENIZERS}, {kind: Counter[str]() for kind in TOKENIZERS}
    for seed in range(ALL):
        kept.clear()
        for kind in TOKENIZERS:
            known[kind][check_known(name, kind, seed)] += 1
            how = await check_sampled(name, kind, seed)
            assert how != "branched" or not append_only(name, seed), (name, kind, seed)
            sampled[kind][how] += 1
    with capsys.disabled():
        print()
        for kind in TOKENIZERS:
            counts = [known[kind][how] for how in ("exact", "refused")]
            counts += [sampled[kind][how] for how in ("exact", "differs", "branched")]
            print(f"| {name} | {kind} |", " | ".join(map(str, counts)), "|", flush=True)
