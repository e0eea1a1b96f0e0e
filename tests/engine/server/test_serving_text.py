"""Text that has been sent never changes, and is what the tokens say."""

from __future__ import annotations

from functools import cache

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from serving_cases import byte_tokenizer

from tidemill.api_formats.detokenizer import Detokenizer, StopStrings
from tidemill.api_formats.vocabulary import BROKEN, Vocabulary
from tidemill.core.types import Finish, SamplingParams
from tidemill.engine.server.choices import Asked, Assembler

tokenizer = cache(byte_tokenizer)
vocabulary = cache(lambda: Vocabulary(tokenizer()))
PROMPT = np.zeros(1, np.int32)


def pieces(tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(vocabulary())
    return [*(detokenizer.push(token)[1] for token in tokens), detokenizer.flush()]


@settings(max_examples=150)
@given(st.text(max_size=30))
@example("é€😀" * 3)
@example("a<pad>b")
def test_no_piece_ends_inside_a_character(text: str) -> None:
    tokens = tokenizer().encode(text, add_special_tokens=False)
    parts = pieces(tokens)
    assert "".join(parts) == tokenizer().decode(tokens, skip_special_tokens=True)
    if BROKEN not in text:
        assert not any(BROKEN in part for part in parts)
    if text.isascii():
        special = tokenizer().all_special_ids  # a text may spell one, which shows nothing
        shown = [part for token, part in zip(tokens, parts, strict=False) if token not in special]
        assert all(shown) and not parts[-1]  # nothing is held that is complete


@settings(max_examples=150)
@given(st.lists(st.integers(0, 258), max_size=60))
def test_any_tokens_at_all(tokens: list[int]) -> None:
    """Bytes that are no text: nothing is lost, nothing is held for long."""
    parts = pieces(tokens)
    assert "".join(parts) == tokenizer().decode(tokens, skip_special_tokens=True)
    held = 0
    for token, part in zip(tokens, parts, strict=False):
        held = 0 if part else held + (token > 2)
        assert held <= 3


def cut(text: str, stops: list[str]) -> str:
    """The reference: character by character, the first stop that is complete cuts where it begins."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@settings(max_examples=400)
@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
@example(["xa", "b", "ab", "aabb"], ["abab", "abba"])
def test_stop_strings_cut_wherever_the_pieces_end(parts: list[str], stops: list[str]) -> None:
    finder, sent = StopStrings(stops), ""
    for part in parts:
        sent += finder.push(part)
        if finder.found:
            break
    else:
        sent += finder.flush()
    text = "".join(parts)
    assert sent == cut(text, stops)
    assert finder.found == any(stop in text for stop in stops)


def test_only_what_may_become_a_stop_is_held() -> None:
    finder = StopStrings(["STOP", "TON"])
    assert [finder.push(part) for part in ("a", "S", "T", "O", "M", "ST", "ON")] == ["a", "", "", "", "STOM", "", "S"]
    assert finder.found


def test_an_end_that_the_tokenizer_would_show_has_no_text() -> None:
    a, b = tokenizer().encode("ab", add_special_tokens=False)
    assembler = Assembler(vocabulary(), Asked(PROMPT, SamplingParams()), ends=(b,))
    said = [assembler.push((token, -1.0, -2.0, [])) for token in (a, a, b)]
    last = assembler.finish(Finish.STOP)
    assert [piece.text for piece in (*said, last)] == ["a", "a", "", ""] and last.finish == "stop" and last.sampled == 3
    assert [t.token for piece in (*said, last) for t in piece.tokens] == [a, a, b]
    assert {t.logprob for piece in said for t in piece.tokens} == {-2.0}  # the model's, not the sampled distribution's


def test_a_stop_string_that_only_the_end_reveals() -> None:
    """A byte is held in case it becomes a character; it does not, and what it then shows is the stop string."""
    byte = tokenizer().encode("é", add_special_tokens=False)[0]
    assembler = Assembler(vocabulary(), Asked(PROMPT, SamplingParams(), (BROKEN,)), ends=())
    assert assembler.push((byte, -1.0, -1.0, [])).text == ""
    last = assembler.finish(Finish.LENGTH)
    assert (last.text, last.tokens, last.finish, last.sampled) == ("", [], "stop", 1)
