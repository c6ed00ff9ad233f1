"""What running processes' segments tell of themselves, and why somebody waits: seen from outside, nobody is disturbed.

`finding` says where to look (`processes`, `segments`), `verdict` what it means (`waits`), `showing` how it is told
(`tables`, `words`). Leaves to the native core: reading one segment.
"""

from penstock.tools.inspect.diagnosis import verdict_of
from penstock.tools.inspect.discovery import NotFound, holders_of_segments, look
from penstock.tools.inspect.numbers import counted, in_seconds, in_units
from penstock.tools.inspect.processes import Process, all_processes, private_nbytes_of, process_of
from penstock.tools.inspect.render import show
from penstock.tools.inspect.segments import Json
from penstock.tools.inspect.tables import Table, tables_of

__all__ = [
    "Json",
    "NotFound",
    "Process",
    "Table",
    "all_processes",
    "counted",
    "holders_of_segments",
    "in_seconds",
    "in_units",
    "look",
    "private_nbytes_of",
    "process_of",
    "show",
    "tables_of",
    "verdict_of",
]
