"""The dashboard's files as a browser gets them: what is served, to whom, with which headers, and what is in them."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from control_api.app import create_app
from control_api.routes.dashboard import DIRECTORY
from control_api.settings import Settings
from control_api.store.database import Database
from tests.fakes.control_plane import assert_problem

FILES = sorted(path.relative_to(DIRECTORY).as_posix() for path in DIRECTORY.rglob("*") if path.is_file())
OURS = [name for name in FILES if not name.startswith("vendor/")]
PROGRAMS = [name for name in OURS if name.endswith(".js")]
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".md": "text/plain; charset=utf-8",
    "": "text/plain; charset=utf-8",
}
LINES_ALLOWED = 400


def _text(name: str) -> str:
    return (DIRECTORY / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def with_token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    unused = Database(f"sqlite:///{tmp_path_factory.mktemp('token')}/a.sqlite")
    yield TestClient(create_app(unused, Settings(token="right")), raise_server_exceptions=False)
    unused.close()


@pytest.mark.parametrize("path", ["/", "/dashboard"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_the_address_alone_is_enough(with_token: TestClient, method: str, path: str) -> None:
    response = with_token.request(method, path, follow_redirects=False)
    assert (response.status_code, response.headers["location"]) == (307, "/dashboard/")


@pytest.mark.parametrize("name", ["", *FILES])
def test_files_need_no_token_and_may_do_little(with_token: TestClient, name: str) -> None:
    response = with_token.get(f"/dashboard/{name}")
    assert response.status_code == 200
    assert response.content == (DIRECTORY / (name or "index.html")).read_bytes()
    assert response.headers["content-type"] == TYPES[Path(name or "index.html").suffix]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-cache"
    policy = dict(one.split(" ", 1) for one in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert {policy[one] for one in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}


def test_head_and_a_file_that_is_known_already(with_token: TestClient) -> None:
    whole = with_token.get("/dashboard/app.js")
    head = with_token.head("/dashboard/app.js")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(whole.content))
    again = with_token.get("/dashboard/app.js", headers={"If-None-Match": whole.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["/v1/runs", "/v1/recipes", "/openapi.json", "/dashboards", "/dashboard.js"])
def test_everything_else_needs_the_token(with_token: TestClient, path: str) -> None:
    assert_problem(with_token.get(path), 401, "ACCESS_DENIED")


@pytest.mark.parametrize(
    "path",
    [
        "../app.py",
        "%2e%2e/app.py",
        "..%2fapp.py",
        "views/../../app.py",
        "%2e%2e%2f%2e%2e%2f%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/etc/passwd",
        "%2fetc/passwd",
        "..%5capp.py",
        "views",
        "views/",
        "app.js%00.html",
        "nothing.js",
        "x" * 5000,
    ],
)
def test_nothing_but_the_files_is_served(client: TestClient, path: str) -> None:
    response = client.get(f"/dashboard/{path}")
    if response.url.path.startswith("/dashboard"):
        assert_problem(response, 404, "NOT_FOUND")
    else:
        assert response.status_code == 404, "the client itself has resolved the dots"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_files_are_only_read(client: TestClient, method: str) -> None:
    assert_problem(client.request(method, "/dashboard/app.js"), 405, "METHOD_NOT_ALLOWED")


def test_it_is_no_part_of_the_documented_api(client: TestClient) -> None:
    assert not [path for path in client.get("/openapi.json").json()["paths"] if "dashboard" in path or path == "/"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_the_api_says_never_becomes_markup(name: str) -> None:
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function|cssText"
    assert not re.findall(forbidden, _text(name))


@pytest.mark.parametrize("name", OURS)
def test_nothing_is_loaded_from_elsewhere(name: str) -> None:
    addresses = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", re.sub(r"^\s*//.*$", "", _text(name), flags=re.M))
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_module_that_is_imported_is_there(name: str) -> None:
    imported = re.findall(r'^(?:import|\} from|import .* from) .*?"(\.[^"]+)"', _text(name), flags=re.MULTILINE)
    assert not [one for one in imported if not ((DIRECTORY / name).parent / one).is_file()]


def test_the_page_has_nothing_inline() -> None:
    page = _text("index.html")
    assert not re.findall(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page)
    assert not [one for one in re.findall(r'(?:src|href)="([^"#]+)"', page) if not (DIRECTORY / one).is_file()]


@pytest.mark.parametrize("name", OURS)
def test_our_files_stay_readable(name: str) -> None:
    assert len(_text(name).splitlines()) <= LINES_ALLOWED


def test_vendored_files_are_as_they_were_published() -> None:
    sums = re.findall(r"^([0-9a-f]{64})  (\S+)$", _text("vendor/README.md"), flags=re.MULTILINE)
    assert {name for _, name in sums} == {"uplot/uPlot.esm.js", "uplot/uPlot.min.css"}
    for expected, name in sums:
        assert hashlib.sha256((DIRECTORY / "vendor" / name).read_bytes()).hexdigest() == expected
    assert "MIT License" in _text("vendor/uplot/LICENSE")


def _luminance(color: str) -> float:
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (one / 12.92 if one <= 0.03928 else ((one + 0.055) / 1.055) ** 2.4 for one in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read(theme: int) -> None:
    """Contrast of at least 4.5 : 1, as WCAG AA asks of text."""
    block = re.findall(r":root \{(.*?)\}", _text("theme.css"), flags=re.DOTALL)[theme]
    colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
    pairs = [(text, ground) for text in ("text", "text-quiet") for ground in ("ground", "surface", "sunken")]
    pairs += [(name, f"{name}-ground") for name in ("run", "wait", "rest", "bad", "done")]
    pairs += [("accent", "surface"), ("accent", "ground"), ("on-accent", "accent"), ("on-accent", "accent-strong")]
    pairs += [("bad", "surface")]
    for text, ground in pairs:
        dark, light = sorted((_luminance(colors[text]), _luminance(colors[ground])))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, ground)
