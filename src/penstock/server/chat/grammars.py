"""Checks grammars in a server process, before anything is submitted.

A worker compiles the grammar again, with the ids of the model. Here bytes take their place: a compilation takes
milliseconds, and the server needs no table of the model's ids. A thread compiles, with limits, and streams go on.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from penstock.engine.text.grammar import build_grammar, byte_tokenizer, check_grammar, relaxed_calls
from penstock.engine.text.grammar_fields import CallRules, Grammar, GrammarError, GrammarSource, special_tokens
from penstock.server.chat.prompt_builder import PromptBuilder
from penstock.server.errors import ApiError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_REMEMBERED = 1024  # grammars


class GrammarChecker:
    def __init__(self, prompt_builder: PromptBuilder, has_end: bool) -> None:
        """`has_end`: the model has an end id, without which no answer would end where its grammar does."""
        self._prompt_builder = prompt_builder  # for its threads
        self._has_end = has_end
        self._answers: OrderedDict[bytes, Grammar | GrammarError] = OrderedDict()
        self._tokenizer: LLTokenizer | None = None

    async def check(self, source: GrammarSource) -> Grammar:
        """Returns the grammar of a request. Raises ApiError for a grammar that is not supported."""
        if not self._has_end:
            message = (
                f"{source.param} is not supported: the model has no end id (eos_token_id), and no answer would end"
            )
            raise ApiError(400, message, param=source.param)
        key = msgspec.msgpack.encode(source)
        answer = self._answers.get(key)
        if answer is None:
            answer = await self._prompt_builder.in_a_thread(lambda: self._checked(source))
            self._answers[key] = answer
            if len(self._answers) > MAX_REMEMBERED:
                self._answers.popitem(last=False)
        if isinstance(answer, GrammarError):
            raise ApiError(400, str(answer), param=answer.param)
        return answer

    def _checked(self, source: GrammarSource) -> Grammar | GrammarError:
        if self._tokenizer is None:
            self._tokenizer = byte_tokenizer([*special_tokens(self._prompt_builder.tokenizer.tokenizer).values()])
        try:
            grammar = build_grammar(in_bytes(source))
            try:
                check_grammar(self._tokenizer, grammar, source)
            except GrammarError:
                if not isinstance(source.value, CallRules):
                    raise
                source = source._replace(value=relaxed_calls(self._tokenizer, source.value))
                check_grammar(self._tokenizer, build_grammar(in_bytes(source)), source)
            return build_grammar(source)
        except GrammarError as error:
            return error


def in_bytes(source: GrammarSource) -> GrammarSource:
    """Returns a source without ids of the model."""
    return source._replace(value=replace(source.value, marks={})) if isinstance(source.value, CallRules) else source
