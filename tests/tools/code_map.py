"""Draws docs/architecture.md from the real imports: `python -m tests.tools.code_map` writes it, `--check` compares.

One graph of the packages, one of the sub-packages of each package, and for every sub-package what its `__init__` says
of it. The unit test `test_the_map_of_the_code_is_not_stale` runs the check.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "docs" / "architecture.md"
PACKAGES = ("appliance", "scheduler", "train", "serve", "weights", "runtime")
HEAD = """# The map of the code

Drawn from the real imports by `make map`; a test fails when it is stale. An arrow means *imports* (typing imports
included). Arrows point one way, in the order of `SUBPACKAGES` in `tests/unit/test_architecture.py`; a sub-package may
have at most 15 files and 2,500 lines. What the words mean: [glossary.md](glossary.md). Why it is made like this:
[handover.md](handover.md), [scheduler.md](scheduler.md), [weight-store.md](weight-store.md), [gateway.md](gateway.md),
[training-state.md](training-state.md).
"""


def main() -> int:
    text = drawn()
    if "--check" in sys.argv:
        if TARGET.is_file() and TARGET.read_text() == text:
            return 0
        print(f"{TARGET.relative_to(ROOT)} is stale: run python -m tests.tools.code_map", file=sys.stderr)
        return 1
    TARGET.write_text(text)
    return 0


def drawn() -> str:
    modules = {module_of(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}
    files = {module: path for module, path in modules.items() if path.name != "__init__.py"}
    inner: dict[str, list[str]] = defaultdict(list)
    for module in files:
        inner[module.rpartition(".")[0]].append(module)
    edges: dict[str, set[str]] = defaultdict(set)
    for module, path in files.items():
        subpackage = module.rpartition(".")[0]
        edges[subpackage] |= {name.rpartition(".")[0] for name in imports(path, files)} - {subpackage}
    parts = [HEAD, "## Packages\n", graph(between_packages(edges), "")]
    for package in PACKAGES:
        inside = [subpackage for subpackage in sorted(inner) if top(subpackage) == package]
        own = {subpackage: {other for other in edges[subpackage] if top(other) == package} for subpackage in inside}
        parts += [f"## {package}/\n", graph(own, package), table(inside, inner, modules)]
    return "\n".join(parts)


def module_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix().removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def top(module: str) -> str:
    return module.partition(".")[0]


def between_packages(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {package: set() for package in PACKAGES}
    for subpackage, others in edges.items():
        found[top(subpackage)] |= {top(other) for other in others} - {top(subpackage)}
    return found


def imports(path: Path, files: dict[str, Path]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parts[: -node.level]
            base = ".".join([*package, *([node.module] if node.module else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found & files.keys()


def graph(edges: dict[str, set[str]], package: str) -> str:
    """Mermaid, without the arrows that a longer way already says."""

    def name(subpackage: str) -> str:
        return (
            subpackage.removeprefix(package + ".").replace(".", "/")
            if package and subpackage != package
            else subpackage + "/"
        )

    def reached(start: str, skip: str) -> set[str]:
        seen: set[str] = set()
        waiting = [other for other in edges.get(start, ()) if other != skip]
        while waiting:
            subpackage = waiting.pop()
            if subpackage not in seen:
                seen.add(subpackage)
                waiting += edges.get(subpackage, ())
        return seen

    lines = ["```mermaid", "graph TD"]
    for subpackage in sorted(edges):
        lines.append(f'  {subpackage.replace(".", "_")}["{name(subpackage)}"]')
    for subpackage in sorted(edges):
        for other in sorted(edges[subpackage]):
            if other not in reached(subpackage, other):
                lines.append(f"  {subpackage.replace('.', '_')} --> {other.replace('.', '_')}")
    return "\n".join([*lines, "```\n"])


def table(inside: list[str], inner: dict[str, list[str]], modules: dict[str, Path]) -> str:
    lines = ["| sub-package | what it owns | what it never does | begin with | files |", "|---|---|---|---|---|"]
    for subpackage in inside:
        doc = ast.get_docstring(ast.parse(modules[subpackage].read_text())) or ""
        owns, _, rest = doc.partition("\n\n")
        never, _, begin = rest.removeprefix("Never: ").partition("Begin with ")
        files = " ".join(f"`{module.rpartition('.')[2]}`" for module in sorted(inner[subpackage]))
        owns, never, begin = (" ".join(said.split()).replace("|", "\\|") for said in (owns, never, begin))
        lines.append(f"| `{subpackage.replace('.', '/')}/` | {owns} | {never} | {begin} | {files} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
