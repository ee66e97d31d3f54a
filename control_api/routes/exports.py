"""/v1/runs/{run}/…: checkpoints written as an engine reads them, where this server can reach them."""

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Response
from fastapi import Path as InPath
from sqlalchemy.orm import Session

from control_api import views
from control_api.dependencies import OnceDep, PageDep, ServicesDep, require_run
from control_api.exporter import ExportRequest
from control_api.field_types import LARGEST
from control_api.routes.responses import refusals
from control_api.schemas import ExportCreate, ExportList, ExportPublic
from control_api.store import checkpoints
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

router = APIRouter(prefix="/v1/runs/{run}", tags=["runs"])

Step = Annotated[int, InPath(ge=0, le=LARGEST)]


@router.post(
    "/checkpoints/{step}:export",
    operation_id="export_checkpoint",
    status_code=202,
    response_model=ExportPublic,
    responses=refusals(404, 409),
)
def export_checkpoint(run: str, step: Step, body: ExportCreate, services: ServicesDep, once: OnceDep) -> Response:
    """Start to write it into a directory of its own below --export-root; it is decoded with before it appears."""

    def begin(session: Session) -> ExportPublic:
        row = require_run(session, run)
        found = checkpoints.of_step(session, row.id, step)
        if found is None:
            raise SlipstreamError(
                f"Run {run!r} has no checkpoint of step {step}.",
                reason=Reason.NOT_FOUND,
                remedy=f"GET /v1/runs/{run}/checkpoints lists those there are.",
            )
        flags: tuple[str, ...] = ("--dtype", body.dtype) if body.dtype else ()
        flags += ("--without-self-test",) if body.without_self_test else ()
        flags += ("--force",) if body.replace else ()
        request = ExportRequest(row.name, step, Path(found.path), body.to, flags)
        return views.export(services.exporter.request(request))

    return once(begin, status=202)


@router.get("/exports", operation_id="list_exports", responses=refusals(404, has_body=False))
def list_exports(run: str, services: ServicesDep, page: PageDep) -> ExportList:
    """Those that were asked for since this server started."""
    with services.database.read() as session:
        name = require_run(session, run).name
    found = services.exporter.of_run(name, after=page.after, size=page.size)
    token = page.token_after([one.id for one in found])
    return ExportList(exports=[views.export(one) for one in found], next_page_token=token)
