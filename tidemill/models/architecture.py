"""A decoder's architecture, read from a Hugging Face `config.json` without torch.

Llama 3, Mistral, Qwen2/2.5 and Qwen3 differ only in the fields below. A configuration that asks for anything else is
refused, and the message names what it asked for: a model computed differently without notice would be a wrong policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidemill.core.errors import CodecError, UnsupportedModel
from tidemill.core.serialization import parse_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TOKENIZER_FILES += ("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json")
OTHER_FILES = ("config.json", "generation_config.json", INDEX)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
MOST = {  # the largest accepted numbers: a config.json from elsewhere must not decide how much memory is taken
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 18,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 14,
    "intermediate_size": 1 << 20,
    "max_position_embeddings": 1 << 30,
    "sliding_window": 1 << 30,
    "original_max_position_embeddings": 1 << 30,
}
# What transformers assumes where config.json is silent.
_KV_HEADS_DEFAULT = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_CONTEXT_DEFAULT = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}


@dataclass(frozen=True)
class Llama3Rope:
    """Frequency-dependent stretching of RoPE (Llama 3.1, `rope_type = "llama3"`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class Architecture:
    family: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context: int  # max_position_embeddings
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_factor: float = 1.0  # linear scaling: positions are divided by it
    rope_llama3: Llama3Rope | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False
    windows: tuple[int | None, ...] = ()  # sliding window of each layer; None attends to everything
    eos_ids: tuple[int, ...] = ()
    raw: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # config.json as it was read

    @classmethod
    def from_folder(cls, folder: str | Path) -> Architecture:
        path = Path(folder) / "config.json"
        expect_files(Path(folder))
        try:
            raw = parse_json(path.read_bytes())
        except FileNotFoundError:
            raise UnsupportedModel(f"{folder}: no config.json there; expected a Hugging Face model folder") from None
        except (OSError, CodecError) as error:
            raise UnsupportedModel(f"{path}: {error}") from None
        if not isinstance(raw, dict):
            raise UnsupportedModel(f"{path} holds {type(raw).__name__}: expected a JSON object")
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Architecture:
        family = raw.get("model_type")
        if not isinstance(family, str) or family not in FAMILIES:
            raise UnsupportedModel(
                f"model_type {family!r:.80} is not one of {', '.join(FAMILIES)}: "
                "use a model of these families (other architectures need the transformers trainer, which does not exist yet)"
            )
        _refuse_what_we_cannot_do(raw)
        heads, hidden = _whole(raw, "num_attention_heads"), _whole(raw, "hidden_size")
        kv_heads = _whole(raw, "num_key_value_heads", _KV_HEADS_DEFAULT.get(family) or heads)
        head_dim = _whole(raw, "head_dim", 128 if family == "qwen3" else hidden // heads)
        if heads % kv_heads:
            raise UnsupportedModel(f"num_attention_heads {heads}: not a multiple of num_key_value_heads {kv_heads}")
        if head_dim < 2 or head_dim % 2:
            raise UnsupportedModel(f"head_dim {head_dim}: rotary embeddings need an even number")
        theta, factor, llama3 = _rope(raw)
        bias = bool(raw.get("attention_bias", False)) and family in ("llama", "qwen3")
        return cls(
            family=family,
            vocab=_whole(raw, "vocab_size"),
            hidden=hidden,
            layers=_whole(raw, "num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=_whole(raw, "intermediate_size"),
            context=_whole(raw, "max_position_embeddings", _CONTEXT_DEFAULT[family]),
            norm_eps=_number(raw, "rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_factor=factor,
            rope_llama3=llama3,
            qk_norm=family == "qwen3",
            qkv_bias=bias or family == "qwen2",
            o_bias=bias,
            mlp_bias=bool(raw.get("mlp_bias", False)) and family == "llama",
            tied=bool(raw.get("tie_word_embeddings", False)),
            windows=_windows(raw),
            eos_ids=_eos_ids(raw.get("eos_token_id")),
            raw=raw,
        )


def expect_files(folder: Path) -> None:
    """Raise UnsupportedModel for an adapter, or a model's file that is not regular.

    Reading a pipe or device would wait without end, and a dangling link would be passed over.
    """
    for path in (*(folder / name for name in (SINGLE, *OTHER_FILES, *TOKENIZER_FILES)), *folder.glob("*.safetensors")):
        if (path.exists() or path.is_symlink()) and not path.is_file():
            what = "a folder" if path.is_dir() else "a pipe or device" if path.exists() else "a link to what is not there"
            raise UnsupportedModel(f"{path} is {what}: expected a file; save or copy the model again")
    if (folder / "adapter_config.json").exists():
        raise UnsupportedModel(f"{folder} holds an adapter (adapter_config.json): merge it into the model, or remove it")


def matrices(arch: Architecture) -> list[tuple[int, int]]:
    """[N, K] shapes of all matrices that inputs are multiplied with, the head last."""
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    layer = [(q + 2 * kv, arch.hidden), (arch.hidden, q), (2 * arch.intermediate, arch.hidden)]
    return [*layer, (arch.hidden, arch.intermediate)] * arch.layers + [(arch.vocab, arch.hidden)]


def wide_matrices(arch: Architecture) -> int:
    """The numbers of the layers' matrices: those that a quantised base holds in few bits."""
    return sum(n * k for n, k in matrices(arch)[:-1])


def parameters(arch: Architecture) -> int:
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    vectors = 2 * arch.hidden + 2 * arch.head_dim * arch.qk_norm + (q + 2 * kv) * arch.qkv_bias + arch.hidden * arch.o_bias
    vectors += (2 * arch.intermediate + arch.hidden) * arch.mlp_bias
    embedding = 0 if arch.tied else arch.vocab * arch.hidden
    return sum(n * k for n, k in matrices(arch)) + embedding + arch.layers * vectors + arch.hidden


def _whole(given: dict[str, Any], key: str, default: int | None = None) -> int:
    """A whole number of config.json. null means the default, if there is one."""
    value = default if given.get(key) is None else given[key]
    if type(value) is not int or not 1 <= value <= MOST[key]:
        raise UnsupportedModel(f"config.json: {key} = {value!r:.80}: expected a whole number from 1 to {MOST[key]}")
    return value


def _number(given: dict[str, Any], key: str, default: float | None = None) -> float:
    value: Any = default if given.get(key) is None else given[key]
    if type(value) not in (int, float) or not 0 < value < 1e30:  # NaN is neither
        raise UnsupportedModel(f"config.json: {key} = {value!r:.80}: expected a number above 0")
    return float(value)


def _eos_ids(given: Any) -> tuple[int, ...]:
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(each) is int and 0 <= each < 1 << 31 for each in ids):
        raise UnsupportedModel(f"config.json: eos_token_id = {given!r:.80}: expected a token id, or a list of them")
    return tuple(ids)


def _refuse_what_we_cannot_do(raw: dict[str, Any]) -> None:
    if experts := raw.get("num_experts") or raw.get("num_local_experts"):
        raise UnsupportedModel(f"a mixture of {experts!s:.80} experts: only dense models are supported")
    if str(raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act {raw['hidden_act']!r:.80}: only 'silu' is supported")
    if raw.get("transformers_weights") is not None:
        raise UnsupportedModel("transformers_weights: other files than model.safetensors are not supported; remove the key")
    if raw.get("quantization_config") or raw.get("compression_config"):
        raise UnsupportedModel("quantization_config: quantised weights cannot be trained; use the unquantised model")
    if raw.get("attention_dropout", 0):
        raise UnsupportedModel(f"attention_dropout {raw['attention_dropout']!r:.80}: set it to 0 in config.json")


_ROPE_NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _rope(raw: dict[str, Any]) -> tuple[float, float, Llama3Rope | None]:
    """(theta, linear factor, llama3 scaling) of the rotary embedding."""
    # the older key wins where both are given, as in transformers
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise UnsupportedModel(f"config.json: rope_scaling = {rope!r:.80}: expected an object")
    if nested := sorted(key for key, value in rope.items() if isinstance(value, dict)):
        raise UnsupportedModel(
            f"rope_parameters per layer type ({', '.join(nested)}): one rotary embedding for all layers is supported"
        )
    theta = _number(rope, "rope_theta", _number(raw, "rope_theta", 10000.0))
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel("partial_rotary_factor: only full rotary embeddings are supported")
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    if missing := [key for key in _ROPE_NEEDS.get(kind, ()) if key not in rope]:
        raise UnsupportedModel(f"rope type {kind!r}: config.json does not give its {', '.join(missing)}")
    match kind:
        case "default":
            return theta, 1.0, None
        case "linear":
            return theta, _number(rope, "factor"), None
        case "llama3":
            low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
            if low >= high:
                raise UnsupportedModel(f"config.json: low_freq_factor {low:g} is not below high_freq_factor {high:g}")
            if raw.get("original_max_position_embeddings") is not None:  # its meaning there differs between versions
                raise UnsupportedModel("original_max_position_embeddings outside of rope_scaling: move it there")
            original = _whole(rope, "original_max_position_embeddings")
            return theta, 1.0, Llama3Rope(_number(rope, "factor"), low, high, original)
        case other:
            raise UnsupportedModel(f"rope type {other[:80]!r}: supported are 'default', 'linear' and 'llama3'")


def _windows(raw: dict[str, Any]) -> tuple[int | None, ...]:
    layers = _whole(raw, "num_hidden_layers")
    sliding = raw["model_type"] == "mistral" or (raw["model_type"] != "llama" and raw.get("use_sliding_window", False))
    if not sliding or raw.get("sliding_window", 0) is None:
        return (None,) * layers
    window = _whole(raw, "sliding_window", 4096)  # what transformers assumes
    kinds = raw.get("layer_types")
    if kinds is not None and raw["model_type"] == "mistral":
        raise UnsupportedModel("layer_types in a mistral configuration: transformers ignores them there; remove them")
    if kinds is None:
        first = 0 if raw["model_type"] == "mistral" else raw.get("max_window_layers", 28)
        if type(first) is not int:
            raise UnsupportedModel(f"config.json: max_window_layers = {first!r:.80}: expected a whole number")
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if not isinstance(kinds, list) or not set(map(str, kinds)) <= {"sliding_attention", "full_attention"}:
        raise UnsupportedModel(f"layer_types {kinds!r:.80}: supported are 'full_attention' and 'sliding_attention'")
    if len(kinds) != layers:
        raise UnsupportedModel(f"layer_types has {len(kinds)} entries for {layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
