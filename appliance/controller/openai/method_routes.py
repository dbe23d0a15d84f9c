"""/v1/fine_tuning/methods: the methods of training that this box has, and what each takes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter

from appliance.controller.http.routers import make_router
from appliance.controller.interfaces.principal import FINE_TUNING
from train.methods.methods import METHODS


def routes() -> APIRouter:
    router = make_router("/v1/fine_tuning/methods", FINE_TUNING)

    @router.get("")
    def list_methods() -> dict[str, Any]:
        """`takes`: what a request says beside hyperparameters; `options`: hyperparameters of this method alone."""
        methods = [
            {
                "object": "fine_tuning.method",
                "name": method.name,
                "summary": method.summary,
                "takes": list(method.takes),
                "options": [asdict(option) for option in method.options],
            }
            for method in METHODS.values()
        ]
        return {"object": "list", "data": methods, "has_more": False}

    return router
