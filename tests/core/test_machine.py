"""Memory and cores that a container leaves, by the files of either version of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.core.hardware import memory_bytes, usable_cores

GIB = 1 << 30
GROUPS: dict[str, tuple[str, dict[str, str], tuple[int, int], int]] = {  # own group, files, (memory, free), cores
    "version 1": (
        "5:memory:/jobs/mine\n4:cpu,cpuacct:/jobs/mine\n",
        {
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "memory/memory.usage_in_bytes": "0",
            "memory/jobs/memory.limit_in_bytes": str(4 * GIB),
            "memory/jobs/memory.usage_in_bytes": str(3 * GIB),
            "memory/jobs/memory.stat": f"cache 5\ntotal_inactive_file {GIB}\n",
            "memory/jobs/mine/memory.limit_in_bytes": str(3 * GIB),
            "memory/jobs/mine/memory.usage_in_bytes": str(GIB // 2),
            "cpu,cpuacct/jobs/cpu.cfs_quota_us": "150000",
            "cpu,cpuacct/jobs/cpu.cfs_period_us": "50000",
            "cpu,cpuacct/jobs/mine/cpu.cfs_quota_us": "-1",
            "cpu,cpuacct/jobs/mine/cpu.cfs_period_us": "50000",
        },
        (3 * GIB, 2 * GIB),
        3,
    ),
    "version 1, within a container": (
        "5:memory:/docker/0123\n",
        {"memory/memory.limit_in_bytes": str(2 * GIB), "memory/memory.usage_in_bytes": str(GIB)},
        (2 * GIB, GIB),
        64,
    ),
    "version 2, a group above": (
        "0::/slice/mine\n",
        {
            "slice/memory.max": str(GIB),
            "slice/memory.current": str(GIB // 4),
            "slice/memory.stat": "inactive_file 0\n",
            "slice/mine/memory.max": "max",
            "slice/mine/memory.current": "5",
            "slice/cpu.max": "200000 100000",
            "slice/mine/cpu.max": "max 100000",
        },
        (GIB, GIB * 3 // 4),
        2,
    ),
    "no limits": (
        "0::/\n",
        {"memory.max": "max", "memory.current": "7", "cpu.max": "max 100000"},
        (100 * GIB, 50 * GIB),
        64,
    ),
    "a path that leads out": ("5:memory:/../../etc\n", {}, (100 * GIB, 50 * GIB), 64),
    "nothing there": ("", {}, (100 * GIB, 50 * GIB), 64),
}


@pytest.mark.parametrize("case", GROUPS)
def test_limits_of_both_versions_of_control_groups(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, files, memory, cores = GROUPS[case]
    (tmp_path / "self").write_text(own)
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    machine = "tidemill.core.hardware."
    monkeypatch.setattr(machine + "CGROUP", tmp_path / "root")
    monkeypatch.setattr(machine + "OWN_GROUP", tmp_path / "self")
    there = type("Memory", (), {"total": 100 * GIB, "available": 50 * GIB})
    monkeypatch.setattr(machine + "psutil.virtual_memory", lambda: there)
    monkeypatch.setattr(machine + "os.sched_getaffinity", lambda _: range(64))
    assert (memory_bytes(), usable_cores()) == (memory, cores)
