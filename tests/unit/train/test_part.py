"""Parts of data files: exact, nested, and made in a process that no file harms."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from train.data.part import NoPart, write_apart


def put(path: Path, count: int, *, array: bool = False) -> Path:
    lines = [
        json.dumps({"prompt": f"{number}", "completion": "x"}, indent=1 if array else None) for number in range(count)
    ]
    path.write_text(f"[{', '.join(lines)}]" if array else "".join(line + "\n" for line in lines))
    return path


def numbers(path: Path) -> list[int]:
    return [int(json.loads(line)["prompt"]) for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize("array", [False, True])
def test_a_larger_part_has_the_smaller_one(tmp_path: Path, array: bool):
    source, small, large = put(tmp_path / "s", 1000, array=array), tmp_path / "small", tmp_path / "large"
    assert write_apart(source, small, 0.01, 16) == small.stat().st_size
    write_apart(source, large, 0.1, 16)
    found = numbers(small), numbers(large)
    assert [len(one) for one in found] == [16, 100] and set(found[0]) < set(found[1]) and found[0] == sorted(found[0])
    assert small.stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_no_data_is_said_to_be_none_in_little_memory(tmp_path: Path):
    """One line, which was read whole, by the controller, however long it was."""
    with open(tmp_path / "s", "wb") as out:
        out.truncate(64 << 20)
    with pytest.raises(NoPart, match=r"line 1 is 67108864 bytes long; the limit"):
        write_apart(tmp_path / "s", tmp_path / "t", 0.5, 16)


def test_many_lines_take_the_memory_of_the_process_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(NoPart, match="no examples"):
        write_apart(put(tmp_path / "s", 0), tmp_path / "t", 0.5, 16)
    source = put(tmp_path / "s", 10)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(NoPart, match="could not be made with 3600 s of CPU and 4 GiB of memory"):
        write_apart(source, tmp_path / "t", 0.5, 16)
