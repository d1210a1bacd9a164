"""Check the device maps of a group, with torch's error messages.

Every worker checks the maps of all workers, so that all raise the same error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from telegrad.errors import UsageError
from telegrad.messages.device_routes import parse_device
from telegrad.runtime import AgentRuntime

DeviceMap = Mapping[torch.device, torch.device]


class DeclaredDevices(NamedTuple):
    """The devices and device maps of one worker."""

    gpus: int
    maps: Mapping[str, Mapping[str, str]]
    devices: list[str]


def check_group(runtime: AgentRuntime, devices: Iterable[torch.device]) -> None:
    """Check the maps of all workers if any worker has one.

    In a dynamic group, whose workers may join later, check only the maps of this worker.
    """
    own = DeclaredDevices(
        torch.cuda.device_count(), runtime.config.device_maps, [str(device) for device in devices]
    )
    if runtime.world_size is None:
        check({runtime.name: own}, complete=False)
    elif any(member.maps_devices for member in runtime.directory.members(refresh=False)):
        declared = runtime.all_gather(own, timeout=runtime.config.join_timeout)
        by_rank = {info.name: declared[info.name] for info in runtime.get_worker_infos()}
        check(by_rank, complete=True)


def check(group: Mapping[str, DeclaredDevices], *, complete: bool) -> None:
    """Raise `UsageError` for the first error in the maps; `complete` if these are all workers."""
    for name, declared in group.items():
        devices = [parse_device(device) for device in declared.devices]
        _require(
            len(set(devices)) == len(devices),
            f"Node {name} has duplicated devices",
            declared.devices,
        )
        _require(
            _exist(devices, declared.gpus),
            f"Node {name} has devices with invalid indices",
            declared.devices,
        )
        unknown = set(declared.maps) - set(group)
        _require(
            not complete or not unknown,
            f"Node {name} has invalid target node names in its device maps",
            unknown,
        )
        for target, device_map in declared.maps.items():
            parsed = {parse_device(key): parse_device(value) for key, value in device_map.items()}
            _check_map(name, target, parsed, group)


def _check_map(
    name: str, target: str, device_map: DeviceMap, group: Mapping[str, DeclaredDevices]
) -> None:
    where = f"in its device map for {target}"
    _require(
        len(set(device_map.values())) == len(device_map),
        f"Node {name} has duplicated target devices {where}",
        device_map,
    )
    for side, worker, used in (
        ("source", name, device_map.keys()),
        ("target", target, device_map.values()),
    ):
        if worker not in group:
            continue
        allowed = {parse_device(device) for device in group[worker].devices}
        outside = {device for device in used if device.type != "cpu"} - allowed
        _require(
            not allowed or not outside,
            f"Node {name} has unexpected {side} devices {where}",
            device_map,
        )
        _require(
            _exist(used, group[worker].gpus),
            f"Node {name} has {side} devices with invalid indices {where}",
            device_map,
        )


def _exist(devices: Iterable[torch.device], count: int) -> bool:
    return all(
        device.type == "cpu" or (device.type == "cuda" and device.index < count)
        for device in devices
    )


def _require(condition: bool, message: str, value: object) -> None:
    if not condition:
        raise UsageError(f"{message}: {value}")
