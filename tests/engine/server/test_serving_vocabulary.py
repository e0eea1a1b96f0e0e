"""Names and bytes of tokens add up to the text, whatever the tokenizer."""

from __future__ import annotations

import random
from functools import cache
from itertools import product

import numpy as np
import pytest
from tokenizers_of import KINDS, LINES, SPECIAL, tokenizer_of

from tidemill.api_formats.detokenizer import Detokenizer
from tidemill.api_formats.replies import TextPiece
from tidemill.api_formats.vocabulary import BROKEN, Vocabulary
from tidemill.core.types import Finish, SamplingParams
from tidemill.engine.server.choices import Asked, Assembler, goes_on

TEXTS = ["The mill", " tide", "é€😀 naïve", "\n  x + 1\n", "日本語 café", "a<|tool|>b the", "grains, mill.", "  the", "x"]
vocabulary_of = cache(lambda kind: Vocabulary(tokenizer_of(kind)))


def rows(kind: str) -> list[list[int]]:
    """Ids of texts, parts of them, and any ids at all."""
    tokenizer, choose = tokenizer_of(kind), random.Random(3)
    found = [tokenizer.encode(text, add_special_tokens=False) for text in (*TEXTS, *LINES[:3])]
    found += [row[at:] for row in found for at in (1, 2) if len(row) > at]
    found += [[choose.randrange(len(tokenizer)) for _ in range(choose.randrange(1, 9))] for _ in range(300)]
    return found


def said(kind: str, ids: list[int], begun: bool = False) -> tuple[str, bytes]:
    detokenizer = Detokenizer(vocabulary_of(kind), begun=begun)
    parts = [detokenizer.push(token) for token in ids]
    return "".join([*(text for _, text in parts), detokenizer.flush()]), b"".join(data for data, _ in parts)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_the_tokenizers(kind: str) -> None:
    tokenizer, broken = tokenizer_of(kind), 0
    for ids in rows(kind):
        expected = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        text, data = said(kind, ids)
        assert text == data.decode("utf-8", "replace")
        if BROKEN in expected and kind != "byte-level":  # a run of bytes with one that is wrong is all wrong there
            broken += 1
            continue
        assert text == expected, ids
    assert (broken > 0) == (kind in ("byte fallback", "gemma"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_goes_on_where_its_prompt_ends(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    for prompt in ("The mill", "café,"):
        before = tokenizer.encode(prompt, add_special_tokens=False)
        assert goes_on(np.array(before), vocabulary_of(kind)) and not goes_on(np.array([1, 5]), vocabulary_of(kind))
        for ids in rows(kind):
            whole = tokenizer.decode([*before, *ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)
            if BROKEN not in whole:
                text = tokenizer.decode(before, skip_special_tokens=True, clean_up_tokenization_spaces=False)
                assert text + said(kind, ids, begun=True)[0] == whole, ids


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_texts_and_no_two_texts_have_one_name(kind: str) -> None:
    tokenizer, vocabulary = tokenizer_of(kind), vocabulary_of(kind)
    for first in (False, True):
        by_name: dict[str, bytes] = {}
        for token in range(len(tokenizer) + 3):
            name, data = vocabulary.name(token, first), vocabulary.data(token, first)
            assert by_name.setdefault(name, data) == data, f"{token} and another are called {name!r}"
            whole = BROKEN not in data.decode("utf-8", "replace")
            if token < len(SPECIAL):
                assert (name, data) == (SPECIAL[token], b"")
            elif token >= len(tokenizer):
                assert (name, data) == (f"token_id:{token}", b"")
            else:
                assert name == (data.decode() if whole else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data))
    if kind in ("byte-level", "byte fallback"):
        assert vocabulary.name(tokenizer.encode("😀", add_special_tokens=False)[-1]) == "bytes:\\x80"
    if kind == "byte fallback":
        known = tokenizer.get_vocab()
        pairs = [
            (known[name], known[name[1:]]) for name in known if name[:1] == "▁" and name[1:2] != "▁" and name[1:] in known
        ]
        assert pairs and all(vocabulary.name(one) == " " + vocabulary.name(other) for one, other in pairs)
        assert all(vocabulary.name(one, True) == vocabulary.name(other, True) for one, other in pairs)


def cut(kind: str, ids: list[int], stops: list[str]) -> str:
    """The reference: token by token, the text before the first stop that is complete, special tokens read or passed over."""
    tokenizer, units = tokenizer_of(kind), list[tuple[str, str]]()  # (what is shown, what is read)
    for i in range(len(ids)):
        shown = tokenizer.decode(ids[: i + 1], skip_special_tokens=True)[sum(len(s) for s, _ in units) :]
        units += [(c, c) for c in shown] or [("", tokenizer.convert_ids_to_tokens(ids[i]))]
    for end in range(1, len(units) + 1):
        begins = [begin for begin in range(end) if not spelt(units[begin:end]).isdisjoint(stops)]
        if begins:
            return "".join(shown for shown, _ in units[: min(begins)])
    return "".join(shown for shown, _ in units)


def spelt(units: list[tuple[str, str]]) -> set[str]:
    """Each special token read or passed over."""
    return {"".join(parts) for parts in product(*({shown} if shown else {"", read} for shown, read in units))}


def assembled(kind: str, ids: list[int], asked: Asked, ends: tuple[int, ...] = ()) -> list[TextPiece]:
    assembler, found = Assembler(vocabulary_of(kind), asked, ends), list[TextPiece]()
    for token in ids:
        found.append(assembler.push((token, -1.0, -1.0, [])))
        if assembler.stopped:
            break
    return [*found, assembler.finish(Finish.LENGTH)]


PROMPT = np.zeros(1, np.int32)
STOPS = [
    ["<|tool|>"],
    ["xx<|tool|>", "ab"],
    ["a<|tool|>"],
    ["<|tool|>b"],
    ["ab"],
    ["tool"],
    ["<|im_start|>", "the"],
    ["b<|tool|><|tool|>", "x"],
    [">"],
]


@pytest.mark.parametrize("kind", ["byte-level", "gemma", "metaspace never", "characters"])
def test_stop_strings_may_name_special_tokens(kind: str) -> None:
    tokenizer, choose = tokenizer_of(kind), random.Random(1)
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "abtx"]
    special = [SPECIAL.index(name) for name in ("<|tool|>", "<|im_start|>")]
    cuts = 0
    for _ in range(400):
        ids = choose.choices([*letters, *special], k=7)
        stops = choose.choice(STOPS)
        pieces = assembled(kind, ids, Asked(PROMPT, SamplingParams(), tuple(stops), begun=True))
        text = "".join(piece.text for piece in pieces)
        assert text == cut(kind, ids, stops), (tokenizer.convert_ids_to_tokens(ids), stops)
        assert not any(0xD800 <= ord(c) < 0xE000 for c in text)
        cuts += pieces[-1].finish == "stop"
    assert cuts > 60


def test_the_stop_may_hold_the_end_token() -> None:
    """An end token has no text, and still counts where a stop string names it."""
    a, b = (tokenizer_of("byte-level").convert_tokens_to_ids(letter) for letter in "ab")
    pieces = assembled("byte-level", [a, b, 2], Asked(PROMPT, SamplingParams(), ("b</s>",)), ends=(2,))
    assert "".join(piece.text for piece in pieces) == "a" and pieces[-1].finish == "stop"


def test_no_stop_string_ends_what_has_to_be_longer() -> None:
    ids = [tokenizer_of("byte-level").convert_tokens_to_ids(letter) for letter in "abab"]
    for least, expected in ((0, ""), (1, "ab"), (2, "ab"), (3, "abab")):
        pieces = assembled("byte-level", ids, Asked(PROMPT, SamplingParams(min_tokens=least), ("ab",)))
        assert "".join(piece.text for piece in pieces) == expected, least


def test_special_tokens_are_shown_where_that_was_asked_for() -> None:
    a = tokenizer_of("byte-level").convert_tokens_to_ids("a")
    for stops, expected in (((), "a<|tool|>a"), (("<|tool|>",), "a"), (("|>a",), "a<|tool")):
        pieces = assembled("byte-level", [a, 5, a], Asked(PROMPT, SamplingParams(), stops, shown=True))
        assert "".join(piece.text for piece in pieces) == expected


def test_ids_of_all_that_was_sampled_stand_beside_their_logprobs() -> None:
    ids = [tokenizer_of("byte-level").convert_tokens_to_ids(letter) for letter in "abcd"]
    for every, expected in ((True, ids[:3]), (False, ids[:1])):
        pieces = assembled("byte-level", ids, Asked(PROMPT, SamplingParams(), ("bc",), every=every))
        assert [i for piece in pieces for i in piece.ids] == [t.token for p in pieces for t in p.tokens] == expected
        assert max(t.offset for p in pieces for t in p.tokens) <= 1
