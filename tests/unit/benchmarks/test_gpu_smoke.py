"""The logic of `make gpu-smoke` around its measurements, which need a GPU."""

import math
import subprocess
import sys

import pytest

from benchmarks.gpu import smoke
from benchmarks.gpu.checks import Check
from runtime.devices.kind import Found

GPUS = [Found(index, "NVIDIA H200", 141 * 10**9) for index in range(2)]


@pytest.mark.parametrize(("found", "ok"), [(0.9, True), (0.4, False), (2.1, False), (math.nan, False)])
def test_check_out_of_bounds_fails_with_remedy(found, ok):
    check = Check("copies", found, "x", least=0.5, most=2, remedy="look at numa_bind")
    assert check.ok is ok and ("look at numa_bind" in check.line()) is not ok


def test_failing_part_does_not_lose_results_of_other_parts(monkeypatch):
    answers = iter(
        [
            """print('[{"name": "link", "found": 50, "least": 10}]')""",
            "import sys; sys.exit('out of memory')",
            "import time; time.sleep(60)",
        ]
    )

    def start(asked, gpu):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([sys.executable, "-c", next(answers)], text=True, **pipes)

    monkeypatch.setattr(smoke, "start", start)
    found = smoke.measured("copies", GPUS)
    assert [(check.name, check.ok) for check in found] == [("GPU 0: link", True), ("GPU 1: it ran", False)]
    assert "out of memory" in found[1].remedy
    monkeypatch.setattr(smoke, "LIMIT_S", 0.1)
    (hung,) = smoke.measured("copies", GPUS[:1])
    assert not hung.ok and "did not end" in hung.remedy


def test_smoke_writes_results_and_exits_1_on_failure(monkeypatch, tmp_path):
    gpus = list(GPUS)
    monkeypatch.setattr(smoke, "kind_of", lambda _: type("Kind", (), {"probe": staticmethod(lambda: gpus)}))
    monkeypatch.setattr(smoke, "measured", lambda part, _: [Check(part, 1, least=1)])
    command = ["--results", str(tmp_path / "lines.txt"), "--parts", "copies,ranks"]
    assert smoke.main([*command, "--gpus", "2"]) == 0
    assert "ok    ranks: 1" in (tmp_path / "lines.txt").read_text()
    assert smoke.main([*command, "--gpus", "8"]) == 1
    gpus.clear()
    assert smoke.main(command) == 2
