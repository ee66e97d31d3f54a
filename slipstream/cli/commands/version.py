"""`slipstream version`: versions of Slipstream and of what it stands on, read without importing any of it."""

import argparse
import json
import platform

from slipstream import __version__
from slipstream.machine_probe import package_version

PACKAGES = ("torch", "triton", "transformers", "grpcio", "protobuf")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = subparsers.add_parser("version", help="print versions")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")


def run(args: argparse.Namespace) -> int:
    """Print the versions."""
    versions = installed_versions()
    if args.output == "json":
        print(json.dumps(versions))
    else:
        print("\n".join(f"{name} {version or 'not installed'}" for name, version in versions.items()))
    return 0


def installed_versions() -> dict[str, str | None]:
    """Name → version, None where it is not installed."""
    own = {"slipstream": __version__, "python": platform.python_version()}
    return own | {name: package_version(name) for name in PACKAGES}
