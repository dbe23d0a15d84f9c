from pathlib import Path

from tests.tools import words


def test_hits_in_prose_and_not_in_code(tmp_path: Path) -> None:
    source = tmp_path / "one.py"
    source.write_text('"""It goes on."""\n\nbeside = "beside"  # nobody\nraise ValueError(f"it is {beside} anew")\n')
    page = tmp_path / "page.md"
    page.write_text("fine\nlearnt of it\n")
    found = [hit.split(": ")[0:2] for hit in words.hits(iter([source, page]))]
    numbered = sorted((Path(place).name, phrase) for place, phrase in found)
    assert numbered == [("one.py:1", "goes on"), ("one.py:3", "nobody"), ("one.py:4", "anew"), ("page.md:2", "learnt")]
