"""What a hint tells the user to type works as it stands, whether or not the environment is activated."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tidemill.cli.commands.screen import own_name


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "env" / "bin" / "tidemill"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return program


@pytest.mark.parametrize("called", ["env/bin/tidemill", "absolute"])
def test_a_program_that_the_shell_does_not_find_is_named_by_its_path(place, monkeypatch, called):
    monkeypatch.setattr(sys, "argv", [str(place) if called == "absolute" else called, "demo"])
    monkeypatch.setenv("PATH", os.devnull)
    assert own_name() == "env/bin/tidemill"


def test_one_that_it_finds_by_its_name(place, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(place), "demo"])
    monkeypatch.setenv("PATH", str(place.parent))
    assert own_name() == "tidemill"


def test_another_one_of_that_name_is_not_meant(place, monkeypatch, tmp_path):
    other = tmp_path / "other" / "tidemill"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(place), "demo"])
    monkeypatch.setenv("PATH", str(other.parent))
    assert own_name() == "env/bin/tidemill"


def test_a_module_has_no_program_of_its_own(monkeypatch):
    monkeypatch.setattr(sys, "argv", [__file__])
    assert own_name() == "tidemill"
