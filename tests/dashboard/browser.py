"""A headless Chromium, driven by the DevTools protocol through two pipes.

Chromium reads commands from descriptor 3 and writes answers and events to descriptor 4, each a text
of JSON that ends with a zero byte.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from typing import Any

PATIENCE = 60.0  # seconds after which something has failed; nothing takes that long
_OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # tests may run as root
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def executable() -> str | None:
    """Return the path of Chromium or Chrome; None if there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


class Browser:
    """A browser with an empty profile of its own."""

    def __init__(self) -> None:
        self._profile = tempfile.TemporaryDirectory(
            prefix="telegrad-browser-", ignore_cleanup_errors=True
        )
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()
        command = [str(executable()), *_OPTIONS, f"--user-data-dir={self._profile.name}"]
        wrapper = f'exec "$@" 3<&{read_commands} 4>&{write_answers}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", wrapper, "bash", *command],
            pass_fds=(read_commands, write_answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        self._ids = itertools.count(1)
        self._received = b""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser, and remove its profile."""
        try:
            self.command("Browser.close")
        except (OSError, EOFError):
            self._process.kill()
        self._process.wait(PATIENCE)
        os.close(self._commands)
        os.close(self._answers)
        self._profile.cleanup()

    def command(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result. Events that arrive are kept."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") != number:
                self.events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            else:
                return dict(answer["result"])

    def _receive(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._answers], [], [], max(until - time.monotonic(), 0))
            if not ready:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._answers, 1 << 16)
            if not data:
                raise EOFError("the browser has ended")
            self._received += data
        message, _, self._received = self._received.partition(b"\0")
        return dict(json.loads(message))

    def open(self, url: str, width: int = 1280, height: int = 900, dark: bool = False) -> Tab:
        """Open an address in a new tab, which shares nothing with others."""
        context = self.command("Target.createBrowserContext")["browserContextId"]
        target = self.command("Target.createTarget", url="about:blank", browserContextId=context)
        attached = self.command("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        tab = Tab(self, attached["sessionId"], target["targetId"])
        tab.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 700,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.command("Emulation.setEmulatedMedia", features=[scheme])
        for domain in ("Page", "Runtime", "Log"):
            tab.command(f"{domain}.enable")
        tab.go(url)
        return tab


class Tab:
    """A page."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser = browser
        self._session = session
        self._target = target

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.command(method, self._session, **parameters)

    def go(self, url: str) -> None:
        """Load an address, and wait until its script has run."""
        self.command("Page.navigate", url=url)
        self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    def reload(self) -> None:
        """Load the same address again."""
        self.evaluate("window.isOld = true")
        self.command("Page.reload")
        self.until("!window.isOld && document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript."""
        answer = self.command(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression is true, and return its value."""
        until = time.monotonic() + PATIENCE
        while True:
            try:
                found = self.evaluate(f"(() => {{ return {expression} }})()")
            except RuntimeError:  # the document is being replaced
                found = None
            if found:
                return found
            if time.monotonic() > until:
                text = self.evaluate("document.body && document.body.innerText")
                raise AssertionError(f"{expression} did not become true; the page says:\n{text}")
            time.sleep(0.02)

    def until_text(self, element: str, text: str) -> None:
        """Wait until the element with this id contains a text."""
        self.until(f"document.getElementById({element!r})?.innerText.includes({json.dumps(text)})")

    def click(self, element: str) -> None:
        """Click on the element with this id."""
        self.evaluate(f"document.getElementById({element!r}).click()")

    def errors(self) -> list[str]:
        """Return uncaught exceptions, and errors and violations of policies that were logged."""
        self.evaluate("0")  # so that what was sent before has arrived
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            parameters = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(parameters["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and parameters["entry"]["level"] == "error":
                found.append(parameters["entry"]["text"])
        return found

    def screenshot(self, whole: bool = False) -> bytes:
        """Return a picture, as PNG, of what is visible, or of the whole page."""
        answer = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(answer["data"])

    def close(self) -> None:
        self._browser.command("Target.closeTarget", targetId=self._target)
