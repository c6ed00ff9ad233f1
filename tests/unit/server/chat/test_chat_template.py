"""Where a model's chat template is found, and what it may be told."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("starlette")

from penstock.server.chat.prompt_builder import RESERVED, ChatTemplate
from penstock.server.errors import ApiError

MESSAGES = [{"role": "user", "content": "hi"}]
TEMPLATE = "{{ bos_token }}{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}{{ tone }}"


def template(path: Path, **files: Any) -> ChatTemplate:
    for name, file in files.items():
        kind = ".jinja" if isinstance(file, str) else ".json"
        (path / f"{name}{kind}").write_text(file if isinstance(file, str) else json.dumps(file))
    return ChatTemplate(path)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"chat_template": TEMPLATE}},
        {
            "tokenizer_config": {
                "chat_template": [{"name": "a", "template": ""}, {"name": "default", "template": TEMPLATE}]
            }
        },
        {"chat_template": TEMPLATE, "tokenizer_config": {"chat_template": "not this one"}},
        {"chat_template": {"chat_template": TEMPLATE}},
    ],
)
def test_a_template_is_found_wherever_models_keep_theirs(files: dict[str, Any], tmp_path: Path) -> None:
    result = template(tmp_path, **files)
    assert result.prompt(MESSAGES, True, {}) == "hi>"
    assert result.prompt(MESSAGES, False, {"tone": "!"}) == "hi!"


def test_template_gets_the_special_tokens(tmp_path: Path) -> None:
    for text in ("<s>", {"content": "<s>", "special": True}):
        output = {"chat_template": TEMPLATE, "bos_token": text, "pad_token": None, "add_bos_token": True}
        assert template(tmp_path, tokenizer_config=output).prompt(MESSAGES, False, {}) == "<s>hi"


def test_refused_messages_and_template_errors_are_client_errors(tmp_path: Path) -> None:
    for name in RESERVED:
        with pytest.raises(ApiError) as caught:
            template(tmp_path, chat_template=TEMPLATE).prompt(MESSAGES, True, {name: "{{ 1 }}"})
        assert caught.value.param == f"chat_template_kwargs.{name}"
    for output, words in (("{{ raise_exception('no system') }}", "no system"), ("{{ messages.a.b }}", "chat template")):
        with pytest.raises(ApiError, match=words) as caught:
            template(tmp_path, chat_template=output).prompt(MESSAGES, True, {})
        assert caught.value.status == 400


def test_a_model_without_one_cannot_chat(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="no chat template"):
        template(tmp_path).prompt(MESSAGES, True, {})


TEXT, IMAGE = {"type": "text", "text": "hi"}, {"type": "image"}
EITHER = (
    "{% for one in messages %}{% if one.content is string %}{{ one.content }}{% else %}{% for part in one.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}{% endfor %}"
)
ONLY_PARTS = (
    "{% for one in messages %}{% for part in one.content | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for part in one.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "of_parts", "of_an_image"),
    [(TEMPLATE, "hi\nhi", "hi\nhi"), (EITHER, "hihi", "hi<image>hi"), (ONLY_PARTS, "hihi", "<image>hihi")],
    ids=["text", "either", "parts"],
)
def test_a_template_is_told_what_is_said_as_it_takes_it(
    source: str, of_parts: str, of_an_image: str, tmp_path: Path
) -> None:
    result = template(tmp_path, chat_template=source)
    for content, expected in (("hi", "hi"), ([TEXT, TEXT], of_parts), ([TEXT, IMAGE, TEXT], of_an_image)):
        assert result.prompt([{"role": "user", "content": content}], False, {}) == expected
