"""Values travel with a request as handles, and are held for as long as the request lives, however it ends.

Keys by content need `pip install '.[store]'`.
"""

import msgspec
import numpy as np

import penstock


class Submit(msgspec.Struct, array_like=True):
    request: int
    image: penstock.Handle


def main():
    pixels = np.ones((3, 448, 448), np.float32)
    store = penstock.Store(64 << 20)
    requests = penstock.Ring(Submit)
    with requests.open_sender() as sender, requests.open_receiver() as receiver:
        with penstock.Scope(store) as scope:  # one for each request
            key = penstock.content_key(pixels)
            sender.send(Submit(1, scope.put(pixels, key=key)))  # inline where the store has no room

            submit = receiver.receive(timeout=5)  # a core passes handles on, and needs no store
            with submit.image.open(store) as lease:  # penstock.Missing if the scope has ended and the value was evicted
                assert lease.value().sum() == pixels.sum()
            print(scope.stats())


if __name__ == "__main__":
    main()
