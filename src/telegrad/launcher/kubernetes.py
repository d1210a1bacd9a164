"""`telegrad launch --on k8s`: a manifest with an Indexed Job, a headless Service and a Secret.

Each index of the Job is a worker. Kubernetes replaces a pod that fails, under the same index and
name in the network, up to the number of restarts; an index that fails for good ends the Job.

Without restarts, the worker with rank 0 hosts the store. With restarts, a Deployment with a Service
hosts it, so that every worker may be replaced. A Deployment does not end with the Job.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from telegrad.cluster.roles import format_roles

_RESTART_TIMEOUT = "300"  # the time until a pod is replaced grows with each failure
_PORT = 29500  # of the store
_FAILURES = "metadata.annotations['batch.kubernetes.io/job-index-failure-count']"


def manifest(
    command: Sequence[str],
    roles: Mapping[str, int],
    *,
    name: str,
    image: str,
    secret: str,
    restarts: int = 0,
    gpus: int = 0,
) -> str:
    """Return the YAML of a job that runs ``python <command>`` in each worker."""
    size = sum(roles.values())
    labels = {"app.kubernetes.io/name": name}
    variables = [
        {"name": "WORLD_SIZE", "value": str(size)},
        {"name": "TELEGRAD_ROLES", "value": format_roles(roles)},
        {"name": "TELEGRAD_LISTEN", "value": "0.0.0.0"},
        {
            "name": "TELEGRAD_ADVERTISE",
            "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}},
        },
        {"name": "TELEGRAD_RESTART", "valueFrom": {"fieldRef": {"fieldPath": _FAILURES}}},
        {
            "name": "TELEGRAD_SECRET",
            "valueFrom": {"secretKeyRef": {"name": name, "key": "secret"}},
        },
    ]
    documents: list[dict[str, Any]] = []
    if restarts:
        variables.append({"name": "TELEGRAD_RESTART_TIMEOUT", "value": _RESTART_TIMEOUT})
        variables.append({"name": "TELEGRAD_STORE", "value": f"{name}-store:{_PORT}"})
        documents = _store(f"{name}-store", image)
    container: dict[str, Any] = {
        "name": "worker",
        "image": image,
        "command": ["python", "-u", *command],
        "env": variables,
    }
    if gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
    documents += [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "labels": labels},
            "stringData": {"secret": secret},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {"batch.kubernetes.io/job-name": name},
            },
        },
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "completionMode": "Indexed",
                "completions": size,
                "parallelism": size,
                "backoffLimitPerIndex": restarts,
                "maxFailedIndexes": 0,
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {
                        "subdomain": name,
                        "restartPolicy": "Never",
                        "enableServiceLinks": False,  # they would make TELEGRAD_* variables
                        "containers": [container],
                    },
                },
            },
        },
    ]
    return "---\n".join("\n".join(_yaml(document)) + "\n" for document in documents)


def _store(name: str, image: str) -> list[dict[str, Any]]:
    """Return a Service and a Deployment that host the store."""
    labels = {"app.kubernetes.io/name": name}
    container = {
        "name": "store",
        "image": image,
        "command": ["python", "-m", "telegrad.launcher.store", str(_PORT)],
        "ports": [{"containerPort": _PORT}],
        "readinessProbe": {"tcpSocket": {"port": _PORT}},
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "labels": labels},
            "spec": {"selector": labels, "ports": [{"port": _PORT}]},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "replicas": 1,
                "strategy": {"type": "Recreate"},
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {"enableServiceLinks": False, "containers": [container]},
                },
            },
        },
    ]


def _yaml(value: Any, indent: str = "") -> Iterator[str]:
    """Yield the lines of a value as YAML in block style. Scalars are written as in JSON."""
    if isinstance(value, Mapping):
        entries = [(f"{key}:", item) for key, item in value.items()]
    else:
        entries = [("-", item) for item in value]
    for start, item in entries:
        if not isinstance(item, (Mapping, list)):
            yield f"{indent}{start} {json.dumps(item)}"
        elif start == "-":
            first, *rest = _yaml(item, indent + "  ")
            yield f"{indent}- {first.strip()}"
            yield from rest
        else:
            yield f"{indent}{start}"
            yield from _yaml(item, indent + "  ")
