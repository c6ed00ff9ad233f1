"""Penstock: the data plane between the processes of an inference engine, through shared memory."""

from __future__ import annotations

# typing is not imported: `penstock serve` must reach the installation of its signal handlers within milliseconds.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from penstock.public_names import (
        AsyncReceiver,
        AsyncSender,
        Broadcast,
        Buffer,
        ClosedError,
        DecodeError,
        EndOfChannel,
        Handle,
        Inbox,
        Lease,
        Loan,
        MemoryExhausted,
        Missing,
        PeerDied,
        PenstockError,
        Receiver,
        Ring,
        Scope,
        Sender,
        Store,
        Timeout,
        WouldBlock,
        __version__,
        attach,
        content_key,
    )
else:

    def __getattr__(name: str) -> object:
        """Imports all public names when the first of them is used: the import of numpy and of the core takes 0.2 s."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from penstock import public_names

        globals().update({public: getattr(public_names, public) for public in __all__})
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "AsyncReceiver",
    "AsyncSender",
    "Broadcast",
    "Buffer",
    "ClosedError",
    "DecodeError",
    "EndOfChannel",
    "Handle",
    "Inbox",
    "Lease",
    "Loan",
    "MemoryExhausted",
    "Missing",
    "PeerDied",
    "PenstockError",
    "Receiver",
    "Ring",
    "Scope",
    "Sender",
    "Store",
    "Timeout",
    "WouldBlock",
    "__version__",
    "attach",
    "content_key",
]
