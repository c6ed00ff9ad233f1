"""Images and videos of requests: their bytes, what bounds these, their decoding, and their tensors."""
