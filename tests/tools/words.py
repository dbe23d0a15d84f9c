"""Counts phrases that have a plainer word, in pages, docstrings, comments and messages.

    python -m tests.tools.words [FILE ...] # prints each line with one; default: the whole tree

`make lint` limits their number (tests/tools/sizes.json), which may only fall.
"""

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("appliance", "train", "serve", "scheduler", "weights", "runtime", "images", "benchmarks", "examples", "docs")
INSTEAD = {
    r"is no (?!longer|more)[a-z]+": "is not a",
    r"(?:that|which) (?:is|are) to [a-z]+": "the future, or an imperative",
    r"anew": "again",
    r"learnt": "trained",
    r"little by little": "in chunks",
    r"(?:gives?|given|giving) back": "release",
    r"lets? go": "release",
    r"goes on": "continues",
    r"(?:any|no|some)body(?:'s|s)?": "any owner, no owner, another owner",
    r"of whom|whoever": "owner, the caller",
    r"late enough|sooner": "before, deadline",
    r"beside": "alongside, with",
}
_FOUND = re.compile("|".join(rf"\b(?:{phrase})\b" for phrase in INSTEAD), re.IGNORECASE)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of prose: all lines of a page; comments and strings with a space of Python."""
    if path.suffix == ".md":
        yield from enumerate(path.read_text().splitlines(), 1)
        return
    with path.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for offset, line in enumerate(node.value.splitlines()):
                yield node.lineno + offset, line


def hits(paths: Iterator[Path]) -> Iterator[str]:
    """ "FILE:LINE: phrase: text" for each match."""
    for path in paths:
        for number, line in prose(path):
            for match in _FOUND.finditer(line):
                yield f"{path}:{number}: {match[0]}: {line.strip()[:100]}"


def whole_tree() -> Iterator[Path]:
    yield from (ROOT / "README.md", ROOT / "CONTRIBUTING.md")
    for folder in FOLDERS:
        yield from sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md"))


def main() -> None:
    found = list(hits(map(Path, sys.argv[1:]) if sys.argv[1:] else whole_tree()))
    print("\n".join([*found, f"{len(found)} phrases; use instead: {', '.join(sorted(set(INSTEAD.values())))}"]))


if __name__ == "__main__":
    main()
