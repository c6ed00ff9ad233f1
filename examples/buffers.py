"""Large records without a copy: on a channel of buffers, receivers get views."""

import numpy as np

import penstock

frames = penstock.Ring(penstock.Buffer, name="frames")
with frames.open_sender() as sender, frames.open_receiver() as receiver:
    sender.send([b"head", np.zeros(1 << 20, np.uint8)])  # a list of buffers is sent as one record
    with receiver.receive(timeout=5) as buffer:
        print(buffer.nbytes, bytes(buffer.view[:4]))
