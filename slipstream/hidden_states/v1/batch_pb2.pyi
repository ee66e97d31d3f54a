import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from slipstream.hidden_states.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PackManifest(_message.Message):
    __slots__ = ("sequence_number", "tensors", "payload_size_bytes", "num_tokens", "num_supervised_tokens")
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SUPERVISED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence_number: int
    tensors: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.TensorSpec]
    payload_size_bytes: int
    num_tokens: int
    num_supervised_tokens: int
    def __init__(self, sequence_number: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[_tensor_pb2.TensorSpec, _Mapping]]] = ..., payload_size_bytes: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_supervised_tokens: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("lease_token", "manifest", "step", "time_to_live", "delivery_attempt", "locations")
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_LIVE_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LOCATIONS_FIELD_NUMBER: _ClassVar[int]
    lease_token: bytes
    manifest: PackManifest
    step: int
    time_to_live: _duration_pb2.Duration
    delivery_attempt: int
    locations: _containers.RepeatedCompositeFieldContainer[PayloadLocation]
    def __init__(self, lease_token: _Optional[bytes] = ..., manifest: _Optional[_Union[PackManifest, _Mapping]] = ..., step: _Optional[int] = ..., time_to_live: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., delivery_attempt: _Optional[int] = ..., locations: _Optional[_Iterable[_Union[PayloadLocation, _Mapping]]] = ...) -> None: ...

class PayloadLocation(_message.Message):
    __slots__ = ("grpc", "shared_memory", "nixl")
    GRPC_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    NIXL_FIELD_NUMBER: _ClassVar[int]
    grpc: GrpcLocation
    shared_memory: SharedMemoryLocation
    nixl: NixlLocation
    def __init__(self, grpc: _Optional[_Union[GrpcLocation, _Mapping]] = ..., shared_memory: _Optional[_Union[SharedMemoryLocation, _Mapping]] = ..., nixl: _Optional[_Union[NixlLocation, _Mapping]] = ...) -> None: ...

class GrpcLocation(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class SharedMemoryLocation(_message.Message):
    __slots__ = ("segment_name", "offset_bytes", "slot_generation")
    SEGMENT_NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOT_GENERATION_FIELD_NUMBER: _ClassVar[int]
    segment_name: str
    offset_bytes: int
    slot_generation: int
    def __init__(self, segment_name: _Optional[str] = ..., offset_bytes: _Optional[int] = ..., slot_generation: _Optional[int] = ...) -> None: ...

class NixlLocation(_message.Message):
    __slots__ = ("agent_metadata", "address", "device_id", "slot_generation")
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_GENERATION_FIELD_NUMBER: _ClassVar[int]
    agent_metadata: bytes
    address: int
    device_id: int
    slot_generation: int
    def __init__(self, agent_metadata: _Optional[bytes] = ..., address: _Optional[int] = ..., device_id: _Optional[int] = ..., slot_generation: _Optional[int] = ...) -> None: ...
