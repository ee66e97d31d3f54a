"""The line between server and engine process: a message as JSON, and after it bytes that need no description.

Two numbers (uint32: length of the JSON, length of the bytes), then both. Nothing on it can run code.
"""

import json
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

_LENGTHS = struct.Struct("<II")
_LONGEST = 1 << 30


@dataclass(frozen=True)
class Message:
    """What travels."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    blob: bytes = b""


class EngineLine:
    """One end of a socket pair. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """Readable when there is a message, and for ever once the other end is gone."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send; waits while the other end does not read.

        Raises:
            OSError: the other end is gone.
        """
        text = json.dumps({"kind": message.kind, **message.fields}).encode()
        with self._sending:
            self._socket.sendall(_LENGTHS.pack(len(text), len(message.blob)) + text + message.blob)

    def receive(self) -> Message | None:
        """Wait for a message; None: the other end is gone, perhaps in the middle of one."""
        try:
            lengths = self._exactly(_LENGTHS.size)
            if lengths is None:
                return None
            text_bytes, blob_bytes = _LENGTHS.unpack(lengths)
            assert text_bytes + blob_bytes < _LONGEST, "this is no message of an engine"
            text, blob = self._exactly(text_bytes), self._exactly(blob_bytes)
        except OSError:
            return None
        if text is None or blob is None:
            return None
        fields = json.loads(text)
        return Message(fields.pop("kind"), fields, bytes(blob))

    def hang_up(self) -> None:
        """The other end's `receive` returns None, and so does one that waits at this end."""
        with suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back; nobody waits at this end."""
        self._socket.close()

    def _exactly(self, count: int) -> bytearray | None:
        received = bytearray(count)
        view, filled = memoryview(received), 0
        while filled < count:
            more = self._socket.recv_into(view[filled:])
            if more == 0:
                return None
            filled += more
        return received
