import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from slipstream.hidden_states.v1 import batch_pb2 as _batch_pb2
from slipstream.hidden_states.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StartPosition(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    START_POSITION_UNSPECIFIED: _ClassVar[StartPosition]
    START_POSITION_BEGINNING: _ClassVar[StartPosition]
    START_POSITION_LIVE: _ClassVar[StartPosition]
    START_POSITION_GROUP: _ClassVar[StartPosition]

class Transport(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSPORT_UNSPECIFIED: _ClassVar[Transport]
    TRANSPORT_GRPC: _ClassVar[Transport]
    TRANSPORT_SHARED_MEMORY: _ClassVar[Transport]
    TRANSPORT_NIXL: _ClassVar[Transport]

class StreamState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STREAM_STATE_UNSPECIFIED: _ClassVar[StreamState]
    STREAM_STATE_ACTIVE: _ClassVar[StreamState]
    STREAM_STATE_PAUSED: _ClassVar[StreamState]
    STREAM_STATE_EXHAUSTED: _ClassVar[StreamState]
    STREAM_STATE_DRAINING: _ClassVar[StreamState]
    STREAM_STATE_WAITING_FOR_GROUP: _ClassVar[StreamState]

class ReleaseReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RELEASE_REASON_UNSPECIFIED: _ClassVar[ReleaseReason]
    RELEASE_REASON_SHUTDOWN: _ClassVar[ReleaseReason]
    RELEASE_REASON_PAUSE: _ClassVar[ReleaseReason]
    RELEASE_REASON_PACK_NOT_FINITE: _ClassVar[ReleaseReason]
    RELEASE_REASON_PACK_CORRUPT: _ClassVar[ReleaseReason]
START_POSITION_UNSPECIFIED: StartPosition
START_POSITION_BEGINNING: StartPosition
START_POSITION_LIVE: StartPosition
START_POSITION_GROUP: StartPosition
TRANSPORT_UNSPECIFIED: Transport
TRANSPORT_GRPC: Transport
TRANSPORT_SHARED_MEMORY: Transport
TRANSPORT_NIXL: Transport
STREAM_STATE_UNSPECIFIED: StreamState
STREAM_STATE_ACTIVE: StreamState
STREAM_STATE_PAUSED: StreamState
STREAM_STATE_EXHAUSTED: StreamState
STREAM_STATE_DRAINING: StreamState
STREAM_STATE_WAITING_FOR_GROUP: StreamState
RELEASE_REASON_UNSPECIFIED: ReleaseReason
RELEASE_REASON_SHUTDOWN: ReleaseReason
RELEASE_REASON_PAUSE: ReleaseReason
RELEASE_REASON_PACK_NOT_FINITE: ReleaseReason
RELEASE_REASON_PACK_CORRUPT: ReleaseReason

class GetTargetRequest(_message.Message):
    __slots__ = ("protocol_version",)
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    def __init__(self, protocol_version: _Optional[int] = ...) -> None: ...

class GetTargetResponse(_message.Message):
    __slots__ = ("protocol_version", "server_version", "model_id", "model_revision", "target_fingerprint", "num_layers", "hidden_size", "vocab_size", "hidden_state_data_type", "max_outstanding_leases", "host_id", "probe", "frozen_weights", "target_config_json")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATE_DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTSTANDING_LEASES_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    FROZEN_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TARGET_CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    server_version: str
    model_id: str
    model_revision: str
    target_fingerprint: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    hidden_state_data_type: _tensor_pb2.DataType
    max_outstanding_leases: int
    host_id: str
    probe: FixedPayload
    frozen_weights: FixedPayload
    target_config_json: str
    def __init__(self, protocol_version: _Optional[int] = ..., server_version: _Optional[str] = ..., model_id: _Optional[str] = ..., model_revision: _Optional[str] = ..., target_fingerprint: _Optional[str] = ..., num_layers: _Optional[int] = ..., hidden_size: _Optional[int] = ..., vocab_size: _Optional[int] = ..., hidden_state_data_type: _Optional[_Union[_tensor_pb2.DataType, str]] = ..., max_outstanding_leases: _Optional[int] = ..., host_id: _Optional[str] = ..., probe: _Optional[_Union[FixedPayload, _Mapping]] = ..., frozen_weights: _Optional[_Union[FixedPayload, _Mapping]] = ..., target_config_json: _Optional[str] = ...) -> None: ...

class FixedPayload(_message.Message):
    __slots__ = ("token", "manifest", "locations")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    LOCATIONS_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    manifest: _batch_pb2.PackManifest
    locations: _containers.RepeatedCompositeFieldContainer[_batch_pb2.PayloadLocation]
    def __init__(self, token: _Optional[bytes] = ..., manifest: _Optional[_Union[_batch_pb2.PackManifest, _Mapping]] = ..., locations: _Optional[_Iterable[_Union[_batch_pb2.PayloadLocation, _Mapping]]] = ...) -> None: ...

class OpenSubscriptionRequest(_message.Message):
    __slots__ = ("run", "data_spec_json", "layer_ids", "last_hidden_state", "packs_per_step", "start_position", "group", "group_size", "max_epochs")
    RUN_FIELD_NUMBER: _ClassVar[int]
    DATA_SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    LAST_HIDDEN_STATE_FIELD_NUMBER: _ClassVar[int]
    PACKS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    START_POSITION_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    run: str
    data_spec_json: str
    layer_ids: _containers.RepeatedScalarFieldContainer[int]
    last_hidden_state: bool
    packs_per_step: int
    start_position: StartPosition
    group: str
    group_size: int
    max_epochs: int
    def __init__(self, run: _Optional[str] = ..., data_spec_json: _Optional[str] = ..., layer_ids: _Optional[_Iterable[int]] = ..., last_hidden_state: bool = ..., packs_per_step: _Optional[int] = ..., start_position: _Optional[_Union[StartPosition, str]] = ..., group: _Optional[str] = ..., group_size: _Optional[int] = ..., max_epochs: _Optional[int] = ...) -> None: ...

class OpenSubscriptionResponse(_message.Message):
    __slots__ = ("subscription", "stream", "incarnation", "first_sequence_number", "total_packs", "data_report_json")
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PACKS_FIELD_NUMBER: _ClassVar[int]
    DATA_REPORT_JSON_FIELD_NUMBER: _ClassVar[int]
    subscription: str
    stream: str
    incarnation: int
    first_sequence_number: int
    total_packs: int
    data_report_json: str
    def __init__(self, subscription: _Optional[str] = ..., stream: _Optional[str] = ..., incarnation: _Optional[int] = ..., first_sequence_number: _Optional[int] = ..., total_packs: _Optional[int] = ..., data_report_json: _Optional[str] = ...) -> None: ...

class SeekSubscriptionRequest(_message.Message):
    __slots__ = ("subscription", "next_step", "quarantined_sequence_numbers", "expected_incarnation", "lineage_incarnation", "first_sequence_number", "request_id")
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEP_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_SEQUENCE_NUMBERS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    subscription: str
    next_step: int
    quarantined_sequence_numbers: _containers.RepeatedScalarFieldContainer[int]
    expected_incarnation: int
    lineage_incarnation: int
    first_sequence_number: int
    request_id: str
    def __init__(self, subscription: _Optional[str] = ..., next_step: _Optional[int] = ..., quarantined_sequence_numbers: _Optional[_Iterable[int]] = ..., expected_incarnation: _Optional[int] = ..., lineage_incarnation: _Optional[int] = ..., first_sequence_number: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class SeekSubscriptionResponse(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    def __init__(self, incarnation: _Optional[int] = ...) -> None: ...

class LeasePacksRequest(_message.Message):
    __slots__ = ("subscription", "incarnation", "trainer", "max_packs", "max_wait", "time_to_live", "target_fingerprint", "transport", "end_sequence_number")
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    MAX_PACKS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_LIVE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    END_SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    subscription: str
    incarnation: int
    trainer: str
    max_packs: int
    max_wait: _duration_pb2.Duration
    time_to_live: _duration_pb2.Duration
    target_fingerprint: str
    transport: Transport
    end_sequence_number: int
    def __init__(self, subscription: _Optional[str] = ..., incarnation: _Optional[int] = ..., trainer: _Optional[str] = ..., max_packs: _Optional[int] = ..., max_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., time_to_live: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., target_fingerprint: _Optional[str] = ..., transport: _Optional[_Union[Transport, str]] = ..., end_sequence_number: _Optional[int] = ...) -> None: ...

class LeasePacksResponse(_message.Message):
    __slots__ = ("leases", "stream_state", "quarantined_sequence_numbers")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    STREAM_STATE_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_SEQUENCE_NUMBERS_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[_batch_pb2.Lease]
    stream_state: StreamState
    quarantined_sequence_numbers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, leases: _Optional[_Iterable[_Union[_batch_pb2.Lease, _Mapping]]] = ..., stream_state: _Optional[_Union[StreamState, str]] = ..., quarantined_sequence_numbers: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadPayloadRequest(_message.Message):
    __slots__ = ("lease_token", "offset_bytes", "size_bytes")
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    lease_token: bytes
    offset_bytes: int
    size_bytes: int
    def __init__(self, lease_token: _Optional[bytes] = ..., offset_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class ReadPayloadResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class ConfirmReadRequest(_message.Message):
    __slots__ = ("lease_token", "slot_generation")
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SLOT_GENERATION_FIELD_NUMBER: _ClassVar[int]
    lease_token: bytes
    slot_generation: int
    def __init__(self, lease_token: _Optional[bytes] = ..., slot_generation: _Optional[int] = ...) -> None: ...

class ConfirmReadResponse(_message.Message):
    __slots__ = ("valid",)
    VALID_FIELD_NUMBER: _ClassVar[int]
    valid: bool
    def __init__(self, valid: bool = ...) -> None: ...

class RenewLeasesRequest(_message.Message):
    __slots__ = ("lease_tokens", "time_to_live")
    LEASE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_LIVE_FIELD_NUMBER: _ClassVar[int]
    lease_tokens: _containers.RepeatedScalarFieldContainer[bytes]
    time_to_live: _duration_pb2.Duration
    def __init__(self, lease_tokens: _Optional[_Iterable[bytes]] = ..., time_to_live: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RenewLeasesResponse(_message.Message):
    __slots__ = ("lost_lease_tokens", "stream_state")
    LOST_LEASE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STREAM_STATE_FIELD_NUMBER: _ClassVar[int]
    lost_lease_tokens: _containers.RepeatedScalarFieldContainer[bytes]
    stream_state: StreamState
    def __init__(self, lost_lease_tokens: _Optional[_Iterable[bytes]] = ..., stream_state: _Optional[_Union[StreamState, str]] = ...) -> None: ...

class ReleaseLeasesRequest(_message.Message):
    __slots__ = ("lease_tokens", "reason", "subscription", "incarnation")
    LEASE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    lease_tokens: _containers.RepeatedScalarFieldContainer[bytes]
    reason: ReleaseReason
    subscription: str
    incarnation: int
    def __init__(self, lease_tokens: _Optional[_Iterable[bytes]] = ..., reason: _Optional[_Union[ReleaseReason, str]] = ..., subscription: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class ReleaseLeasesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CommitStepRequest(_message.Message):
    __slots__ = ("subscription", "incarnation", "step")
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    subscription: str
    incarnation: int
    step: int
    def __init__(self, subscription: _Optional[str] = ..., incarnation: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class CommitStepResponse(_message.Message):
    __slots__ = ("quarantined_sequence_numbers",)
    QUARANTINED_SEQUENCE_NUMBERS_FIELD_NUMBER: _ClassVar[int]
    quarantined_sequence_numbers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, quarantined_sequence_numbers: _Optional[_Iterable[int]] = ...) -> None: ...
