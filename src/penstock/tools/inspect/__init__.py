"""`penstock inspect`: the state of other processes' segments, and why a process waits. It only reads.

`discovery` finds processes and segments (`processes`, `segments`), `diagnosis` explains waits (`wait_graph`,
`owed_replies`), `node_memory` adds up bytes, `stacks` reads Python stacks, and `render` prints (`tables`). The native
core reads one segment.
"""

from penstock.tools.inspect.diagnosis import add_sentence, verdict_of
from penstock.tools.inspect.discovery import NotFound, holders_of_segments, look
from penstock.tools.inspect.node_memory import memory_by_kind, memory_of
from penstock.tools.inspect.owed_replies import OwedReply, owed_to
from penstock.tools.inspect.processes import Process, all_processes, private_nbytes_of, process_of
from penstock.tools.inspect.render import show
from penstock.tools.inspect.segments import Json
from penstock.tools.inspect.stacks import add_stacks
from penstock.tools.inspect.tables import tables_of

__all__ = [
    "Json",
    "NotFound",
    "OwedReply",
    "Process",
    "add_sentence",
    "add_stacks",
    "all_processes",
    "holders_of_segments",
    "look",
    "memory_by_kind",
    "memory_of",
    "owed_to",
    "private_nbytes_of",
    "process_of",
    "show",
    "tables_of",
    "verdict_of",
]
