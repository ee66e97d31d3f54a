"""Health checks of the compose stack: exit status 0 when a service is ready, else 1 and why not.

    python health.py api 127.0.0.1:8080         # /readyz answers 200
    python health.py target 127.0.0.1:50051     # gRPC health says SERVING: the model is loaded
    python health.py trainer NAME               # the control API at $SLIPSTREAM_API hears of this trainer

It asks the service that it is for, over the network, as its clients do: a process that merely exists is not ready.
"""

import sys
import urllib.error
import urllib.request
from collections.abc import Callable

SECONDS = 3.0


def api(address: str) -> str | None:
    """Why the control API is not ready."""
    try:
        urllib.request.urlopen(f"http://{address}/readyz", timeout=SECONDS).close()
    except urllib.error.HTTPError as error:
        return f"{error.code}: {error.read(2000).decode(errors='replace')}"
    except OSError as error:
        return str(error)
    return None


def target(address: str) -> str | None:
    """Why the target server is not ready. Health needs no token."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        except grpc.RpcError as error:
            return str(error.details())
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return None if status == "SERVING" else f"{status}: it loads its model, or it drains"


def trainer(name: str) -> str | None:
    """Why the trainer agent is not ready: the control API has not heard from it for a while, or never."""
    import os

    from slipstream.control_client import ControlClient
    from slipstream.errors import SlipstreamError
    from slipstream.listen import read_token

    try:
        with ControlClient(os.environ["SLIPSTREAM_API"], read_token(None)) as client:
            known = client.get(f"/v1/trainers/{name}")
    except SlipstreamError as error:
        return error.message
    is_gone = known["status"] in ("STOPPED", "LOST")
    return f"the control API heard from it last at {known['last_seen_at']}" if is_gone else None


CHECKS: dict[str, Callable[[str], str | None]] = {"api": api, "target": target, "trainer": trainer}

if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in CHECKS:
        sys.exit(__doc__)
    problem = CHECKS[sys.argv[1]](sys.argv[2])
    sys.exit(f"not ready: {problem}" if problem else 0)
