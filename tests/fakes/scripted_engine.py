"""An engine process without a model: says at once that it is ready, computes nothing, and fails where it is told to.

The server's side of engines is real around it. Its target names a directory: `facts.json` there is what it says of the
target, the other files are its orders, by the number of a pack:

    crash-7     it crashes whenever it is to compute pack 7
    hold-7      it makes `at-7.PID`, and waits until `hold-7` is gone or it is killed
    nan-7       it says that pack 7 is not finite
    refuse-7    it says that it has no memory for pack 7, and ends
    crash-start, refuse-start
"""

import argparse
import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from target_server.engine_line import EngineLine, Message


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--threads")
    args = parser.parse_args()
    line = EngineLine(socket.socket(fileno=args.control_fd))
    begin = line.receive()
    if begin is None:
        return 0
    directory = Path(json.loads(begin.fields["target"])["model"])
    if (directory / "crash-start").exists():
        sys.stderr.write(f"{args.name} cannot find its device\n")
        return 3
    if (directory / "refuse-start").exists():
        line.send(refusal("the target is too large."))
        return 3
    line.send(Message("ready", json.loads((directory / "facts.json").read_text())))
    orders: list[Message] = []
    heard = threading.Condition()

    def listen() -> None:
        while (message := line.receive()) is not None:
            with heard:
                orders.append(message)
                heard.notify()
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        with heard:
            heard.wait_for(lambda: bool(orders))
            order = orders.pop(0)
        number = order.fields.get("number")
        if (directory / f"refuse-{number}").exists():
            line.send(refusal(f"no memory for pack {number}."))
            return 3
        answer = obey(order, directory)
        if begin.fields["rank"] == 0:
            line.send(answer)


def refusal(message: str) -> Message:
    """What an engine says that cannot go on."""
    return Message("refused", {"message": message, "reason": "OUT_OF_MEMORY", "remedy": "Take a smaller one."})


def obey(order: Message, directory: Path) -> Message:
    """Compute a pack, or do what else is asked for."""
    if order.kind != "pack":
        return Message("done", {"of": order.fields["id"]})
    number = order.fields["number"]
    if (directory / f"hold-{number}").exists():
        (directory / f"at-{number}.{os.getpid()}").touch()
        while (directory / f"hold-{number}").exists():
            time.sleep(0.01)
    if (directory / f"crash-{number}").exists():
        sys.stderr.write(f"pack {number} is poison\n")
        sys.stderr.flush()
        os.abort()
    finite = not (directory / f"nan-{number}").exists()
    return Message("computed", {"stream": order.fields["stream"], "number": number, "finite": finite})


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the server has ended
        sys.exit(main())
