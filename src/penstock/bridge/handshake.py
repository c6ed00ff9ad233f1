"""The handshake of a link: both sides prove that they have the secret, then compare what they are.

    connector                                      listener
    Hello: magic, nonce, knock             ──►
                                           ◄──     Hello: magic, nonce, clock, proof; or a refusal
    Hello: clock, proof                    ──►
    Introduction: offer                    ──►
                                           ◄──     Introduction: verdict and offer
    Introduction: verdict                  ──►

A proof is an HMAC of the secret over both nonces, the role and the clock. An introduction is sealed by an HMAC, with a
key of this handshake, over the role, the number of the message and its bytes. A verdict is empty, or says why the link
is refused. Until a proof has come a side reads STRANGER_NBYTES of a message at most, and a listener says nothing of
itself. When a link goes on over a new connection, `resumption` says what is in the place of the offers.

A knock is 16 random bytes and their HMAC. The first bytes of a connection carry the knock: the first Hello, or over
TLS the name of the server in ClientHello. A listener keeps connections that have knocked apart from strangers. A knock
proves no more than that: a process that reads the network may send a knock before the node does.

This is the protocol alone: `receive` takes a message, and `outbox` has those to be sent. Leaves sockets to the
listener, and what fits to the offer.
"""

from __future__ import annotations

import hmac
import os
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from penstock.bridge.link_errors import BridgeRefused, RefusalKind
from penstock.bridge.link_offer import LinkOffer, differences
from penstock.bridge.link_spec import SECRET_NBYTES, LinkSpec, RemoteSide
from penstock.bridge.resumption import ENDED, ListenerResumer, ResumeOffer, Suspension

MAGIC = b"penstock bridge 2"
NONCE_NBYTES = 32
KNOCK_NBYTES = 32  # half of them random, half an HMAC
MAX_KNOCKS = 4096  # that a listener remembers
STRANGER_NBYTES = 256
OFFER_NBYTES = 8 << 20  # descriptions of the messages of all channels
CONNECTOR, LISTENER = b"connector", b"listener"
WRONG_SECRET = "the secret is another one"
FOREIGN = "the other side does not speak the protocol of a bridge"
ONE_SIDED_TLS = "one side speaks TLS and the other one does not: give certificates to both, or to neither"
KINDS: dict[str, RefusalKind] = {WRONG_SECRET: "secret", ONE_SIDED_TLS: "tls"}


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """The messages before both sides have proved themselves."""

    magic: bytes
    nonce: bytes
    clock_ns: int = 0
    proof: bytes = b""  # of a connector's first one: the knock
    refusal: str = ""


class Introduction(msgspec.Struct, array_like=True, frozen=True):
    verdict: str = ""  # why the link is refused; empty: it is not, as far as the local side can know yet
    offer: LinkOffer | None = None
    resume_offer: ResumeOffer | None = None


class Sealed(msgspec.Struct, array_like=True, frozen=True):
    seal: bytes
    introduction: bytes


_hello = msgspec.msgpack.Decoder(Hello)
_sealed = msgspec.msgpack.Decoder(Sealed)
_introduction = msgspec.msgpack.Decoder(Introduction)
_WRONG = (msgspec.MsgspecError, RecursionError)


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(len(part).to_bytes(4, "little") + part for part in parts), "sha256")


def require_secret(secret: bytes) -> None:
    if len(secret) != SECRET_NBYTES:
        raise ValueError(f"the secret of a bridge has {SECRET_NBYTES} bytes, not {len(secret)}")


def make_knock(secret: bytes) -> bytes:
    chance = os.urandom(KNOCK_NBYTES // 2)
    return chance + _mac(secret, b"knock", chance)[: KNOCK_NBYTES // 2]


class KnockLog:
    """The knocks that a listener has received: each counts once."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._used: dict[bytes, None] = {}  # the oldest first

    def is_new(self, knock: bytes) -> bool:
        """Returns whether a process that has the secret made this knock, and no connection has had it."""
        chance, mac = knock[: KNOCK_NBYTES // 2], knock[KNOCK_NBYTES // 2 :]
        if not hmac.compare_digest(_mac(self._secret, b"knock", chance)[: KNOCK_NBYTES // 2], mac):
            return False
        if knock in self._used:
            return False
        self._used[knock] = None
        if len(self._used) > MAX_KNOCKS:
            del self._used[next(iter(self._used))]
        return True


class Handshake:
    """One side. `receive` raises BridgeRefused; what is in `outbox` then is still to be sent."""

    role = b""
    other_role = b""

    def __init__(self, secret: bytes, nonce: bytes | None = None, clock: Callable[[], int] = time.monotonic_ns) -> None:
        require_secret(secret)
        self.outbox: list[bytes] = []
        self.spec: LinkSpec | None = None
        self.offer: LinkOffer | None = None  # the remote side's
        self.remote: RemoteSide | None = None
        self.resume_offer: ResumeOffer | None = None  # the remote side's, of a link that goes on
        self._secret = secret
        self._nonce = os.urandom(NONCE_NBYTES) if nonce is None else nonce
        self._clock = clock
        self._sent_ns = clock()
        self._clock_offset_ns = 0
        self.knock = b""  # of a connector
        self.has_knocked = False  # a connector has; a listener knows
        self._is_proved = False  # the remote side has the secret
        self._sent = self._received = 0  # introductions

    @property
    def max_nbytes(self) -> int:
        """Of the next message."""
        return OFFER_NBYTES if self._is_proved else STRANGER_NBYTES

    @property
    def is_done(self) -> bool:
        return self.remote is not None or self.resume_offer is not None

    @property
    def session(self) -> bytes:
        """The name of the link that has begun, for a ResumeOffer."""
        return _mac(self._key, b"name of the session")

    def receive(self, message: bytes) -> None:
        """Takes the next message. Raises BridgeRefused."""
        raise NotImplementedError

    # ── before the proofs ──
    def _say_hello(self, role: bytes = b"") -> None:
        """role: that is proved; empty: the connector knocks."""
        self._sent_ns = self._clock()
        proof = self._proof(role, self._nonce, self._sent_ns) if role else self.knock
        self.outbox.append(msgspec.msgpack.encode(Hello(MAGIC, self._nonce, self._sent_ns, proof)))

    def _read_hello(self, message: bytes) -> Hello:
        try:
            hello = _hello.decode(message)
        except _WRONG:
            raise self.refused("foreign", FOREIGN) from None
        if hello.refusal:
            text = f"the {self.other_role.decode()} refuses: {hello.refusal[:STRANGER_NBYTES]}"
            raise BridgeRefused.of(KINDS.get(hello.refusal, "foreign"), text)
        if hello.magic != MAGIC or len(hello.nonce) != NONCE_NBYTES:
            raise self.refused("foreign", f"{FOREIGN} that is spoken here, {MAGIC.decode()}")
        return hello

    def refused(self, kind: RefusalKind, reason: str) -> BridgeRefused:
        """Returns the error, and tells the remote side why."""
        self.outbox.append(msgspec.msgpack.encode(Hello(b"", b"", refusal=reason)))
        return BridgeRefused.of(kind, reason)

    def _set_key(self, connector_hello: bytes, listener_nonce: bytes) -> None:
        self._nonces = (connector_hello, listener_nonce)
        self._key = _mac(self._secret, b"session", *self._nonces)

    def _proof(self, role: bytes, nonce: bytes, clock_ns: int) -> bytes:
        return _mac(self._secret, b"proof", role, *self._nonces, nonce, str(clock_ns).encode())

    def _accept_proof(self, hello: Hello) -> None:
        """Also compares the clocks: the remote side has read its own between the time of our message, and now."""
        if not hmac.compare_digest(self._proof(self.other_role, hello.nonce, hello.clock_ns), hello.proof):
            raise self.refused("secret", WRONG_SECRET)
        self._is_proved = True
        self._clock_offset_ns = hello.clock_ns - (self._sent_ns + self._clock()) // 2

    # ── after them ──
    def _introduce(self, introduction: Introduction) -> None:
        encoded = msgspec.msgpack.encode(introduction)
        seal = _mac(self._key, self.role, bytes([self._sent]), encoded)
        self._sent += 1
        self.outbox.append(msgspec.msgpack.encode(Sealed(seal, encoded)))

    def _read_introduction(self, message: bytes) -> Introduction:
        try:
            sealed = _sealed.decode(message)
        except _WRONG:
            raise BridgeRefused.of("foreign", FOREIGN) from None
        expected = _mac(self._key, self.other_role, bytes([self._received]), sealed.introduction)
        if not hmac.compare_digest(expected, sealed.seal):
            raise BridgeRefused.of("foreign", "a message of the handshake has been changed on its way")
        self._received += 1
        try:
            introduction = _introduction.decode(sealed.introduction)
        except _WRONG as error:
            raise self._unfit([f"the two sides introduce themselves in different forms: {error}"]) from None
        if introduction.verdict:
            raise BridgeRefused(f"the {self.other_role.decode()} refuses: {introduction.verdict}")
        return introduction

    def _unfit(self, reasons: Sequence[str]) -> BridgeRefused:
        """Returns the error, and tells the remote side, which has proved itself, why."""
        text = "; ".join(reasons)
        self._introduce(Introduction(text))
        return BridgeRefused(text)

    def _require_fit(self, spec: LinkSpec, introduction: Introduction) -> LinkOffer:
        offer = introduction.offer
        if offer is None:
            raise self._unfit(["the other side has not introduced itself"])
        if reasons := differences(LinkOffer.of(spec), offer):
            raise self._unfit([f"link '{spec.link}' with '{offer.name}'", *reasons])
        return offer

    def _finish(self, offer: LinkOffer) -> None:
        self.offer = offer
        self.remote = RemoteSide(offer.name, offer.pid, offer.version, offer.info, self._clock_offset_ns)


class ConnectorHandshake(Handshake):
    role, other_role = CONNECTOR, LISTENER

    def __init__(
        self,
        spec: LinkSpec,
        secret: bytes,
        nonce: bytes | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        resume_offer: ResumeOffer | None = None,
    ) -> None:
        """resume_offer: the connection is for a link that has begun; None: for a new one."""
        super().__init__(secret, nonce, clock)
        self._own_spec = self.spec = spec
        self.knock = make_knock(secret)
        self._own_offer = resume_offer
        self._say_hello()
        self._first_hello = self.outbox[0]

    def receive(self, message: bytes) -> None:
        if not self._is_proved:
            hello = self._read_hello(message)
            self._set_key(self._first_hello, hello.nonce)
            self._accept_proof(hello)
            self._say_hello(CONNECTOR)
            if self._own_offer is None:
                self._introduce(Introduction(offer=LinkOffer.of(self._own_spec)))
            else:
                self._introduce(Introduction(resume_offer=self._own_offer))
        elif self._own_offer is not None:
            resume_offer = self._read_introduction(message).resume_offer
            if resume_offer is None:
                raise self._unfit([ENDED])
            self._introduce(Introduction())
            self.resume_offer = resume_offer
        else:
            offer = self._require_fit(self._own_spec, self._read_introduction(message))
            self._introduce(Introduction())
            self._finish(offer)


class ListenerHandshake(Handshake):
    """Of a listener that awaits several links: `spec` becomes the one that the connector names. `links` are those that
    have begun, by their sessions: `resumer` becomes that of the link that is to go on."""

    role, other_role = LISTENER, CONNECTOR

    def __init__(
        self,
        awaited: Sequence[LinkSpec],
        secret: bytes,
        nonce: bytes | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        knocks: KnockLog | None = None,
        links: Mapping[bytes, ListenerResumer] | None = None,
    ) -> None:
        super().__init__(secret, nonce, clock)
        self._knocks = knocks
        self.resumer: ListenerResumer | None = None
        self.suspension: Suspension | None = None  # of that link
        self._resume_offer: ResumeOffer | None = None
        self._is_parked = False
        self._links = {} if links is None else links
        self._awaited = awaited
        self._has_key = False
        self._offer: LinkOffer | None = None

    def receive(self, message: bytes) -> None:
        if not self._has_key:
            knock = self._read_hello(message).proof
            self.has_knocked = self._knocks is not None and self._knocks.is_new(knock)
            self._set_key(message, self._nonce)
            self._has_key = True
            self._say_hello(LISTENER)
        elif not self._is_proved:
            self._accept_proof(self._read_hello(message))
        elif self._resume_offer is not None:
            self._read_introduction(message)
            self.resume_offer = self._resume_offer
        elif self._offer is not None:
            self._read_introduction(message)
            self._finish(self._offer)
        elif not self._is_parked:
            self._on_offer(self._read_introduction(message))

    def _on_resume_offer(self, offer: ResumeOffer) -> None:
        self.resumer = self._links.get(offer.session)
        if self.resumer is None:
            raise self._unfit([ENDED])
        try:
            self.suspension = self.resumer.suspend()
        except BridgeRefused as refusal:
            raise self._unfit([str(refusal)]) from None
        self._resume_offer = offer
        self._introduce(Introduction(resume_offer=ResumeOffer(offer.session, self.suspension.received)))

    def _on_offer(self, introduction: Introduction) -> None:
        if introduction.resume_offer is not None:
            return self._on_resume_offer(introduction.resume_offer)
        offer = introduction.offer
        for link in list(self._links.values()):
            if offer is not None and offer.link == link.link:
                link.replace()
        if not self._awaited:  # it is neither refused nor answered: it connects again, perhaps when it is awaited
            self._is_parked = True
            return
        spec = next((spec for spec in self._awaited if offer is not None and spec.link == offer.link), None)
        if offer is not None and spec is None:
            names = ", ".join(f"'{spec.link}'" for spec in self._awaited) or "none"
            raise self._unfit([f"link '{offer.link}' of '{offer.name}' is not awaited here, but {names}"])
        spec = spec or self._awaited[0]
        self._offer = self._require_fit(spec, introduction)
        self.spec = spec
        self._introduce(Introduction(offer=LinkOffer.of(spec)))
