"""The controller's event hub: the events, and the handlers called for each.

A part that causes an event calls the signal; a part that needs it connects to it. Neither knows the other, so the parts
can be built in order of dependency. The hub is not for queries: a part that needs an answer receives the part that has
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec

from scheduler.core.inventory import Device, NodeChange

P = ParamSpec("P")


class Signal(Generic[P]):
    """One kind of event. A call runs the connected handlers at once, in order of connection; an exception of a handler
    reaches the caller, and later handlers are not called."""

    def __init__(self) -> None:
        self._handlers: list[Callable[P, Any]] = []

    def connect(self, *handlers: Callable[P, Any]) -> None:
        self._handlers.extend(handlers)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for handler in self._handlers:
            handler(*args, **kwargs)


class Signals:
    """load_reported: a gateway reported its load. table_changed: the models of the routing table changed.
    usage_reported: gateways counted request costs (rows of the bus; a handler raises ValueError for invalid ones).
    models_changed: which models can be called, or by whom, changed. keys_changed: permissions of keys changed.
    published: a run's weights became a version. node_changed: a node with these devices joined or left."""

    def __init__(self) -> None:
        self.load_reported: Signal[[]] = Signal()
        self.table_changed: Signal[[]] = Signal()
        self.usage_reported: Signal[[list[dict[str, Any]]]] = Signal()
        self.models_changed: Signal[[]] = Signal()
        self.keys_changed: Signal[[]] = Signal()
        self.published: Signal[[]] = Signal()
        self.node_changed: Signal[[str, NodeChange, tuple[Device, ...]]] = Signal()
