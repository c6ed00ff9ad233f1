"""The bytes of images, videos and long bodies that a server process holds at a time: `--media-mb-in-flight`.

A request passes three stages, and each has a part of the budget:

| stage   | part | held                                          | from                 | to                      |
|---------|------|-----------------------------------------------|----------------------|-------------------------|
| bodies  | 1/4  | long bodies, and the data URLs cut from them  | the first byte       | the prompt is built     |
| files   | 1/4  | files read from a directory or another host   | before they are read | the medium is stored    |
| decoded | 1/2  | pixels, and the tensors made of them          | before decoding      | the medium is stored    |

A holder of one stage waits only for later stages, and a holder of the last one for none. So there is no deadlock,
which one pool for all stages would have: many half-received bodies could hold all of it.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.engine.media.byte_semaphore import ByteLease, ByteSemaphore
from penstock.engine.media.image_processor import ImageRefused

STAGES = ("bodies", "files", "decoded")
PARTS = (4, 4, 2)  # of the budget, each stage has one in so many
BODY_COPIES = 2  # a body as it was received, and the strings in it


class MediaBudget:
    """The budget of one server process."""

    def __init__(
        self, nbytes: int, changed: Callable[[int, int, int], None] = lambda stage, held, waiting: None
    ) -> None:
        """`changed` gets the number of a stage, its bytes held, and its waits."""
        self.nbytes = nbytes
        self.bodies, self.files, self.decoded = (
            ByteSemaphore(nbytes // part, _bound(changed, stage)) for stage, part in enumerate(PARTS)
        )


def _bound(changed: Callable[[int, int, int], None], stage: int) -> Callable[[int, int], None]:
    return lambda held, waiting: changed(stage, held, waiting)


async def admit(stage: ByteSemaphore, client: str, nbytes: int, work: str) -> ByteLease:
    """Waits for the bytes of some work, as "decoding the video". Raises ImageRefused if the stage never has as many."""
    try:
        return await stage.acquire(client, nbytes)
    except ValueError:
        limit = f"at most {stage.nbytes} are held at a time (--media-mb-in-flight)"
        raise ImageRefused(413, f"{work} takes {nbytes} bytes, and {limit}") from None
