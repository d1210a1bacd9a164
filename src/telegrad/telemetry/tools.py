"""Start the tools of `telegrad.telemetry` that this process uses, when an agent opens."""

from __future__ import annotations

import importlib
import os
import sys

from telegrad.errors import UsageError
from telegrad.runtime import AgentRuntime
from telegrad.telemetry import kineto, torch_debug


def start(runtime: AgentRuntime) -> None:
    """Show the calls of an agent in torch's profiler and debug server, and in what is imported."""
    kineto.enable()
    torch_debug.register()
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"  # OpenTelemetry's variable
    if "opentelemetry.trace" in sys.modules and not disabled:
        importlib.import_module("telegrad.telemetry.opentelemetry").enable()
    if runtime.config.metrics_port is not None:
        try:
            prometheus = importlib.import_module("telegrad.telemetry.prometheus")
        except ImportError as error:
            raise UsageError(
                "metrics_port needs the package prometheus-client: "
                "pip install 'telegrad[prometheus]'"
            ) from error
        prometheus.serve(runtime)
