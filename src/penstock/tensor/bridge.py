"""Tensors between processes: put into a pool, or made in it, and referred to; viewed by receivers where they lie.

A small tensor travels within its reference; so does any tensor when there is no pool, or no room. The pool records the
holders; the caller decides how references travel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
import numpy as np

from penstock._native import Lease, array, array_to_fill, forbid_writing, lease_of, place_of
from penstock.errors import MemoryExhausted, StaleRef
from penstock.memory import Peer, Pool, Ref
from penstock.tensor.kinds import kind_of
from penstock.tensor.ref import TensorRef, nbytes_of
from penstock.tensor.source import Source, source
from penstock.tensor.views import As, copied, shown_as, view, writable_as

INLINE_NBYTES = 16 << 10  # lending costs as much as copying at about 32 KiB, with 1, 2 or 4 receivers
MAX_INLINE_NBYTES = 1 << 30  # of one that finds no room: msgpack has four bytes for it

Overflow = Literal["inline", "raise"]


class TensorStats(msgspec.Struct):
    """What one `Tensors` did, in this process."""

    puts: int = 0
    put_nbytes: int = 0
    inline: int = 0  # of the puts: small ones
    overflowed: int = 0  # of the puts: those that found no pool, or no room
    shares: int = 0  # without a copy
    views: int = 0


class Tensors:
    """Tensors in a pool that several processes share. `pool`: None for none, then all of them travel inline.

    overflow: what happens to a tensor for which the pool has no room: "inline", counted, or "raise".
    """

    def __init__(self, pool: Pool | None, *, inline_nbytes: int = INLINE_NBYTES, overflow: Overflow = "inline") -> None:
        if overflow not in ("inline", "raise"):
            raise ValueError(f"overflow is 'inline' or 'raise', not {overflow!r}")
        if not 0 <= inline_nbytes <= MAX_INLINE_NBYTES:
            raise ValueError(f"inline_nbytes is between 0 and {MAX_INLINE_NBYTES}, not {inline_nbytes}")
        self.pool = pool
        self.inline_nbytes = inline_nbytes
        self.overflow: Overflow = overflow
        self.stats = TensorStats()

    # ── senders ──
    def put(
        self, array: Any, to: Iterable[Peer | int], *, detach: bool = False, timeout: float | None = 0
    ) -> TensorRef:
        """A reference to a copy of this array: of NumPy, of torch, or anything with `__dlpack__` or a buffer.

        Copied once, C-contiguous, and only what the array shows of its storage. The copy is held for the peers in `to`,
        each of which may view it once; it is gone when each has dropped its view, died, or left. Waits up to `timeout`
        seconds (None: for ever) for room. Raises UnsupportedTensor, which says what to do instead; for a tensor that
        requires grad, that is `detach=True`.
        """
        given = source(array, detach=detach)
        peers = tuple(to)
        self.stats.puts += 1
        self.stats.put_nbytes += given.nbytes
        if given.nbytes <= self.inline_nbytes:
            self.stats.inline += 1
            return _inline(given)
        if self.pool is None:
            return self._overflowing(given, MemoryExhausted(f"no pool for a tensor of {given.nbytes} bytes"))
        if not peers:
            raise ValueError("nobody would hold the copy: name the peers that may view it, or use empty() and share()")
        try:
            lease = self.pool.take(given.nbytes, timeout)
        except MemoryExhausted as error:
            return self._overflowing(given, error)
        with lease:
            given.write(lease)
            return TensorRef(given.kind.code, given.shape, self.pool.share(lease, peers))

    def empty(self, shape: Iterable[int] | int, dtype: Any, *, as_: As = "numpy", timeout: float | None = 0) -> Any:
        """An array in the pool, to be filled in place and given to share(). It holds its block as long as any view of
        it lives. dtype: of torch, of NumPy, or its name. Raises MemoryExhausted; a small one is a plain array.
        """
        kind = kind_of(dtype)
        sizes = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(map(int, shape))
        nbytes = nbytes_of(kind, sizes)
        if nbytes <= self.inline_nbytes:
            return shown_as(np.empty(sizes, kind.numpy or kind.bits), kind, as_)
        if self.pool is None:
            raise MemoryExhausted(f"no pool for a tensor of {nbytes} bytes")
        lease = self.pool.take(nbytes, timeout)
        made = array_to_fill(lease, kind.code, sizes, as_)
        return made if made is not None else writable_as(lease, kind, sizes, 0, as_)

    def share(self, array: Any, to: Iterable[Peer | int] = ()) -> TensorRef:
        """Returns a reference to an array of empty(), or to a contiguous part of it, without a copy.

        From now on the array must not be written: a NumPy array is made read-only; of a torch tensor the caller must
        see to it. Each peer in `to` may view it once, even if the caller has dropped it by then; other peers only while
        it is held. Raises ValueError for any other array: put() copies it.
        """
        pool = self.pool
        plain = None if pool is None else place_of(pool.place, array)
        if pool is not None and plain is not None and plain[-1] > self.inline_nbytes:
            ref = Ref(*plain[2:])
            pool.grant_all(ref, to)
            forbid_writing(array)
            self.stats.shares += 1
            return TensorRef(plain[0], plain[1], ref)
        given = source(array)
        if given.nbytes <= self.inline_nbytes:
            self.stats.inline += 1
            return _inline(given)
        shown = given.array
        if not isinstance(shown, np.ndarray) or not shown.flags.c_contiguous or not shown.dtype.isnative:
            raise ValueError("the array is not contiguous, or in the other byte order: put() copies it")
        address = shown.ctypes.data
        lease = None if pool is None else lease_of(pool.place, address, given.nbytes)
        if pool is None or lease is None:
            raise ValueError("the array does not lie in this pool: share() takes what empty() made, put() copies any")
        begin = np.frombuffer(memoryview(lease), np.uint8).ctypes.data
        ref = pool.share(lease, to).slice(address - begin, given.nbytes)
        forbid_writing(array)
        self.stats.shares += 1
        return TensorRef(given.kind.code, given.shape, ref)

    def revoke(self, ref: TensorRef, to: Iterable[Peer | int]) -> None:
        """Takes back what was granted with a reference that could not be sent after all."""
        if self.pool is not None and isinstance(ref.where, Ref):
            for peer in to:
                self.pool.revoke(ref.where, peer)

    # ── receivers ──
    def view(self, ref: TensorRef, as_: As = "numpy", *, writable: bool = False) -> Any:
        """Returns the tensor where it lies: read-only, and held as long as any view of it lives. Raises StaleRef if it
        is gone or was never there.

        as_: "numpy", "torch" or "bits": see views.py. writable: a private copy. Otherwise NumPy refuses to write; torch
        cannot, so a stray write through it is a SIGSEGV of this process, and no other process sees anything of it.
        """
        self.stats.views += 1
        where = ref.where
        if type(where) is bytes:
            held: bytes | Lease = where
        elif self.pool is None:
            raise ValueError("a tensor in a pool was received, and there is no pool here")
        else:
            held = self.pool.open(where)  # type: ignore[arg-type]
            if not writable:
                made = array(held, ref.code, ref.shape, as_)
                if made is not None:
                    return made
        make = copied if writable else view
        return make(held, ref.kind, ref.shape, 0, as_)

    def drop(self, ref: TensorRef) -> None:
        """Gives up a grant of this process, unread. Does nothing if the tensor is gone already."""
        if isinstance(ref.where, Ref) and self.pool is not None:
            with contextlib.suppress(StaleRef):
                self.pool.open(ref.where).release()

    # ── within ──
    def _overflowing(self, given: Source, error: MemoryExhausted) -> TensorRef:
        if self.overflow == "raise" or given.nbytes > MAX_INLINE_NBYTES:
            raise error
        self.stats.overflowed += 1
        return _inline(given)

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_spawn, (self.pool, self.inline_nbytes, self.overflow)  # of the pool only while spawning


def _from_spawn(pool: Pool | None, inline_nbytes: int, overflow: Overflow) -> Tensors:
    return Tensors(pool, inline_nbytes=inline_nbytes, overflow=overflow)


def _inline(given: Source) -> TensorRef:
    return TensorRef(given.kind.code, given.shape, given.tobytes())
