"""Products with packed weights: against PyTorch in float64, row by row the same bits, and never of stale weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tidemill.models.decoder import Decoder
from tidemill.models.fingerprint import word_sum
from tidemill.models.kernels.cpu import thread_thresholds
from tidemill.models.kernels.cpu.bindings import FLOATS, PAIRED, TILED, WIDENED, Native
from tidemill.models.new_model import ModelSize, architecture
from tidemill.models.piecewise import at_once
from tidemill.models.served_linear import Linear

WAYS = {"floats": FLOATS, "widened": WIDENED, "pairs": PAIRED, "tiles": TILED}


@pytest.fixture(params=WAYS)
def dtype(request: pytest.FixtureRequest, kernels: Native, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Of each way to multiply that this processor knows, whichever is the quickest here."""
    way = WAYS[request.param]
    dtype = torch.float32 if way == FLOATS else torch.bfloat16
    if not kernels.multiplies(way):
        pytest.skip("no such products on this processor")
    monkeypatch.setitem(kernels.products, dtype, way)
    return dtype


SHAPES = [  # rows, outputs, inputs
    (1, 32, 32),
    (3, 40, 64),
    (17, 100, 96),
    (128, 512, 256),
    (33, 30, 64),
    (70, 16, 768),
    (300, 96, 2048),
    (30, 96, 1024),  # its rows are so far apart that they are copied
    (5, 7, 2816),
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("n, outputs, inputs", SHAPES)
def test_products(
    kernels: Native, dtype: torch.dtype, n: int, outputs: int, inputs: int, biased: bool, threads: int
) -> None:
    torch.manual_seed(n)
    apart = inputs if inputs == 1024 else inputs + 2
    inputs -= 3 if dtype == torch.float32 else 0
    x = torch.randn(n, apart).to(dtype)[:, :inputs]
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype) if biased else None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        packed = kernels.pack(weight)
        found = kernels.linear(x, packed, outputs, bias)
        wide = kernels.linear(x, packed, outputs, bias, wide=True)
        alone = torch.cat([kernels.linear(x[i : i + 1], packed, outputs, bias, wide=True) for i in range(min(n, 40))])
    finally:
        torch.set_num_threads(before)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert found.dtype == dtype and wide.dtype == torch.float32
    torch.testing.assert_close(wide.double(), expected, atol=1e-5 * inputs**0.5, rtol=1e-5)
    torch.testing.assert_close(found.double(), wide.to(dtype).double(), atol=0, rtol=0)
    assert torch.equal(alone, wide[:40]), "a row depends on its neighbours"


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("outputs, inputs", [(32, 32), (45, 96), (7, 64), (160, 64)])
def test_packing(
    kernels: Native, dtype: torch.dtype, outputs: int, inputs: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights come back bit for bit, and the packed copy holds their words and zeros; a copy is made where one was."""
    monkeypatch.setattr(thread_thresholds, "BYTES", 0)
    weight, one = torch.randn(outputs + 2, inputs + 4).to(dtype)[:outputs, :inputs], torch.eye(inputs).to(dtype)
    other = torch.randn(outputs, inputs).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        packed = kernels.pack(weight)
        assert torch.equal(kernels.linear(one, packed, outputs), weight.T) and word_sum(packed) == word_sum(weight)
        assert kernels.pack(other, packed) is packed and torch.equal(kernels.linear(one, packed, outputs), other.T)
    finally:
        torch.set_num_threads(before)


def test_nan_and_infinity_come_out(kernels: Native, dtype: torch.dtype) -> None:
    weight, x = torch.ones(32, 64).to(dtype), torch.ones(20, 64).to(dtype)
    x[3, 5], x[17, 60] = torch.nan, torch.inf
    found = kernels.linear(x, kernels.pack(weight), 32)
    assert found[3].isnan().all() and found[17].isinf().all() and found[[0, 2, 4, 16, 18, 19]].isfinite().all()


def test_beside_pytorchs_own_products(kernels: Native, dtype: torch.dtype) -> None:
    """Both set the processor's tiles up for themselves, on the same threads."""
    torch.manual_seed(0)
    weight, x = torch.randn(256, 256).to(dtype), torch.randn(100, 256).to(dtype)
    packed = kernels.pack(weight)
    ours, theirs = kernels.linear(x, packed, 256), F.linear(x, weight)
    for n in (100, 3, 64, 17):
        assert torch.equal(kernels.linear(x[:n], packed, 256), ours[:n])
        torch.testing.assert_close(F.linear(x[:n], weight), theirs[:n], atol=0.3, rtol=1e-2)


def test_a_layer_uses_them_for_no_gradient(dtype: torch.dtype) -> None:
    layer = Linear(64, 32, bias=True).to(dtype).requires_grad_(False)
    x = torch.randn(9, 64).to(dtype)
    before = layer(x)
    at_once(layer.packed.packing(layer.weight))
    with torch.no_grad():
        assert layer.packed.product(x, 32) is not None
        torch.testing.assert_close(layer(x), before, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)
        assert layer.packed.product(x.double(), 32) is None
    assert layer.packed.product(x, 32) is None, "a gradient could be wanted"
    layer.weight.mul_(2)
    at_once(layer.packed.packing(layer.weight))
    with torch.no_grad():
        torch.testing.assert_close(layer(x) - layer.bias, 2 * (before - layer.bias), atol=5e-2, rtol=2e-2)


def test_a_decoder_that_moves_forgets_them(dtype: torch.dtype) -> None:
    size: ModelSize = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "intermediate": 96}
    model = Decoder(architecture(size, vocab=40, context=64, ends={})).to(dtype)
    at_once(model.packing())
    assert all(packed.numbers is not None for _, _, packed in model.packed())
    model.to(torch.float64)
    assert all(packed.numbers is None for _, _, packed in model.packed())


@pytest.mark.parametrize(
    "n, outputs, inputs", [(1, 1, 32), (2, 12, 64), (5, 13, 96), (511, 40, 32), (513, 96, 160), (1030, 25, 64)]
)
def test_gradients_of_weights(kernels: Native, n: int, outputs: int, inputs: int) -> None:
    """Added to what is there; of rows that lie apart, too."""
    torch.manual_seed(n)
    d, x = torch.randn(n, outputs + 3).bfloat16()[:, :outputs], torch.randn(n, inputs + 5).bfloat16()[:, 2 : 2 + inputs]
    if not kernels.adds_outer(d, x):
        pytest.skip("no such products on this processor")
    begun = torch.randn(outputs, inputs)
    found = []
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            found.append(begun.clone())
            kernels.add_outer(d, x, found[-1])
        finally:
            torch.set_num_threads(before)
    expected = begun.double() + d.double().T @ x.double()
    assert float((found[0] - expected).abs().max()) < 1e-6 * n**0.5 * float(expected.abs().max())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_gradients_of_weights_are_for_whole_blocks_of_bfloat16(kernels: Native) -> None:
    x, narrow = torch.zeros(4, 64), torch.zeros(4, 64, dtype=torch.bfloat16)
    assert (
        not kernels.adds_outer(x, x) and not kernels.adds_outer(narrow, x) and not kernels.adds_outer(narrow, narrow[:, :48])
    )
