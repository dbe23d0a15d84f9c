"""Selects the form of this package's hot modules: compiled by mypyc if `make setup` found a C compiler, else Python.

Both come from the same files. The compiled form is in a directory of the environment whose name is a hash of these
files and the interpreter. Any edit changes the name, and without such a directory the .py files run, so a compiled
module never hides an edited one. `images/compile_gateway.py` makes the directory.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import sysconfig
from pathlib import Path

MODULES = (
    "access.admission",
    "access.allowance",
    "access.request",
    "access.spending",
    "access.written_rate",
    "control.controller_call",
    "control.previous_response",
    "control.relay",
    "control.scrape",
    "core.routes",
    "gateway",
    "http.client",
    "http.connection",
    "http.handler",
    "http.known_head",
    "http.outbox",
    "http.upstream",
    "http.wire",
    "inference.answer",
    "inference.attempt",
    "inference.handler",
    "inference.placement",
    "inference.response_copies",
    "observe.access_log",
    "observe.metrics",
    "payload.body_weight",
    "payload.expression_ways",
    "payload.fields",
    "payload.nesting",
    "payload.request_check",
    "payload.shapes",
    "payload.structure",
    "answers.kept_completion",
    "answers.transcript",
    "answers.usage",
    "routing.router",
    "routing.table",
    "server.client_connection",
    "server.dispatch",
    "server.repeated_head",
    "server.request_parser",
    "state.placeable",
    "state.state",
)
HERE = Path(__file__).parent


def directory() -> Path:
    """Path of the compiled form of the current sources, if it exists."""
    seen = hashlib.sha256(f"{sysconfig.get_config_var('SOABI')} {sys.version} {MODULES}".encode())
    for path in sorted(HERE.rglob("*.py")):
        seen.update(b"%b\0%b\0" % (path.relative_to(HERE).as_posix().encode(), path.read_bytes()))
    return Path(sys.prefix) / "lib" / "appliance-gateway" / seen.hexdigest()[:32]


def use(package_path: list[str]) -> str:
    """Let the package whose `__path__` this is find its compiled modules. Returns the form that runs from now on.

    `python -X gateway=interpreted` runs the .py files in any case.
    """
    found = directory()
    if sys._xoptions.get("gateway") == "interpreted" or not found.is_dir():
        return "interpreted"
    try:
        # The modules are thin: their code is in one library, which they import by its name.
        (library,) = found.glob("*__mypyc.*")
        name = library.name.partition(".")[0]
        spec = importlib.util.spec_from_file_location(name, library)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, ValueError):
        return "interpreted"  # made for another C library, or half deleted
    package_path.insert(0, str(found))
    for room in {module.rpartition(".")[0] for module in MODULES} - {""}:
        importlib.import_module(f"{__package__}.{room}").__path__.insert(0, str(found / room))
    return "compiled"
