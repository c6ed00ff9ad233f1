"""Values travel with a request as items, and are held for as long as the request lives, however it ends.

Keys by content need `pip install '.[store]'`.
"""

import msgspec
import numpy as np

import penstock


class Submit(msgspec.Struct, array_like=True):
    request: int
    image: penstock.Item


def main():
    pixels = np.ones((3, 448, 448), np.float32)
    store = penstock.Store(64 << 20)
    requests = penstock.Ring(Submit)
    with requests.open_sender() as sender, requests.open_receiver() as receiver:
        outgoing = penstock.Outgoing(store)  # one in each server
        with outgoing.scope() as scope:  # one for each request
            sender.send(Submit(1, scope.put(pixels, penstock.content_key(pixels))))  # inline where there is no room

            incoming = penstock.Incoming(store)  # one in each worker; a core passes items on, and needs no store
            submit = receiver.receive(timeout=5)
            with incoming.open(submit.image) as held:  # penstock.Missing if it came too late: that request fails
                assert held.value().sum() == pixels.sum()
    print(outgoing.stats())


if __name__ == "__main__":
    main()
