"""Mapping between the decoder's parameters and Hugging Face folders, read and written.

`hf_views` is the one place that knows the mapping: every named tensor is a view of rows of a parameter, so that reading,
writing and publishing need no second copy of the weights. A folder appears under its name only when it is complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tidemill.core.atomic_files import whole_folder
from tidemill.core.errors import UnsupportedModel
from tidemill.models.architecture import INDEX, OTHER_FILES, TOKENIZER_FILES, Architecture
from tidemill.models.decoder import Decoder, Layer
from tidemill.models.hf_files import check_headers, folder_slices, is_buffer, weight_files
from tidemill.models.kernels.cuda.transfers import Uploads
from tidemill.models.local_shards import first_row, full, local
from tidemill.models.piecewise import Work, at_once, by_rows
from tidemill.models.quantised_linear import Base
from tidemill.models.served_linear import Linear
from tidemill.models.weight_slices import Coverage, Slice

_TEMPLATES = "additional_chat_templates"
SCORE = "score.weight"  # [1, D] in a folder for sequence classification with one label
_HEAD = "lm_head.weight"
_ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
MAX_SHARD_BYTES = 4 << 30
Through = Callable[[Decoder, Iterable[Slice]], Iterable[Slice]]


def hf_views(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, view of a parameter) of every tensor; writing to a view changes the decoder.

    The views are detached. A tied head is no tensor of its own. Of a sharded decoder they are gathered copies, for which all
    ranks must iterate; see `hf_blocks`. What is held in few bits is dequantised, matrix by matrix.
    """
    for _, places in groupby(_places(decoder), key=lambda place: id(place.parameter)):
        stacked = list(places)
        if (base := stacked[0].base) is not None:
            yield from ((place.name, base.part(place.first)) for place in stacked)
            continue
        whole = full(stacked[0].parameter.detach())
        for place in stacked:
            yield place.name, whole[place.first : place.first + place.rows]


def hf_blocks(decoder: Decoder) -> Iterator[Slice]:
    """The block of every tensor that this process holds, as a view: of a sharded decoder some rows, else all.

    A tensor of which it holds nothing comes as an empty block. What is held in few bits, by all ranks, comes dequantised and
    whole from one of them.
    """
    return (make() for make in held_blocks(decoder))


def held_blocks(decoder: Decoder) -> list[Callable[[], Slice]]:
    """The blocks of `hf_blocks`, each made when it is called for.

    They stay those that this process holds now, while a pass gathers the parameters. Only what is held in few bits is
    computed by the call.
    """
    return [partial(_narrow_block, place) if place.base else partial(_same, _block(place)) for place in _places(decoder)]


def _same(block: Slice) -> Slice:
    return block


def _narrow_block(place: _Place) -> Slice:
    assert place.base is not None
    inputs = place.parameter.shape[1]
    rows = place.base.part(place.first) if place.base.owned else torch.empty(0, inputs)
    return Slice(place.name, (place.rows, inputs), (0, 0), rows)


def _block(place: _Place) -> Slice:
    held, at = local(place.parameter.detach()), first_row(place.parameter)
    begin, end = max(at, place.first), min(at + len(held), place.first + place.rows)
    rows = held[begin - at : end - at] if begin < end else held[:0]
    shape = (place.rows, *place.parameter.shape[1:])
    offset = (begin - place.first if begin < end else 0, *(0,) * (len(shape) - 1))
    return Slice(place.name, shape, offset, rows)


class _Place(NamedTuple):
    """A tensor by its Hugging Face name, and where it lies."""

    name: str
    parameter: Tensor
    first: int  # its first row there
    rows: int
    base: Base | None = None  # what holds the numbers, if the parameter is a shape only


def _places(decoder: Decoder) -> Iterator[_Place]:
    yield _whole("model.embed_tokens.weight", decoder.embed.weight)
    for layer in decoder.layers:
        assert isinstance(layer, Layer)
        yield from (place._replace(name=f"model.layers.{layer.index}.{place.name}") for place in _layer_places(layer))
    yield _whole("model.norm.weight", decoder.norm.weight)
    if decoder.head is not None:
        yield _whole(_HEAD, decoder.head.weight)


def _whole(name: str, parameter: Tensor) -> _Place:
    return _Place(name, parameter, 0, len(parameter))


def stacked_modules(decoder: Decoder) -> Iterator[tuple[Linear, list[tuple[str, int, int]]]]:
    """Each matrix of the layers, with the (Hugging Face module, first row, rows) of the projections stacked in it."""
    linears = {id(module.weight): module for module in decoder.modules() if isinstance(module, Linear)}
    for key, places in groupby(_places(decoder), key=lambda place: id(place.parameter)):
        if key in linears:
            yield linears[key], [(place.name.removesuffix(".weight"), place.first, place.rows) for place in places]


def _layer_places(layer: Layer) -> Iterator[_Place]:
    q, kv = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    intermediate = layer.down.in_features
    yield _whole("input_layernorm.weight", layer.input_norm.weight)
    yield from _stacked(layer.qkv, {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv})
    if layer.q_norm is not None and layer.k_norm is not None:
        yield _whole("self_attn.q_norm.weight", layer.q_norm.weight)
        yield _whole("self_attn.k_norm.weight", layer.k_norm.weight)
    yield from _stacked(layer.o, {"self_attn.o_proj": layer.o.out_features})
    yield _whole("post_attention_layernorm.weight", layer.post_norm.weight)
    yield from _stacked(layer.gate_up, {"mlp.gate_proj": intermediate, "mlp.up_proj": intermediate})
    yield from _stacked(layer.down, {"mlp.down_proj": layer.down.out_features})


def _stacked(linear: Linear, sizes: dict[str, int]) -> Iterator[_Place]:
    """The projections that are stacked in `linear`, in order."""
    for kind, parameter in (("weight", linear.weight), ("bias", linear.bias)):
        first = 0
        for name, rows in sizes.items() if parameter is not None else ():
            yield _Place(f"{name}.{kind}", parameter, first, rows, linear.base if kind == "weight" else None)
            first += rows


def serving_slices(decoder: Decoder, dtype: torch.dtype, blocks: Iterable[Slice] | None = None) -> Iterator[Slice]:
    """The blocks that are not empty, cast one by one; without a cast they are the live parameters. None: `hf_blocks`."""
    blocks = hf_blocks(decoder) if blocks is None else blocks
    return (replace(block, tensor=block.tensor.to(dtype)) for block in blocks if block.tensor.numel())


def load_slices(decoder: Decoder, slices: Iterable[Slice]) -> None:
    """Copy slices into the decoder, cast to its dtype.

    Every element of every tensor must come exactly once. Raises ValueError that names the tensor that is unexpected, has
    the wrong shape, is repeated or is missing; the decoder then holds some of the new weights and must not be used.
    """
    at_once(loading(decoder, slices))


def loading(decoder: Decoder, slices: Iterable[Slice], uploads: Uploads | None = None) -> Work[None]:
    """`load_slices` in pieces; `uploads`, if given, copies them. A slice that is the decoder's own memory is there."""
    views, coverage = dict(hf_views(decoder)), Coverage()
    for piece in slices:
        if piece.name not in views:
            raise ValueError(f"unexpected tensor {piece.name!r}: this {decoder.arch.family} model has no such weight")
        view = views[piece.name]
        if piece.shape != view.shape:
            raise ValueError(f"{piece.name}: shape {list(piece.shape)} where {list(view.shape)} is expected")
        coverage.add(piece)
        if piece.tensor.shape != view.shape:
            view = view[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.tensor.shape, strict=True))]
        if piece.tensor.data_ptr() == view.data_ptr() and piece.tensor.dtype == view.dtype and view.is_contiguous():
            continue  # it was received in place
        for rows, given in by_rows(view, piece.tensor.detach()):
            if uploads is None:
                rows.copy_(given)
            else:
                uploads.copy(rows, given)
            yield
    coverage.complete()
    if missing := [name for name in views if name not in coverage.tensors]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(f"missing {', '.join(missing[:3])}{more}")


def empty_decoder(arch: Architecture, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Decoder:
    """A decoder with uninitialised weights, to be filled by `load_slices`."""
    return _shaped(arch).to(dtype)._apply(lambda shape: torch.empty(shape.shape, dtype=shape.dtype, device=device))


def _shaped(arch: Architecture) -> Decoder:
    """A decoder of shapes without memory, on the meta device."""
    # Random numbers and `to_empty` there import a compiler that nothing here uses, which takes as long as importing torch.
    with torch.device("meta"), _Unfilled():
        return Decoder(arch)


class _Unfilled(TorchFunctionMode):
    """Mode in which new modules are not initialised."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def load_folder(folder: str | Path, dtype: torch.dtype = torch.float32, *, through: Through | None = None) -> Decoder:
    """The model of a Hugging Face folder (`config.json` and safetensors, whole or sharded).

    Files are memory-mapped and copied tensor by tensor. through: makes what is loaded of the decoder and the files' tensors.
    Raises UnsupportedModel, a ValueError, if the folder is not such a model, is incomplete, or asks for something that this
    decoder does not compute.
    """
    folder = Path(folder)
    arch = Architecture.from_folder(folder)
    aside = {_HEAD: list[Tensor]()} if arch.tied else {}
    decoder = _read(folder, arch, dtype, aside, through)
    if any(not torch.equal(head.to(dtype), decoder.embed.weight) for head in aside.get(_HEAD, [])):
        raise UnsupportedModel(
            f"{folder}: config.json ties the head to the embedding, but its lm_head.weight differs from it; "
            "set tie_word_embeddings to false"
        )
    return decoder


def load_scored(folder: str | Path, *, through: Through | None = None) -> tuple[Decoder, Tensor | None]:
    """(decoder, score [labels, D]) of a folder for sequence classification.

    The score is None for a language model, whose head is not read. through: as in `load_folder`. Raises UnsupportedModel as
    that does.
    """
    folder = Path(folder)
    aside = {_HEAD: list[Tensor](), SCORE: list[Tensor]()}
    decoder = _read(folder, replace(Architecture.from_folder(folder), tied=True), torch.float32, aside, through)
    return decoder, next(iter(aside[SCORE]), None)


def check_folder(folder: str | Path, scored: bool = False) -> None:
    """Raise what `load_folder` or `load_scored` would, except for values: no weight is read."""
    folder = Path(folder)
    arch = Architecture.from_folder(folder)
    arch = replace(arch, tied=True) if scored else arch
    _check_size(arch, folder)
    aside = (_HEAD, SCORE) if scored else (_HEAD,) if arch.tied else ()
    check_headers(folder, {name: tuple(view.shape) for name, view in hf_views(_shaped(arch))}, aside)


def _read(
    folder: Path, arch: Architecture, dtype: torch.dtype, aside: dict[str, list[Tensor]], through: Through | None = None
) -> Decoder:
    """A decoder with a folder's weights; tensors named in `aside` are put there."""
    _check_size(arch, folder)
    decoder = empty_decoder(arch, dtype)

    def wanted() -> Iterator[Slice]:
        for piece in folder_slices(folder):
            if piece.name in aside:
                aside[piece.name].append(piece.tensor)
            elif not is_buffer(piece.name):
                yield piece

    try:
        load_slices(decoder, wanted() if through is None else through(decoder, wanted()))
    except ValueError as error:
        raise UnsupportedModel(str(error) if isinstance(error, UnsupportedModel) else f"{folder}: {error}") from None
    return decoder


def _check_size(arch: Architecture, folder: Path) -> None:
    """Refuse a folder whose files cannot hold what config.json describes, before memory is taken."""
    weights = sum(parameter.numel() for parameter in _shaped(arch).parameters())
    files = weight_files(folder)
    if not all(file.is_file() for file in files):
        return  # reading them will name the missing one
    held = sum(file.stat().st_size for file in files)
    if weights > held:  # each takes two bytes and more
        raise UnsupportedModel(f"{folder}: config.json describes {weights:,} weights, its safetensors have {held:,} bytes")


def save_folder(
    decoder: Decoder,
    folder: str | Path,
    *,
    tokenizer_from: str | Path | None,
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    score: Tensor | None = None,
    pad: int | None = None,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
) -> None:
    """Write a Hugging Face folder: weights in `dtype`, configuration and tokenizer.

    The tokenizer and the generation configuration are copied from the folder `tokenizer_from`. score: [1, D]; with it,
    the folder is one for sequence classification, without the language-model head. pad: the padding id, which
    transformers skips to find a row's last token. tensors: those to write, by name; None: the decoder's.

    Everything is written beside `folder`, as `.NAME.partial`, flushed to disk, and moved there by rename. A model folder
    that is there already is replaced. Raises ValueError if `folder` holds anything else, or `tokenizer_from` holds no
    tokenizer.
    """
    folder = Path(folder).resolve()
    _check_replaceable(folder)
    tensors = scored_tensors(decoder, score) if tensors is None else tensors
    with whole_folder(folder) as partial:
        write_model(partial, decoder.arch, tensors, tokenizer_from, dtype, max_shard_bytes, score is not None, pad)


def scored_tensors(decoder: Decoder, score: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder: those of `hf_views`, or, with a `score`, without the head and with that."""
    yield from ((name, view) for name, view in hf_views(decoder) if score is None or name != _HEAD)
    if score is not None:
        yield SCORE, full(score.detach())


def write_model(
    folder: Path,
    arch: Architecture,
    tensors: Iterable[tuple[str, Tensor]],
    tokenizer_from: str | Path | None,
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    scores: bool = False,
    pad: int | None = None,
) -> None:
    """Write the files of a Hugging Face folder into a folder that exists.

    tensors: (Hugging Face name, tensor) of all weights. scores: they are those of a model for sequence classification;
    `pad` is its padding id. The files are neither flushed nor moved: a kill leaves some of them.
    """
    assert arch.raw, "an Architecture made by from_dict or from_folder knows its config.json"
    _write_json(folder / "config.json", _config(arch, dtype, scores, pad))
    if tokenizer_from is not None:
        _copy_tokenizer(Path(tokenizer_from), folder)
    _write_weights(tensors, folder, dtype, max_shard_bytes)


def _config(arch: Architecture, dtype: torch.dtype, scores: bool, pad: int | None) -> dict[str, Any]:
    """config.json as it was read, with the class and dtype that are saved."""
    key = "torch_dtype" if "torch_dtype" in arch.raw and "dtype" not in arch.raw else "dtype"
    kept = {name: value for name, value in arch.raw.items() if name not in ("torch_dtype", "dtype", *_ONE_LABEL)}
    made_for = f"{arch.family.capitalize()}For{'SequenceClassification' if scores else 'CausalLM'}"
    labels = {**_ONE_LABEL, "pad_token_id": pad} if scores else {}
    return kept | labels | {"architectures": [made_for], key: str(dtype).removeprefix("torch.")}


def _write_weights(tensors: Iterable[tuple[str, Tensor]], folder: Path, dtype: torch.dtype, max_shard_bytes: int) -> None:
    shards, room, total = [], 0, 0
    for name, view in tensors:
        size = view.numel() * dtype.itemsize
        if not shards or size > room:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = view
        room, total = room - size, total + size
    where: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        cast = {name: view.to("cpu", dtype).contiguous() for name, view in shard.items()}
        save_file(cast, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def _copy_tokenizer(source: Path, target: Path) -> None:
    found = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not found:
        raise ValueError(f"{source}: no tokenizer files there; give the folder of the model's tokenizer")
    for name in [*found, "generation_config.json"]:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    if (source / _TEMPLATES).is_dir():
        shutil.copytree(source / _TEMPLATES, target / _TEMPLATES)


def _check_replaceable(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file: give a folder to save the model to")
    ours = {*TOKENIZER_FILES, *OTHER_FILES, _TEMPLATES}
    others = sorted(p.name for p in folder.iterdir() if p.name not in ours and p.suffix != ".safetensors")
    if others:
        raise ValueError(
            f"{folder} holds {others[0]!r}, which is no part of a saved model: move it, or choose another folder"
        )


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")
