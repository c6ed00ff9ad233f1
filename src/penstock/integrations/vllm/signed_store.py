"""A store that a tree of processes finds by an environment variable, with a secret that signs references.

The creator puts the ticket and the reference of the secret into the environment, and all processes started later can
attach. A reference from outside, such as one that a client sends back, is accepted only with a valid signature. The
secret has no key, so clearing the store keeps the secret.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets

from penstock import Handle, Lease, PenstockError, Store, Ticket
from penstock.environment import VLLM, VLLM_STORE
from penstock.lowlevel import Ref

SECRET_NBYTES = 32


def store_variable(name: str) -> str:
    """Returns the environment variable of the store of a name."""
    return VLLM_STORE.name.replace("*", name)


SHARED_IMAGES = store_variable("VLLM_IMAGES")  # of the store of all processes of a server


def ticket_of(variable: str) -> Ticket | None:
    """Returns the ticket of the store in the environment; None: the environment names no store."""
    value = os.environ.get(variable)
    return None if value is None else Ticket.parse(value.partition("/")[0])


class SignedStore:
    """The store and the secret.

    Args:
        store: the store.
        secret: a lease of the secret, held for the life of the object.
    """

    def __init__(self, store: Store, secret: Lease) -> None:
        self.store = store
        self._lease = secret
        self.secret: bytes = secret.value()

    @classmethod
    def create(
        cls, variable: str, nbytes: int, *, name: str, peer_name: str, max_items: int, max_peers: int
    ) -> SignedStore:
        """Creates a store for the process, and for all processes started later.

        Raises:
            MemoryExhausted, OSError: the machine lacks memory, or cannot create memory of the kind.
        """
        store = Store(nbytes, name=name, peer_name=peer_name, max_items=max_items, max_peers=max_peers)
        secret = store.put(secrets.token_bytes(SECRET_NBYTES))
        ref = secret.ref
        assert isinstance(ref, Ref), "a value of a store has a reference"
        os.environ[variable] = f"{store.ticket}/{ref.segment}.{ref.block}.{ref.generation}.{ref.offset}.{ref.nbytes}"
        return cls(store, secret)

    @classmethod
    def attach(cls, variable: str, *, peer_name: str) -> SignedStore:
        """Attaches to the store that the environment names.

        Raises:
            RuntimeError: the process cannot attach.
        """
        ticket, _, numbers = os.environ[variable].partition("/")
        try:
            store = Store.attach(ticket, peer_name=peer_name)
            secret = Handle(None, Ref(*map(int, numbers.split(".")))).open(store)
        except (PenstockError, OSError, ValueError, TypeError) as error:
            raise RuntimeError(
                f"{peer_name} (pid {os.getpid()}) cannot attach to the store of pid {Ticket.parse(ticket).pid}: "
                f"{error}. Both must run as one user in one pid namespace; {VLLM.name}=0 switches penstock off"
            ) from error
        return cls(store, secret)

    def sign(self, key: str, ref: Ref) -> bytes:
        """Returns the signature of a reference that was issued for `key`."""
        text = f"{ref.segment}.{ref.block}.{ref.generation}.{ref.offset}.{ref.nbytes}.{key}"
        return hmac.digest(self.secret, text.encode(), hashlib.sha256)

    def close(self) -> None:
        self._lease.release()
        self.store.close()
