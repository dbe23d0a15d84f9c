"""/v1/fine_tuning/checkpoints/{name}/permissions: which projects may use a checkpoint.

A box is one organization with one project, so a grant has no effect today: it is stored and listed so that tools which
set permissions keep working, and so that it exists once keys belong to projects.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import Field, StringConstraints

from appliance.controller.access.naming import resolve
from appliance.controller.context.context import ControllerContext
from appliance.controller.http import views
from appliance.controller.http.paging import MOST, After, list_object, listed
from appliance.controller.http.routers import make_router
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.errors import NotFound, shown
from appliance.controller.interfaces.principal import ADMIN
from appliance.store.errors import RowNotFound
from appliance.store.ids import new_id
from appliance.store.objects import job_records
from appliance.store.rows import PermissionRow


class PermissionCreate(StrictBody):
    project_ids: Annotated[
        list[Annotated[str, StringConstraints(min_length=1, max_length=128)]], Field(min_length=1, max_length=100)
    ]


def routes(context: ControllerContext) -> APIRouter:
    router = make_router("/v1/fine_tuning/checkpoints/{name:path}/permissions", ADMIN, noun="permission")
    db = context.db

    def check(name: str) -> None:
        if resolve(db, name) is None:
            raise NotFound(
                f"The checkpoint {shown(name)} does not exist.",
                param="fine_tuned_model_checkpoint",
                code="checkpoint_not_found",
            )

    @router.post("")
    async def create(name: str, body: PermissionCreate) -> dict[str, Any]:
        check(name)
        made = []
        with db.transaction():
            for project_id in dict.fromkeys(body.project_ids):
                row = job_records.find_permission(db, name, project_id)
                if row is None:
                    row = PermissionRow(new_id("cp_"), name, project_id, time.time())
                    job_records.insert_permission(db, row)
                made.append(views.permission_object(row))
        return listed(made, has_more=False)

    @router.get("")
    def list_permissions(
        name: str,
        after: After = None,
        limit: Annotated[int, Query(ge=0, le=MOST)] = 10,
        order: Literal["ascending", "descending"] = "descending",
        project_id: Annotated[str | None, Query(max_length=128)] = None,
    ) -> dict[str, Any]:
        check(name)
        page = job_records.page_permissions(
            db, name, project_id=project_id, after=after, limit=limit, descending=order == "descending"
        )
        return list_object(page, views.permission_object)

    @router.delete("/{permission_id}")
    async def delete(name: str, permission_id: str) -> dict[str, Any]:
        check(name)
        try:
            job_records.delete_permission(db, name, permission_id)
        except RowNotFound as error:
            raise NotFound(
                f"The permission {shown(permission_id)} does not exist for {shown(name)}.",
                param="permission_id",
                code="permission_not_found",
            ) from error
        return {"id": permission_id, "object": "checkpoint.permission", "deleted": True}

    return router
