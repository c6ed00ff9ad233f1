"""Penstock: the data plane between the processes of an inference engine, through shared memory."""

from __future__ import annotations

import os
import sys

# typing is not imported: `penstock serve` must reach the installation of its signal handlers within milliseconds.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from penstock.public_names import (
        AsyncReceiver,
        AsyncSender,
        Broadcast,
        Buffer,
        ChannelError,
        ClosedError,
        CorruptRecord,
        DeathCause,
        DecodeError,
        Empty,
        EndGroup,
        EndOfChannel,
        Handle,
        Inbox,
        LayoutMismatch,
        Lease,
        Loan,
        LongRecords,
        MemoryExhausted,
        MemoryOptions,
        Missing,
        PeerDied,
        PenstockError,
        Receiver,
        Ring,
        Scope,
        Sender,
        Store,
        Ticket,
        Timeout,
        UnsupportedTensor,
        WouldBlock,
        attach,
        content_key,
    )

    __version__: str
else:

    def _is_quick_command() -> bool:
        """Whether this process begins as `penstock serve` or `penstock inspect`, also by `python -m penstock`."""
        words = sys.orig_argv
        module = words[words.index("-m") + 1 :][:1] if "-m" in words else []
        is_penstock = module == ["penstock"] or os.path.basename(sys.argv[0]) == "penstock"
        return is_penstock and sys.argv[1:2] in (["serve"], ["inspect"])

    def _import_names() -> None:
        from penstock import public_names

        globals().update({name: getattr(public_names, name) for name in __all__ if name != "__version__"})

    def __getattr__(name: str) -> object:
        """Returns the version, which takes 25 ms to find. A quick command imports the public names at the first use
        of a name."""
        if name == "__version__":
            from importlib.metadata import version

            return globals().setdefault(name, version("penstock"))
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        _import_names()
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "AsyncReceiver",
    "AsyncSender",
    "Broadcast",
    "Buffer",
    "ChannelError",
    "ClosedError",
    "CorruptRecord",
    "DeathCause",
    "DecodeError",
    "Empty",
    "EndGroup",
    "EndOfChannel",
    "Handle",
    "Inbox",
    "LayoutMismatch",
    "Lease",
    "Loan",
    "LongRecords",
    "MemoryExhausted",
    "MemoryOptions",
    "Missing",
    "PeerDied",
    "PenstockError",
    "Receiver",
    "Ring",
    "Scope",
    "Sender",
    "Store",
    "Ticket",
    "Timeout",
    "UnsupportedTensor",
    "WouldBlock",
    "__version__",
    "attach",
    "content_key",
]

# Numpy and the core take 0.2 s. Any other process imports them now: it may have no descriptor, or no right to read a
# file, when it needs the name of an error.
if not TYPE_CHECKING and not _is_quick_command():
    _import_names()
