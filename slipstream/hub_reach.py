"""Whether the hub can be reached at all, for its client tries for half a minute before it says so; and what it raises
where a connection fails."""

import socket
import threading
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

_SECONDS = 5.0
_PORTS = {"http": 80, "https": 443}


def why_unreachable(endpoint: str, seconds: float = _SECONDS) -> str | None:
    """Why nobody answers at the hub's address; None when somebody does, or when only a proxy would know.

    Args:
        endpoint: URL of the hub.
        seconds: after which no answer is an answer.
    """
    url = urlsplit(endpoint)
    host = url.hostname or ""
    if (url.scheme in getproxies() or "all" in getproxies()) and not proxy_bypass(host):
        return None
    found: list[str] = []

    def connect() -> None:
        try:
            socket.create_connection((host, url.port or _PORTS.get(url.scheme, 443)), seconds).close()
        except OSError as error:
            found.append(error.strerror or str(error))
        else:
            found.append("")

    # In a thread: a name server that does not answer keeps the lookup for longer than any timeout of a socket.
    thread = threading.Thread(target=connect, name="hub-reach", daemon=True)
    thread.start()
    thread.join(seconds)
    return (found[0] or None) if found else f"no answer within {seconds:g} s"


def connection_failures() -> tuple[type[Exception], type[Exception]]:
    """What the hub's client raises where it had no answer, or none of use: for `except`.

    It lets pass what its HTTP library raises of a connection that breaks within a file.
    """
    import httpx2

    return OSError, httpx2.HTTPError
