"""Names files that are not JSON lines, and the one command that makes JSON lines of each."""

from __future__ import annotations

import re
from typing import BinaryIO

_HEAD, _TAIL = 4096, 1 << 16
MARK = b"\xef\xbb\xbf"
"""The byte order mark of UTF-8. Files that were joined have one in their middle."""


def _pandas(read: str) -> str:
    return (
        f"python3 -c \"import pandas as pd; pd.{read}.to_json('train.jsonl', orient='records', lines=True, "
        'force_ascii=False)"'
    )


_UTF8 = "save it as UTF-8: iconv -f {} -t utf-8 FILE > train.jsonl"
_DATASETS = "python3 -c \"import datasets; datasets.Dataset.from_file('FILE').to_json('train.jsonl')\""
_SQLITE = "sqlite3 -json FILE 'select * from TABLE' | jq -c '.[]' > train.jsonl"
_WRITE = "write its examples as JSON lines, one object on each"
_BEGINNINGS: tuple[tuple[bytes, str, str], ...] = (
    (rb"\xff\xfe\0\0|\0\0\xfe\xff", "UTF-32", _UTF8.format("utf-32")),
    (rb"\xff\xfe|\xfe\xff", "UTF-16", _UTF8.format("utf-16")),
    (rb"[\[{\r\n \"]\0", "UTF-16", _UTF8.format("utf-16le")),
    (rb"\0[\[{\r\n \"]", "UTF-16", _UTF8.format("utf-16be")),
    (rb"PAR1", "a Parquet table", _pandas("read_parquet('FILE')")),
    (rb"ARROW1", "an Arrow (Feather) table", _pandas("read_feather('FILE')")),
    (rb"\xff\xff\xff\xff", "an Arrow stream, as datasets keeps its tables", _DATASETS),
    (rb"SQLite format 3\0", "a SQLite database", _SQLITE),
    (rb"\xd0\xcf\x11\xe0|PK\x03\x04(?=.*xl/workbook)", "a sheet of Excel", _pandas("read_excel('FILE')")),
    (rb"PK\x03\x04(?=.*word/document)|%PDF", "a document", _WRITE),
    (rb"PK\x03\x04(?=.*/data\.pkl)|\x80[\x02-\x05]|\x93NUMPY", "a file of Python's", _WRITE),
    (rb"PK\x03\x04", "a ZIP archive", "unzip -p FILE > train.jsonl"),
    (rb"\x1f\x8b", "compressed with gzip", "gzip -dc FILE > train.jsonl"),
    (rb"\xfd7zXZ\0", "compressed with xz", "xz -dc FILE > train.jsonl"),
    (rb"BZh", "compressed with bzip2", "bzip2 -dc FILE > train.jsonl"),
    (rb"\x28\xb5\x2f\xfd", "compressed with zstd", "zstd -dc FILE > train.jsonl"),
    (rb"7z\xbc\xaf\x27\x1c", "a 7z archive", "7z x -so FILE > train.jsonl"),
    (rb".{257}ustar", "a tar archive", "tar -xOf FILE > train.jsonl"),
    (rb"version https://git-lfs", "a pointer of Git LFS, not the data itself", "git lfs pull"),
    (rb"(?i)\s*<(?:!doctype|html|\?xml|[a-z]+[ >])", "a page of HTML or XML, not data", "download the data itself"),
)
_DELIMITERS = ((b"\t", "TSV", ", sep='\\t'"), (b",", "CSV", ""), (b";", "CSV", ", sep=';'"))


def foreign_file(file: BinaryIO) -> tuple[str, str] | None:
    """What a file is that cannot be JSON lines or a JSON array, and the command that converts it; None for all others.
    Leaves the file at its beginning."""
    head = file.read(_HEAD)
    file.seek(max(0, file.seek(0, 2) - _TAIL))
    names = head + file.read()  # those in a ZIP archive, most of which stand at its end
    file.seek(0)
    for begins, what, command in _BEGINNINGS:
        if re.match(begins, names, re.DOTALL):
            return what, command
    text = head.removeprefix(MARK).lstrip()
    return None if text[:1] in (b"{", b"[") else _table(text.split(b"\n"))


def _table(lines: list[bytes]) -> tuple[str, str] | None:
    """A table of text: its first two lines have the same delimiter, the first without braces."""
    first, second = lines[0], lines[1] if len(lines) > 1 else b""
    for delimiter, name, option in _DELIMITERS:
        if delimiter in first and delimiter in second and b"{" not in first:
            return f"a table ({name})", _pandas(f"read_csv('FILE'{option})")
    return None
