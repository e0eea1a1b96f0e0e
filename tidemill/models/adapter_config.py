"""Low-rank adapters as data: which matrices have one, of which rank and scale; read from and written to PEFT's JSON.

No torch here. A setting that changes what an adapter computes is honoured, or refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from tidemill.core.errors import CodecError, UnsupportedModel
from tidemill.core.serialization import parse_json

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EVERY = "all-linear"  # PEFT's word for all matrices of the layers
QUANTISED_BASE = "quantised_base.json"  # beside the configuration, which PEFT reads: it knows no such setting
BaseDtype = Literal["float32", "nf4", "int8"]
MOST = 1_000_000  # of a number in a configuration; more is a mistake
NEUTRAL: Mapping[str, Sequence[Any]] = {  # settings that are refused unless they have one of these values
    "bias": ("none",),
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    **dict.fromkeys(
        (
            *("modules_to_save", "layer_replication", "trainable_token_indices", "target_parameters", "eva_config"),
            *("alora_invocation_tokens", "use_bdlora", "arrow_config", "monteclora_config", "velora_config", "kasa_config"),
        ),
        (None, [], {}, False),
    ),
}


@dataclass(frozen=True)
class AdapterConfig:
    """A LoRA adapter (2106.09685) of a model: x W^T + scale * (x A^T) B^T, by the names of Hugging Face modules.

    A is [rank, inputs], B [outputs, rank]; scale is alpha / rank, or alpha / sqrt(rank) with `rslora` (2312.03732).
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] | str = PROJECTIONS  # ends of module names, or a regular expression of whole names
    excluded: tuple[str, ...] | str = ()
    layers: tuple[int, ...] | None = None  # None: all
    rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict[str, int])  # other ranks, by the end of a module's name
    alpha_pattern: Mapping[str, float] = field(default_factory=dict[str, float])
    dropout: float = 0.0  # while it is trained
    base: str = ""  # model that it was trained on
    base_dtype: BaseDtype = "float32"  # how its layers' matrices were held
    task: Literal["CAUSAL_LM", "SEQ_CLS"] = "CAUSAL_LM"  # PEFT's word for what the model is; it changes no number

    def __hash__(self) -> int:
        return hash(self.to_json())

    @property
    def highest_rank(self) -> int:
        return max(self.rank, *self.rank_pattern.values()) if self.rank_pattern else self.rank

    def of(self, module: str) -> tuple[int, float] | None:
        """(rank, scale) of the adapter of a module, such as `model.layers.0.self_attn.q_proj`; None if it has none."""
        if not _matches(self.targets, module) or (self.excluded and _matches(self.excluded, module)):
            return None
        layer = re.match(r".*?\.[^.]*\.(\d+)\.", module)
        if self.layers is not None and layer is not None and int(layer[1]) not in self.layers:
            return None
        rank = int(_by_pattern(self.rank_pattern, module, self.rank))
        alpha = _by_pattern(self.alpha_pattern, module, self.alpha)
        return rank, alpha / (rank**0.5 if self.rslora else rank)

    @classmethod
    def from_folder(cls, folder: str | Path) -> AdapterConfig:
        """Read `adapter_config.json`. Raises UnsupportedModel for an adapter that is not computed here."""
        path = Path(folder) / ADAPTER_CONFIG
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            raise UnsupportedModel(f"{folder}: no {ADAPTER_CONFIG} there; expected the folder of a PEFT adapter") from None
        except OSError as error:
            raise UnsupportedModel(f"{path}: {error}") from None
        return replace(cls.from_json(text, path), base_dtype=_base_dtype(Path(folder) / QUANTISED_BASE))

    @classmethod
    def from_json(cls, text: bytes, path: str | Path) -> AdapterConfig:
        """Read the text of `adapter_config.json`. path: named by errors. Raises as `from_folder` does."""
        try:
            raw = parse_json(text)
        except CodecError as error:
            raise UnsupportedModel(f"{path}: {error}") from None
        if not isinstance(raw, dict) or raw.get("peft_type") != "LORA":
            kind = raw.get("peft_type") if isinstance(raw, dict) else type(raw).__name__
            raise UnsupportedModel(f"{path}: peft_type {kind!r:.80}; only 'LORA' is known")
        if raw.get("task_type") == "SEQ_CLS":
            raise UnsupportedModel(
                f"{path}: task_type 'SEQ_CLS' is a reward model's adapter, which samples nothing; give a policy's, or the "
                "merged reward model"
            )
        for name, neutral in NEUTRAL.items():
            if name in raw and raw[name] not in neutral:
                raise UnsupportedModel(
                    f"{path}: {name} = {raw[name]!r:.80} is not computed here; expected {name} = {neutral[0]!r}. Merge the "
                    "adapter into its model with PEFT (merge_and_unload), and give that model"
                )
        if (dropout := _number(path, raw, "lora_dropout", 0.0, float, least=0.0)) >= 1:
            raise UnsupportedModel(f"{path}: lora_dropout = {dropout:g}, expected a number from 0, below 1")
        return cls(
            rank=_number(path, raw, "r", 8, int),
            alpha=_number(path, raw, "lora_alpha", 8, float),
            targets=_targets(path, raw),
            excluded=_names(path, raw, "exclude_modules"),
            layers=_layers(path, raw),
            rslora=raw.get("use_rslora") is True,
            rank_pattern=_pattern(path, raw, "rank_pattern", int),
            alpha_pattern=_pattern(path, raw, "alpha_pattern", float),
            dropout=dropout,
            base=str(raw.get("base_model_name_or_path") or ""),
        )

    def write(self, folder: Path) -> None:
        """Write `adapter_config.json`, and `quantised_base.json` if the base was quantised."""
        (folder / ADAPTER_CONFIG).write_text(self.to_json())
        if self.base_dtype != "float32":
            (folder / QUANTISED_BASE).write_text(json.dumps({"base_dtype": self.base_dtype}) + "\n")

    def to_json(self) -> str:
        """The text of `adapter_config.json`, as PEFT reads it."""
        targets = self.targets if isinstance(self.targets, str) else sorted(self.targets)
        fields: dict[str, Any] = {
            "peft_type": "LORA",
            "task_type": self.task,
            "base_model_name_or_path": self.base or None,
            "inference_mode": True,
            "r": self.rank,
            "lora_alpha": int(self.alpha) if float(self.alpha).is_integer() else self.alpha,
            "lora_dropout": self.dropout,
            "target_modules": targets,
            "exclude_modules": (self.excluded if isinstance(self.excluded, str) else sorted(self.excluded)) or None,
            "layers_to_transform": None if self.layers is None else list(self.layers),
            "use_rslora": self.rslora,
            "rank_pattern": dict(self.rank_pattern),
            "alpha_pattern": dict(self.alpha_pattern),
            "bias": "none",
            "use_dora": False,
            "modules_to_save": None,
        }
        return json.dumps(fields, indent=2, sort_keys=True) + "\n"


def _matches(names: tuple[str, ...] | str, module: str) -> bool:
    if names == EVERY:
        return module.rpartition(".")[2] in PROJECTIONS
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _by_pattern(pattern: Mapping[str, float], module: str, default: float) -> float:
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _base_dtype(path: Path) -> BaseDtype:
    try:
        raw = parse_json(path.read_bytes())
    except FileNotFoundError:
        return "float32"
    except (OSError, CodecError) as error:
        raise UnsupportedModel(f"{path}: {error}") from None
    given = raw.get("base_dtype") if isinstance(raw, dict) else None
    if (found := next((known for known in get_args(BaseDtype) if known == given), None)) is None:
        raise UnsupportedModel(f"{path}: base_dtype = {given!r:.80}, expected one of {', '.join(get_args(BaseDtype))}")
    return found


def _number(path: str | Path, raw: dict[str, Any], name: str, default: float, kind: type, least: float = 1e-9) -> Any:
    value = raw.get(name, default)
    known = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= MOST
    if not known or kind(value) != value:
        expected = f"a {'whole ' * (kind is int)}number {'above' if least else 'from'} 0, {MOST:,} at most"
        raise UnsupportedModel(f"{path}: {name} = {value!r:.80}, expected {expected}")
    return kind(value)


def _targets(path: str | Path, raw: dict[str, Any]) -> tuple[str, ...] | str:
    if not (found := _names(path, raw, "target_modules")):
        raise UnsupportedModel(f"{path}: target_modules is {raw.get('target_modules')!r}; expected names of modules")
    return found


def _names(path: str | Path, raw: dict[str, Any], name: str) -> tuple[str, ...] | str:
    value = raw.get(name)
    if value is None:
        return ()
    if isinstance(value, str):
        if value != EVERY:
            _expect_pattern(path, name, value)
        return value
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise UnsupportedModel(f"{path}: {name} = {value!r:.80}, expected names of modules or one regular expression")
    return tuple(value)


def _layers(path: str | Path, raw: dict[str, Any]) -> tuple[int, ...] | None:
    value = raw.get("layers_to_transform")
    if value is None or value == []:
        return None
    if raw.get("layers_pattern"):
        raise UnsupportedModel(f"{path}: layers_pattern = {raw['layers_pattern']!r:.80} is not read here; leave it out")
    given = [value] if isinstance(value, int) else value
    if not isinstance(given, list) or not all(isinstance(each, int) for each in given):
        raise UnsupportedModel(f"{path}: layers_to_transform = {value!r:.80}, expected numbers of layers")
    return tuple(given)


def _pattern(path: str | Path, raw: dict[str, Any], name: str, kind: type) -> dict[str, Any]:
    value = raw.get(name) or {}
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path}: {name} = {value!r:.80}, expected a number for each end of a module's name")
    for key in value:
        _expect_pattern(path, name, key)
    return {key: _number(path, value, key, 0, kind) for key in value}


def _expect_pattern(path: str | Path, name: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise UnsupportedModel(f"{path}: {name}: {pattern!r:.80} is no regular expression ({error})") from None
