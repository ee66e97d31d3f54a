"""Where a service listens, its bearer token, and the rule that only loopback may be served without one."""

import errno
import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

_LAST_PORT = 65535


@dataclass(frozen=True)
class ListenAddress:
    """A host and a port; port 0 lets the system choose."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, flag: str = "--listen") -> Self:
        """Read `host:port` or `[ipv6]:port`.

        Raises:
            SlipstreamError: SPEC_INVALID, the text is neither.
        """
        host, _, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        wrong = ""
        if port.isdecimal() and (len(port.lstrip("0")) > 5 or int(port) > _LAST_PORT):
            wrong = f"; port {port} is out of range"
        elif text.startswith(":"):
            wrong = "; no host is named"
        if wrong or not host or (":" in host and not bracketed) or not port.isdecimal():
            raise SlipstreamError(
                f"{flag} is {text!r}{wrong}, expected HOST:PORT with a port from 0 to {_LAST_PORT}",
                reason=Reason.SPEC_INVALID,
                remedy=f"Example: {flag} 127.0.0.1:8080 (port 0 takes a free one).",
            )
        return cls(host[1:-1] if bracketed else host, int(port))

    @property
    def is_loopback(self) -> bool:
        """True when only processes of this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # any other host name: it may resolve to anything, now or later
            return False

    def require_token(self, token: str | None) -> None:
        """Refuse to serve other machines without a token.

        Raises:
            SlipstreamError: SPEC_INVALID, the address is not loopback and `token` is empty.
        """
        if not self.is_loopback and not token:
            raise SlipstreamError(
                f"{self} is reachable from other machines and no token is set",
                reason=Reason.SPEC_INVALID,
                remedy="Set SLIPSTREAM_TOKEN or --token-file, or listen on 127.0.0.1.",
            )

    def bind(self) -> socket.socket:
        """A bound TCP socket, not yet listening.

        Raises:
            SlipstreamError: PORT_IN_USE, or SPEC_INVALID when the host is no address of this machine.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((self.host, self.port))
        except OSError as error:
            bound.close()
            raise self._refusal(error) from error
        return bound

    def in_use(self, why: str = "") -> SlipstreamError:
        """The refusal where something else listens there; `why` is the system's word for it."""
        return SlipstreamError(
            f"{self} is in use" + (f" ({why})" if why else ""),
            reason=Reason.PORT_IN_USE,
            remedy="Stop what listens there, or choose a port (0: any): --listen; a stack's target: --target-listen.",
        )

    def _refusal(self, error: OSError) -> SlipstreamError:
        if isinstance(error, PermissionError):
            remedy = "Ports below 1024 need privileges; choose a higher one."
        elif isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            remedy = "The host must be an address of this machine."
        else:
            return self.in_use(error.strerror or "")
        return SlipstreamError(f"cannot listen on {self}: {error.strerror}", reason=Reason.SPEC_INVALID, remedy=remedy)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


_TOKEN_REMEDY = "Write the token into it, or name the file that holds it."
_FIT_TOKEN = "A token is one line of letters, digits and signs of ASCII, such as `openssl rand -hex 32` prints."


def read_token(path: Path | None) -> str | None:
    """The bearer token: from the file `path`, else from $SLIPSTREAM_TOKEN, else from the file $SLIPSTREAM_TOKEN_FILE.

    None when none of them is set. Containers name the file: a secret in the environment shows in every listing of it.

    Raises:
        SlipstreamError: SPEC_INVALID, the file is unreadable or empty, or what it holds no header can carry.
    """
    if path is None:
        if token := os.environ.get("SLIPSTREAM_TOKEN"):
            return _fit(token, "$SLIPSTREAM_TOKEN")
        if not (file := os.environ.get("SLIPSTREAM_TOKEN_FILE")):
            return None
        path = Path(file)
    try:
        # A byte that is no text becomes a character that no token has.
        token = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise SlipstreamError(
            f"cannot read the token file {path}: {error.strerror}", reason=Reason.SPEC_INVALID, remedy=_TOKEN_REMEDY
        ) from error
    if not token:
        raise SlipstreamError(f"the token file {path} is empty", reason=Reason.SPEC_INVALID, remedy=_TOKEN_REMEDY)
    return _fit(token, f"the token file {path}")


def _fit(token: str, where: str) -> str:
    if not (token.isascii() and token.isprintable()):
        raise SlipstreamError(
            f"what {where} holds is no token: it has characters that no header can carry",
            reason=Reason.SPEC_INVALID,
            remedy=_FIT_TOKEN,
        )
    return token
