"""The committed generated code is exactly what proto/ gives."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path("slipstream/hidden_states/v1")


def _generated(root: Path) -> dict[str, str]:
    files = (path for path in (root / PACKAGE).iterdir() if "_pb2" in path.name)
    return {path.name: path.read_text(encoding="utf-8") for path in files}


@pytest.mark.skipif(importlib.util.find_spec("grpc_tools") is None, reason="grpcio-tools is not installed (extra test)")
def test_committed_code_is_what_proto_generates(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, str(ROOT / "tools/generate_proto.py"), "--output", str(tmp_path)], check=True, timeout=50
    )
    fresh, committed = _generated(tmp_path), _generated(ROOT)
    assert sorted(committed) == sorted(fresh)
    stale = [name for name, text in fresh.items() if committed[name] != text]
    assert not stale, f"run `make proto`: {stale} differ from what proto/ gives"


def test_only_services_have_grpc_code() -> None:
    grpc_files = sorted(name for name in _generated(ROOT) if name.endswith("_grpc.py"))
    assert grpc_files == ["hidden_state_service_pb2_grpc.py", "stream_admin_service_pb2_grpc.py"]
