"""The orders of native/atomic.h, by name, for the models: `load("committed", publish.acquire)`.

Each half is a number of explorer.py that knows its name, so a scene can be walked without it (Scene.without): what
acquires, or releases, by that name is relaxed then, and nothing else changes. Of a sequentially consistent pair, side
says which half it is: what comes first and then looks (release), or what says that it waits and looks again (acquire).
"""

from tests.model.explorer import ACQ_REL, ACQUIRE, RELAXED, RELEASE, SEQ_CST, Half

ORDERS: list[str] = []


class Order:
    def __init__(self, name: str) -> None:
        ORDERS.append(name)
        self.acquire = Half(ACQUIRE, name, {"acquire": RELAXED})
        self.release = Half(RELEASE, name, {"release": RELAXED})
        self.acq_rel = Half(ACQ_REL, name, {"acquire": RELEASE, "release": ACQUIRE})
        self.seq_cst_first = Half(SEQ_CST, name, {"release": RELAXED})
        self.seq_cst_then = Half(SEQ_CST, name, {"acquire": RELAXED})


publish = Order("publish")
room = Order("room")
ready = Order("ready")
bell = Order("bell")
pend = Order("pend")
mode = Order("mode")
joining = Order("joining")
end = Order("end")
changes = Order("changes")
lock = Order("lock")
block = Order("block")
returns = Order("returns")
fills = Order("fills")
granules = Order("granules")
tap = Order("tap")
trace = Order("trace")
identity = Order("identity")
epoch = Order("epoch")
members = Order("members")
ledger = Order("ledger")
bell_pipe = Order("bell_pipe")
watch_pipe = Order("watch_pipe")
ranks = Order("ranks")
views = Order("views")
mapping = Order("mapping")
watcher = Order("watcher")
robust = Order("robust")
point = Order("point")
work = Order("work")
