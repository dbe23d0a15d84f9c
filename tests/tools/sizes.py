"""Limits the lines of each room (code, tests, pages), the patches of vLLM, and the phrases that words.py counts.

    python -m tests.tools.sizes

The limits are in tests/tools/sizes.json. A room above its limit fails `make lint`; the limit of a smaller room is
lowered at once. Raise a limit only by hand, with the reason in the commit message.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.tools import words

ROOT = Path(__file__).parents[2]
HELD = Path(__file__).with_name("sizes.json")
_PRODUCT = ("train", "serve", "scheduler", "weights", "runtime")
_STORE = ("appliance/controller", "appliance/store")
PATCHES = "patches of vLLM and torch"
PHRASES = "phrases with a plainer word"


def sizes() -> dict[str, int]:
    """Lines by room, and the numbers of patches and phrases."""
    found = {
        "appliance/gateway": _lines("*.py", "appliance/gateway"),
        " + ".join(_STORE): _lines("*.py", *_STORE),
        "appliance/cli": _lines("*.py", "appliance/cli"),
    }
    found["appliance (rest)"] = _lines("*.py", "appliance") - sum(found.values())
    found |= {room: _lines("*.py", room) for room in _PRODUCT}
    found["tests"] = _lines("*.py", "tests")
    found["benchmarks"] = _lines("*.py", "benchmarks")
    found["docs and README"] = _lines("*.md", "docs") + _length(ROOT / "README.md")
    found[PATCHES] = sum(patches(path.read_text()) for path in (ROOT / "serve").rglob("*.py"))
    found[PHRASES] = len(list(words.hits(words.whole_tree())))
    return found


def patches(source: str) -> int:
    """Number of attributes that a module sets on imports from vLLM and torch, without those set on arguments."""
    tree = ast.parse(source)
    theirs = set(_imported(tree))
    return sum(_is_patch(node, theirs) for node in ast.walk(tree))


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in node.names:
                module = getattr(node, "module", None) or name.name
                if module.partition(".")[0] in ("vllm", "torch"):
                    yield (name.asname or name.name).partition(".")[0]


def _is_patch(node: ast.AST, theirs: set[str]) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
        return _root(node.args[0]) in theirs
    targets = node.targets if isinstance(node, ast.Assign) else ()
    return any(isinstance(target, ast.Attribute) and _root(target.value) in theirs for target in targets)


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _lines(pattern: str, *folders: str) -> int:
    return sum(_length(path) for folder in folders for path in (ROOT / folder).rglob(pattern))


def _length(path: Path) -> int:
    return len(path.read_text(errors="replace").splitlines())


def main() -> int:
    held, now = json.loads(HELD.read_text()), sizes()
    grown = {room: size for room, size in now.items() if size > held.get(room, 0)}
    for room, size in grown.items():
        print(
            f"{room}: {size:,}, limit {held.get(room, 0):,}. Remove some lines; if it must grow, raise the limit "
            f"in {HELD.name} beside this file and say why in the commit.",
            file=sys.stderr,
        )
    lowered = {room: min(size, held.get(room, 0)) for room, size in now.items()}
    if lowered != held:
        HELD.write_text(json.dumps(lowered, indent=2) + "\n")
    return bool(grown)


if __name__ == "__main__":
    sys.exit(main())
