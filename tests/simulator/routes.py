"""Analyses the control app's routes once per process: FastAPI needs 0.2 s of CPU time for each app."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import pytest
from fastapi import routing
from fastapi.dependencies.models import Dependant


@pytest.fixture(scope="session", autouse=True)
def routes_are_analysed_once() -> Iterator[None]:
    """Reuse the analysis of endpoints with the same code: each app creates new functions."""
    analyse, known = routing.get_dependant, dict[tuple[str, CodeType], Dependant]()

    def get_dependant(*, path: str, call: Callable[..., Any], **more: Any) -> Dependant:
        key = path, inspect.unwrap(call).__code__
        if key not in known:
            known[key] = analyse(path=path, call=call, **more)
        found = known[key]
        if any(getattr(part.call, "__closure__", None) for part in found.dependencies):
            return analyse(path=path, call=call, **more)  # such a dependency may know its app
        return dataclasses.replace(found, call=call, dependencies=list(found.dependencies))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "get_dependant", get_dependant)
        patch.setattr(routing, "create_model_field", functools.cache(routing.create_model_field))
        yield
