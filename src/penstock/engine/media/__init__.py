"""Images and videos of requests: sources, budget, decoding and tensors."""
