"""Ways of bytes from the target server to a trainer, behind one interface."""

from slipstream.wire.transports.base import PayloadReader, PayloadRef
from slipstream.wire.transports.choose import choose_reader
from slipstream.wire.transports.grpc import GrpcReader
from slipstream.wire.transports.shm import SharedMemoryReader

__all__ = ["GrpcReader", "PayloadReader", "PayloadRef", "SharedMemoryReader", "choose_reader"]
