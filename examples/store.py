"""Values that many processes need are kept by content, once for all of them, and evicted when no process holds them.

Keys by content need `pip install '.[store]'`.
"""

import multiprocessing

import numpy as np

import penstock


def preprocess(image):
    return image.astype(np.float32) / 255


def reader(store, key):
    print("over there:", store.get(key).value()["pixels"].shape)  # no copy: a read-only view of the same memory


def main():
    image = np.random.default_rng(0).integers(0, 256, (448, 448, 3), np.uint8)
    store = penstock.Store(64 << 20)  # pages are claimed as values fill it

    key = penstock.content_key(image, "divide by 255")  # 32 bytes: of the image, and of how it is processed
    try:
        lease = store.get(key)  # held, for as long as `lease` or an array of it lives
    except penstock.Missing:
        lease = store.put({"pixels": preprocess(image), "grid": [1, 32, 32]}, key=key)  # the first process copies it
    pixels = lease.value()["pixels"]
    assert not pixels.flags.writeable

    process = multiprocessing.get_context("spawn").Process(target=reader, args=(store, key))
    process.start()
    process.join()

    key = penstock.content_key(image, "divide by 255, in place")
    held = store.loan(key, {"pixels": penstock.Empty((448, 448, 3), "float32")})
    if isinstance(held, penstock.Loan):  # else a lease: another process has made the value
        with held as loan:  # other processes that want the key wait for commit()
            np.divide(image, 255, out=loan.value()["pixels"], dtype=np.float32)
            held = loan.commit()
    assert (held.value()["pixels"] == pixels).all()

    stats = store.stats()
    print(f"{len(stats.items)} values; hits: {stats.hits}, misses: {stats.misses}")


if __name__ == "__main__":
    main()
