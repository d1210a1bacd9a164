"""Run one test in this process, which is there for nothing else, and say what happened."""

import os
import re
import sys
import time
import traceback
import unittest
from typing import Any

import cases
import fixtures
import gpus
import torch
from catalog import Test
from results import Result
from torch.testing._internal import common_distributed

RANK_FAILED = re.compile(r"Process (\d+) exited with error code 10 and exception:")
RANK_DIED = re.compile(r"Expected exit code 0 but got (-?\d+)")
ERROR_LINE = re.compile(
    r"^(?!Exception raised from)[\w.]*(Error|Exception|Failure|Exit|Interrupt)\b.*", re.M
)
LOST_PEER = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|eof \(|(Wait|Socket|Application) [Tt]imeout|peer"
)


def run(test: Test) -> Result:
    """Run the test. When its time is up, PyTorch's own watchdog gives up."""
    if os.environ[fixtures.START] == "spawn":
        gpus.show()
    if torch.cuda.device_count() < test.gpus:
        return Result(test.id, "skip", message=f"needs {test.gpus} GPU")
    if "missing_config" in test.name:
        # torch's rule; by default the same device is used
        os.environ["TELEGRAD_UNMAPPED_DEVICES"] = "refuse"
    common_distributed.TIMEOUT_DEFAULT = int(os.environ[fixtures.LIMIT])
    result, start = Result(test.id), time.monotonic()
    try:
        case: Any = getattr(cases, test.suite)(test.name)
        outcome = unittest.TextTestRunner(stream=sys.stderr, verbosity=2, warnings="ignore").run(
            unittest.TestSuite([case])
        )
        result.status, result.message = _verdict(outcome)
    except Exception as error:
        traceback.print_exc()
        result.message = f"{type(error).__name__}: {error}"
    result.ranks = list(fixtures.EXIT_CODES)
    result.seconds = round(time.monotonic() - start, 2)
    return result


def _verdict(outcome: unittest.TestResult) -> tuple[str, str]:
    for _, text in outcome.failures + outcome.errors:
        return "timeout" if "terminated or timed out" in text else "fail", _first_error(text)
    for _, reason in outcome.skipped:
        return "skip", reason
    return ("fail", "unexpected success") if outcome.unexpectedSuccesses else ("pass", "")


def _first_error(text: str) -> str:
    """One line: the error of the lowest rank that failed, passing over ranks that merely lost a
    peer.
    """
    if died := RANK_DIED.search(text):
        return f"rank 0: ended with code {died[1]}"
    _, *parts = RANK_FAILED.split(text)
    ranks = [
        (f"rank {rank}: ", body) for rank, body in zip(parts[::2], parts[1::2], strict=True)
    ] or [("", text)]
    lines = [rank + match[0] for rank, body in ranks if (match := ERROR_LINE.search(body))]
    primary = [line for line in lines if not LOST_PEER.search(line)]
    return (primary or lines or [text.strip().rpartition("\n")[2]])[0]
