"""The sampling parameters of a request, as a server checks them and workers, core and output processors read them."""

from __future__ import annotations

from collections.abc import Collection

import msgspec


# A new sampling parameter takes this way:
#   1. `Sampling` in server/chat/request_schema.py: a field of the HTTP body, and its name in `_PASSED_THROUGH`;
#   2. a field here with a default, hashable (a tuple, not a list: `columns_of_params` sends equal parameters once), and
#      its range in `_LIMITS`. The second word of an error is the field ("expected top_p above 0"): `param` of the 400;
#   3. its reader: `Sampler.join` (worker), `StopConditions.join` (core) or `OutputState` (output processor).
#   4. if generation_config.json may set it: `SamplingDefaults` in config.py.
# `penstock generate` accepts each field here by its name.
class SamplingParams(msgspec.Struct, array_like=True, frozen=True):
    """The sampling parameters of a request, and the conditions that end it."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16  # None: as many as fit the model
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # how many besides the sampled one
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # sequences that are not generated as a whole
    prompt_logprobs: int | None = None  # how many besides the token itself, of each token of the prompt but the first

    def __post_init__(self) -> None:
        """Raises ValueError, which decoding turns into an error with a path."""
        for name, low, high in _LIMITS:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"expected {name} between {low:g} and {high:g}, got {value}")
        if not self.top_p > 0:
            raise ValueError(f"expected top_p above 0, got {self.top_p}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"expected min_tokens up to max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if () in self.bad_words_ids:
            raise ValueError("expected bad_words_ids that are not empty")
        if "" in self.stop:
            raise ValueError("expected stop strings that are not empty")
        if self.stop and not self.detokenize:
            raise ValueError("expected detokenize with stop strings: they are found in text")

    def require_choice(self, eos_ids: Collection[int], vocabulary: int) -> None:
        """Raises ValueError unless one of the allowed ids can be the first token of an answer."""
        if self.allowed_token_ids is None:
            return
        allowed = {token_id for token_id in self.allowed_token_ids if 0 <= token_id < vocabulary}
        if not allowed:
            raise ValueError(
                f"expected an id below {vocabulary} at $.allowed_token_ids: a request needs an id that it allows"
            )
        ends = {*self.stop_token_ids, *(() if self.ignore_eos else eos_ids)}
        if self.min_tokens and allowed <= ends:
            raise ValueError(
                "expected an id at $.allowed_token_ids that does not end the answer, as min_tokens is "
                f"{self.min_tokens}: all {len(allowed)} are end ids"
            )


_MAX_INT = float(2**31 - 1)
_LIMITS = (
    ("n", 1.0, 16384.0),
    ("temperature", 0.0, 1e6),
    ("top_p", 0.0, 1.0),
    ("top_k", 0.0, _MAX_INT),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 1e-6, 1e6),
    ("max_tokens", 1.0, _MAX_INT),
    ("min_tokens", 0.0, _MAX_INT),
    ("logprobs", 0.0, _MAX_INT),
    ("prompt_logprobs", 0.0, _MAX_INT),
)
