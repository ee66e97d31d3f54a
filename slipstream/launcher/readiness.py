"""Whether the processes of a stack do their work, as the control API says."""

from datetime import datetime
from typing import Any

import httpx2

from slipstream.launcher.processes import SupervisedProcess
from slipstream.launcher.stack import API, TARGET

NO_ANSWER = "the control API does not answer"
_SECONDS = 3.0
"""A question may take; the supervisor does nothing else meanwhile."""


class Readiness:
    """Asks the control API of a stack. Not for several threads."""

    def __init__(self, api: str, token: str | None, target: str | None) -> None:
        """Nothing is sent yet.

        Args:
            api: `http://HOST:PORT`.
            token: bearer token of the services.
            target: name of the stack's target.
        """
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx2.Client(base_url=api, headers=headers, timeout=_SECONDS, trust_env=False)
        self._target = target

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def problem_of(self, process: SupervisedProcess) -> str | None:
        """Why a process does not do its work yet; None when it does."""
        try:
            if process.name == API:
                return self._problem_of_api()
            if process.name == TARGET:
                return self._problem_of_target()
            return self._problem_of_trainer(process)
        except (httpx2.HTTPError, ValueError):  # ValueError: what answers is no control API
            return NO_ANSWER

    def _problem_of_api(self) -> str | None:
        status, body = self._ask("GET", "/readyz")
        return None if status == 200 and body.get("status") == "ready" else _detail(status, body)

    def _problem_of_target(self) -> str | None:
        # Asked now: by itself the API looks at its targets every few seconds only.
        status, body = self._ask("POST", f"/v1/targets/{self._target}:probe")
        if status != 200:
            return _detail(status, body)
        return None if body["status"] == "REACHABLE" else str(body.get("detail") or body["status"])

    def _problem_of_trainer(self, process: SupervisedProcess) -> str | None:
        status, body = self._ask("GET", f"/v1/trainers/{process.name}")
        if status == 404:
            return "has not registered yet"
        if status != 200:
            return _detail(status, body)
        heard = _seconds(body["last_seen_at"])
        # Of an earlier life, it says nothing about this one.
        is_gone = body["status"] in ("STOPPED", "LOST")
        return None if not is_gone and heard >= process.since else "has not been heard of yet"

    def _ask(self, method: str, path: str) -> tuple[int, dict[str, Any]]:
        answer = self._http.request(method, path)
        body = answer.json()
        return answer.status_code, body if isinstance(body, dict) else {}


def _detail(status: int, body: dict[str, Any]) -> str:
    return str(body.get("detail") or f"the control API answered with status {status}")


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()
