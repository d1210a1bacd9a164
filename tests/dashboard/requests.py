"""Requests to a dashboard, as a browser sends them."""

from __future__ import annotations

import http.client
import json
from typing import Any, NamedTuple
from urllib.parse import urlsplit

LIMIT = 20.0


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is not JSON")

        return json.loads(self.text, parse_constant=refuse)


def token_of(url: str) -> str:
    return urlsplit(url).fragment.removeprefix("token=")


def get(url: str, path: str, method: str = "GET", **headers: str) -> Answer:
    """Send a request with the token of the address. Headers replace those that a browser sends."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=LIMIT)
    try:
        sent = {"Authorization": f"Bearer {token_of(url)}"}
        sent |= {name.replace("_", "-"): text for name, text in headers.items()}
        connection.request(method, path, headers=sent)
        answer = connection.getresponse()
        return Answer(answer.status, dict(answer.getheaders()), answer.read().decode())
    finally:
        connection.close()


def states(url: str) -> dict[str, str]:
    """Return the states of the workers."""
    workers = get(url, "/api/group").json["workers"]
    return {worker["name"]: worker["state"] for worker in workers}
