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
        theta, factor, llama3 = _rope(raw)
        bias = bool(raw.get("attention_bias", False))
        eos = raw.get("eos_token_id")
        return cls(
            family=family,
            vocab=raw["vocab_size"],
            hidden=hidden,
            layers=raw["num_hidden_layers"],
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or hidden // heads,
            intermediate=raw["intermediate_size"],
            context=raw.get("max_position_embeddings", 2048),
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_factor=factor,
            rope_llama3=llama3,
            qk_norm=family == "qwen3",
            qkv_bias=bias or family == "qwen2",
            o_bias=bias and family in ("llama", "qwen3"),
            mlp_bias=bool(raw.get("mlp_bias", False)) and family == "llama",
            tied=bool(raw.get("tie_word_embeddings", False)),
            windows=_windows(raw),
            eos_ids=tuple(eos if isinstance(eos, list) else [] if eos is None else [eos]),
            raw=raw,
        )


def _refuse_what_we_cannot_do(raw: dict[str, Any]) -> None:
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act {raw['hidden_act']!r}: only 'silu' is supported")
    if raw.get("quantization_config"):
        raise UnsupportedModel("quantization_config: quantised weights cannot be trained; use the unquantised model")
    if raw.get("attention_dropout", 0):
        raise UnsupportedModel(f"attention_dropout {raw['attention_dropout']}: set it to 0 in config.json")


def _rope(raw: dict[str, Any]) -> tuple[float, float, Llama3Rope | None]:
    """(theta, linear factor, llama3 scaling), from `rope_parameters` or from the older `rope_theta` + `rope_scaling`."""
    rope = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel("partial_rotary_factor: only full rotary embeddings are supported")
    match rope.get("rope_type", rope.get("type", "default")):
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
    layers, window = raw["num_hidden_layers"], raw.get("sliding_window")
    if raw["model_type"] in ("qwen2", "qwen3") and not raw.get("use_sliding_window", False):
        window = None
    if window is None or raw["model_type"] == "llama":
        return (None,) * layers
    kinds = raw.get("layer_types")
    if kinds is None:
        first = raw.get("max_window_layers", layers) if raw["model_type"] != "mistral" else 0
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
        raise UnsupportedModel(f"layer_types {sorted(unknown)}: supported are 'full_attention' and 'sliding_attention'")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
