"""Statistics over cohorts: rewards centred and normalised among the attempts that are compared."""

from __future__ import annotations

import math

import numpy as np

from tidemill.core.types import Array


def cohort_index(cohorts: Array) -> Array:
    """[n] number of each attempt's cohort, 0 .. cohorts - 1."""
    return np.unique(cohorts, return_inverse=True)[1]


def cohort_size(cohorts: Array) -> Array:
    """[n] size of each attempt's cohort."""
    index = cohort_index(cohorts)
    return np.bincount(index)[index]


def centre(values: Array, cohorts: Array) -> Array:
    """[n] values minus their cohort's mean, counted from its first value so that equal ones give 0."""
    _, first, index = np.unique(cohorts, return_index=True, return_inverse=True)
    offset = np.asarray(values, np.float64) - values[first][index]
    return offset - (np.bincount(index, offset) / np.bincount(index))[index]


def normalise(values: Array, cohorts: Array, eps: float) -> Array:
    """[n] values centred in their cohort, over its sample standard deviation + eps."""
    centred, index = centre(values, cohorts), cohort_index(cohorts)
    variance = np.bincount(index, centred**2) / np.maximum(np.bincount(index) - 1, 1)
    return divide(centred, np.sqrt(variance)[index] + eps)


def divide(values: Array, by: Array | float) -> Array:
    """values / by, or 0 where `by` is not positive."""
    return np.divide(values, by, out=np.zeros(len(values)), where=np.asarray(by) > 0)


def unit(values: Array, eps: float) -> Array:
    """[n] values over the root of their mean square (n - 1 in the denominator) + eps."""
    return divide(values, math.sqrt(float(values @ values) / max(len(values) - 1, 1)) + eps)


def standardise(values: Array, eps: float) -> Array:
    """[n] values centred over all of them, over the root of their sample variance + eps."""
    centred = centre(values, np.zeros(len(values), np.int64))
    return centred / math.sqrt(float(centred @ centred) / max(len(values) - 1, 1) + eps)


def discounted_sums(values: Array, lengths: Array, factor: Array | float) -> Array:
    """[M] sum over s >= t within the row of factor^(s-t) * values_s; one `factor` for all or per row."""
    order = np.argsort(-lengths, kind="stable")  # the longest first: those that reach a column are then the first rows
    last = (np.cumsum(lengths) - 1)[order]
    factors = np.broadcast_to(np.asarray(factor, np.float64), lengths.shape)[order]
    columns = np.arange(int(lengths.max(initial=0)))  # counted from the end
    reach = np.searchsorted(-lengths[order], -columns, side="left")
    total, result = np.zeros(len(lengths)), np.empty(len(values))
    for column, rows in zip(columns.tolist(), reach.tolist(), strict=True):
        at = last[:rows] - column
        total[:rows] = values[at] + factors[:rows] * total[:rows]
        result[at] = total[:rows]
    return result
