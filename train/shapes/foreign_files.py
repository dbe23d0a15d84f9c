"""Names files that are not JSON lines, and the one command that makes JSON lines of each."""

from __future__ import annotations

import re
from typing import BinaryIO

_HEAD, _TAIL = 4096, 1 << 16
_MARK = b"\xef\xbb\xbf"


def _pandas(read: str) -> str:
    return (
        f"python3 -c \"import pandas as pd; pd.{read}.to_json('train.jsonl', orient='records', lines=True, "
        'force_ascii=False)"'
    )


_BEGINNINGS: tuple[tuple[bytes | tuple[bytes, ...], str, str], ...] = (
    (b"PAR1", "a Parquet table", _pandas("read_parquet('FILE')")),
    (b"ARROW1", "an Arrow (Feather) table", _pandas("read_feather('FILE')")),
    (
        b"\xff\xff\xff\xff",
        "an Arrow stream, as datasets keeps its tables",
        "python3 -c \"import datasets; datasets.Dataset.from_file('FILE').to_json('train.jsonl')\"",
    ),
    (b"ORC", "an ORC table", _pandas("read_orc('FILE')")),
    (b"Obj\x01", "an Avro file", "avro cat FILE > train.jsonl"),
    (b"\x89HDF", "an HDF5 file", _pandas("read_hdf('FILE')")),
    (
        b"SQLite format 3\0",
        "a SQLite database",
        "sqlite3 -json FILE 'select * from TABLE' | jq -c '.[]' > train.jsonl",
    ),
    (b"\xd0\xcf\x11\xe0", "a sheet or document of old Microsoft Office", _pandas("read_excel('FILE')")),
    (b"\x1f\x8b", "compressed with gzip", "gzip -dc FILE > train.jsonl"),
    (b"\xfd7zXZ\0", "compressed with xz", "xz -dc FILE > train.jsonl"),
    (b"BZh", "compressed with bzip2", "bzip2 -dc FILE > train.jsonl"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "zstd -dc FILE > train.jsonl"),
    (b"\x04\x22\x4d\x18", "compressed with lz4", "lz4 -dc FILE > train.jsonl"),
    (b"\xff\x06\0\0sNaPpY", "compressed with snappy", "python3 -m snappy -d FILE train.jsonl"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "7z x -so FILE > train.jsonl"),
    (b"Rar!\x1a\x07", "a RAR archive", "unrar p -inul FILE > train.jsonl"),
    (b"PK\x03\x04", "a ZIP archive", "unzip -p FILE > train.jsonl"),
    (b"\x93NUMPY", "an array of NumPy", "write it as JSON lines in Python"),
    ((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), "a pickle of Python", "write it as JSON lines in Python"),
    (b"%PDF", "a PDF document", "write its examples as JSON lines"),
    ((b"\x89PNG", b"\xff\xd8\xff"), "an image", "only text can be trained on"),
    (b"version https://git-lfs", "a pointer of Git LFS, not the data itself", "git lfs pull"),
)
_IN_ZIP: tuple[tuple[bytes, str, str], ...] = (
    (b"xl/workbook", "a sheet of Excel", _pandas("read_excel('FILE')")),
    (b"opendocument.spreadsheet", "a sheet of OpenDocument", _pandas("read_excel('FILE')")),
    (b"word/document", "a document of Word", "save it as text, one JSON object on each line"),
    (b"/data.pkl", "a file of PyTorch", "write it as JSON lines in Python"),
    (b".npy", "arrays of NumPy", "write it as JSON lines in Python"),
)
_ENCODINGS: tuple[tuple[bytes, str], ...] = (
    (b"\xff\xfe\0\0", "utf-32"),
    (b"\0\0\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
_UNMARKED = re.compile(rb"(?P<le>[\[{\r\n \"]\0)|(?P<be>\0[\[{\r\n \"])")
_MARKUP = re.compile(rb"\s*<(!doctype|html|\?xml|[a-z]+[ >])", re.IGNORECASE)
_TAR_AT, _TAR = 257, b"ustar"
_DELIMITERS = ((b"\t", "TSV", ", sep='\\t'"), (b",", "CSV", ""), (b";", "CSV", ", sep=';'"), (b"|", "CSV", ", sep='|'"))


def foreign_file(file: BinaryIO) -> tuple[str, str] | None:
    """What a file is that cannot be JSON lines or a JSON array, and the command that converts it; None for all others.
    Leaves the file at its beginning."""
    found = _named(file, file.read(_HEAD))
    file.seek(0)
    return found


def _named(file: BinaryIO, head: bytes) -> tuple[str, str] | None:
    for begins, encoding in _ENCODINGS:
        if head.startswith(begins):
            return encoding.upper(), f"save it as UTF-8: iconv -f {encoding} -t utf-8 FILE > train.jsonl"
    if unmarked := _UNMARKED.match(head):
        encoding = f"utf-16{unmarked.lastgroup}"
        return "UTF-16", f"save it as UTF-8: iconv -f {encoding} -t utf-8 FILE > train.jsonl"
    for begins, what, command in _BEGINNINGS:
        if head.startswith(begins):
            return (begins == b"PK\x03\x04" and _in_zip(file, head)) or (what, command)
    if head[_TAR_AT:].startswith(_TAR):
        return "a tar archive", "tar -xOf FILE > train.jsonl"
    text = head.removeprefix(_MARK).lstrip()
    if text[:1] in (b"{", b"["):
        return None
    if _MARKUP.match(text):
        return "a page of HTML or XML, not data", "download the data itself"
    return _table(text.split(b"\n"))


def _in_zip(file: BinaryIO, head: bytes) -> tuple[str, str] | None:
    """What a ZIP archive is by the names in it, most of which stand at its end."""
    size = file.seek(0, 2)
    file.seek(max(0, size - _TAIL))
    names = head + file.read(_TAIL)
    return next(((what, command) for name, what, command in _IN_ZIP if name in names), None)


def _table(lines: list[bytes]) -> tuple[str, str] | None:
    """A table of text: its first two lines have the same delimiter, the first without braces."""
    first, second = lines[0], lines[1] if len(lines) > 1 else b""
    for delimiter, name, option in _DELIMITERS:
        if delimiter in first and delimiter in second and b"{" not in first:
            return f"a table ({name})", _pandas(f"read_csv('FILE'{option})")
    return None
