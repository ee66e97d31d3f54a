"""The gRPC contract as the parts rely on it: names, field numbers and rules that old peers know."""

from google.protobuf.descriptor import FieldDescriptor, FileDescriptor

from slipstream.hidden_states.v1 import (
    batch_pb2,
    hidden_state_service_pb2,
    stream_admin_service_pb2,
    tensor_pb2,
)

FILES: tuple[FileDescriptor, ...] = (
    batch_pb2.DESCRIPTOR,
    hidden_state_service_pb2.DESCRIPTOR,
    stream_admin_service_pb2.DESCRIPTOR,
    tensor_pb2.DESCRIPTOR,
)


def test_services_have_exactly_these_methods() -> None:
    trainer_facing = hidden_state_service_pb2.DESCRIPTOR.services_by_name["HiddenStateService"]
    assert trainer_facing.full_name == "slipstream.hidden_states.v1.HiddenStateService"
    assert [method.name for method in trainer_facing.methods] == [
        "GetTarget",
        "OpenSubscription",
        "SeekSubscription",
        "LeasePacks",
        "ReadPayload",
        "ConfirmRead",
        "RenewLeases",
        "ReleaseLeases",
        "CommitStep",
    ]
    control_facing = stream_admin_service_pb2.DESCRIPTOR.services_by_name["StreamAdminService"]
    assert [method.name for method in control_facing.methods] == [
        "PauseSubscription",
        "ResumeSubscription",
        "CloseSubscription",
        "GetStreamStats",
        "DrainTarget",
    ]


def test_only_read_payload_streams() -> None:
    methods = [method for file in FILES for service in file.services_by_name.values() for method in service.methods]
    assert [method.name for method in methods if method.server_streaming] == ["ReadPayload"]
    assert not [method.name for method in methods if method.client_streaming]


def test_enum_zero_is_unspecified_and_never_a_meaning() -> None:
    enums = [enum for file in FILES for enum in file.enum_types_by_name.values()]
    assert len(enums) == 5
    for enum in enums:
        assert enum.values_by_number[0].name.endswith("_UNSPECIFIED"), enum.full_name


def test_wire_values_of_enums_never_move() -> None:
    data_types = tensor_pb2.DESCRIPTOR.enum_types_by_name["DataType"]
    assert {value.name.removeprefix("DATA_TYPE_"): value.number for value in data_types.values} == {
        "UNSPECIFIED": 0,
        "BFLOAT16": 1,
        "FLOAT16": 2,
        "FLOAT32": 3,
        "FLOAT8_E4M3FN": 4,
        "INT32": 5,
        "INT64": 6,
        "UINT8": 7,
    }


def test_only_the_documented_payload_message_and_the_probe_tokens_carry_bytes() -> None:
    """The control path carries no tensors: no metadata message has room for them."""
    carriers = {
        f"{message.name}.{field.name}"
        for file in FILES
        for message in file.message_types_by_name.values()
        for field in message.fields
        if field.type == FieldDescriptor.TYPE_BYTES
    }
    assert carriers == {
        "ReadPayloadResponse.data",
        "NixlLocation.agent_metadata",
        "Lease.lease_token",
        "FixedPayload.token",
        "ReadPayloadRequest.lease_token",
        "ConfirmReadRequest.lease_token",
        "RenewLeasesRequest.lease_tokens",
        "RenewLeasesResponse.lost_lease_tokens",
        "ReleaseLeasesRequest.lease_tokens",
    }
