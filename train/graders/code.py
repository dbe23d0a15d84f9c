"""What code of a python grader may be, told without running it: it is Python, imports what is there, and defines
`grade(sample, item)`."""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.machinery import PathFinder

PACKAGES = (
    "numpy scipy sympy pandas rapidfuzz sklearn rouge_score deepdiff jsonschema pydantic yaml nltk sqlparse ast_grep_py"
).split()
"""By the names that code imports: what OpenAI's API documents for its graders, less `rdkit` and `skbio`. The
environment has more, which the box itself uses, and may lose it."""
LOADED = {
    "deepdiff": ("deepdiff",),
    "pandas": ("pandas",),
    "rouge_score": ("rouge_score.rouge_scorer",),
    "scipy": ("scipy.stats", "scipy.spatial.distance"),
    "sklearn": ("sklearn.metrics", "sklearn.feature_extraction.text"),
    "sympy": ("sympy",),
}
"""What takes 0.5 to 2 s of CPU to import, by what code says for it: a worker does so once, before it forks for the
first code that names it, and every call then has it."""
_CAUGHT = ("ImportError", "ModuleNotFoundError", "Exception", "BaseException")
_OWN_SCOPE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def why_refused(source: str) -> str:
    """In words that follow the name of what has the source; "" for what can run. It takes as long as reading the code
    does, and code can be written so that this ends the process."""
    try:
        tree = ast.parse(source, "grader.py")
        compile(tree, "grader.py", "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"is not Python: {error.msg}" + (f" (line {error.lineno})" if error.lineno else "")
    except (ValueError, RecursionError, MemoryError) as error:
        return f"cannot be read: {str(error) or type(error).__name__}"
    for line, name in _imports(tree):
        if not _is_there(name):
            return (
                f"imports {name!r} (line {line}), which is not there; beside Python's own modules there are "
                + ", ".join(PACKAGES)
            )
    return _function_refused(tree)


def named(source: str) -> set[str]:
    """Those of LOADED that it may import."""
    return {name for name in LOADED if name in source}


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, top-level name) of what is imported, but for what the code goes on without."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Try) and any(map(_catches_imports, node.handlers)):
            left.extend([*node.handlers, *node.orelse, *node.finalbody])
        else:
            left.extend(ast.iter_child_nodes(node))


def _catches_imports(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or isinstance(kind, ast.Name) and kind.id in _CAUGHT for kind in kinds)


def _is_there(name: str) -> bool:
    return name in sys.stdlib_module_names or PathFinder.find_spec(name, _packages()) is not None


@cache
def _packages() -> list[str]:
    return sorted({sysconfig.get_path(name) for name in ("purelib", "platlib")})


def _function_refused(tree: ast.Module) -> str:
    """Why there is no function `grade` that takes a sample and an item; "" where that only shows when it runs."""
    found = _bound(tree)
    seen = {"grade"}
    if "grade" not in found:
        return "" if "*" in found else "defines no function `grade(sample, item)`"
    bound = found["grade"]
    while isinstance(bound, ast.Name) and bound.id not in seen and bound.id in found:
        seen.add(bound.id)
        bound = found[bound.id]
    if isinstance(bound, ast.Constant):
        return f"defines `grade` as {bound.value!r}; expected a function `grade(sample, item)`"
    if not isinstance(bound, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return ""
    if not isinstance(bound, ast.Lambda):
        if bound.decorator_list:
            return ""
        if isinstance(bound, ast.AsyncFunctionDef):
            return f"defines `grade` as `async def` (line {bound.lineno}), which nothing awaits: write `def`"
        if _yields(bound):
            return f"has a `yield` in `grade` (line {bound.lineno}); it returns a number, and a generator is none"
    given = bound.args
    places = [*given.posonlyargs, *given.args]
    needed = len(places) - len(given.defaults)
    named_only = [one.arg for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None]
    if needed > 2 or (len(places) < 2 and given.vararg is None) or named_only:
        return f"defines `grade({ast.unparse(given)})` (line {bound.lineno}); it is called as `grade(sample, item)`"
    return ""


def _bound(tree: ast.Module) -> dict[str, ast.AST | None]:
    """What each name of the module stands for in the end, None where only running it tells; "*" if it imports some
    that are not written here."""
    found: dict[str, ast.AST | None] = {}
    left: list[ast.AST] = list(reversed(tree.body))
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            found[node.name] = None
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0]: None for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                plain = isinstance(target, ast.Name)
                names = [one.id for one in ast.walk(target) if isinstance(one, ast.Name)]
                found |= dict.fromkeys(names, node.value if plain else None)
        elif not isinstance(node, ast.Lambda):
            left.extend(reversed([*ast.iter_child_nodes(node)]))
    return found


def _yields(function: ast.FunctionDef) -> bool:
    left: list[ast.AST] = list(function.body)
    while left:
        node = left.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, _OWN_SCOPE):
            left.extend(ast.iter_child_nodes(node))
    return False
