"""Runs that earlier versions recorded are read, and go on: `recorded/format_1.tar.gz` is of commit 9eb9a96.

`format_2.tar.gz` is of commit b92f64a, with scores of parts and turns, and attempts without a score. Each holds a recipe,
its reward and tasks, a model of a thousand parameters, and the folder of its run after four steps.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tidemill.cli.main import app
from tidemill.core.errors import ConfigError
from tidemill.run.storage import folder_format
from tidemill.run.storage.folder_format import FORMAT, check_format
from tidemill.run.storage.run_folder import RunFolder

pytestmark = pytest.mark.runs

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.tar.gz"))


@pytest.fixture(params=RECORDED, ids=lambda path: path.name.removesuffix(".tar.gz"))
def recorded(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run folder, with its recipe beside it and as the current folder."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def said(*arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_commands_read_it(recorded):
    assert "conserved: 0 lost, 0 trained twice" in said("ledger", "run")
    samples = json.loads(said("samples", "run", "--worst", "3", "--tokens", "--json"))
    assert len(samples["samples"] if isinstance(samples, dict) else samples) == 3
    assert "complete" in said("why", "run")
    assert "what was recorded is what these weights say" in said("parity", "run")
    assert check_format(recorded) < FORMAT, "reading changes nothing"


@pytest.mark.parametrize(
    "recorded", [RECORDED[0], *(pytest.param(p, marks=pytest.mark.slow) for p in RECORDED[1:])], indirect=True
)
def test_it_goes_on(recorded):
    before = {path.name: path.read_bytes() for path in (recorded / "trajectories").iterdir()}
    said("train", "recipe.toml", "steps=6")
    found = json.loads(said("ledger", "run", "--json"))
    assert (found["trained"], found["lost"], found["trained_twice"]) == (12, 0, 0)
    assert all((recorded / "trajectories" / name).read_bytes().startswith(held) for name, held in before.items())
    assert check_format(recorded) == FORMAT
    assert "what was recorded is what these weights say" in said("parity", "run")


def test_a_newer_folder_is_refused_by_its_version(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "format.json").write_text(json.dumps({"format": FORMAT + 1, "tidemill": "9.1"}))
    with pytest.raises(ConfigError, match=rf"format {FORMAT + 1}, written by Tidemill 9\.1: expected at most {FORMAT}"):
        RunFolder.existing(tmp_path)
    (tmp_path / "format.json").write_text("{")
    with pytest.raises(ConfigError, match="not readable"):
        RunFolder.existing(tmp_path)


def test_every_format_has_its_migration():
    assert sorted(folder_format.MIGRATIONS) == list(range(1, FORMAT))
    tree = {"warmup": {"seconds": 60, "steps": 3}, "steps": 4}
    assert folder_format.migrated(tree, 1) == {"warmup": {"steps": 3}, "steps": 4}
