"""The page of Telegrad in the front end of torch's debug server.

    from torch.distributed.debug import start_debug_server
    from torch.distributed.debug._debug_handlers import default_handlers
    from telegrad.telemetry.torch_debug_page import TelegradHandler

    start_debug_server(handlers=[*default_handlers(), TelegradHandler()])

It needs a torch that is newer than 2.11. The front end needs ``jinja2`` and ``tabulate``, and
``aiohttp`` or ``requests``.
"""

from __future__ import annotations

import html
import json
from typing import Any

from telegrad.errors import UsageError
from telegrad.observer.group import ObservedWorker, WorkerReply, group_state
from telegrad.observer.tables import status_text
from telegrad.telemetry.torch_debug import NAME

try:
    from torch.distributed.debug._frontend import DebugHandler, NavLink, Response, Route, fetch_all

    _problem = ""
    if not hasattr(DebugHandler, "fetch_timeout"):
        # one dead process would make the page fail
        _problem = "the debug server of this torch is too old: install a newer torch"
except ImportError as error:
    DebugHandler = object  # type: ignore[assignment,misc]
    _problem = f"torch's debug server cannot be imported: {error}"

__all__ = ["TelegradHandler"]


class TelegradHandler(DebugHandler):
    """Shows what `telegrad status` shows, of all processes of the job."""

    def __init__(self) -> None:
        if _problem:
            raise UsageError(_problem)

    def routes(self) -> list[Any]:
        """Return the address of the page."""
        return [Route(f"/{NAME}", self._handle)]

    def nav_links(self) -> list[Any]:
        """Return the link to the page."""
        return [NavLink(f"/{NAME}", "Telegrad")]

    def _handle(self, request: Any) -> bytes:
        addresses, replies = fetch_all(NAME, timeout=self.fetch_timeout)
        text = html.escape(_text(replies))
        page: bytes = request.frontend.render_template(
            "raw_resp.html",
            title="Telegrad",
            addrs=addresses[:1],  # the template has a section for each of them
            resps=[Response(200, text)],
        )
        return page

    def dump(self) -> str | None:
        """Return the text for torch's periodic dumps."""
        return _text(fetch_all(NAME, timeout=self.fetch_timeout)[1])

    def dump_filename(self) -> str:
        """Return the name of the file of a dump."""
        return NAME


def _text(responses: list[Any]) -> str:
    """Return the state of all processes as text."""
    replies: list[WorkerReply] = []
    for rank, response in enumerate(responses):
        if response.status_code != 200:
            worker = ObservedWorker(f"rank {rank}", rank, "", ())
            problem = f"{response.status_code}: {response.text}".partition("\n")[0]
            replies.append(WorkerReply(worker, problem=problem))
            continue
        for snapshot in json.loads(response.text):
            found = snapshot["worker"]
            worker = ObservedWorker(found["name"], found.get("rank", rank), "", ())
            problem = snapshot.get("error", "")
            replies.append(WorkerReply(worker, None if problem else snapshot, problem))
    groups = {reply.value["worker"]["group"] for reply in replies if reply.value is not None}
    return status_text(group_state(", ".join(sorted(groups)), replies))
