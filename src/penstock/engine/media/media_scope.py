"""The scope of a request's media, with the bytes of the budget that its inline tensors hold.

Tensors in the store have left the budget: the store bounds them. Where it has no room they lie in this process until
their request ends, and count until then. They are counted when all media of the request have been loaded: a request
that held bytes while it waits for more could wait for another that does the same.
"""

from __future__ import annotations

from penstock.engine.media.byte_semaphore import ByteLease
from penstock.tensor import Scope


class MediaScope(Scope):
    """Used by one event loop, apart from `put` and `add`."""

    _leases: tuple[ByteLease, ...] = ()

    def hold(self, lease: ByteLease) -> None:
        """Holds bytes until the scope is released: at once, if it has been."""
        self._leases += (lease,)
        if self.is_released:
            self.release()

    def release(self) -> None:
        super().release()
        leases, self._leases = self._leases, ()
        for lease in leases:
            lease.release()
