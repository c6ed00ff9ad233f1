"""Words of 8 bytes that the remote side mirrors: those that have changed since they were sent last.

Each word is one aligned load and one aligned store, as everywhere with a status board; no two words are read as one.
"""

from __future__ import annotations

from penstock.bridge import packets
from penstock.bridge.link_errors import ProtocolError
from penstock.bridge.link_spec import InboundWords, OutboundWords
from penstock.bridge.packets import WORD_PAIR, PacketQueue

MIN_PERIOD = 0.005  # seconds between two looks while frames pass


class WordSource:
    def __init__(self, lane: int, spec: OutboundWords) -> None:
        self._lane, self._spec = lane, spec
        self._sent = [0] * len(spec.words)
        self._looked_at = 0.0

    def send_changes(self, queue: PacketQueue, now: float) -> None:
        """Looks for changes, unless it has looked just now."""
        if now - self._looked_at < min(MIN_PERIOD, self._spec.period):
            return
        self._looked_at = now
        words = self._spec.words.tolist()
        if words != self._sent:
            pairs = [
                WORD_PAIR.pack(place, word)
                for place, (word, sent) in enumerate(zip(words, self._sent, strict=True))
                if word != sent
            ]
            queue.put(packets.WORDS, self._lane, payload=b"".join(pairs))
            self._sent = words

    @property
    def due_at(self) -> float:
        return self._looked_at + self._spec.period


class WordMirror:
    def __init__(self, spec: InboundWords) -> None:
        self._spec = spec
        self._places = frozenset(range(len(spec.words)) if spec.places is None else spec.places)

    def store(self, payload: memoryview) -> None:
        words = self._spec.words
        if len(payload) % WORD_PAIR.size:
            raise ProtocolError(f"words '{self._spec.name}' came in {len(payload)} bytes, not in pairs")
        for place, word in WORD_PAIR.iter_unpack(payload):
            if place >= len(words):
                raise ProtocolError(f"words '{self._spec.name}' are {len(words)}: word {place} came")
            if place in self._places:
                words[place] = word
