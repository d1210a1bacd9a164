"""References to objects that live on one worker and are used from others.

`RRef` and `remote` are public; everything else here is internal. `owned_objects` is the owner's
side: the objects and the number of references that each other worker has to them. `manager` knows
the references that are alive on this worker, and carries changes from users to owners.
`owner_calls` holds the functions that an owner runs for its users. Torch's argument conventions
and module-level functions belong in `telegrad.rpc`, not here.
"""

from telegrad.refs.rref import RRef, remote

__all__ = ["RRef", "remote"]
