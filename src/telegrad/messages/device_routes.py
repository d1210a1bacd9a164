"""Device routes: on which device a tensor arrives.

Device maps are those of torch. The setting `unmapped` decides about devices that no map contains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from telegrad.errors import UsageError
from telegrad.wire import tensors

F = TypeVar("F", bound=Callable[..., Any])
_CPU = torch.device("cpu")

SAME, CPU, REFUSE = UNMAPPED = ("same", "cpu", "refuse")


class DeviceRoute(NamedTuple):
    """Map the devices of this worker to those of a peer.

    A reply uses the map of the caller in the other direction.
    """

    device_map: Mapping[torch.device, torch.device]
    unmapped: str
    is_reply: bool = False

    def target(self, device: torch.device) -> torch.device | None:
        """Return where a tensor on `device` arrives; None: it must not be sent."""
        if device in self.device_map:
            return self.device_map[device]
        return None if self.unmapped == REFUSE and device.type != "cpu" else device

    def falls_back_to_cpu(self, device: torch.device) -> bool:
        """Return whether a tensor may arrive on the CPU if the peer has no such device."""
        return self.unmapped == CPU and device not in self.device_map


ANY_DEVICE = DeviceRoute({}, CPU)  # for tensors that their receiver moves to another device
ANY_DEVICE_MARK = "_tensors_go_anywhere"


def allow_any_device(function: F) -> F:
    """Decorate a function of Telegrad that moves the tensors that it gets and returns itself."""
    setattr(function, ANY_DEVICE_MARK, True)
    return function


def request_route(maps: Mapping[str, Mapping[str, str]], peer: str, unmapped: str) -> DeviceRoute:
    """Return the route of calls to a peer."""
    names = maps.get(peer, {})
    if len(set(names.values())) != len(names):
        raise UsageError(
            f"the device map for {peer!r} sends two devices to one, so results could not find back"
        )
    device_map = {parse_device(local): parse_device(remote) for local, remote in names.items()}
    return _route(device_map, unmapped)


def reply_route(devices: Mapping[str, str], unmapped: str) -> DeviceRoute:
    """Return the route of replies to a peer that calls with this device map."""
    device_map = {parse_device(local): parse_device(remote) for remote, local in devices.items()}
    return _route(device_map, unmapped)._replace(is_reply=True)


def parse_device(device: str | int | torch.device) -> torch.device:
    """Return a device with its index; `cuda` alone is the first."""
    parsed = torch.device(device)
    return torch.device(parsed.type, 0) if parsed.index is None and parsed.type != "cpu" else parsed


def is_device_map(devices: object) -> bool:
    """Return whether a value that a peer sent is a valid device map."""
    try:
        return isinstance(devices, dict) and all(
            parse_device(device) for pair in devices.items() for device in pair
        )
    except (RuntimeError, TypeError):
        return False


def _route(device_map: dict[torch.device, torch.device], unmapped: str) -> DeviceRoute:
    if device_map.get(_CPU, _CPU) != _CPU:
        tensors.map_cpu_tensors()
    return DeviceRoute(device_map, unmapped)
