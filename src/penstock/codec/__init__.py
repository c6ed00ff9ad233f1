"""Messages: typed objects to frames and back, and changes in sequence.

Messages are msgspec structs, encoded as arrays; no code crosses a process boundary. The channel decides how frames
travel, and the user which messages exist.
"""

from penstock.codec.buffer import Buffer
from penstock.codec.catalogue import Catalogue, Schema
from penstock.codec.frame import FrameDecoder, FrameEncoder

__all__ = ["Buffer", "Catalogue", "FrameDecoder", "FrameEncoder", "Schema"]
