"""A web page that shows a running group, live.

`serve` attaches to a group like `telegrad status` and listens on loopback; `telegrad dashboard` and
the launcher call it. `watcher` asks the workers while a page is open, `view` makes of their answers
what the page needs, `server` answers the page, and the folder `page` has its parts, which are sent
as one document.
"""

from telegrad.dashboard.server import Dashboard, serve, serve_job

__all__ = ["Dashboard", "serve", "serve_job"]
