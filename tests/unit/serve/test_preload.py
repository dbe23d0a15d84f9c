"""What the serving warm parent imports, read as text: importing the list itself loads all of vLLM."""

from __future__ import annotations

import ast
from importlib import util


def _tree(module: str) -> ast.Module:
    spec = util.find_spec(module)
    assert spec and spec.origin
    with open(spec.origin) as source:
        return ast.parse(source.read())


def _texts(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _lazy(module: str) -> set[str]:
    """What a module of vLLM's imports when it is first used: `LazyLoader(its name here, globals(), the module)`."""
    calls = [node for node in ast.walk(_tree(module)) if isinstance(node, ast.Call)]
    of_loader = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "LazyLoader"]
    return {str(ast.literal_eval(call.args[2])) for call in of_loader}


def test_the_first_form_of_an_engine_imports_nothing():
    """Both backends load their library with the first form, in the core that steps for everybody. `llguidance.torch`
    alone brought 547 modules of inductor with it: 1.8 s on a quiet machine, 14 and 99 s on two loaded ones."""
    listed = _texts(_tree("serve.engine.preload"))
    needed = _lazy("vllm.v1.structured_output.backend_guidance") | _lazy("vllm.v1.structured_output.backend_xgrammar")
    assert {"llguidance.torch", "xgrammar"} <= needed
    packages = {module.rpartition(".")[0] for module in listed}
    of_grammars = {
        name.name for node in _tree("serve.vllm.grammars").body if isinstance(node, ast.Import) for name in node.names
    }
    assert needed - listed - packages - of_grammars == set()
