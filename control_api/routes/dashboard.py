"""/dashboard/: the pages that a browser shows. Static files; all they show comes from /v1, with the token."""

from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles

DIRECTORY = Path(__file__).resolve().parent.parent / "dashboard"
HOME = "/dashboard/"

# Nothing from elsewhere, nothing inline: text that came from a trainer cannot become a program.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Ask each time, by ETag: after an upgrade no page is half old.
    "Cache-Control": "no-cache",
}
# Not left to the machine's own table: a module with another type is refused by browsers.
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".md": "text/plain; charset=utf-8",
    "": "text/plain; charset=utf-8",
}

_router = APIRouter(include_in_schema=False)


class DashboardFiles(StaticFiles):
    """The directory, with the headers that every file of it gets."""

    def __init__(self) -> None:
        super().__init__(directory=DIRECTORY, html=True)

    def file_response(self, *args: Any, **more: Any) -> Response:
        """One file, or 304 for who has it already."""
        response = super().file_response(*args, **more)
        response.headers.update(_HEADERS)
        if response.status_code == 200:
            response.headers["Content-Type"] = _MEDIA_TYPES.get(Path(args[0]).suffix, "application/octet-stream")
        return response


@_router.api_route("/", methods=["GET", "HEAD"], operation_id="get_root")
@_router.api_route("/dashboard", methods=["GET", "HEAD"], operation_id="get_dashboard")
async def to_dashboard() -> RedirectResponse:
    """Where a person who only knows the address should land."""
    return RedirectResponse(HOME, status_code=307)


def install(app: FastAPI) -> None:
    """Serve the dashboard from `app`; `/` leads to it."""
    app.include_router(_router)
    app.mount(HOME.rstrip("/"), DashboardFiles(), name="dashboard")
