"""TorchRL: `TelegradWeightSyncScheme` for weights, `TelegradTransport` for inference servers.

Written for and tested with TorchRL 0.14.
"""

try:
    import torchrl as _torchrl  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"telegrad.integrations.torchrl needs TorchRL ({error}): pip install 'telegrad[torchrl]'"
    ) from error

from telegrad.integrations.torchrl.transport import TelegradTransport
from telegrad.integrations.torchrl.weight_sync import TelegradWeightSyncScheme

__all__ = ["TelegradTransport", "TelegradWeightSyncScheme"]
