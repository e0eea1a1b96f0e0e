"""Tokenizers: loaded from a folder, or made of characters or bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from tidemill.core.errors import CodecError
from tidemill.core.serialization import parse_json
from tidemill.models.architecture import Architecture, expect_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"  # the ids 0, 1 and 2 of a character tokenizer
_NEEDED = ("tokenizer.json", "tokenizer.model", "vocab.json")


class Tokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that are used here."""

    name_or_path: str
    chat_template: Any
    bos_token_id: int | None
    eos_token_id: int | None
    all_special_ids: list[int]
    is_fast: bool

    @property
    def added_tokens_decoder(self) -> dict[int, Any]: ...
    def __len__(self) -> int: ...
    def convert_ids_to_tokens(self, ids: int) -> str | None: ...
    def __call__(self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool) -> Any: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str: ...
    def get_vocab(self) -> dict[str, int]: ...
    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, **more: Any) -> Any: ...


def load_tokenizer(folder: str | Path, of_class: str | None = None) -> Tokenizer:
    """The tokenizer of a Hugging Face folder.

    of_class: the class that `class_name` returned where it was loaded before. None: transformers chooses by the model's
    configuration, and imports torch for that. Raises ValueError if there is no tokenizer, or if it has no end token.
    """
    folder = Path(folder)
    expect_files(folder)
    if not any((folder / name).is_file() for name in _NEEDED):
        raise ValueError(f"{folder}: no tokenizer there; expected a folder with one of {', '.join(_NEEDED)}")
    import transformers

    loader = getattr(transformers, of_class or "AutoTokenizer")
    try:
        tokenizer = loader.from_pretrained(str(folder), local_files_only=True)
    except (OSError, KeyError, TypeError, ValueError, ImportError) as error:
        raise ValueError(f"{folder}: its tokenizer cannot be loaded ({error})") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{folder}: its tokenizer has no eos_token; name one in tokenizer_config.json")
    return cast(Tokenizer, tokenizer)


def class_name(tokenizer: Tokenizer) -> str | None:
    """The name of the tokenizer's class for `load_tokenizer`; None if it is not in transformers."""
    import transformers

    of_class = type(tokenizer)
    return of_class.__name__ if getattr(transformers, of_class.__name__, None) is of_class else None


def import_tokenizers() -> None:
    """Import what loading a tokenizer by its class needs, while something else is waited for."""
    from transformers import PreTrainedTokenizerFast  # noqa: F401


def character_tokenizer(alphabet: str, *, lowercase: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, after <pad> = 0, <eos> = 1 and <unk> = 2.

    Encoding adds nothing and text over the alphabet decodes to itself, spaces and line breaks included. lowercase: text
    is read as if it were in lower case, so that a small model need not learn every letter twice. Raises ValueError if
    the alphabet is empty or repeats a character.
    """
    if not alphabet or len(set(alphabet)) != len(alphabet):
        repeated = sorted({c for c in alphabet if alphabet.count(c) > 1})
        raise ValueError(f"alphabet {alphabet!r}: expected each character once, repeated are {repeated}")
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Core
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((PAD, EOS, UNK, *alphabet))}
    core = Core(models.WordLevel(vocabulary, unk_token=UNK))
    if lowercase:
        core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, unk_token=UNK, clean_up_tokenization_spaces=False
    )


def byte_tokenizer(*special: str, literal: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per UTF-8 byte, after the special tokens.

    The first special token pads, the last ends. Encoding adds nothing, and any text decodes to itself. literal: a
    special token's name in a text is treated as text.
    """
    from tokenizers import Tokenizer as Core
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Core(models.BPE({token: i for i, token in enumerate([*special, *letters])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=special[0],
        eos_token=special[-1],
        additional_special_tokens=list(special[1:-1]),
        split_special_tokens=literal,
        clean_up_tokenization_spaces=False,
    )


def generation_config(folder: str | Path) -> dict[str, Any]:
    """The contents of a model folder's `generation_config.json`; {} if there is none."""
    path = Path(folder) / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        data = parse_json(path.read_bytes())
    except CodecError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return data


def stop_ids(
    tokenizer: Tokenizer | None, arch: Architecture, generation: Mapping[str, Any] | None = None
) -> tuple[int, ...]:
    """Every id that ends a completion, ascending; chat models have several."""
    from tidemill.models.chat_template import end_of_turn

    given = (generation or {}).get("eos_token_id")
    ids = {*arch.eos_ids, *(given if isinstance(given, list) else [] if given is None else [given])}
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if tokenizer is not None and (end := end_of_turn(tokenizer)) is not None:
        ids.add(end)
    return tuple(sorted(ids))
