from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PauseSubscriptionRequest(_message.Message):
    __slots__ = ("subscription",)
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    subscription: str
    def __init__(self, subscription: _Optional[str] = ...) -> None: ...

class PauseSubscriptionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeSubscriptionRequest(_message.Message):
    __slots__ = ("subscription",)
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    subscription: str
    def __init__(self, subscription: _Optional[str] = ...) -> None: ...

class ResumeSubscriptionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CloseSubscriptionRequest(_message.Message):
    __slots__ = ("subscription",)
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    subscription: str
    def __init__(self, subscription: _Optional[str] = ...) -> None: ...

class CloseSubscriptionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStreamStatsRequest(_message.Message):
    __slots__ = ("stream", "subscription")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    stream: str
    subscription: str
    def __init__(self, stream: _Optional[str] = ..., subscription: _Optional[str] = ...) -> None: ...

class GetStreamStatsResponse(_message.Message):
    __slots__ = ("packs_ready", "shelf_size_bytes", "shelf_capacity_bytes", "packs_computed", "packs_recomputed", "target_tokens_per_second", "subscriptions", "stream")
    PACKS_READY_FIELD_NUMBER: _ClassVar[int]
    SHELF_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHELF_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PACKS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    PACKS_RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    TARGET_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    packs_ready: int
    shelf_size_bytes: int
    shelf_capacity_bytes: int
    packs_computed: int
    packs_recomputed: int
    target_tokens_per_second: float
    subscriptions: _containers.RepeatedCompositeFieldContainer[SubscriptionStats]
    stream: str
    def __init__(self, packs_ready: _Optional[int] = ..., shelf_size_bytes: _Optional[int] = ..., shelf_capacity_bytes: _Optional[int] = ..., packs_computed: _Optional[int] = ..., packs_recomputed: _Optional[int] = ..., target_tokens_per_second: _Optional[float] = ..., subscriptions: _Optional[_Iterable[_Union[SubscriptionStats, _Mapping]]] = ..., stream: _Optional[str] = ...) -> None: ...

class SubscriptionStats(_message.Message):
    __slots__ = ("subscription", "packs_leased", "packs_committed", "leases_expired", "packs_quarantined", "lag_packs", "trainer_wait_ratio", "trainer_wait_seconds", "serving_seconds", "paused")
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PACKS_LEASED_FIELD_NUMBER: _ClassVar[int]
    PACKS_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    LEASES_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    PACKS_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    LAG_PACKS_FIELD_NUMBER: _ClassVar[int]
    TRAINER_WAIT_RATIO_FIELD_NUMBER: _ClassVar[int]
    TRAINER_WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SERVING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    subscription: str
    packs_leased: int
    packs_committed: int
    leases_expired: int
    packs_quarantined: int
    lag_packs: int
    trainer_wait_ratio: float
    trainer_wait_seconds: float
    serving_seconds: float
    paused: bool
    def __init__(self, subscription: _Optional[str] = ..., packs_leased: _Optional[int] = ..., packs_committed: _Optional[int] = ..., leases_expired: _Optional[int] = ..., packs_quarantined: _Optional[int] = ..., lag_packs: _Optional[int] = ..., trainer_wait_ratio: _Optional[float] = ..., trainer_wait_seconds: _Optional[float] = ..., serving_seconds: _Optional[float] = ..., paused: bool = ...) -> None: ...

class DrainTargetRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainTargetResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
