"""Checkpoints of several ranks: written in parts, read by any number of ranks, refused when a part is damaged."""

import json
import os
import shutil

import pytest
import torch
from rank_processes import together
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from trainer_cases import LOSSES, batch, decoder

from tidemill.core.errors import CheckpointError, UnsupportedModel
from tidemill.models.adapter_files import read_tensors
from tidemill.models.block_files import BlockReader, rank_file, rank_files, write_blocks
from tidemill.models.hf_weights import hf_views, load_folder
from tidemill.models.served_weights import Contents
from tidemill.models.weight_slices import Slice
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings

SIZES = (1, 2, 4)
SHARD = {1: "zero2", 2: "zero3", 4: "hsdp"}


def everything(folder):
    """All tensors of a checkpoint, whole, by name."""
    return dict(hf_views(load_folder(folder))) | tensors_of(
        rank_files(folder, "optimizer") or [folder / "optimizer.safetensors"]
    )


def tensors_of(files):
    reader = BlockReader(files)
    outlines = {name: seen.shape for name, seen in reader._coverage.tensors.items() if not name.startswith("random.")}
    return reader.read([Slice(name, shape, (0,) * len(shape), torch.empty(shape)) for name, shape in outlines.items()])


def furthest(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max() / (one[name].abs().max() + 1e-30)) for name in one)


def parted(folder, ranks):
    """The folder of one rank as several ranks would have written it."""
    for stem in ("model", "optimizer"):
        tensors = load_file(folder / f"{stem}.safetensors")
        (folder / f"{stem}.safetensors").unlink()
        for rank in range(ranks):
            blocks = []
            for name, tensor in tensors.items():
                rows = -(-len(tensor) // ranks)
                held = tensor[rank * rows : (rank + 1) * rows]
                if name.startswith("random."):
                    held, rows = (tensor, 0) if rank == 0 else (tensor[:0], 0)
                blocks.append(Slice(name, tuple(tensor.shape), (rank * rows, *(0,) * (tensor.ndim - 1)), held))
            write_blocks(folder / rank_file(stem, rank, ranks), blocks)


async def written(folder):
    trainer = NativeTrainer(decoder(), TrainerSettings(device="cpu", lr=0.01), steps=9)
    await trainer.forward_backward(batch(0), LOSSES)
    await trainer.apply(1 / 50)
    await trainer.snapshot()
    await trainer.save(str(folder))
    return trainer


@pytest.mark.parametrize("ranks", [2, 3, 7])
async def test_one_rank_reads_what_several_wrote(tmp_path, ranks):
    straight, other = await written(tmp_path / "c"), NativeTrainer(decoder(seed=5), TrainerSettings(device="cpu"), steps=9)
    parted(tmp_path / "c", ranks)
    await other.load(str(tmp_path / "c"))
    assert all(torch.equal(*pair) for pair in zip(straight.decoder.parameters(), other.decoder.parameters(), strict=True))
    for one, two in zip(straight._optimizer.state(), other._optimizer.state(), strict=True):
        assert one.name == two.name and torch.equal(one.tensor, two.tensor)


async def test_a_rank_reads_its_own_rows_wherever_they_lie(tmp_path):
    name = "exp_avg.layers.0.qkv.weight"
    await written(tmp_path / "c")
    whole = load_file(tmp_path / "c" / "optimizer.safetensors")[name]
    parted(tmp_path / "c", 3)
    reader = BlockReader(rank_files(tmp_path / "c", "optimizer"))
    for first, end in ((0, len(whole)), (1, 2), (3, 25), (len(whole) - 1, len(whole)), (5, 5)):
        block = Slice(name, tuple(whole.shape), (first, 0), torch.empty(end - first, whole.shape[1]))
        assert torch.equal(reader.read([block])[name], whole[first:end]), (first, end)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints by 1, 2 and 4 ranks after two steps, what each becomes by a third, and what each number of ranks reads."""
    home = tmp_path_factory.mktemp("checkpoints")
    begun = [["step", 0], ["step", 1], ["save", "saved"], ["publish", 2], ["held", 0], ["step", 2], ["save", "straight"]]
    answers = {}
    for size in SIZES:
        asked = [_case(home, size, begun, "")]
        answers[size] = together(home, size, asked)[0]
    for size in SIZES:
        again = [["load", "saved"], ["save", "loaded"], ["step", 2], ["save", "stepped"]]
        together(home, size, [_case(home, size, again, f"-by-{size}", of, seed=7) for of in SIZES])
    return home, answers


def _case(home, size, verbs, suffix, of=None, seed=0):
    def path(verb, what):
        if not isinstance(what, str):
            return what
        return str(home / (f"{what}-{of or size}" + (suffix if verb == "save" else "")))

    folder = home / f"slots-{size}"
    return {"shard": SHARD[size], "seed": seed, "folder": str(folder), "do": [[v, path(v, w)] for v, w in verbs]}


@pytest.mark.ranks
def test_any_number_of_ranks_reads_what_any_number_wrote(saved):
    home, answers = saved
    for of in SIZES:
        assert all(answer is not None for answer in answers[of])
        written = everything(home / f"saved-{of}")
        assert len(written) > 100 and any(name.startswith("critic.exp_avg") for name in written)
        for size in SIZES:
            loaded = everything(home / f"loaded-{of}-by-{size}")
            assert written.keys() == loaded.keys() and all(torch.equal(written[n], loaded[n]) for n in written), (of, size)
            stepped, straight = everything(home / f"stepped-{of}-by-{size}"), everything(home / f"straight-{of}")
            assert furthest(straight, stepped) <= (0 if of == size else 1e-6), (of, size)


@pytest.mark.ranks
def test_all_ranks_announce_the_fingerprint_of_their_weights(saved):
    home, answers = saved
    for size in SIZES:
        own = Contents.of(load_folder(home / f"saved-{size}"), torch.float32).fingerprint
        assert {answer["answers"][2]["fingerprint"] for answer in answers[size]} == {own}
        total = sum(p.nbytes for p in decoder().parameters())
        assert sum(answer["answers"][2]["bytes"] for answer in answers[size]) == total


@pytest.mark.ranks
def test_each_of_four_ranks_holds_a_quarter(tmp_path):
    """Weights of policy, reference and critic, and both moments, between two steps under ZeRO-3."""

    def held(size):
        case = {"shard": "zero3", "folder": str(tmp_path), "do": [["step", 0], ["held", 0]]}
        (answers,) = together(tmp_path, size, [case])
        return max(answer["answers"][1]["bytes"] for answer in answers)

    assert held(4) <= 0.27 * held(1)


@pytest.mark.ranks
def test_any_number_of_ranks_reads_the_adapters_of_policy_and_critic(tmp_path):
    def run(size, *verbs):
        do = [[verb, str(tmp_path / what) if isinstance(what, str) else what] for verb, what in verbs]
        case = {"shard": "zero3", "lora": True, "folder": str(tmp_path / f"slots-{size}"), "do": do}
        assert all(together(tmp_path, size, [case])[0]), "a rank ended early"

    def of(name):
        files = rank_files(tmp_path / name, "optimizer") or [tmp_path / name / "optimizer.safetensors"]
        return tensors_of(files) | read_tensors(tmp_path / name)

    for size in (1, 2):
        run(size, ("step", 0), ("step", 1), ("save", f"saved-{size}"), ("step", 2), ("save", f"straight-{size}"))
    for was in (1, 2):
        written = of(f"saved-{was}")
        kept = {name.removeprefix("critic.") for name in written if name.startswith("critic.") and ".exp_avg" not in name}
        assert kept and all(".adapter." in name or name == "head.weight" for name in kept)
        for size in (1, 2):
            loaded, stepped = f"loaded-{was}-{size}", f"stepped-{was}-{size}"
            run(size, ("step", 5), ("load", f"saved-{was}"), ("save", loaded), ("step", 2), ("save", stepped))
            assert furthest(written, of(loaded)) == 0
            assert furthest(of(f"straight-{was}"), of(stepped)) <= (0 if was == size else 1e-6), (was, size)


def rewrite(file, change):
    with safe_open(file, framework="pt") as opened:
        metadata = dict(opened.metadata())
    tensors = load_file(file)
    change(tensors, metadata)
    save_file(tensors, file, metadata)


def place(name, **changed):
    def change(tensors, metadata):
        blocks = json.loads(metadata["blocks"])
        shape, first = blocks[name]
        blocks[name] = [changed.get("shape", shape), changed.get("first", first)]
        metadata["blocks"] = json.dumps(blocks)

    return change


NAME = "exp_avg.layers.0.qkv.weight"
DAMAGE = {
    "a part is missing": (lambda f: (f / "optimizer-rank-2-of-2.safetensors").unlink(), "1 of 2 ranks' files are missing"),
    "weights of a part are missing": (lambda f: (f / "model-rank-1-of-2.safetensors").unlink(), "ranks' files are missing"),
    "a part is cut off": (lambda f: os.truncate(f / "optimizer-rank-2-of-2.safetensors", 900), "not readable"),
    "weights of a part are cut off": (lambda f: os.truncate(f / "model-rank-2-of-2.safetensors", 900), "not a readable"),
    "a part twice": (
        lambda f: shutil.copy(f / "optimizer-rank-1-of-2.safetensors", f / "optimizer-rank-2-of-2.safetensors"),
        "given twice",
    ),
    "weights of a part twice": (
        lambda f: shutil.copy(f / "model-rank-1-of-2.safetensors", f / "model-rank-2-of-2.safetensors"),
        "given twice",
    ),
    "a block is gone": (
        lambda f: rewrite(f / "optimizer-rank-2-of-2.safetensors", lambda t, m: t.pop(NAME)),
        "elements were given",
    ),
    "a block lies elsewhere": (
        lambda f: rewrite(f / "optimizer-rank-2-of-2.safetensors", place(NAME, first=0)),
        "given twice",
    ),
    "a block lies outside": (
        lambda f: rewrite(f / "optimizer-rank-2-of-2.safetensors", place(NAME, first=10**6)),
        "lies outside",
    ),
    "a tensor of another shape": (
        lambda f: [rewrite(f / f"optimizer-rank-{r}-of-2.safetensors", place(NAME, shape=[9000, 16])) for r in (1, 2)],
        r"this trainer has",
    ),
    "metadata is no JSON": (
        lambda f: rewrite(f / "optimizer-rank-1-of-2.safetensors", lambda t, m: m.update(blocks="{")),
        "not readable",
    ),
    "a stranger": (
        lambda f: rewrite(f / "optimizer-rank-1-of-2.safetensors", lambda t, m: t.update(x=torch.zeros(1))),
        "do not belong here, among them x",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
async def test_damage_in_any_part_is_found_before_it_is_used(tmp_path, damage):
    change, told = DAMAGE[damage]
    await written(tmp_path / "c")
    parted(tmp_path / "c", 2)
    change(tmp_path / "c")
    trainer = NativeTrainer(decoder(seed=5), TrainerSettings(device="cpu"), steps=9)
    before = [p.clone() for p in trainer.decoder.parameters()]
    with pytest.raises((CheckpointError, UnsupportedModel), match=told):
        await trainer.load(str(tmp_path / "c"))
    assert all(torch.equal(p, b) for p, b in zip(trainer.decoder.parameters(), before, strict=True))
    assert trainer.updates == 0
