"""A worker sends a record and is killed. The receiver gets the record, and then an error that names the worker."""

import os

import penstock

ring = penstock.Ring()
if os.fork() == 0:
    ring.open_sender(name="worker").send(b"step 1")
    os.kill(os.getpid(), 9)
for record in ring.open_receiver():
    print(record)
