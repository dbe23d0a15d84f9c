"""Checks the code of a python grader without running it: it is Python, imports only packages that are installed, and
defines `grade(sample, item)`."""

from __future__ import annotations

import ast
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cache
from importlib.machinery import PathFinder

PACKAGES = (
    "numpy scipy sympy pandas rapidfuzz sklearn rouge_score deepdiff jsonschema pydantic yaml nltk sqlparse ast_grep_py"
).split()
"""Packages by the names that code imports: what OpenAI's API documents for its graders, less `rdkit` and `skbio`. The
environment has more packages, which the box itself uses and may drop."""
LOADED = {
    "deepdiff": ("deepdiff",),
    "pandas": ("pandas",),
    "rouge_score": ("rouge_score.rouge_scorer",),
    "scipy": ("scipy.stats", "scipy.spatial.distance"),
    "sklearn": ("sklearn.metrics", "sklearn.feature_extraction.text"),
    "sympy": ("sympy",),
}
"""Packages that take 0.5 to 2 s of CPU to import, by the names that code imports: a worker imports one once, before it
forks for the first code that names it, and every later call has it."""
_CAUGHT = ("ImportError", "ModuleNotFoundError", "Exception", "BaseException")
_MAKE_NAMES = ("exec", "globals", "locals", "setattr", "vars")
"""With these, code binds names of its module that do not appear in its text."""
_MAY_NOT_RUN = (ast.If, ast.IfExp, ast.BoolOp, ast.For, ast.While, ast.Try, ast.TryStar, ast.Match)
_SHOWN = 200
_OWN_SCOPE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def why_refused(source: str) -> str:
    """What is wrong, in words that follow the name of the object with the source; "" for code that can run. It takes as
    long as reading the code does, and code can be written so that this ends the process."""
    try:
        with warnings.catch_warnings(action="ignore"):  # they would be lines of the box's own log
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
    """(line, top-level name) of all imports except those that the code can do without, and those under an `if`: for
    type checkers, another Python, or a package that the code has found."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Try | ast.TryStar) and any(map(_catches_imports, node.handlers)):
            # What is imported instead, where something is not there.
            lacks = any(not _is_there(name) for one in node.body for _, name in _imports(one))
            left.extend([*(node.handlers if lacks else ()), *node.orelse, *node.finalbody])
        elif not isinstance(node, ast.If) and not (isinstance(node, ast.With) and any(map(_suppresses, node.items))):
            left.extend(ast.iter_child_nodes(node))


def _catches_imports(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or isinstance(kind, ast.Name) and kind.id in _CAUGHT for kind in kinds)


def _suppresses(item: ast.withitem) -> bool:
    """Whether it is `contextlib.suppress(ImportError)`."""
    call = item.context_expr
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name | ast.Attribute):
        return False
    called = call.func.id if isinstance(call.func, ast.Name) else call.func.attr
    return called == "suppress" and any(isinstance(kind, ast.Name) and kind.id in _CAUGHT for kind in call.args)


def _is_there(name: str) -> bool:
    return name in sys.stdlib_module_names or PathFinder.find_spec(name, _packages()) is not None


@cache
def _packages() -> list[str]:
    return sorted({sysconfig.get_path(name) for name in ("purelib", "platlib")})


def _function_refused(tree: ast.Module) -> str:
    """Why there is no function `grade` that takes a sample and an item; "" if only running it would tell."""
    found = _bound(tree)
    if "grade" not in found:
        return "" if "*" in found else "defines no function `grade(sample, item)`"
    bound = found["grade"]
    if isinstance(bound, ast.Constant):
        kind = type(bound.value).__name__
        return f"defines `grade` as {kind} (line {bound.lineno}); expected a function `grade(sample, item)`"
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
        return f"defines `grade({_names(given)})` (line {bound.lineno}); it is called as `grade(sample, item)`"
    return ""


def _names(given: ast.arguments) -> str:
    """Those of a function's arguments. Not ast.unparse: a default value can be nested too deep for it."""
    names = [one.arg for one in (*given.posonlyargs, *given.args)]
    if given.vararg is not None or given.kwonlyargs:
        names.append(f"*{given.vararg.arg if given.vararg is not None else ''}")
    names += [one.arg for one in given.kwonlyargs]
    if given.kwarg is not None:
        names.append(f"**{given.kwarg.arg}")
    return ", ".join(names)[:_SHOWN]


def _bound(tree: ast.Module) -> dict[str, ast.AST | None]:
    """What each name of the module finally refers to, None where only running it tells; "*" if it binds names that do
    not appear here."""
    found: dict[str, ast.AST | None] = {}

    def bind(name: str, to: ast.AST | None, sure: bool) -> None:
        # Where two may be the last one, either counts.
        found[name] = to if sure or name not in found else None

    # Each with whether it runs in any case.
    left: list[tuple[ast.AST, bool]] = [(node, True) for node in reversed(tree.body)]
    while left:
        node, sure = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            bind(node.name, node, sure)
        elif isinstance(node, ast.ClassDef):
            bind(node.name, None, sure)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                bind(alias.asname or alias.name.partition(".")[0], None, sure)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            value = found.get(node.value.id) if isinstance(node.value, ast.Name) else node.value
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    bind(target.id, value, sure)
                else:
                    left.append((target, sure))
            left.append((node.value, sure))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bind(node.id, None, sure)  # in a tuple, by `for` or by `with`
        elif isinstance(node, ast.Name) and node.id in _MAKE_NAMES:
            found["*"] = None
        elif not isinstance(node, ast.AnnAssign | ast.Lambda):
            sure = sure and not isinstance(node, _MAY_NOT_RUN)
            left.extend((one, sure) for one in reversed([*ast.iter_child_nodes(node)]))
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found |= dict.fromkeys(node.names)
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
