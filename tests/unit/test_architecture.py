"""The rules that keep the packages apart, checked on the source: imports point down only, heavy libraries stay behind
their fences, the environment is read in one place, and no error is swallowed."""

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
# Of these neither imports the other, though one has to stand above the other below.
SIDEWAYS = ({"train", "serve"}, {"weights", "runtime"})

# Every subpackage, from the top down: a subpackage imports only subpackages that stand below it here. What runs nothing
# counts too (`if TYPE_CHECKING`): it still says who knows whom.
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

# Library -> the only files that may import it. A name ending in "/" stands for every file below it.
FENCES = {
    "ray": {"scheduler/ray/", "appliance/controller/main.py"},
    # Kinds of devices import it in the methods that compute, and never before: LATE.
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
# Rank hosts and replicas live in Ray actors, and checks of data and numbers in the controller: none may cost torch.
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
# Here a heavy library inside a function costs nobody who does not call it.
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
    """Every module that a file imports, at its top or later, with relative names made absolute.

    typing: also those under `if TYPE_CHECKING`, which run nothing but still say who knows whom. late: also those inside
    functions.
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


def test_only_the_effects_of_the_scheduler_know_training_and_serving():
    """What decides imports neither; the configuration of engines (plain numbers) comes in from above."""
    wrong = {
        f"{name_of(path)} imports {module}"
        for path in files()
        if name_of(path).startswith("scheduler/") and not name_of(path).startswith("scheduler/ray/")
        for module in imports(path)
        if top(module) in ("train", "serve", *HEAVY)
    }
    assert not wrong


@pytest.mark.parametrize("library", FENCES)
def test_heavy_libraries_stay_behind_their_fences(library):
    allowed = FENCES[library]
    inside = {name_of(path) for path in files() if any(top(module) == library for module in imports(path))}
    assert not {name for name in inside if not name.startswith(tuple(allowed))}
    unused = {fence for fence in allowed if not any(name.startswith(fence) for name in inside)}
    assert not unused, "a fence around nothing hides the next mistake"


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_what_runs_outside_the_heavy_processes_is_light(name):
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


# What makers call their drivers, libraries and tools, wherever it stands in a name, a flag or a variable.
OF_A_MAKER = re.compile(
    r"cuda|nccl|nvcc|nvidia|nvml|flashinfer|cumem|\bhip|rocm|rccl|sleep-mode|nvlink|(?<![a-z])xid", re.IGNORECASE
)
NOT_OF_A_MAKER = re.compile(r"AsyncClient|sigprocmask|ProcManager")  # for the sake of "nccl" and "rocm"
# vLLM's name for captured graphs on every kind that has them; a person may set it for a model.
OF_EVERY_KIND = {("serve/core/model_settings.py", "max-cudagraph-capture-size")}


def _device_words(name: str, text: str) -> Iterator[str]:
    """Where a file says by itself which kind of device it means, in a name or a text that is not a docstring."""
    if not OF_A_MAKER.search(text) and not any(f'"{kind}"' in text for kind in kinds.KINDS):
        return  # no token has to be read
    new_line = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        word = token.string.strip("\"'")
        is_text = token.type == tokenize.STRING and not new_line
        if is_text or token.type == tokenize.NAME:
            named = OF_A_MAKER.search(NOT_OF_A_MAKER.sub("", word)) and (name, word) not in OF_EVERY_KIND
            if named or (is_text and word in kinds.KINDS):
                yield f"{name} says {word!r}"
        new_line = token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT)


def test_only_the_file_of_a_kind_of_device_names_it():
    """Everybody else asks its row in runtime.devices.kinds: a third kind is one more file and one more row."""
    outside = [path for path in files() if not name_of(path).startswith("runtime/devices/")]
    assert {word for path in outside for word in _device_words(name_of(path), path.read_text())} == set()
    unused = {(name, word) for name, word in OF_EVERY_KIND if f'"{word}"' not in (ROOT / name).read_text()}
    assert not unused, "an exception for nobody hides the next mistake"


def subpackage_of(module: str) -> str:
    return module.rpartition(".")[0]


@cache
def graph() -> dict[str, frozenset[str]]:
    """Who imports whom among the modules, late imports and those for types included.

    Importing a module runs its packages first; they are empty by rule, so they join nothing.
    """
    modules = {module_of(path): path for path in files()}
    return {
        module: frozenset(
            name for name in imports(path) if name in modules and name != module and modules[name].name != "__init__.py"
        )
        for module, path in modules.items()
        if path.name != "__init__.py"
    }


def test_subpackages_import_one_way():
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


def test_subpackages_are_small_and_say_what_they_are():
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


def test_no_circles():
    """Late imports count, and imports for types: what hides a circle is a circle."""
    TopologicalSorter(graph()).prepare()  # raises CycleError


# The environment is read: neither written nor handed on whole to a child.
READS = re.compile(
    r"getenv|environb|from os import .*environ|"
    r"(?<!\*\*)(?<!dict\()os\.environ(?!\.(?:update|setdefault|pop|clear)\(|\[[^\]]*\] = )"
)


def test_only_the_configuration_reads_the_environment():
    # Ray's names of its certificates are set by us, for every process that can reach another machine. Commands read
    # what stands for options that were not typed, and the shell's line that is completed.
    of_commands = ("appliance/cli/command.py",)
    allowed = {"appliance/config.py", "runtime/network.py", *of_commands}
    assert {name_of(path) for path in files() if READS.search(path.read_text())} == allowed


# Handlers that log what they caught and end the process.
ENDING = {"appliance/controller/main.py", "train/graders/sandbox.py"}


def test_no_error_is_swallowed():
    """ruff (BLE) requires a reason for each broad handler, which must also raise, or pass the error on by name."""
    for path in files():
        assert not re.search(r"suppress\([^)]*\b(Base)?Exception\b", path.read_text()), name_of(path)
        for handler in (node for node in ast.walk(tree(path)) if isinstance(node, ast.ExceptHandler)):
            kinds = getattr(handler.type, "elts", [handler.type])
            if {"Exception", "BaseException", "None"} & {ast.unparse(kind) if kind else "None" for kind in kinds}:
                inside = [node for statement in handler.body for node in ast.walk(statement)]
                raises = any(isinstance(node, ast.Raise) for node in inside)
                used = handler.name and handler.name in [getattr(node, "id", "") for node in inside]
                assert raises or used or name_of(path) in ENDING, f"{name_of(path)}:{handler.lineno}"


def test_no_program_that_we_start_looks_for_modules_where_we_happen_to_be():
    """`python -m` looks in the working directory first. In a folder that others write to, `pip.py` of somebody else ran
    when a model of the catalog was imported. Whose words follow `-m` have `-P` before it."""
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
