"""Which device a tensor arrives on: device maps as torch has them, and what counts where a map says nothing."""

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
    """From the devices of this worker to those of a peer. In a reply, the caller's map is read backwards."""

    known: Mapping[torch.device, torch.device]
    unmapped: str
    is_reply: bool = False

    def target(self, device: torch.device) -> torch.device | None:
        """Where a tensor on `device` arrives; None: it must not be sent."""
        if device in self.known:
            return self.known[device]
        return None if self.unmapped == REFUSE and device.type != "cpu" else device

    def falls_back_to_cpu(self, device: torch.device) -> bool:
        """May a tensor arrive on the CPU if the peer has no such device?"""
        return self.unmapped == CPU and device not in self.known


ANY_DEVICE = DeviceRoute({}, CPU)  # for tensors that their receiver moves where they belong
ANY_DEVICE_MARK = "_tensors_go_anywhere"


def allow_any_device(function: F) -> F:
    """A decorator for functions of Telegrad that move the tensors in their arguments and results themselves."""
    setattr(function, ANY_DEVICE_MARK, True)
    return function


def request_route(maps: Mapping[str, Mapping[str, str]], peer: str, unmapped: str) -> DeviceRoute:
    """The route of calls to a peer."""
    targets = list(maps.get(peer, {}).values())
    if len(set(targets)) != len(targets):
        raise UsageError(
            f"the device map for {peer!r} sends two devices to one, so results could not find back"
        )
    return _route(
        {parse_device(near): parse_device(far) for near, far in maps.get(peer, {}).items()},
        unmapped,
    )


def reply_route(devices: Mapping[str, str], unmapped: str) -> DeviceRoute:
    """The route of replies to a peer that calls with this map."""
    return _route(
        {parse_device(far): parse_device(near) for near, far in devices.items()}, unmapped
    )._replace(is_reply=True)


def parse_device(device: str | int | torch.device) -> torch.device:
    """A device with its index; `cuda` alone is the first."""
    parsed = torch.device(device)
    return torch.device(parsed.type, 0) if parsed.index is None and parsed.type != "cpu" else parsed


def is_device_map(devices: object) -> bool:
    """Could this, which a peer sent, be a device map?"""
    try:
        return isinstance(devices, dict) and all(
            parse_device(device) for pair in devices.items() for device in pair
        )
    except (RuntimeError, TypeError):
        return False


def _route(known: dict[torch.device, torch.device], unmapped: str) -> DeviceRoute:
    if known.get(_CPU, _CPU) != _CPU:
        tensors.move_host()
    return DeviceRoute(known, unmapped)
