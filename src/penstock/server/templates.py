"""The prompt that a conversation is: the model's own chat template, rendered as transformers' tokenizers do it.

By the function that they call for it, and without them: they would bring torch into each server process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from penstock.server.errors import ApiError

# Parameters of the function that renders; a client who could say a template would have it run here.
RESERVED = {
    *("conversations", "tools", "documents", "chat_template", "return_assistant_tokens_mask"),
    *("continue_final_message", "add_generation_prompt", "messages"),
}


class Template:
    """Of the model in a directory; it may have none."""

    def __init__(self, directory: Path) -> None:
        from transformers.utils.chat_template_utils import render_jinja_template

        self._render: Any = render_jinja_template  # what it returns is not what it says
        said = _said_in(directory / "tokenizer_config.json")
        self._template = _template(directory, said)
        self._special = {name: _text(one) for name, one in said.items() if name.endswith("_token") and one}

    def prompt(self, messages: list[dict[str, Any]], is_answered: bool, options: dict[str, Any]) -> str:
        """Raises ApiError."""
        if self._template is None:
            raise ApiError(400, "the model has no chat template: ask for a completion", param="messages")
        reserved = RESERVED & options.keys()
        if reserved:
            message = f"{sorted(reserved)[0]} is not for clients to say"
            raise ApiError(400, message, param=f"chat_template_kwargs.{sorted(reserved)[0]}")
        try:
            rendered, _ = self._render(
                [messages],
                chat_template=self._template,
                add_generation_prompt=is_answered,
                **{**self._special, **options},
            )
        except Exception as error:  # whatever a template does with what a client has sent
            raise ApiError(400, f"the model's chat template: {error}", param="messages") from None
        prompt: str = rendered[0]
        return prompt


def _said_in(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.exists() else {}


def _template(directory: Path, said: dict[str, Any]) -> str | None:
    """In a file of its own, or among what is said of the tokenizer: one, or several with names."""
    alone = directory / "chat_template.jinja"
    if alone.exists():
        return alone.read_text()
    found = _said_in(directory / "chat_template.json").get("chat_template", said.get("chat_template"))
    if isinstance(found, list):
        found = {one["name"]: one["template"] for one in found}.get("default")
    return found if isinstance(found, str) else None


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
