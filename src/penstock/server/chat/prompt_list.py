"""The prompts of one body: a text, a list of texts, a list of ids, or a list of such lists."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from penstock.server.chat.json_limits import MAX_VALUES
from penstock.server.errors import ApiError

MAX_PARTS = MAX_VALUES  # more are no prompt of any model, and are not looked at
Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
PromptList: TypeAlias = str | Annotated[list[str | Id | list[Id]], msgspec.Meta(max_length=MAX_PARTS)]


def separate_prompts(prompts: PromptList, param: str, max_prompts: int, others: int = 0) -> list[str | list[int]]:
    """Returns the prompts, each a text or a list of ids. `others`: prompts of another field, which count, too. Raises
    ApiError if they are of several kinds, or none."""
    if isinstance(prompts, str):
        return [prompts]
    kinds = {type(item) for item in prompts}
    if kinds != {int} and len(prompts) + others > max_prompts:
        message = f"expected at most {max_prompts} prompts, got {len(prompts) + others}"
        raise ApiError(400, message, param=param)
    if len(kinds) != 1:
        message = f"expected either texts or lists of token ids, got both or none at $.{param}"
        raise ApiError(400, message, param=param)
    if kinds == {int}:
        return [[item for item in prompts if isinstance(item, int)]]
    return [item for item in prompts if not isinstance(item, int)]
