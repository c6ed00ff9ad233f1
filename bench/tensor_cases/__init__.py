"""The cases of bench/tensors.py: `carrying` a tensor to others, `serving` requests with images."""
