"""What is learnt, appended and refused, one thing at a time; `test_template_formats.py` looks at all of it by chance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chat_formats import FORMATS, tokenizer_of
from envs.scripted_engine import CHATML, ScriptedEngine, chat_tokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tidemill.controller.offline_groups import check_offline
from tidemill.controller.run_monitor import count
from tidemill.core.errors import ConfigError
from tidemill.core.types import Group, SamplingParams, Score, Task
from tidemill.envs.chat import EpisodeChat, rollout_seeds
from tidemill.envs.episode_worker import _message
from tidemill.models.architecture import Architecture
from tidemill.models.chat_template import as_messages, end_of_turn
from tidemill.models.conversations import check_prompts, completion_of, conversation, prompt_tokens, renderer
from tidemill.models.reply_spans import Rendering
from tidemill.models.tokenizer import character_tokenizer, stop_ids
from tidemill.observability.metrics import StepMetrics
from tidemill.run.sft_warmup import check_answers

USER = [{"role": "user", "content": "what is the answer?"}]
NEXT = [{"role": "user", "content": "two, what?"}]
THINKS = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
NO_END = "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n{% endfor %}"
NO_END += "{% if add_generation_prompt %}assistant:\n{% endif %}"
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
CHAT = chat_tokenizer()
END = CHAT.convert_tokens_to_ids("<|im_end|>")


def marks(span: str) -> str:
    """ChatML with `{% generation %}` around `span` of the assistant's turn."""
    turn = "<|im_start|>assistant\n{{ m.content }}<|im_end|>".replace(
        span, "{% generation %}" + span + "{% endgeneration %}"
    )
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + turn + "\n{% else %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def learnt(tokenizer: Any, *turns: Any) -> list[str]:
    """The stretches that are learnt."""
    tokens, own = conversation(tokenizer, list(turns))
    edges = np.flatnonzero(np.diff(np.concatenate([[False], own, [False]]).astype(int)))
    return [tokenizer.decode(tokens[a:b].tolist()) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def chat_of(tokenizer: Any, *replies: list[int], vocab: int | None = None) -> EpisodeChat:
    left = list(replies)
    engine = ScriptedEngine(lambda tokens, params: left.pop(0))
    params = SamplingParams(stop_ids=tuple(i for i in {tokenizer.eos_token_id, end_of_turn(tokenizer)} if i is not None))
    how: dict[str, Any] = {"context": 10_000, "key": "k", "seeds": rollout_seeds(0, 0, 0), "vocab": vocab}
    return EpisodeChat(engine, tokenizer, params, **how)


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", FORMATS)
def test_what_ends_a_turn_also_stops_sampling(name: str) -> None:
    tokenizer, end = tokenizer_of("byte-level", name), FORMATS[name].end
    assert tokenizer.decode([end_of_turn(tokenizer)]) == end
    shown = {"Mistral": " a", "Qwen 3": "<think>\n\n</think>\n\na"}.get(name, "a")
    assert learnt(tokenizer, (USER, "a")) == [shown + end]
    folder = Architecture.from_dict({**LLAMA, "eos_token_id": 7})
    stops = stop_ids(tokenizer, folder, {"eos_token_id": [9]})
    assert set(stops) == {7, 9, tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(end)}


LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-6,
}  # fmt: skip


@pytest.mark.parametrize("shown", ["", "|"])
def test_a_template_without_an_end_of_its_own_teaches_the_tokenizers(shown: str) -> None:
    tokenizer = chat_tokenizer(NO_END.replace("{{ m.content }}", "{{ m.content }}" + shown))
    assert end_of_turn(tokenizer) is None
    assert learnt(tokenizer, (USER, "a"), (NEXT, "b")) == [f"a{shown}", f"b{shown}<|im_end|>"]


def test_a_prompt_that_opens_the_reasoning_has_one_think() -> None:
    tokenizer = chat_tokenizer(THINKS)
    assert learnt(tokenizer, (USER, "<think>\nhm\n</think>\n\ntwo")) == ["hm\n</think>\n\ntwo<|im_end|>"]
    assert learnt(tokenizer, (USER, "two"), (NEXT, "<b>")) == ["two<|im_end|>", "<b><|im_end|>"]
    sampled = "hm\n</think>\n\ntwo"  # as it is recorded, without what the prompt opened
    assert learnt(tokenizer, (USER, completion_of(tokenizer, USER, sampled))) == [sampled + "<|im_end|>"]
    assert completion_of(CHAT, USER, " two") == " two" == completion_of(character_tokenizer("two "), USER, " two")


async def test_a_second_turn_after_a_prompt_that_opened_the_reasoning() -> None:
    tokenizer = chat_tokenizer(THINKS)
    chat = chat_of(tokenizer, [*ids(tokenizer, "hm\n</think>\n\ntwo"), END], [END])
    assert await chat.reply(USER) == "hm\n</think>\n\ntwo"
    await chat.reply(NEXT)
    whole = [*USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\ntwo"}, *NEXT]
    shown = tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(chat.rows()[-1].tokens[:-1].tolist()) == shown
    assert not {"text_differs", "encoded_alone"} & chat.rows()[-1].info.keys()


@pytest.mark.parametrize("span", ["{{ m.content }}<|im_end|>", "{{ m.content }}"])
def test_the_templates_own_marks_say_what_is_learnt_and_the_end_is_learnt_too(span: str) -> None:
    tokenizer = chat_tokenizer(marks(span))
    assert learnt(tokenizer, (USER, "two"), (NEXT, "")) == ["two<|im_end|>", "<|im_end|>"]
    wide = chat_tokenizer(marks("<|im_start|>assistant\n{{ m.content }}<|im_end|>"))
    assert learnt(wide, (USER, "two")) == ["<|im_start|>assistant\ntwo<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, marks("{{ m.content }}")])
def test_only_replies_are_learnt_not_what_the_prompt_holds_of_the_assistant(template: str) -> None:
    heard = [*USER, {"role": "assistant", "content": "before"}, {"role": "user", "content": "<|im_start|>assistant\ntwo"}]
    assert learnt(chat_tokenizer(template), (heard, "two")) == ["two<|im_end|>"]


@pytest.mark.parametrize("kind", ["Metaspace first", "Metaspace always", "Unigram first", "byte-level"])
def test_without_a_template_too_a_reply_is_encoded_where_it_stands(kind: str) -> None:
    tokenizer = tokenizer_of(kind, "Zephyr")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="</s>")
    tokens, own = conversation(tokenizer, [(USER, "the cat"), (NEXT, "sat")])
    assert tokens.tolist() == ids(tokenizer, "what is the answer?\nthe cat</s>two, what?\nsat</s>")
    assert tokenizer.decode(tokens[own].tolist()) == "the cat</s>sat</s>"


def test_a_special_token_that_takes_spaces_is_not_learnt_with_them() -> None:
    tokenizer = chat_tokenizer(CHATML.replace("<|im_start|>assistant", "<|assistant|>"))
    own = "{{ '<|assistant|>' if m['role'] == 'assistant' else '<|im_start|>' + m['role'] }}"
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_start|>{{ m['role'] }}", own)
    token = AddedToken("<|assistant|>", rstrip=True, special=True)  # as some models have it
    tokenizer.add_special_tokens({"additional_special_tokens": [token]})
    assert learnt(tokenizer, (USER, " two"), (NEXT, "two")) == ["two<|im_end|>"] * 2


class Slow:
    """A tokenizer that does not say where its tokens stand."""

    is_fast = False

    def __init__(self, fast: Any) -> None:
        self._fast = fast

    def __getattr__(self, name: str) -> Any:
        assert name != "__call__"
        return getattr(self._fast, name)

    def __len__(self) -> int:
        return len(self._fast)


@pytest.mark.parametrize("name", ["ChatML", "Mistral", "Qwen 3"])
def test_a_tokenizer_without_offsets_gives_the_same(name: str) -> None:
    fast = tokenizer_of("byte-level", name)
    turns = [(USER, "the cat"), (NEXT, "\n sat 😀"), (NEXT, "")]
    for one, other in zip(conversation(fast, turns), conversation(Slow(fast), turns), strict=True):
        np.testing.assert_array_equal(one, other)
    text = "<s>the  cat\n\nsat</s> on\ta mat"
    one, other = Rendering.of(fast, text), Rendering.of(Slow(fast), text)
    for end in range(1, len(text) + 1):
        assert one.count(end) == other.count(end)
        assert {one.tokens((begin, end)) == other.tokens((begin, end)) for begin in range(3, end)} <= {True}
    with pytest.raises(ConfigError, match=f"the tokenizer of '{name}' does not say where its tokens stand"):
        conversation(Slow(tokenizer_of("Unigram first", name)), [(USER, "?")])  # which it has no token for


@pytest.mark.parametrize(("reply", "differs"), [("two", 1), (" two ", 0)])
async def test_a_reply_that_the_template_pads_ends_once(reply: str, differs: int) -> None:
    tokenizer = chat_tokenizer(LLAMA2)
    tokenizer.bos_token = "<|im_start|>"
    chat = chat_of(tokenizer, [*ids(tokenizer, reply), END], [END])
    await chat.reply(USER)
    await chat.reply(NEXT)
    text = tokenizer.decode(chat.rows()[-1].tokens[:-1].tolist())
    assert text == f"<|im_start|>[INST] what is the answer? [/INST]{reply}<|im_end|><|im_start|>[INST] two, what? [/INST]"
    assert chat.rows()[-1].info.get("text_differs", 0) == differs


@pytest.mark.parametrize("split", [False, True])
async def test_what_has_no_encoding_in_its_place_is_encoded_alone_and_counted(split: bool) -> None:
    tokenizer = chat_tokenizer(NO_END)
    said = [i for c in "forty" for i in ids(tokenizer, c)] if split else ids(tokenizer, "forty")
    chat = chat_of(tokenizer, said, [END])
    assert await chat.reply(USER) == "forty"  # cut off: nothing ends it
    await chat.reply(NEXT)
    record = chat.rows(Score(1.0))[-1]
    text = tokenizer.decode(record.tokens[:-1].tolist())
    assert text == "user:\nwhat is the answer?\nassistant:\nforty\nuser:\ntwo, what?\nassistant:\n"
    metrics = StepMetrics()
    count(metrics, Group(0, Task("t", "x"), [record]), None)
    assert metrics.take().get("chat/encoded_alone", 0) == record.info.get("encoded_alone", 0) == split


async def test_behind_a_special_token_nothing_is_encoded_alone() -> None:
    said = [i for c in "forty" for i in ids(CHAT, c)]
    chat = chat_of(CHAT, said, [END])
    await chat.reply(USER)  # cut off: the template ends it
    await chat.reply(NEXT)
    assert "encoded_alone" not in chat.rows()[-1].info


@pytest.mark.parametrize("template", [NO_END, None])
@pytest.mark.parametrize("kind", ["Metaspace first", "Metaspace always", "Unigram first", "Unigram always"])
async def test_what_is_encoded_alone_gets_no_space_of_its_own(kind: str, template: str | None) -> None:
    tokenizer = tokenizer_of(kind, "Zephyr")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="</s>")
    tokenizer.chat_template = template
    chat = chat_of(tokenizer, [tokenizer.convert_tokens_to_ids(c) for c in "the"], [tokenizer.eos_token_id])
    assert await chat.reply("where is it") == "the"
    await chat.reply("on a mat")
    who = ("user:\n", "assistant:\n") if template else ("", "")
    text = f"{who[0]}where is it\n{who[1]}the\n{who[0]}on a mat\n{who[1]}"
    assert tokenizer.decode(chat.rows()[-1].tokens[:-1].tolist()) == text
    assert chat.rows()[-1].info["encoded_alone"] == 1


def test_follow_without_the_sampled_ids_takes_those_of_the_text() -> None:
    render = renderer(CHAT)
    before = render.begin(USER).tolist()
    after = render.follow("two", END, NEXT).tolist()
    whole = CHAT.apply_chat_template([*USER, {"role": "assistant", "content": "two"}, *NEXT], add_generation_prompt=True)
    assert [*before, *ids(CHAT, "two"), END, *after] == whole["input_ids"]


def test_what_else_a_message_holds_reaches_the_template() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        *USER,
        {"role": "assistant", "tool_calls": [call], "content": None},
        {"role": "tool", "tool_call_id": "1", "name": "add", "content": "2"},
    ]
    tokenizer = tokenizer_of("byte-level", "Qwen 3")
    expected = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert "<tool_call>" in tokenizer.decode(expected)
    assert prompt_tokens(tokenizer, _message(messages)).tolist() == expected
    thought = {"content": "two", "reasoning_content": "hm"}
    assert learnt(tokenizer, (USER, thought)) == ["<think>\nhm\n</think>\n\ntwo<|im_end|>"]
    said = {"content": "so", "tool_calls": [call]}
    assert learnt(tokenizer, (USER, said), (messages[-1:], "3"))[0] == (
        'so\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    )
    parts = chat_tokenizer(CHATML.replace("{{ m['content'] }}", "{% for p in m.content %}{{ p.text }}{% endfor %}"))
    given = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert parts.decode(prompt_tokens(parts, _message(given)).tolist()).startswith("<|im_start|>user\nab<|im_end|>")


async def test_an_episode_may_begin_with_a_call_of_a_tool_that_says_nothing() -> None:
    tokenizer = tokenizer_of("byte-level", "Qwen 3")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    heard = [*USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    chat = chat_of(tokenizer, [*ids(tokenizer, "two"), end], [end])
    await chat.reply(heard)
    await chat.reply(NEXT)
    whole = [*heard, {"role": "assistant", "content": "two"}, *NEXT]
    shown = tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(chat.rows()[-1].tokens[:-1].tolist()) == shown


@pytest.mark.parametrize(
    "message", [[{"role": "user", "content": "a", "x": object()}], [{"role": "user", "content": [{1: "a"}]}]]
)
def test_what_does_not_travel_is_refused_before_it_is_sent(message: Any) -> None:
    with pytest.raises(ValueError, match="a list of messages with a"):
        _message(message)


def test_ids_beyond_the_embedding_are_refused_with_the_rows_name() -> None:
    """Tokens were added to the tokenizer, and the model was not resized."""
    tokenizer = chat_tokenizer(CHATML.replace("<|im_end|>", "<|turn|>"))
    known, data = len(tokenizer), {"answer": "a", "completion": "a", "chosen": "a", "rejected": "b", "label": True}
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    tasks = [Task("t7", "what?", data)]
    said = rf"has the token '<\|turn\|>', id {known}, and the model knows the ids up to {known - 1}"
    with pytest.raises(ConfigError, match=f"the prompt of task t7 {said}"):
        check_prompts(tasks, tokenizer, 99, known)
    for kind in ("answers", "pairs", "labels"):
        with pytest.raises(ConfigError, match=rf"the row of task t7 \('what\?'\) {said}"):
            check_offline(kind, tasks, tokenizer, 99, known)
        assert check_offline(kind, tasks, tokenizer, 99, len(tokenizer)) < 99
    with pytest.raises(ConfigError, match=f"the answer of task t7 {said}"):
        check_answers(tasks, tokenizer, known)
    assert check_prompts(tasks, tokenizer, 99, len(tokenizer)) < 99


async def test_ids_beyond_the_embedding_in_an_environments_message_are_its_own_affair() -> None:
    tokenizer = character_tokenizer("abc\nz")
    chat = chat_of(tokenizer, ids(tokenizer, "a"), ids(tokenizer, "b"), vocab=len(tokenizer) - 1)
    assert await chat.reply("a") == "a"
    with pytest.raises(ValueError, match="the message has the token 'z', id 7, and the model knows the ids up to 6"):
        await chat.reply("z")
    assert chat.failure is None


def test_half_a_character_is_no_text_wherever_it_stands() -> None:
    for message in ("so\ud83d", [{"role": "user", "content": "a", "name": "\udc00"}]):
        with pytest.raises(ValueError, match="holds half a character"):
            as_messages(message)
    said = r"the row of task t \('a'\): the conversation holds half a character, '\\ud83d'"
    with pytest.raises(ConfigError, match=said):
        check_offline("answers", [Task("t", "a", {"answer": "\ud83d"})], CHAT, 99)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ 1 // 0 }}", "integer division or modulo by zero"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].nothing.at_all }}", "has no attribute"),
    ],
)
def test_whatever_a_template_raises_is_one_sentence_that_names_it_and_the_row(template: str, why: str) -> None:
    tokenizer = chat_tokenizer(template)
    said = rf"the chat template of 'tiny-chat' refuses roles user(, assistant)?: .*{why}"
    with pytest.raises(ConfigError, match=f"the prompt of task t: {said}") as raised:
        check_prompts([Task("t", "a")], tokenizer, 99)
    assert "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match=rf"the row of task t \('a'\): {said}"):
        check_offline("answers", [Task("t", "a", {"answer": "b"})], tokenizer, 99)
    assert end_of_turn(tokenizer) is None
