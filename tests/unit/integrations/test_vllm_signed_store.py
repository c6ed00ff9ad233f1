"""A store that is found by a variable of the environment, and signs references."""

import os

import pytest

from penstock import Store
from penstock.integrations.vllm.signed_store import SignedStore, ticket_of

VARIABLE = "PENSTOCK_STORE_TEST"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")  # so that it is removed again
    monkeypatch.delenv(VARIABLE)


def new_store() -> SignedStore:
    return SignedStore.create(VARIABLE, 1 << 20, name="images", peer_name="api server", max_items=64, max_peers=4)


def test_a_signed_store_is_attached_by_its_variable_with_the_same_secret() -> None:
    created = new_store()
    ticket = ticket_of(VARIABLE)
    assert ticket is not None
    assert ticket.pid == os.getpid()
    attached = SignedStore.attach(VARIABLE, peer_name="worker")
    assert attached.secret == created.secret
    assert len(attached.secret) == 32


def test_the_secret_of_a_signed_store_outlives_its_keys() -> None:
    created = new_store()
    created.store.put(b"image", key=bytes(32)).release()
    created.store.clear()
    assert SignedStore.attach(VARIABLE, peer_name="worker").secret == created.secret


def test_a_signature_is_of_one_key_and_one_reference() -> None:
    created = new_store()
    first, two = (created.store.put(b"image") for _ in range(2))
    signatures = {created.sign(key, lease.ref) for key in ("a", "b") for lease in (first, two)}
    assert len(signatures) == 4
    assert SignedStore.attach(VARIABLE, peer_name="worker").sign("a", first.ref) in signatures


@pytest.mark.parametrize("wrong", ["gone", "numbers", "ticket"])
def test_a_signed_store_that_cannot_be_attached_names_the_way_out(wrong: str) -> None:
    created = new_store()
    if wrong == "gone":
        created.close()
        del created
        other = Store(1 << 20)
        os.environ[VARIABLE] = f"{other.ticket}/1.1.1.0.64"
    elif wrong == "numbers":
        os.environ[VARIABLE] = os.environ[VARIABLE].replace(".", "..")
    else:
        os.environ[VARIABLE] = "penstock:1:1:1:1:1/1.1.1.0.64"
    with pytest.raises(RuntimeError, match=r"worker \(pid \d+\) cannot attach to the store of pid .*PENSTOCK_VLLM=0"):
        SignedStore.attach(VARIABLE, peer_name="worker")


def test_there_is_no_ticket_without_the_variable() -> None:
    assert ticket_of(VARIABLE) is None
