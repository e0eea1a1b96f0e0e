"""Reading of the weight files in a Hugging Face folder, as transformers reads them.

If a folder has both, transformers takes `model.safetensors` and not the index beside it; so does this module. A path
that is no regular file is refused before it is opened: a pipe would be waited for without end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tidemill.core.errors import CheckpointError, CodecError, UnsupportedModel
from tidemill.core.serialization import parse_json
from tidemill.models.architecture import INDEX, SINGLE
from tidemill.models.block_files import places_in, rank_files
from tidemill.models.weight_slices import Slice

_DTYPES = ("F32", "BF16", "F16", "F64")
_WHOLE = {"I8": torch.int8, "U8": torch.uint8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}
_NAMED = 3  # tensors in a message


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files. Raises UnsupportedModel if it has none, not all, or a broken index."""
    try:
        if ranks := rank_files(folder, "model"):
            return ranks
    except CheckpointError as error:
        raise UnsupportedModel(str(error)) from None
    if (single := folder / SINGLE).is_file():
        return [single]
    index = folder / INDEX
    if index.is_file():
        try:
            names = set(parse_json(index.read_bytes())["weight_map"].values())
            return [folder / Path(name).name for name in sorted(names)]  # only in this folder, whatever path is named
        except (CodecError, KeyError, AttributeError, TypeError):
            raise UnsupportedModel(f"{index}: expected JSON with a 'weight_map' from tensor to file") from None
    pickled = any(folder.glob("*.bin"))
    hint = "convert its .bin files with save_pretrained of transformers" if pickled else f"expected {SINGLE}"
    raise UnsupportedModel(f"{folder}: no safetensors weights there; {hint}")


def folder_slices(folder: Path) -> Iterator[Slice]:
    """Every tensor of a folder, whole or in blocks, memory-mapped.

    Raises UnsupportedModel for a file that cannot be read, and for a tensor that holds NaN or infinity.
    """
    return (piece for file in weight_files(folder) for piece in file_slices(file, folder))


def file_slices(file: Path, folder: Path) -> Iterator[Slice]:
    """Every tensor of one file of a folder; raises as `folder_slices`."""
    with _opened(file, folder) as tensors:
        places = places_in(tensors)
        for name in tensors.keys():  # noqa: SIM118  (not a dict)
            _expect_dtype(file, name, tensors.get_slice(name).get_dtype())
            tensor = tensors.get_tensor(name)
            if not _finite(tensor):
                raise UnsupportedModel(
                    f"{file}: {name} holds NaN or infinity: the file is damaged, or the training that wrote it "
                    "diverged; take an earlier checkpoint, or save the model again"
                )
            if name in places:
                shape, first = places[name]
                yield Slice(name, shape, (first, *(0,) * (len(shape) - 1)), tensor)
            else:
                yield Slice.whole(name, tensor)


def check_headers(folder: Path, expected: Mapping[str, tuple[int, ...]], aside: Iterable[str] = ()) -> None:
    """Check a folder's tensors without reading a weight: readable, and of the expected names and shapes.

    Raises UnsupportedModel, as `folder_slices` does for everything but values. aside: names that may be there as well.
    """
    found: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        with _opened(file, folder) as tensors:
            places = places_in(tensors)
            for name in tensors.keys():  # noqa: SIM118  (not a dict)
                header = tensors.get_slice(name)
                _expect_dtype(file, name, header.get_dtype())
                if name in found and name not in places:
                    raise UnsupportedModel(f"{file}: {name} is in another of the folder's files too")
                found[name] = places[name][0] if name in places else tuple(header.get_shape())
    for name, shape in found.items():
        if name in expected and shape != expected[name]:
            raise UnsupportedModel(f"{folder}: {name}: shape {list(shape)} where {list(expected[name])} is expected")
        if name not in expected and name not in aside and not is_buffer(name):
            raise UnsupportedModel(f"{folder}: unexpected tensor {name!r}: this model has no such weight")
    if missing := [name for name in expected if name not in found]:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise UnsupportedModel(f"{folder}: missing {', '.join(missing[:_NAMED])}{more}")


def is_buffer(name: str) -> bool:
    """True for a tensor of old checkpoints that is no weight."""
    return name.endswith("rotary_emb.inv_freq")


@contextmanager
def _opened(file: Path, folder: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except FileNotFoundError:
        raise UnsupportedModel(f"{file} does not exist, but {folder / INDEX} names it") from None
    except (SafetensorError, ValueError) as error:
        if isinstance(error, UnsupportedModel):
            raise
        raise UnsupportedModel(f"{file} is not a readable safetensors file ({error}); download or save it again") from None


def _expect_dtype(file: Path, name: str, dtype: str) -> None:
    if dtype not in _DTYPES:
        raise UnsupportedModel(f"{file}: {name} is {_WHOLE.get(dtype, dtype)}; quantised weights are not supported")


def _finite(tensor: Tensor) -> bool:
    """True if a tensor holds neither NaN nor infinity; takes no memory of its size."""
    # NaN passes through minimum and maximum, and infinity is one of them
    return tensor.numel() == 0 or all(bool(torch.isfinite(bound)) for bound in torch.aminmax(tensor))
