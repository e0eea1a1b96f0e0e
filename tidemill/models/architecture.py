"""What a decoder is made of, read from a Hugging Face `config.json`. No torch here.

Llama 3, Mistral, Qwen2/2.5 and Qwen3 differ only in the fields below. Whatever a configuration asks for that these
cannot express is refused by name: a model that is silently computed differently would be a wrong policy.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
# What transformers assumes where config.json is silent.
_KV_HEADS_DEFAULT = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_CONTEXT_DEFAULT = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}


class UnsupportedModel(ValueError):
    """A model this decoder cannot compute exactly. The message names what it asked for and what to do."""


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
        try:
            raw = json.loads(path.read_text())
        except FileNotFoundError:
            raise UnsupportedModel(f"{folder}: no config.json there; expected a Hugging Face model folder") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UnsupportedModel(f"{path}: not valid JSON ({error})") from None
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Architecture:
        family = raw.get("model_type")
        if family not in FAMILIES:
            raise UnsupportedModel(
                f"model_type {family!r} is not one of {', '.join(FAMILIES)}: "
                "use a model of these families (other architectures need the transformers trainer, which does not exist yet)"
            )
        _refuse_what_we_cannot_do(raw)
        heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
        kv_heads = raw.get("num_key_value_heads", _KV_HEADS_DEFAULT.get(family)) or heads
        head_dim = raw.get("head_dim", 128 if family == "qwen3" else None) or hidden // heads
        if heads % kv_heads:
            raise UnsupportedModel(f"num_attention_heads {heads}: not a multiple of num_key_value_heads {kv_heads}")
        theta, factor, llama3 = _rope(raw)
        bias = bool(raw.get("attention_bias", False)) and family in ("llama", "qwen3")
        eos = raw.get("eos_token_id")
        return cls(
            family=family,
            vocab=raw["vocab_size"],
            hidden=hidden,
            layers=raw["num_hidden_layers"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=raw["intermediate_size"],
            context=raw.get("max_position_embeddings", _CONTEXT_DEFAULT[family]),
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_factor=factor,
            rope_llama3=llama3,
            qk_norm=family == "qwen3",
            qkv_bias=bias or family == "qwen2",
            o_bias=bias,
            mlp_bias=bool(raw.get("mlp_bias", False)) and family == "llama",
            tied=bool(raw.get("tie_word_embeddings", False)),
            windows=_windows(raw),
            eos_ids=tuple(eos if isinstance(eos, list) else [] if eos is None else [eos]),
            raw=raw,
        )


def _refuse_what_we_cannot_do(raw: dict[str, Any]) -> None:
    if missing := [key for key in _REQUIRED if not isinstance(raw.get(key), int)]:
        raise UnsupportedModel(f"config.json: {', '.join(missing)} must be given as a whole number")
    if experts := raw.get("num_experts") or raw.get("num_local_experts"):
        raise UnsupportedModel(f"a mixture of {experts} experts: only dense models are supported")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act {raw['hidden_act']!r}: only 'silu' is supported")
    if raw.get("quantization_config"):
        raise UnsupportedModel("quantization_config: quantised weights cannot be trained; use the unquantised model")
    if raw.get("attention_dropout", 0):
        raise UnsupportedModel(f"attention_dropout {raw['attention_dropout']}: set it to 0 in config.json")


_ROPE_NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _rope(raw: dict[str, Any]) -> tuple[float, float, Llama3Rope | None]:
    """(theta, linear factor, llama3 scaling), from `rope_parameters` or from the older `rope_theta` + `rope_scaling`.

    Where both are given `rope_scaling` wins, as in transformers.
    """
    rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    if nested := sorted(key for key, value in rope.items() if isinstance(value, dict)):
        raise UnsupportedModel(
            f"rope_parameters per layer type ({', '.join(nested)}): one rotary embedding for all layers is supported"
        )
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel("partial_rotary_factor: only full rotary embeddings are supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if missing := [key for key in _ROPE_NEEDS.get(kind, ()) if key not in rope]:
        raise UnsupportedModel(f"rope type {kind!r}: config.json does not give its {', '.join(missing)}")
    match kind:
        case "default":
            return theta, 1.0, None
        case "linear":
            return theta, float(rope["factor"]), None
        case "llama3":
            scaling = Llama3Rope(
                float(rope["factor"]),
                float(rope["low_freq_factor"]),
                float(rope["high_freq_factor"]),
                int(rope["original_max_position_embeddings"]),
            )
            return theta, 1.0, scaling
        case other:
            raise UnsupportedModel(f"rope type {other!r}: supported are 'default', 'linear' and 'llama3'")


def _windows(raw: dict[str, Any]) -> tuple[int | None, ...]:
    layers, window = raw["num_hidden_layers"], raw.get("sliding_window", 4096)  # 4096: what transformers assumes
    if raw["model_type"] in ("qwen2", "qwen3") and not raw.get("use_sliding_window", False):
        window = None
    if window is None or raw["model_type"] == "llama":
        return (None,) * layers
    kinds = raw.get("layer_types")
    if kinds is not None and raw["model_type"] == "mistral":
        raise UnsupportedModel("layer_types in a mistral configuration: transformers ignores them there; remove them")
    if kinds is None:
        first = raw.get("max_window_layers", 28) if raw["model_type"] != "mistral" else 0
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
        raise UnsupportedModel(f"layer_types {sorted(unknown)}: supported are 'full_attention' and 'sliding_attention'")
    if len(kinds) != layers:
        raise UnsupportedModel(f"layer_types has {len(kinds)} entries for {layers} layers")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
