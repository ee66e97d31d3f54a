"""A hub of data sets on this machine: just enough of its HTTP interface for `huggingface_hub` to download from."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "a" * 40


@contextmanager
def serving_dataset(name: str, files: Mapping[str, bytes], *, token: str) -> Iterator[tuple[str, list[str]]]:
    """The endpoint, and the paths that were asked for. Whoever has not the token is told that there is nothing."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = self._answer()
            if answer is not None:
                self.wfile.write(answer)

        def do_HEAD(self) -> None:
            self._answer()

        def _answer(self) -> bytes | None:
            asked.append(self.path)
            file = self.path.removeprefix(f"/datasets/{name}/resolve/{COMMIT}/")
            headers: dict[str, str] = {}
            if self.headers.get("Authorization") != f"Bearer {token}":
                content = None
            elif self.path.startswith(f"/api/datasets/{name}/revision/"):
                content = json.dumps(
                    {"id": name, "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]}
                ).encode()
            elif self.path.startswith(f"/api/datasets/{name}/tree/{COMMIT}"):
                tree = [{"type": "file", "path": f, "size": len(files[f]), "oid": _etag(files[f])} for f in files]
                content = json.dumps(tree).encode()
            else:
                content = files.get(file)
                headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_etag(content)}"'} if content is not None else {}
            self.send_response(200 if content is not None else 404)
            for key, value in (headers if content is not None else {"X-Error-Code": "RepoNotFound"}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            return content

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, name="hub", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join(20)
        server.server_close()


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
