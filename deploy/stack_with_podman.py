"""Build and run compose.yaml where no Docker engine runs and no image registry is reached, with podman.

    python deploy/stack_with_podman.py check             # what is missing here; exit status 3 when something is
    python deploy/stack_with_podman.py build             # a base image by debootstrap, then the images of the stack
    python deploy/stack_with_podman.py up                # start it; returns when every health check passes
    python deploy/stack_with_podman.py ready             # wait for that after `compose start`
    python deploy/stack_with_podman.py compose ps        # any command of podman-compose, same settings
    python deploy/stack_with_podman.py down [--volumes]

What a build needs of this machine's pip configuration (indexes, wheels, certificates) is read from `pip config list`.
"""

import argparse
import ast
import configparser
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / ".cache" / "stack"
"""Outlives this program: containers that run read the configuration when they are started again or end."""
STAND_IN = "localhost/slipstream-stand-in"
"""In place of python:3.12-slim."""
SUITE = "bookworm"
PACKAGES = ("python3", "python3-dev", "python3-pip", "python3-venv")
BUILT = ("control-api", "target")
"""One service of each image."""
ORDER = ("token", "control-api", "target", "trainer")
READY_SECONDS = 300.0
NEEDED = ("podman", "buildah", "debootstrap", "runc", "tar")
CONTAINERS_CONF = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
# crun refuses a machine whose cgroups are partly of version 1.
runtime = "runc"
[network]
network_backend = "netavark"
"""


def main() -> int:
    """Run one command."""
    options = _parser().parse_args()
    missing = missing_here()
    if missing:
        print("missing here: " + ", ".join(missing))
        return 3
    if options.command == "check":
        return 0
    _prepare_environment()
    commands = {"build": build, "up": up, "ready": ready, "compose": compose, "down": down}
    return commands[options.command](options)


def missing_here() -> list[str]:
    """What the other commands need and this machine does not have."""
    missing = [] if platform.system() == "Linux" else ["Linux"]
    missing += [program for program in NEEDED if shutil.which(program) is None]
    if _podman_compose() is None:
        missing.append("podman-compose (pip install podman-compose)")
    if not any(Path(place).exists() for place in ("/usr/libexec/podman/catatonit", "/usr/bin/catatonit")):
        missing.append("catatonit")
    if not Path("/usr/lib/podman/netavark").exists():
        missing.append("netavark")
    if hasattr(os, "geteuid") and os.geteuid() != 0:
        missing.append("root (debootstrap changes its root directory)")
    return missing


def build(options: argparse.Namespace) -> int:
    """The base image unless it is there, then both images."""
    if options.fresh or subprocess.run(["podman", "image", "exists", STAND_IN], check=False).returncode != 0:
        started = time.monotonic()
        _build_stand_in()
        print(f"base image: {time.monotonic() - started:.0f} s", flush=True)
    arguments = ["--network=host", f"--volume={_pip_configuration()}:/etc/pip.conf:ro"]
    arguments += [f"--volume={path}:{path}:ro" for path in _paths_of_pip()]
    if options.fresh:
        arguments.append("--no-cache")
    flags = [f"--podman-build-args={' '.join(arguments)}"]
    for service in BUILT:
        started = time.monotonic()
        _compose(options, *flags, "build", service)
        print(f"image of {service}: {time.monotonic() - started:.0f} s", flush=True)
    return 0


def up(options: argparse.Namespace) -> int:
    """Start one service after the other, as their `depends_on` wants it, each once its health check passes.

    podman before 4.6 does not wait for health, and health checks on a timer need systemd: here they are run by hand.
    """
    started = time.monotonic()
    for service in ORDER:
        _compose(options, "up", "--detach", "--no-deps", service)
        if service == "token":
            status = subprocess.check_output(["podman", "wait", _container(options, service)], text=True).strip()
            if status != "0":
                raise SystemExit(f"{service} ended with {status}")
        else:
            _wait_until_healthy(_container(options, service), started)
    return 0


def ready(options: argparse.Namespace) -> int:
    """Wait until every health check passes."""
    started = time.monotonic()
    for service in ORDER[1:]:
        _wait_until_healthy(_container(options, service), started)
    return 0


def compose(options: argparse.Namespace) -> int:
    """Whatever podman-compose can do."""
    return subprocess.run(_compose_command(options, *options.arguments), cwd=ROOT, check=False).returncode


def down(options: argparse.Namespace) -> int:
    """Stop and remove containers and network; with --volumes all data too."""
    _compose(options, "down", *(["--volumes"] if options.volumes else []))
    return 0


def _wait_until_healthy(container: str, started: float) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        check = subprocess.run(["podman", "healthcheck", "run", container], capture_output=True, text=True, check=False)
        if check.returncode == 0:
            print(f"{container} is ready after {time.monotonic() - started:.1f} s", flush=True)
            return
        if time.monotonic() > deadline:
            subprocess.run(["podman", "logs", "--tail", "50", container], check=False)
            raise SystemExit(f"{container} is not healthy after {READY_SECONDS:.0f} s: {check.stdout}{check.stderr}")
        time.sleep(1)


def _build_stand_in() -> None:
    """A Debian with Python, named as the base image of both Dockerfiles."""
    root = WORK / "rootfs"
    shutil.rmtree(root, ignore_errors=True)
    include = ",".join(PACKAGES)
    try:
        _run("debootstrap", "--variant=minbase", f"--include={include}", SUITE, str(root), quiet=True)
        _run("chroot", str(root), "apt-get", "clean")
        archive = subprocess.Popen(["tar", "--directory", str(root), "--create", "."], stdout=subprocess.PIPE)
        subprocess.run(["podman", "import", "--quiet", "-", STAND_IN], stdin=archive.stdout, check=True)
        if archive.wait() != 0:
            raise SystemExit("tar could not read the base system")
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _pip_settings() -> dict[str, str]:
    """This machine's pip configuration, the environment's last, as pip itself weighs them."""
    listing = subprocess.check_output([sys.executable, "-m", "pip", "config", "list"], text=True)
    settings: dict[str, str] = {}
    from_environment: dict[str, str] = {}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in ("global", "install"):
            settings[key] = ast.literal_eval(value)
        elif section == ":env:":
            from_environment[key] = ast.literal_eval(value)
    return settings | from_environment


def _pip_configuration() -> Path:
    """The settings as a file that a build can mount: an environment variable would stay in the image."""
    file = configparser.ConfigParser(interpolation=None)
    file["global"] = _pip_settings()
    path = WORK / "pip.conf"
    with path.open("w", encoding="utf-8") as output:
        file.write(output)
    return path


def _paths_of_pip() -> list[Path]:
    """Files and directories that the settings name. The files of an index lie beside its list of names."""
    paths = set()
    for word in " ".join(_pip_settings().values()).split():
        path = Path(word.removeprefix("file://"))
        if path.is_absolute() and path.exists():
            paths.add(path.parent if word.startswith("file://") else path)
    return sorted(paths)


def _prepare_environment() -> None:
    """For podman and for the variables of compose.yaml."""
    WORK.mkdir(parents=True, exist_ok=True)
    configuration = WORK / "containers.conf"
    configuration.write_text(CONTAINERS_CONF, encoding="utf-8")
    os.environ["CONTAINERS_CONF"] = str(configuration)
    os.environ["SLIPSTREAM_BASE_IMAGE"] = STAND_IN
    # From wherever pip here gets it.
    os.environ.setdefault("SLIPSTREAM_TORCH_INDEX", "")


def _podman_compose() -> str | None:
    return shutil.which("podman-compose") or shutil.which(Path(sys.executable).with_name("podman-compose"))


def _compose_command(options: argparse.Namespace, *arguments: str) -> list[str]:
    program = _podman_compose()
    assert program is not None
    return [program, "--file", str(ROOT / "compose.yaml"), "--project-name", options.project, *arguments]


def _compose(options: argparse.Namespace, *arguments: str) -> None:
    _run(*_compose_command(options, *arguments), quiet=True)


def _container(options: argparse.Namespace, service: str) -> str:
    return f"{options.project}_{service}_1"


def _run(*command: str, quiet: bool = False) -> None:
    """Run a program in the root of the repository; what a quiet one said is shown when it fails."""
    output = subprocess.PIPE if quiet else None
    done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        print(done.stdout or "")
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--project", default="slipstream", help="prefix of containers and volumes; default: %(default)s"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("check", help="say what is missing here")
    build = commands.add_parser("build", help="build the images")
    build.add_argument("--fresh", action="store_true", help="from nothing: no cached layer, a new base image")
    commands.add_parser("up", help="start the stack and wait until it is ready")
    commands.add_parser("ready", help="wait until it is ready")
    anything = commands.add_parser("compose", help="run podman-compose with the same settings")
    anything.add_argument("arguments", nargs=argparse.REMAINDER)
    down = commands.add_parser("down", help="stop the stack and remove its containers")
    down.add_argument("--volumes", action="store_true", help="and everything that it has stored")
    return parser


if __name__ == "__main__":
    sys.exit(main())
