"""What the text of an answer may hold besides content: reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

TOOL_FORMATS = ("hermes", "llama3_json", "mistral", "openai", "pythonic", "qwen3_xml")
CHANNELS = "openai_gptoss"  # the format of reasoning of models that write in channels, calls included
REASONING_MARKS = {  # by the name of the format: the marks before and after the reasoning
    "deepseek_r1": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    CHANNELS: ("<|channel|>analysis<|message|>", "<|end|>"),
    "qwen3": ("<think>", "</think>"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
}


class AnswerFormat(msgspec.Struct, array_like=True, frozen=True):
    """How the text of an answer is parsed, with names of vLLM's parsers. `text.answer_parser` parses it."""

    tools: str | None = None  # of TOOL_FORMATS; None: no text is a tool call
    reasoning: str | None = None  # of REASONING_MARKS; None: no text is reasoning
    in_reasoning: bool = False  # the text begins inside the reasoning: `begins_in_reasoning`
    call_ids: str = ""  # the id of a call is a hash of this text, the sample and the call's index
    types: Mapping[str, Mapping[str, str]] = {}  # JSON type of each parameter of each tool; for qwen3_xml only
    forced: tuple[str, ...] = ()  # functions of which the answer is a call, by its grammar; (): the answer may be text

    @property
    def has_channels(self) -> bool:
        return self.tools == "openai" or self.reasoning == CHANNELS

    def __post_init__(self) -> None:
        """Raises ValueError, which decoding turns into an error with a path."""
        if self.tools is not None and self.tools not in TOOL_FORMATS:
            raise ValueError(f"expected tools of {', '.join(TOOL_FORMATS)}, got {self.tools!r}")
        if self.reasoning is not None and self.reasoning not in REASONING_MARKS:
            raise ValueError(f"expected reasoning of {', '.join(REASONING_MARKS)}, got {self.reasoning!r}")


def begins_in_reasoning(reasoning: str, prompt: str, is_continued: bool = False) -> bool:
    """Returns whether an answer to `prompt`, of which the end suffices, begins inside the reasoning.

    A prompt ends with the mark before the reasoning where its template has opened the reasoning. Answers of DeepSeek-R1
    begin there in any case. `is_continued`: `prompt` is the whole message that the answer continues.
    """
    opening, closing = REASONING_MARKS[reasoning]
    if is_continued and prompt:
        return prompt.rfind(opening) > prompt.rfind(closing)
    return reasoning == "deepseek_r1" or prompt.rstrip().endswith(opening)
