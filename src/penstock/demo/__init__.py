"""A demonstration: a core, some workers and a server exchange messages and images, and now and then one is killed.

    server ──ring 'submit': Image──► core ──broadcast 'steps': Step──► worker i
       │                              ▲ └───ring 'events': Noticed──► this process, which starts all of them, and shows
       │                              └────inbox 'answers': Hello, Done───┘              what the segments tell
       └──pool 'images': the bytes lie here once; workers open them by the Ref in the message

`messages` and `plumbing` are what they share, `processes` what each does, `keeper` who keeps them running, `sight` and
`view` what is shown. Leaves to `inspect`: how numbers are written. Nothing here is needed by anything else.
"""

from penstock.demo.command import run
from penstock.demo.keeper import Options

__all__ = ["Options", "run"]
