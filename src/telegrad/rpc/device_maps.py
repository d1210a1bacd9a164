"""Do the device maps of a group make sense? Every worker checks those of all, so all fail at the same place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from telegrad.errors import UsageError
from telegrad.messages.routes import parse_device
from telegrad.runtime import AgentRuntime

DeviceMap = Mapping[torch.device, torch.device]


class DeclaredDevices(NamedTuple):
    """What a worker says of its devices."""

    gpus: int
    maps: Mapping[str, Mapping[str, str]]
    devices: list[str]


def agree(agent: AgentRuntime, devices: Iterable[torch.device]) -> None:
    """Check the maps of all workers if anybody has one. In an open group, where workers may be missing, only ours."""
    mine = DeclaredDevices(
        torch.cuda.device_count(), agent.config.device_maps, [str(device) for device in devices]
    )
    if agent.world_size is None:
        check({agent.name: mine}, complete=False)
    elif any(member.maps_devices for member in agent.directory.members(refresh=False)):
        declared = agent.all_gather(mine, timeout=agent.config.join_timeout)
        check({info.name: declared[info.name] for info in agent.get_worker_infos()}, complete=True)


def check(group: Mapping[str, DeclaredDevices], *, complete: bool) -> None:
    for name, declared in group.items():
        own = [parse_device(device) for device in declared.devices]
        _require(len(set(own)) == len(own), f"Node {name} has duplicated devices", declared.devices)
        _require(
            _exist(own, declared.gpus),
            f"Node {name} has devices with invalid indices",
            declared.devices,
        )
        unknown = set(declared.maps) - set(group)
        _require(
            not complete or not unknown,
            f"Node {name} has invalid target node names in its device maps",
            unknown,
        )
        for target, raw in declared.maps.items():
            _check_map(
                name,
                target,
                {parse_device(near): parse_device(far) for near, far in raw.items()},
                group,
            )


def _check_map(
    name: str, target: str, devices: DeviceMap, group: Mapping[str, DeclaredDevices]
) -> None:
    where = f"in its device map for {target}"
    _require(
        len(set(devices.values())) == len(devices),
        f"Node {name} has duplicated target devices {where}",
        devices,
    )
    for side, worker, used in (
        ("source", name, devices.keys()),
        ("target", target, devices.values()),
    ):
        if worker not in group:
            continue
        allowed = {parse_device(device) for device in group[worker].devices}
        outside = {device for device in used if device.type != "cpu"} - allowed
        _require(
            not allowed or not outside,
            f"Node {name} has unexpected {side} devices {where}",
            devices,
        )
        valid = _exist(used, group[worker].gpus)
        _require(valid, f"Node {name} has {side} devices with invalid indices {where}", devices)


def _exist(devices: Iterable[torch.device], count: int) -> bool:
    return all(
        device.type == "cpu" or (device.type == "cuda" and device.index < count)
        for device in devices
    )


def _require(good: bool, complaint: str, what: object) -> None:
    if not good:
        raise UsageError(f"{complaint}: {what}")
