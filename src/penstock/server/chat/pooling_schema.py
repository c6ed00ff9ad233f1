"""The bodies of requests for vectors and scores: OpenAI's embeddings, and vLLM's score and rerank."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from penstock.server.chat.prompt_list import Id, PromptList
from penstock.server.errors import ApiError

MAX_INPUTS = 2048  # as OpenAI has it
Short = Annotated[str, msgspec.Meta(max_length=1024)]
Texts: TypeAlias = str | Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_INPUTS)]


class PoolingFields(msgspec.Struct, kw_only=True):
    """The fields that all of them share; those from `truncate_prompt_tokens` on are vLLM's and not OpenAI's."""

    model: str | None = None
    user: Short | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)] | None = None
    add_special_tokens: bool | None = None
    priority: Id | None = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)] | None = None


class EmbeddingRequest(PoolingFields, kw_only=True):
    input: PromptList
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] | None = None
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["native", "little"] | None = None


class ScoreRequest(PoolingFields, kw_only=True):
    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None  # as later versions of vLLM name both
    documents: Texts | None = None
    instruction: str | None = None

    @property
    def param(self) -> str:
        """Returns the field of the second texts."""
        return "documents" if self.text_2 is None else "text_2"

    def pairs(self) -> list[tuple[str, str]]:
        """Returns the pairs of texts: the first text with each of the others, or as many as there are of both. Raises
        ApiError."""
        firsts, seconds = (self._texts(names) for names in (("text_1", "queries"), ("text_2", "documents")))
        if len(firsts) == 1:
            firsts *= len(seconds)
        if len(firsts) != len(seconds):
            message = f"expected as many texts at $.text_2 as at $.text_1, or one there, got {len(seconds)}"
            raise ApiError(400, f"{message} and {len(firsts)}", param="text_2")
        return list(zip(firsts, seconds, strict=True))

    def _texts(self, names: tuple[str, str]) -> list[str]:
        values = [value for name in names if (value := getattr(self, name)) is not None]
        if len(values) != 1:
            message = f"expected either {names[0]} or {names[1]}, got {'both' if values else 'none'}"
            raise ApiError(400, message, param=names[0])
        return [values[0]] if isinstance(values[0], str) else list(values[0])


class RerankDocument(msgspec.Struct):
    text: str


class RerankRequest(PoolingFields, kw_only=True):
    query: str
    documents: Annotated[list[str | RerankDocument], msgspec.Meta(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] | None = None
    return_documents: bool | None = None
    instruction: str | None = None

    @property
    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]
