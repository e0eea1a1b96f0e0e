"""Small tokenizers of every kind that open models have, trained on a few lines."""

from __future__ import annotations

from functools import cache
from typing import Any

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|tool|>"]
LINES = [
    "The tide turns the mill, and the mill grinds the grain.",
    "  def f(x):\n    return x + 1",
    "naïve café 12.50 €",
] * 4
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
KINDS = ("byte-level", "byte fallback", "gemma", "metaspace first", "metaspace never", "unigram", "wordpiece", "characters")


@cache
def tokenizer_of(kind: str) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    given: dict[str, Any] = {"vocab_size": 600, "special_tokens": SPECIAL, "show_progress": False}
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    match kind:
        case "byte-level":
            core = Tokenizer(models.BPE())
            core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
            trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **given)
        case "byte fallback" | "gemma":  # Llama 2's normalizer and decoder; Gemma's
            core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
            parts = [normalizers.Prepend("▁")] if kind == "byte fallback" else []
            core.normalizer = normalizers.Sequence([*parts, normalizers.Replace(" ", "▁")])
            core.decoder = decoders.Sequence([*spaces, *([decoders.Strip(" ", 1, 0)] if parts else [])])
            trainer = trainers.BpeTrainer(**given | {"special_tokens": [*SPECIAL, *BYTES]})
        case "metaspace first" | "metaspace never":
            scheme = kind.split()[1]
            core = Tokenizer(models.BPE(unk_token="<unk>"))
            core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
            core.decoder = decoders.Metaspace(prepend_scheme=scheme)
            trainer = trainers.BpeTrainer(**given)
        case "unigram":  # T5's and XGLM's; the sentences of SentencePiece
            core = Tokenizer(models.Unigram())
            core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
            trainer = trainers.UnigramTrainer(unk_token="<unk>", **given)
        case "wordpiece":
            core = Tokenizer(models.WordPiece(unk_token="<unk>"))
            core.pre_tokenizer, core.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
            trainer = trainers.WordPieceTrainer(**given)
        case _:
            letters = sorted(set("".join(LINES)))
            core = Tokenizer(models.WordLevel({t: i for i, t in enumerate([*SPECIAL, *letters])}, unk_token="<unk>"))
            core.pre_tokenizer, core.decoder = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
            trainer = None
    if trainer is not None:
        core.train_from_iterator(LINES, trainer)
    if kind in ("byte fallback", "gemma"):  # as bytes, not as special tokens that they were trained as
        core = _without_special(core)
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=False))
    return PreTrainedTokenizerFast(tokenizer_object=core, additional_special_tokens=SPECIAL[4:], **names)


def _without_special(core: Any) -> Any:
    import json

    from tokenizers import Tokenizer

    state = json.loads(core.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(state))
