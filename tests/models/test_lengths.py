"""The bound of a text's tokens: never above what the tokenizer makes of it, and of use where there is one."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Core
from transformers import PreTrainedTokenizerFast

from tidemill.models import token_bounds
from tidemill.models.token_bounds import reach_of
from tidemill.models.tokenizer import byte_tokenizer, character_tokenizer

CORPUS = ["the tide rises and falls", "    deep    blanks        ", "ﬁrst café é ---------- ======", "한국어 日本語 🙂"] * 20
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def wrapped(core: Core) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", unk_token="<unk>")


def byte_level(normalizer: Any = None, **added: bool) -> Any:
    core = Core(models.BPE())
    core.normalizer = normalizer
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False))
    core.add_special_tokens([AddedToken("<|assistant|>", **added)])
    return wrapped(core)


def metaspace(fallback: bool = True) -> Any:
    """As Llama 2."""
    core = Core(models.BPE(byte_fallback=fallback, unk_token="<unk>", fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    specials = ["<unk>", *(BYTES if fallback else [])]
    core.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, special_tokens=specials, show_progress=False))
    core.decoder = decoders.Metaspace()
    return wrapped(core)


def unigram(fallback: bool) -> Any:
    pieces = [("<unk>", 0.0), *((name, -20.0) for name in BYTES), ("▁tide", -2.0), ("▁", -3.0), ("t", -5.0), ("e", -5.0)]
    core = Core(models.Unigram(pieces, unk_id=0, byte_fallback=fallback))
    core.normalizer = normalizers.NFKC()
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    return wrapped(core)


def words(model: Any, pre: Any, normalizer: Any = None) -> Any:
    core = Core(model)
    core.pre_tokenizer, core.normalizer = pre, normalizer
    return wrapped(core)


def one_by_one(normalizer: Any, fuse: bool = False) -> Any:
    """An unknown character is a token, or as many as there are in a row."""
    model = models.BPE({"<unk>": 0, "<eos>": 1, "t": 2, "e": 3}, [], unk_token="<unk>", fuse_unk=fuse)
    return words(model, pre_tokenizers.WhitespaceSplit(), normalizer)


def composed(normalizer: Any) -> Any:
    """Each character is a token when it is composed, and none of its tokens has a longer name."""
    core = Core(models.BPE({"?": 0, "t": 1, "e": 2}, [], unk_token="?"))
    core.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?")


BOUNDED: dict[str, Callable[[], Any]] = {
    "bytes": lambda: byte_tokenizer("<pad>", "<|im_start|>", "<|im_end|>"),
    "characters": lambda: character_tokenizer("abc ", lowercase=True),
    "byte level": byte_level,
    "byte level, composed": lambda: byte_level(normalizers.NFC()),
    "byte level, rstrip": lambda: byte_level(rstrip=True),
    "byte level, lstrip": lambda: byte_level(normalizers.NFKC(), lstrip=True),
    "characters, composed": lambda: composed(normalizers.NFC()),
    "characters, composed alike": lambda: composed(normalizers.NFKC()),
    "metaspace": metaspace,
    "unigram": lambda: unigram(True),
    "blanks lost": lambda: one_by_one(None),
    "replaced": lambda: byte_level(normalizers.Replace("----", "-")),
    "stripped": lambda: byte_level(normalizers.Sequence([normalizers.Strip(), normalizers.Lowercase()])),
}
UNBOUNDED: dict[str, Callable[[], Any]] = {
    "fused unknowns": lambda: metaspace(fallback=False),
    "fused in unigram": lambda: unigram(False),
    "fused in BPE": lambda: one_by_one(None, fuse=True),
    "words": lambda: words(models.WordLevel({"<unk>": 0, "<eos>": 1}, unk_token="<unk>"), pre_tokenizers.Whitespace()),
    "word pieces": lambda: words(models.WordPiece({"<unk>": 0, "<eos>": 1}, unk_token="<unk>"), pre_tokenizers.Whitespace()),
    "collapsed": lambda: byte_level(normalizers.Replace(Regex(r"\s+"), " ")),
    "deleted": lambda: byte_level(normalizers.Replace("-", "")),
    "accents": lambda: byte_level(normalizers.StripAccents()),
    "made into blanks": lambda: one_by_one(normalizers.Replace("a", " ")),
    "removed": lambda: words(models.BPE({"<unk>": 0}, [], unk_token="<unk>"), pre_tokenizers.Split("a", "removed")),
}
FEW = list(BOUNDED)[:3]
PARTS = ["a", "tide", "t", "e", " ", "    ", "\n\n\n", "----", "----------", "ﬁ", "e\u0301", "\u1112\u1161\u11ab", "🙂", "İ"]
PARTS += ["<|assistant|>", "the tide rises and falls", "한국어", "\x00", "\u00a0", "\u3000", "\x1d", "K", "\ufb2c", "\u0390"]
PARTS += [unicodedata.normalize("NFD", "\u1f82"), unicodedata.normalize("NFD", "\ufb2c"), "\u03b1\u0313\u0300\u0345t"]


@pytest.mark.parametrize(
    "name", [each if n < 3 else pytest.param(each, marks=pytest.mark.runs) for n, each in enumerate(BOUNDED)]
)
def test_what_fits_is_never_refused(name: str) -> None:
    tokenizer, rng = BOUNDED[name](), random.Random(name)
    reach = reach_of(tokenizer)
    assert reach is not None
    for part in [*PARTS, *tokenizer.get_vocab()]:
        for text in (part * 300, "".join(rng.choices(PARTS, k=60)), part + " " * 500 + "\n" * 500 + part):
            tokens = len(tokenizer.encode(text, add_special_tokens=False))
            assert reach.least(text) <= tokens and not reach.exceeds(text, tokens), (text[:50], tokens)
    assert reach.exceeds("a" * (100 * reach.characters + 1), 100), "of use"


def test_no_character_is_composed_of_more_than_is_thought() -> None:
    """By the tables of Unicode that Python has."""
    every = map(chr, (*range(0xD800), *range(0xE000, 0x110000)))
    parts = {c: unicodedata.normalize("NFD", c) for c in every if unicodedata.normalize("NFC", c) == c}
    assert max(map(len, parts.values())) == token_bounds._COMPOSED


@pytest.mark.parametrize("name", UNBOUNDED)
def test_where_nothing_can_be_proven_nothing_is_refused(name: str) -> None:
    assert reach_of(UNBOUNDED[name]()) is None
