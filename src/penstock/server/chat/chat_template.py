"""Renders a conversation into a prompt by the model's chat template, as transformers' tokenizers do.

It calls the function that they call, and not the tokenizer classes, which would import torch into each server process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from penstock.server.errors import ApiError

# Parameters of the rendering function, refused in a request: a template of the client would run in this process.
RESERVED = {
    *("conversations", "tools", "documents", "chat_template", "return_assistant_tokens_mask"),
    *("continue_final_message", "add_generation_prompt", "messages"),
}
MARK = "as it is written"  # the content of a trial message


def join_texts(content: str | list[dict[str, str]]) -> str:
    """Returns the text of a message: its content, or the texts of its parts, one per line."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)


class ChatTemplate:
    """The chat template of a model's directory, which may have none."""

    def __init__(self, directory: Path) -> None:
        from transformers.utils.chat_template_utils import render_jinja_template

        self._render: Any = render_jinja_template  # its annotation of the result is wrong
        tokenizer_config = _read_json(directory / "tokenizer_config.json")
        self._template = _template(directory, tokenizer_config)
        self._special = {
            name: _text(token) for name, token in tokenizer_config.items() if name.endswith("_token") and token
        }
        # Some templates take a message's content as text, some as parts, and do not say which: so both are tried.
        self._takes_text = self._shows(MARK)
        self._takes_parts = self._shows([{"type": "text", "text": MARK}])

    def prompt(self, messages: list[dict[str, Any]], is_answered: bool, options: dict[str, Any]) -> str:
        """Renders a conversation. Raises ApiError."""
        if self._template is None:
            raise ApiError(400, "the model has no chat template: use /v1/completions", param="messages")
        reserved = RESERVED & options.keys()
        if reserved:
            message = f"{sorted(reserved)[0]} is set by the server: expected another name"
            raise ApiError(400, message, param=f"chat_template_kwargs.{sorted(reserved)[0]}")
        try:
            return self._rendered(self._to_template_format(messages), is_answered, options)
        except Exception as error:  # whatever a template does with what a client has sent
            raise ApiError(400, f"the model's chat template: {error}", param="messages") from None

    def _rendered(self, messages: list[dict[str, Any]], is_answered: bool, options: dict[str, Any]) -> str:
        variables = {**self._special, **options}
        rendered, _ = self._render(
            [messages], chat_template=self._template, add_generation_prompt=is_answered, **variables
        )
        prompt: str = rendered[0]
        return prompt

    def _shows(self, content: Any) -> bool:
        """Returns whether the template renders a content as text, and not as a Python repr."""
        try:
            prompt = self._rendered([{"role": "user", "content": content}], True, {})
        except Exception:  # the template expects the other form
            return False
        return MARK in prompt and "'text'" not in prompt and '"text"' not in prompt

    def _to_template_format(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the messages with contents in the form that the template takes: texts, parts, or both."""
        return [{**message, "content": self._content(message["content"])} for message in messages]

    def _content(self, content: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
        if isinstance(content, str):
            return content if self._takes_text or not self._takes_parts else [{"type": "text", "text": content}]
        return content if self._takes_parts else join_texts(content)


def _read_json(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.exists() else {}


def _template(directory: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """Reads the template from its own file or from tokenizer_config.json, where it may be one of several with names."""
    alone = directory / "chat_template.jinja"
    if alone.exists():
        return alone.read_text()
    template = _read_json(directory / "chat_template.json").get("chat_template", tokenizer_config.get("chat_template"))
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
