"""What running processes' segments say of themselves, and why a process waits: read from outside, disturbing nothing.

`discovery` finds processes and segments (`processes`, `segments`), `diagnosis` says what they mean (`wait_graph`), and
`render` prints it (`tables`). Leaves to the native core: reading one segment.
"""

from penstock.tools.inspect.diagnosis import verdict_of
from penstock.tools.inspect.discovery import NotFound, holders_of_segments, look
from penstock.tools.inspect.processes import Process, all_processes, private_nbytes_of, process_of
from penstock.tools.inspect.render import show
from penstock.tools.inspect.segments import Json
from penstock.tools.inspect.tables import tables_of

__all__ = [
    "Json",
    "NotFound",
    "Process",
    "all_processes",
    "holders_of_segments",
    "look",
    "private_nbytes_of",
    "process_of",
    "show",
    "tables_of",
    "verdict_of",
]
