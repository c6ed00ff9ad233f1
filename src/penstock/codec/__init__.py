"""Messages: typed objects to frames and back, and changes in sequence.

Messages are msgspec structs, encoded as arrays; nothing that could be executed crosses a process boundary. Leaves to
the channel how frames travel, and to those above the line what messages there are.
"""

from penstock.codec.buffer import Buffer
from penstock.codec.catalogue import Catalogue, Schema
from penstock.codec.frame import FrameDecoder, FrameEncoder

__all__ = ["Buffer", "Catalogue", "FrameDecoder", "FrameEncoder", "Schema"]
