import numpy as np
import pytest

from tidemill.warmup import supervised


def test_supervised_rows_are_a_mean_over_loss_tokens():
    rows = [(np.arange(4), np.array([0, 0, 1, 1])), (np.arange(3), np.array([0, 1, 0]))]
    samples, losses, scale = supervised(rows)
    assert scale == 1 / 3 and losses["supervised"].name == "cross_entropy"
    assert not any(s.mask.any() for s in samples) and all((s.versions == -1).all() for s in samples)
    np.testing.assert_array_equal(samples[0].weights, [0, 0, 1, 1])
    assert {s.loss for s in samples} == {"supervised"}
    with pytest.raises(ValueError, match=r"loss_mask\[0\]"):
        supervised([(np.arange(2), np.array([1, 1]))])
    with pytest.raises(ValueError, match="one flag a token"):
        supervised([(np.arange(2), np.array([1]))])
