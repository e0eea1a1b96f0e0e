"""Configuration: merge order, unions by kind, and one clear sentence for each mistake."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from tidemill.core.config import Config, dump, load
from tidemill.core.errors import ConfigError


class Nccl(Config):
    kind: Literal["nccl"] = "nccl"
    bucket_mb: int = 512


class Delta(Config):
    kind: Literal["delta"] = "delta"
    threshold: float = 0.0


class Pool(Config):
    max_lag: int = Field(1, ge=0)
    order: Literal["fifo", "window"] = "fifo"


class Run(Config):
    model: str
    steps: int = 10
    pool: Pool = Pool()
    sync: Annotated[Nccl | Delta, Field(discriminator="kind")] = Nccl()
    tags: tuple[str, ...] = ()
    limit: int | None = None


def test_files_then_overrides(tmp_path):
    a, b = tmp_path / "a.toml", tmp_path / "b.toml"
    a.write_text('model = "m"\nsteps = 3\n[pool]\nmax_lag = 4\n[sync]\nkind = "delta"\nthreshold = 0.5\n')
    b.write_text("steps = 4\n")
    config = load(Run, [a, b], ["--pool.order=window", "limit=7", 'tags=["x", "y"]'])
    assert config == Run(
        model="m", steps=4, pool=Pool(max_lag=4, order="window"), sync=Delta(threshold=0.5), tags=("x", "y"), limit=7
    )


def test_a_new_kind_replaces_the_table(tmp_path):
    a = tmp_path / "a.toml"
    a.write_text('model = "m"\n[sync]\nkind = "delta"\nthreshold = 0.5\n')
    assert load(Run, [a], ["sync.kind=nccl"]).sync == Nccl()


def test_a_kind_that_is_named_last_drops_nothing_that_was_given_before_it():
    assert load(Run, [], ["model=m", "sync.threshold=2", "sync.kind=delta"]).sync == Delta(threshold=2)
    with pytest.raises(ConfigError, match=r"unknown key 'sync.threshold'"):
        load(Run, [], ["model=m", "sync.threshold=2", "sync.kind=nccl"])


def test_dump_loads_to_the_same():
    config = load(Run, [], ["model=m", "sync.kind=delta", "sync.threshold=2"])
    assert load(Run, base=dump(config)) == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=m", "stepz=3"], r"unknown key 'stepz'; did you mean 'steps'\?"),
        (["model=m", "pool.max_lagg=3"], r"unknown key 'pool.max_lagg'; did you mean 'pool.max_lag'\?"),
        (["model=m", "zzz=3"], r"unknown key 'zzz'; known here: limit, model, pool"),
        (["model=m", "pool.max_lag=-1"], r"pool.max_lag = -1: should be greater than or equal to 0"),
        (["steps=1"], r"'model' is required"),
        (["model=m", "steps=1.5"], r"steps = 1.5"),
        (["model=m", "steps=many"], r"steps = 'many': should be a valid integer"),
        (["model=m", "pool.order=lifo"], r"pool.order = 'lifo': should be 'fifo' or 'window'"),
        (["model=m", "sync.kind=smoke"], r"sync.kind = 'smoke': should be one of 'nccl', 'delta'"),
        (["model=m", "sync.bucket=1"], r"did you mean 'sync.bucket_mb'"),
        (["steps"], r"expected key=value"),
        (["model=m", "pool=3"], r"pool = 3"),
    ],
)
def test_mistakes_get_one_sentence(overrides, message):
    with pytest.raises(ConfigError, match=message) as failure:
        load(Run, [], overrides)
    assert "\n" not in str(failure.value)


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load(Run, [tmp_path / "none.toml"])
    with pytest.raises(ConfigError, match="is a folder: give the path of a TOML file"):
        load(Run, [tmp_path])
    (tmp_path / "bad.toml").write_text("model = \n")
    with pytest.raises(ConfigError, match="not readable as TOML"):
        load(Run, [tmp_path / "bad.toml"])
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not readable as TOML"):
        load(Run, [tmp_path / "binary.toml"])


@given(st.text(max_size=40))
def test_no_override_crashes(text):
    try:
        load(Run, [], ["model=m", text])
    except ConfigError as error:
        assert str(error)
