"""The host's memory as the box sees it, and what the box does about it; no process is started."""

from __future__ import annotations

from pathlib import Path

from scheduler.devices.host_reading import MemoryReading, read_memory

GB = 10**9
MEMINFO = "MemTotal: 24000000 kB\nMemFree: 1 kB\nMemAvailable: 8000000 kB\nSwapTotal: 100 kB\nSwapFree: 40 kB\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_tightest_group_above_us_counts_with_its_files_as_free(tmp_path: Path):
    group = "sys/fs/cgroup/system.slice"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/system.slice/appliance.service\n",
            "proc/pressure/memory": "some avg10=9.00 avg60=0 total=1\nfull avg10=3.50 avg60=0.00 avg300=0.00 total=5\n",
            f"{group}/appliance.service/memory.max": "max\n",
            f"{group}/appliance.service/memory.current": "5\n",
            f"{group}/appliance.service/memory.stat": "",
            f"{group}/memory.max": f"{10 * GB}\n",
            f"{group}/memory.current": f"{9 * GB}\n",
            f"{group}/memory.stat": f"anon 1\ninactive_file {GB}\nactive_file {GB}\nshmem {GB}\n",
        },
    )
    assert read_memory(root) == MemoryReading(10 * GB, 3 * GB, 3.5, "control group /system.slice", 60 * 1024)


def test_the_older_kind_of_groups_too_seen_from_inside_a_container(tmp_path: Path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu:/docker/abc\n4:memory:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GB}",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GB}",
            "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GB // 2}\ntotal_active_file 0\n",
        },
    )
    found = read_memory(root)
    assert (found.total, found.available, found.where) == (4 * GB, 3 * GB // 2, "control group /")
