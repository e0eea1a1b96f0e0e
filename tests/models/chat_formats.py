"""Public chat templates, tokenizers trained here, and random conversations, for the tests of `models.conversations`.

The templates are written from the formats that model cards publish, as small as they can be while they render the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

Messages = list[dict[str, Any]]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{- bos_token }}{%- for message in messages %}{%- if message.role == 'tool' or message.role == 'ipython' %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content + '<|eot_id|>' }}"
    "{%- elif message.tool_calls is defined %}{%- set call = message.tool_calls[0].function %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' + (call.arguments | tojson) + '}' + '<|eot_id|>' }}"
    "{%- else %}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}"
    "{{- message.content | trim + '<|eot_id|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
MISTRAL = (  # 7B v0.3: the system's message stands in the last user's turn, so it moves
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set talk = messages[1:] %}"
    "{%- else %}{%- set talk = messages %}{%- endif %}{{- bos_token }}{%- for message in talk %}"
    "{%- if message.role == 'user' %}"
    "{%- if loop.last and system is defined %}{{- '[INST] ' + system + '\n\n' + message.content + '[/INST]' }}"
    "{%- else %}{{- '[INST] ' + message.content + '[/INST]' }}{%- endif %}"
    "{%- elif message.tool_calls is defined %}"
    "{{- '[TOOL_CALLS] [' + (message.tool_calls[0].function | tojson) + ']' + eos_token }}"
    "{%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + eos_token }}"
    "{%- elif message.role == 'tool' %}"
    "{{- '[TOOL_RESULTS] {\"content\": ' + message.content | string + '}[/TOOL_RESULTS]' }}"
    "{%- else %}{{- raise_exception('Only user and assistant roles are supported') }}{%- endif %}{%- endfor %}"
)
QWEN3 = (
    "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}"
    "{%- set ns = namespace(looking=true, last=messages|length - 1) %}"
    "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
    "{%- if ns.looking and message.role == 'user' and not (message.content.startswith('<tool_response>') "
    "and message.content.endswith('</tool_response>')) %}{%- set ns.looking = false %}{%- set ns.last = index %}{%- endif %}"
    "{%- endfor %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}"
    "{%- set content = message.content if message.content is string else '' %}{%- set thought = '' %}"
    "{%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}"
    "{%- if message.tool_calls %}{%- for call in message.tool_calls %}"
    "{%- if (loop.first and content) or not loop.first %}{{- '\n' }}{%- endif %}"
    '{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' + (call.function.arguments | tojson) }}'
    "{{- '}\n</tool_call>' }}{%- endfor %}{%- endif %}{{- '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
GEMMA = (  # Gemma 3: a system's message begins the first user's turn; roles must alternate
    "{{ bos_token }}{%- if messages[0].role == 'system' %}{%- set first = messages[0].content + '\n\n' %}"
    "{%- set talk = messages[1:] %}{%- else %}{%- set first = '' %}{%- set talk = messages %}{%- endif %}"
    "{%- for message in talk %}{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}"
    "{%- set role = 'model' if message.role == 'assistant' else message.role %}"
    "{{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') }}{{ message.content | trim }}"
    "{{ '<end_of_turn>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{%- endif %}"
)
ZEPHYR = (
    "{% for message in messages %}\n"
    "{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)


@dataclass(frozen=True)
class Format:
    """A template with the names of its special tokens; `end` is what it ends an assistant's turn with."""

    template: str
    end: str
    eos: str
    bos: str = "<s>"
    tools: bool = True  # it takes messages of the role tool
    system_moves: bool = False
    forgets: bool = False  # it takes the reasoning of earlier turns out


FORMATS = {
    "ChatML": Format(CHATML, "<|im_end|>", "<|endoftext|>"),
    "Llama 3": Format(LLAMA3, "<|eot_id|>", "<|eot_id|>"),
    "Mistral": Format(MISTRAL, "</s>", "</s>", system_moves=True),
    "Qwen 3": Format(QWEN3, "<|im_end|>", "<|im_end|>", forgets=True),
    "Gemma": Format(GEMMA, "<end_of_turn>", "<eos>", tools=False),
    "Zephyr": Format(ZEPHYR, "</s>", "</s>"),
}
SPECIAL = ["<unk>", "<s>", "</s>", "<eos>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>"]
SPECIAL += ["<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
SPECIAL += ["<start_of_turn>", "<end_of_turn>"]
WORDS = "the cat sat on a mat where answer is 42 and 3.5 or x=1 café naïve Ünïcode привет мир 日本語 テスト".split()  # noqa: SIM905
WORDS += "שלום مرحبا 👩\u200d👩\u200d👧 😀 e\u0301 ﬁ don't e.g. $5 a_b {json: [1,2]} \\frac{1}{2} — “quoted”".split()  # noqa: SIM905
WORDS += ["system", "user", "assistant", "tool", "<b>", "<think>"]
SPACES = [" ", " ", " ", "\n", "\n\n", "  ", "\t"]
_CORPUS = [" ".join(WORDS), "\n".join(WORDS), "\n\n  \t", "<think>\n\n</think>\n\n", "user\nassistant\nsystem\nmodel\n"]
_CORPUS += [
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "<|user|>\n<|assistant|>\n<|system|>\nipython",
]


def _byte_level(trim: bool) -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if trim:  # offsets leave out the spaces that tokens begin with
        core.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        _CORPUS * 3,
        trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    return core


def _metaspace(scheme: str, split: bool) -> Tokenizer:
    core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = SPECIAL + [f"<0x{i:02X}>" for i in range(256)]
    core.train_from_iterator(_CORPUS * 3, trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False))
    return core


def _unigram(scheme: str) -> Tokenizer:
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    core.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    core.train_from_iterator(_CORPUS * 3, trainer)
    return core


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": lambda: _byte_level(False),
    "byte-level, trimmed offsets": lambda: _byte_level(True),
    "Metaspace first": lambda: _metaspace("first", False),
    "Metaspace first, split": lambda: _metaspace("first", True),
    "Metaspace always": lambda: _metaspace("always", False),
    "Metaspace always, split": lambda: _metaspace("always", True),
    "Unigram first": lambda: _unigram("first"),
    "Unigram always": lambda: _unigram("always"),
}


@cache
def tokenizer_of(kind: str, form: str) -> PreTrainedTokenizerFast:
    """A tokenizer of this kind that carries this format's template and names."""
    names = FORMATS[form]
    core = Tokenizer.from_str(_trained(kind))
    extra = [token for token in SPECIAL if token not in ("<unk>", names.bos, names.eos)]
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token=names.bos,
        eos_token=names.eos,
        additional_special_tokens=extra,
        clean_up_tokenization_spaces=False,
    )
    made.chat_template, made.name_or_path = names.template, form
    return made


@cache
def _trained(kind: str) -> str:
    return TOKENIZERS[kind]().to_str()


def conversation_of(rng: random.Random, form: Format) -> Messages:
    """One to six turns; system, tools, reasoning, unicode, outer white space and empty replies by chance."""
    messages: Messages = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": _text(rng)})
    for _ in range(rng.randint(1, 6)):
        messages.append({"role": "user", "content": _text(rng)})
        if form.tools and rng.random() < 0.2:
            messages += [_said(rng, call=True), {"role": "tool", "content": _text(rng)}]
        messages.append(_said(rng))
    return messages


def _text(rng: random.Random) -> str:
    return "".join(rng.choice(WORDS) + rng.choice(SPACES) for _ in range(rng.randint(1, 6))).strip()


def _said(rng: random.Random, call: bool = False) -> dict[str, Any]:
    """An assistant's message: often plain, sometimes empty, padded, or with reasoning in its content or beside it."""
    message: dict[str, Any] = {"role": "assistant", "content": _text(rng)}
    draw = rng.random()
    if draw < 0.1:
        message["content"] = ""
    elif draw < 0.2:
        message["content"] = rng.choice(SPACES) + message["content"] + rng.choice(SPACES)
    elif draw < 0.4:
        message["content"] = f"<think>\n{_text(rng)}\n</think>\n\n{message['content']}"
    elif draw < 0.5:
        message["reasoning_content"] = _text(rng)
    if call and rng.random() < 0.5:
        message["tool_calls"] = [{"type": "function", "function": {"name": "add", "arguments": {"a": rng.randint(0, 9)}}}]
    return message


def split_again(tokenizer: PreTrainedTokenizerFast, ids: list[int], rng: random.Random) -> list[int]:
    """The same text in other tokens: each that is no special one is cut, as long as chance and the vocabulary allow."""
    vocab, added, found = tokenizer.get_vocab(), tokenizer.added_tokens_decoder, list[int]()
    for token in ids:
        pieces = [tokenizer.convert_ids_to_tokens(token)]
        while token not in added and rng.random() < 0.7:
            place = rng.randrange(len(pieces))
            piece = pieces[place]
            cuts = [i for i in range(1, len(piece)) if piece[:i] in vocab and piece[i:] in vocab]
            if not cuts or piece.startswith("<0x"):
                break
            cut = rng.choice(cuts)
            pieces[place : place + 1] = [piece[:cut], piece[cut:]]
        found += [vocab[piece] for piece in pieces]
    return found
