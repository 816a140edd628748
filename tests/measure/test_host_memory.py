"""Free memory under control groups of both versions, as in containers and jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytescale_ext.measure.host_memory import free_host_bytes

FREE = 1024_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Fake machine with ``FREE`` bytes, without control groups."""
    amounts = f"MemTotal:       9000 kB\nMemFree:  10 kB\nMemAvailable:   {FREE // 1024} kB\nHugePages_Total:  0"
    write(tmp_path, {"proc/meminfo": amounts})
    return tmp_path


def group_files(folder: str, limit: object, used: int, cached: int = 0) -> dict[str, object]:
    """Write the files of a group of version 2."""
    stat = f"anon 7\ninactive_file {cached}\nactive_file 9"
    return {f"{folder}/memory.max": limit, f"{folder}/memory.current": used, f"{folder}/memory.stat": stat}


def write(root: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")


def test_without_groups_it_is_the_machines(root: Path) -> None:
    assert free_host_bytes(root) == FREE
    write(root, {"proc/self/cgroup": "0::/"})
    assert free_host_bytes(root) == FREE


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"job/step": ("max", 50), "job": ("max", 60)}, FREE),
        ({"job/step": (400, 50), "job": ("max", 60)}, 350),
        ({"job/step": (400, 50), "job": (500, 460)}, 40),
        ({"job/step": (400, 450), "job": (5000, 460)}, 0),
        ({"job": (FREE * 10, 0)}, FREE),
    ],
)
def test_version_2_counts_every_group_above(limits: dict[str, tuple[object, int]], expected: int, root: Path) -> None:
    write(root, {"proc/self/cgroup": "0::/job/step"})
    for group, (limit, used) in limits.items():
        write(root, group_files(f"sys/fs/cgroup/{group}", limit, used))
    assert free_host_bytes(root) == expected


def test_cached_files_are_given_up(root: Path) -> None:
    write(root, {"proc/self/cgroup": "0::/job", **group_files("sys/fs/cgroup/job", 500, 490, cached=300)})
    assert free_host_bytes(root) == 310


def test_version_1_has_its_own_tree(root: Path) -> None:
    folder = "sys/fs/cgroup/memory"
    write(root, {"proc/self/cgroup": "5:cpu,cpuacct:/other\n4:memory:/job\n0::/"})
    for group, limit, used, cached in (("job", 300, 20, 10), ("", 9223372036854771712, 90, 0), ("other", 1, 0, 0)):
        stat = f"cache 5\ntotal_inactive_file {cached}"
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
        write(root, {f"{folder}/{group}/{name}": text for name, text in zip(names, (limit, used, stat), strict=True)})
    assert free_host_bytes(root) == 290
