"""The unit tests that a change asks for: `python -m tests.tools.changed [COMMIT]` prints their files, one a line.

A test file is chosen when it changed since COMMIT (default: the commit where this branch left `main`; on `main`: HEAD),
or when it, or a file of tests that it imports, imports a changed module of the product. The architecture test is always
one of them.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALWAYS = "tests/unit/test_architecture.py"


def main() -> None:
    since = sys.argv[1] if len(sys.argv) > 1 else left_main_at()
    print("\n".join(chosen(changed_since(since))))


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def left_main_at() -> str:
    branches = git("branch", "--list", "main", "--format", "%(refname:short)")
    return git("merge-base", "HEAD", "main") if branches else "HEAD"


def changed_since(commit: str) -> set[str]:
    """Files that differ from the commit, those that git does not know yet included."""
    known = git("diff", "--name-only", commit).splitlines()
    return {*known, *git("ls-files", "--others", "--exclude-standard").splitlines()}


def chosen(changed: set[str]) -> list[str]:
    modules = {module_of(name) for name in changed if name.endswith(".py")}
    return sorted(
        {ALWAYS}
        | {
            name
            for path in (ROOT / "tests" / "unit").rglob("test_*.py")
            if (name := path.relative_to(ROOT).as_posix()) in changed or reach(path) & modules
        }
    )


def module_of(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def reach(path: Path) -> frozenset[str]:
    """What a test file imports, and what the files of tests it imports do (fixtures of its folders included)."""
    found: set[str] = set()
    waiting, seen = [path, *(folder / "conftest.py" for folder in path.parents if ROOT in folder.parents)], set()
    while waiting:
        current = waiting.pop()
        if current in seen or not current.is_file():
            continue
        seen.add(current)
        package = list(current.relative_to(ROOT).parts[:-1])
        for node in ast.walk(ast.parse(current.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = ".".join(
                    [*package[: len(package) - node.level + 1], node.module or ""]
                    if node.level
                    else [node.module or ""]
                ).rstrip(".")
                names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
            else:
                continue
            found.update(names)
            waiting += [ROOT / (name.replace(".", "/") + ".py") for name in names if name.startswith("tests.")]
    return frozenset(found)


if __name__ == "__main__":
    main()
