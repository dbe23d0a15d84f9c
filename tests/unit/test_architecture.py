"""Architecture rules, checked on the source: order of imports, files that may import heavy libraries, and more."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from runtime.devices import kinds

ROOT = Path(__file__).parents[2]
PACKAGES = ("appliance", "scheduler", "train", "serve", "weights", "runtime")
# Pairs of packages that never import each other, although SUBPACKAGES lists one package above the other.
SIDEWAYS = ({"train", "serve"}, {"weights", "runtime"})

# Every subpackage, from the top down: a subpackage imports only subpackages below it in this list. Imports under
# `if TYPE_CHECKING` count too, because they are dependencies.
SUBPACKAGES = (
    "appliance.controller",
    "appliance.boot",
    "appliance.cli.commands",
    "appliance.cli",
    "appliance.controller.scheduling",
    "appliance.controller.admin",
    "appliance.controller.openai",
    "appliance.controller.grading",
    "appliance.controller.responses",
    "appliance.controller.jobs",
    "appliance.controller.files",
    "appliance.controller.models",
    "appliance.controller.http",
    "appliance.controller.context",
    "appliance.controller.devices",
    "appliance.controller.engines",
    "appliance.memory",
    "appliance.tiers",
    "appliance.controller.access",
    "appliance.controller.bus",
    "appliance.gateway",
    "appliance",
    "appliance.controller.interfaces",
    "appliance.gateway.server",
    "appliance.gateway.requests",
    "appliance.gateway.core",
    "appliance.ui",
    "appliance.models",
    "appliance.store",
    "scheduler.ray",
    "scheduler.devices",
    "scheduler.loop",
    "scheduler.handover",
    "scheduler.plan",
    "scheduler.core",
    "train.convert",
    "train.trainer",
    "train.rollouts",
    "train.state",
    "train.control",
    "train.data_checks",
    "train.methods",
    "train.graders",
    "train.model",
    "train.data",
    "train.plan",
    "serve.engine",
    "serve.vllm",
    "serve.load",
    "serve.core",
    "weights.tiers",
    "weights.memory",
    "weights.checkpoint",
    "weights.format",
    "runtime.processes",
    "runtime.devices",
    "runtime",
)
MOST_FILES, MOST_LINES = 15, 2_500

# Library -> the only files that may import the library. A name that ends in "/" means every file in that folder.
FENCES = {
    "ray": {"scheduler/ray/", "appliance/controller/main.py"},
    # Files of device kinds import torch only inside functions (see LATE).
    "torch": {
        "train/",
        "serve/",
        "weights/format/torch_views.py",
        "runtime/devices/kind.py",
        "runtime/devices/cuda.py",
    },
    "vllm": {"serve/"},
    "deepspeed": {"train/"},
    "transformers": {"train/"},
    "peft": {"train/"},
    "openai": {"appliance/demo.py"},
    "fastapi": {"appliance/controller/", "serve/vllm/answers.py"},
    "boto3": {"weights/tiers/objects.py"},
    "botocore": {"weights/tiers/objects.py"},
    "mlflow": {"appliance/tracking.py"},
    "wandb": {"appliance/tracking.py"},
    "opentelemetry": {"appliance/gateway/server/tracing.py"},
}
# These modules must not load torch: the controller and Ray actors import them.
WITHOUT_TORCH = (
    "train/plan/auto.py",
    "train/plan/errors.py",
    "train/plan/spec.py",
    "train/data_checks/check.py",
    "train/data_checks/process.py",
    "train/data/formats.py",
    "train/control/group.py",
    "train/graders/sandbox.py",
    "train/methods/methods.py",
    "runtime/devices/kind.py",
    "serve/core/config.py",
    "serve/core/errors.py",
    "serve/core/sizing.py",
    "serve/core/spec.py",
    "serve/engine/replica.py",
)
# Files in these folders may import heavy libraries, but only inside functions.
LATE = ("runtime/devices/", "train/methods/", "train/data_checks/")
HEAVY = ("torch", "vllm", "ray", "deepspeed", "transformers", "peft")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(path: Path, typing: bool = True, late: bool = True) -> tuple[str, ...]:
    """Return the absolute names of all modules that a file imports.

    typing: include imports under `if TYPE_CHECKING`. late: include imports inside functions.
    """
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    found, waiting = [], list(tree(path).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            # `from package import module` imports the module too.
            found += [module, *(f"{module}.{alias.name}" for alias in node.names)]
        of_types = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (typing or not of_types) and (late or not function):
            waiting += [inside for inside in ast.iter_child_nodes(node) if not isinstance(inside, ast.expr)]
    return tuple(found)


def top(module: str) -> str:
    return module.partition(".")[0]


def test_only_scheduler_effects_import_training_and_serving():
    """Decision code imports neither; callers pass it the engine configuration as plain numbers."""
    wrong = {
        f"{name_of(path)} imports {module}"
        for path in files()
        if name_of(path).startswith("scheduler/") and not name_of(path).startswith("scheduler/ray/")
        for module in imports(path)
        if top(module) in ("train", "serve", *HEAVY)
    }
    assert not wrong


@pytest.mark.parametrize("library", FENCES)
def test_heavy_libraries_are_imported_only_inside_fences(library):
    allowed = FENCES[library]
    inside = {name_of(path) for path in files() if any(top(module) == library for module in imports(path))}
    assert not {name for name in inside if not name.startswith(tuple(allowed))}
    unused = {fence for fence in allowed if not any(name.startswith(fence) for name in inside)}
    assert not unused, "a fence around nothing hides the next mistake"


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_light_modules_load_no_heavy_library(name):
    seen, waiting = set(), [name]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        for module in imports(ROOT / current, typing=False, late=not current.startswith(LATE)):
            assert top(module) not in HEAVY, f"{current} imports {module}, and {name} needs {current}"
            source = ROOT / Path(*module.split(".")).with_suffix(".py")
            if top(module) in PACKAGES and source.exists():
                waiting.append(name_of(source))


# Vendor words (drivers, libraries, tools) that other names must not contain.
OF_A_MAKER = re.compile(
    r"cuda|nccl|nvcc|nvidia|nvml|flashinfer|cumem|\bhip|rocm|rccl|sleep-mode|nvlink|(?<![a-z])xid", re.IGNORECASE
)
NOT_OF_A_MAKER = re.compile(r"AsyncClient|sigprocmask|ProcManager")  # names that contain "nccl" or "rocm" by accident
# (file, word): a vLLM option for graphs, despite its name for every kind of device; users may set it for a model.
OF_EVERY_KIND = {("serve/core/model_settings.py", "max-cudagraph-capture-size")}


def _device_words(name: str, text: str) -> Iterator[str]:
    """Yield the words of a file that name a kind of device, from identifiers and strings except docstrings."""
    if not OF_A_MAKER.search(text) and not any(f'"{kind}"' in text for kind in kinds.KINDS):
        return  # most files: save the time of the tokenizer
    new_line = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        word = token.string.strip("\"'")
        is_text = token.type == tokenize.STRING and not new_line
        if is_text or token.type == tokenize.NAME:
            named = OF_A_MAKER.search(NOT_OF_A_MAKER.sub("", word)) and (name, word) not in OF_EVERY_KIND
            if named or (is_text and word in kinds.KINDS):
                yield f"{name} says {word!r}"
        new_line = token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT)


def test_only_device_kind_files_name_vendors():
    """Other code uses the row in runtime.devices.kinds: a new kind needs only one file and one row."""
    outside = [path for path in files() if not name_of(path).startswith("runtime/devices/")]
    assert {word for path in outside for word in _device_words(name_of(path), path.read_text())} == set()
    unused = {(name, word) for name, word in OF_EVERY_KIND if f'"{word}"' not in (ROOT / name).read_text()}
    assert not unused, "an exception for nobody hides the next mistake"


def subpackage_of(module: str) -> str:
    return module.rpartition(".")[0]


@cache
def graph() -> dict[str, frozenset[str]]:
    """Map each module to the modules that it imports, also inside functions and for types.

    An import also runs the parent packages, but they are empty by rule, so the graph omits them.
    """
    modules = {module_of(path): path for path in files()}
    return {
        module: frozenset(
            name for name in imports(path) if name in modules and name != module and modules[name].name != "__init__.py"
        )
        for module, path in modules.items()
        if path.name != "__init__.py"
    }


def test_subpackages_import_only_downward():
    assert len(set(SUBPACKAGES)) == len(SUBPACKAGES) and {subpackage_of(module) for module in graph()} == set(
        SUBPACKAGES
    )
    height = {subpackage: -place for place, subpackage in enumerate(SUBPACKAGES)}
    upward = {
        (module, name)
        for module, known in graph().items()
        for name in known
        if subpackage_of(name) != subpackage_of(module) and height[subpackage_of(name)] >= height[subpackage_of(module)]
    }
    assert upward == set(), "a subpackage imports only what stands below it in SUBPACKAGES"
    assert not [(m, name) for m, known in graph().items() for name in known if {top(m), top(name)} in SIDEWAYS]


def test_subpackages_are_small_and_documented():
    subpackages: dict[Path, list[Path]] = {}
    for path in files():
        subpackages.setdefault(path.parent, []).append(path)
    for subpackage, inside in subpackages.items():
        own = [path for path in inside if path.name != "__init__.py"]
        lines = sum(path.read_text().count("\n") for path in own)
        assert len(own) <= MOST_FILES and lines <= MOST_LINES, f"{name_of(subpackage)}: {len(own)} files, {lines} lines"
        if own and "." in module_of(subpackage / "__init__.py"):
            doc = ast.get_docstring(tree(subpackage / "__init__.py")) or ""
            assert "Never: " in doc and "Begin with " in doc, (
                f"{name_of(subpackage)}/__init__.py says not what the subpackage is"
            )


def test_modules_have_no_import_cycles():
    """Imports inside functions and imports for types count too."""
    TopologicalSorter(graph()).prepare()  # raises CycleError if modules import each other


# Matches reads of environment variables, but neither writes nor copies of the environment for a child process.
READS = re.compile(
    r"getenv|environb|from os import .*environ|"
    r"(?<!\*\*)(?<!dict\()os\.environ(?!\.(?:update|setdefault|pop|clear)\(|\[[^\]]*\] = )"
)


def test_only_configuration_reads_environment():
    # Processes that reach other machines read Ray's certificate variables, which the box sets. Commands read variables
    # for options, and the line for shell completion.
    of_commands = ("appliance/cli/command.py",)
    allowed = {"appliance/config.py", "runtime/network.py", *of_commands}
    assert {name_of(path) for path in files() if READS.search(path.read_text())} == allowed


# Files that are exempt: their handlers log the error and end the process.
ENDING = {"appliance/controller/main.py", "train/graders/sandbox.py"}


def test_broad_handlers_raise_or_use_the_error():
    """ruff (BLE) requires a reason for each broad handler; the handler must also raise or use the error."""
    for path in files():
        assert not re.search(r"suppress\([^)]*\b(Base)?Exception\b", path.read_text()), name_of(path)
        for handler in (node for node in ast.walk(tree(path)) if isinstance(node, ast.ExceptHandler)):
            kinds = getattr(handler.type, "elts", [handler.type])
            if {"Exception", "BaseException", "None"} & {ast.unparse(kind) if kind else "None" for kind in kinds}:
                inside = [node for statement in handler.body for node in ast.walk(statement)]
                raises = any(isinstance(node, ast.Raise) for node in inside)
                used = handler.name and handler.name in [getattr(node, "id", "") for node in inside]
                assert raises or used or name_of(path) in ENDING, f"{name_of(path)}:{handler.lineno}"


def test_no_module_assigns_a_constant_twice():
    for path in files():
        targets = (target for node in tree(path).body if isinstance(node, ast.Assign) for target in node.targets)
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        assert len(names) == len(set(names)), f"{path}: the second value would replace the first everywhere"


def test_python_m_commands_have_safe_path_option():
    """`-m` must follow `-P`: else Python loads modules from the working directory, where any user may put a module."""
    found, missing = 0, []
    for path in files():
        for node in ast.walk(tree(path)):
            said = node.elts if isinstance(node, ast.List) else node.args if isinstance(node, ast.Call) else []
            words = [word.value if isinstance(word, ast.Constant) else None for word in said]
            for place, word in enumerate(words):
                if word == "-m":
                    found += 1
                    missing += [] if place and words[place - 1] == "-P" else [f"{name_of(path)}:{node.lineno}"]
    assert found > 8 and missing == []
