"""Probes."""

from fastapi import APIRouter
from pydantic import BaseModel
from sqlalchemy import text

from control_api.dependencies import ServicesDep
from control_api.routes.responses import refusals
from slipstream import __version__
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

router = APIRouter(tags=["health"])


class Health(BaseModel):
    """Answer of a probe."""

    status: str
    version: str


@router.get("/healthz", operation_id="get_health")
async def get_health() -> Health:
    """The process answers."""
    return Health(status="ok", version=__version__)


@router.get("/readyz", operation_id="get_readiness", responses=refusals(has_body=False))
def get_readiness(services: ServicesDep) -> Health:
    """The database answers, and runs are looked after."""
    with services.database.read() as session:
        session.execute(text("SELECT count(*) FROM targets"))
    if not (services.reconciler.is_alive and services.prober.is_alive):
        raise SlipstreamError(
            "A background thread of this server has ended.", reason=Reason.NOT_READY, remedy="Start it again."
        )
    return Health(status="ready", version=__version__)
