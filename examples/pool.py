"""A pool lends blocks of shared memory, and its peers grant each other the right to open them."""

import numpy as np

from penstock.lowlevel import Pool

image = np.arange(1 << 20, dtype=np.uint8)
pool = Pool.create(64 << 20)  # claimed now, or MemoryExhausted now
lease = pool.take(image.nbytes)
np.frombuffer(lease, image.dtype)[:] = image  # or let the decoder write there
ref = pool.share(lease, to=[pool.peer])  # plain data, for any message; each named peer may open it once
view = np.frombuffer(pool.open(ref), image.dtype)  # over there: a read-only view, given back with its last array
assert (view == image).all() and not view.flags.writeable
