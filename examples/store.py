"""What many processes want is kept by content, once for all of them, and makes room when nobody holds it.

Keys by content need `pip install '.[store]'`.
"""

import multiprocessing

import numpy as np

import penstock
from penstock import lowlevel


def preprocess(image):
    return image.astype(np.float32) / 255


def reader(store, key):
    print("over there:", store.get(key).value()["pixels"].shape)  # no copy: a read-only view of the same memory


def main():
    image = np.random.default_rng(0).integers(0, 256, (448, 448, 3), np.uint8)
    store = penstock.Store(64 << 20)  # claimed now, or MemoryExhausted now

    key = penstock.content_key(image)  # 32 bytes of what is in it, and of how it was processed
    try:
        stored = store.get(key)  # held, for as long as `stored` or an array of it lives
    except penstock.Missing:
        stored = store.put(key, {"pixels": preprocess(image), "grid": [1, 32, 32]})  # copied by whoever is first
    pixels = stored.value()["pixels"]
    assert not pixels.flags.writeable

    process = multiprocessing.get_context("spawn").Process(target=reader, args=(store, key))
    process.start()
    process.join()

    key = penstock.content_key(image, "in place")
    shape = lowlevel.Empty((448, 448, 3), "float32")
    with store.make(key, {"pixels": shape}) as making:  # others who want the key wait for commit()
        if making.is_new:
            np.divide(image, 255, out=making.value()["pixels"], dtype=np.float32)
        stored = making.commit()
    assert (stored.value()["pixels"] == pixels).all()

    seen = store.stats()
    print(f"{len(seen.items)} values; hits: {seen.hits}, misses: {seen.misses}")


if __name__ == "__main__":
    main()
