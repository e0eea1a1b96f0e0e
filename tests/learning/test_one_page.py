"""The loop on one page: a user's first look at the parts, which nothing else runs."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np

PAGE = Path(__file__).parents[2] / "recipes" / "one_page.py"


async def test_the_loop_on_one_page_learns(tmp_path: Path):
    main = runpy.run_path(str(PAGE))["main"]
    main.__globals__["STEPS"] = 30
    rewards = await main(tmp_path)
    assert np.mean(rewards[:3]) < 0.3 < 0.5 < np.mean(rewards[-5:]), rewards
    assert (tmp_path / "final" / "config.json").is_file()
