"""`penstock top`: a running server on a terminal, as often as one likes to look.

`source` says where the server is seen, `view` how it looks, `keys` hears when it is enough, `command` is the loop.
Leaves to `server.watch` and `server.rates` what there is to see.
"""
