"""Where a model's chat template is found, and what it may be told."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("penstock.engine.worker.stock")
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
def test_chat_template_is_read_from_each_place_where_models_keep_it(files: dict[str, Any], tmp_path: Path) -> None:
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
def test_chat_template_gets_content_as_text_or_parts_as_it_expects(
    source: str, of_parts: str, of_an_image: str, tmp_path: Path
) -> None:
    result = template(tmp_path, chat_template=source)
    for content, expected in (("hi", "hi"), ([TEXT, TEXT], of_parts), ([TEXT, IMAGE, TEXT], of_an_image)):
        assert result.prompt([{"role": "user", "content": content}], False, {}) == expected


CALL = {"id": "abc123456", "type": "function", "function": {"name": "f", "arguments": '{"b": "ü", "a": [1, null]}'}}
CALLED = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
# As the templates of these families write calls.
OF_CALLS = {
    "qwen": (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% endfor %}{% endfor %}',
        '{"name": "f", "arguments": {"b": "ü", "a": [1, null]}}',
    ),
    "llama": (
        "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('single tool-calls') }}{% endif %}{% set c = m.tool_calls[0].function %}"
        "{% for name, value in c.arguments | items %}{{ name }}={{ value | tojson }};{% endfor %}"
        "{% endif %}{% endfor %}",
        'b="ü";a=[1, null];',
    ),
    "deepseek": (
        "{% for m in messages %}{% if m['role'] == 'assistant' and m['tool_calls'] is defined %}"
        "{% for c in m['tool_calls'] %}{{ c['function']['name'] + ' ' + c['function']['arguments'] }}{% endfor %}"
        "{% endif %}{% endfor %}",
        'f {"b": "ü", "a": [1, null]}',
    ),
    "either": (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.function.arguments is string %}"
        "{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}{% endfor %}{% endfor %}",
        '{"b": "ü", "a": [1, null]}',
    ),
    "text": (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}{% endfor %}",
        '{"b": "ü", "a": [1, null]}',
    ),
    "mistral": (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
        "{{ raise_exception('length 9') }}{% endif %}{{ c.function | tojson }}{% endfor %}{% endfor %}",
        '{"name": "f", "arguments": {"b": "ü", "a": [1, null]}}',
    ),
}


@pytest.mark.parametrize("family", OF_CALLS)
def test_arguments_of_calls_are_as_the_template_takes_them(family: str, tmp_path: Path) -> None:
    source, expected = OF_CALLS[family]
    result = template(tmp_path, chat_template=source)
    assert result.prompt(CALLED, False, {}) == expected
    decoded = {**CALL, "function": {"name": "f", "arguments": {"b": "ü", "a": [1, None]}}}
    assert result.prompt([CALLED[0], {**CALLED[1], "tool_calls": [decoded]}], False, {}) == expected


def test_arguments_that_are_no_json_are_refused_if_taken_as_objects(tmp_path: Path) -> None:
    for family, is_text in (("qwen", False), ("deepseek", True)):
        result = template(tmp_path, chat_template=OF_CALLS[family][0])
        for arguments in ('{"a": ', "[1]", "x", "[" * 5000):
            call = {**CALL, "function": {"name": "f", "arguments": arguments}}
            messages = [CALLED[0], {**CALLED[1], "tool_calls": [CALL, call]}]
            if is_text:
                assert result.prompt(messages, False, {}).endswith(f"f {arguments}")
                continue
            with pytest.raises(ApiError) as caught:
                result.prompt(messages, False, {})
            assert caught.value.param == "messages[1].tool_calls[1].function.arguments"


def test_template_for_tools_is_used_if_there_are_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].function.name }}"}]
    result = template(tmp_path, tokenizer_config={"chat_template": named})
    assert result.prompt(MESSAGES, True, {}) == "plain"
    assert result.prompt(MESSAGES, True, {}, TOOLS) == "f"
    result = ChatTemplate(tmp_path, "[TOOL_CALLS]")  # of --chat-template, in place of both
    assert result.prompt(MESSAGES, True, {}, TOOLS) == result.tool_source == "[TOOL_CALLS]"


def test_template_that_shows_no_tools_or_calls_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "penstock.engine")
    tools = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    calls = OF_CALLS["qwen"][0]
    for source, unseen in (
        (tools + calls, None),
        (tools, "calls"),
        (calls, "tools"),
        ("{{ messages[0].content }}", "tools and calls"),
    ):
        for messages, listed in ((MESSAGES, TOOLS), (CALLED, [])):
            caplog.clear()
            result = template(tmp_path, chat_template=source)
            result.prompt(MESSAGES, True, {})
            assert not caplog.records
            for _ in range(2):
                result.prompt(messages, True, {}, listed)
            reasons = [record.fields["reason"] for record in caplog.records]  # type: ignore[attr-defined]
            assert reasons == ([] if unseen is None else [f"the chat template shows no {unseen}"])
