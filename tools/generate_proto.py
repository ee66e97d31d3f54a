"""Generates slipstream/hidden_states/v1 from proto/. Needs grpcio-tools; run it with `make proto`.

Usage: python tools/generate_proto.py [--output DIR]

DIR (default: the repository root) receives slipstream/hidden_states/v1/*_pb2.py and *.pyi, and *_pb2_grpc.py for the
files that declare a service.
"""

import argparse
import importlib.resources
import sys
from collections.abc import Sequence
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[1]
PROTO_DIR = ROOT / "proto"


def generate(output: Path) -> None:
    """Write the generated code of every .proto file below `output`.

    Raises:
        SystemExit: protoc refused a file; its message is on stderr.
    """
    sources = sorted(PROTO_DIR.rglob("*.proto"))
    services = [path for path in sources if path.stem.endswith("_service")]
    _protoc(sources, [f"--python_out={output}", f"--pyi_out={output}"])
    _protoc(services, [f"--grpc_python_out={output}"])


def _protoc(sources: Sequence[Path], outputs: Sequence[str]) -> None:
    well_known_types = importlib.resources.files("grpc_tools") / "_proto"
    command = ["protoc", f"-I{PROTO_DIR}", f"-I{well_known_types}", *outputs, *map(str, sources)]
    if protoc.main(command) != 0:
        raise SystemExit("protoc failed; see its message above")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Generate slipstream/hidden_states/v1 from proto/.")
    parser.add_argument("--output", type=Path, default=ROOT, help="where slipstream/hidden_states/v1 is written")
    generate(parser.parse_args(arguments).output)


if __name__ == "__main__":
    main(sys.argv[1:])
