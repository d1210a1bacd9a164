"""Which optimizers of torch work element by element, so that a parameter may be divided."""

from __future__ import annotations

from typing import Any

from torch import optim

State = dict[str, Any]  # of one parameter, as in the `state_dict` of an optimizer

_BY_ELEMENT = {
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
}


def works_by_element(optimizer: Any) -> bool:
    """Return whether the result for each element depends on that element only.

    This is known for optimizers of torch and not assumed for others.
    """
    return optimizer in _BY_ELEMENT
