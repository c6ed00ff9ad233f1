"""A tiny real model behind the server: its tokenizer, its chat template, and log-probabilities."""

import json
from pathlib import Path

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("torch")
pytest.importorskip("penstock.engine.worker.stock")
pytest.importorskip("httptools")

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from tests.e2e.test_server import run_server  # noqa: E402
from tests.support.loops import in_a_loop  # noqa: E402
from tests.support.models import ENGINE_SIZES, VOCABULARY, build_family  # noqa: E402

TEMPLATE = (
    "{{ bos_token }}{% for one in messages %}{{ one['role'][0] }}:{{ one['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def save_tokenizer(path: Path) -> Tokenizer:
    """One id for each character that can be printed, then pairs."""
    ids = {"<pad>": 0, "<s>": 1, "</s>": 2}
    for character in ["Ġ", *map(chr, range(0x21, 0x7F))]:
        ids[character] = len(ids)
    pairs = [("a", character) for character in "abcdefghijklmnopqrstuvwxyzABCDEF"]
    for first, second in pairs:
        ids[first + second] = len(ids)
    tokenizer = Tokenizer(models.BPE(ids, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<pad>", "<s>", "</s>")])
    assert tokenizer.get_vocab_size() <= VOCABULARY
    tokenizer.save(str(path / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "bos_token": "<s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(kind))
    return tokenizer


@in_a_loop
async def test_a_model_answers_as_transformers_does_whichever_way_it_is_asked(tmp_path: Path) -> None:
    family = build_family("llama", tmp_path)
    tokenizer = save_tokenizer(tmp_path)
    async with run_server(simulated=None, model=str(tmp_path), api_server_count=1, **ENGINE_SIZES) as cluster:
        client, name = cluster.client, tmp_path.name
        for request, expected in list(zip(family.requests, family.answers, strict=True))[-2:]:
            options = {"model": name, "prompt": request.prompt, "max_tokens": len(expected), "temperature": 0}
            options |= {"logprobs": 2, "extra_body": {"ignore_eos": True, "skip_special_tokens": False}}
            done = await client.completions.create(**options)
            assert done.choices[0].text == tokenizer.decode(expected, skip_special_tokens=False)
            logprobs = done.choices[0].logprobs
            assert len(logprobs.token_logprobs) == len(expected) and logprobs.text_offset[0] == 0
            events = [event async for event in await client.completions.create(**options, stream=True)]
            assert "".join(event.choices[0].text for event in events) == done.choices[0].text
            parts = [event.choices[0].logprobs for event in events if event.choices[0].logprobs]
            assert [token for part in parts for token in part.tokens] == logprobs.tokens
            assert [offset for part in parts for offset in part.text_offset] == logprobs.text_offset

        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello  world"}]
        prompt = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert prompt == "<s>s:be brief;u:hello  world;a:"
        options = {"model": name, "max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 3}
        whole = await client.chat.completions.create(**options, messages=messages)
        same = await client.completions.create(model=name, max_tokens=8, temperature=0, prompt=prompt)
        assert whole.choices[0].message.content == same.choices[0].text
        assert whole.usage.prompt_tokens == len(tokenizer.encode(prompt).ids)
        parts = whole.choices[0].logprobs.content
        for entry in parts:
            assert entry.top_logprobs[0].token == entry.token and len(entry.top_logprobs) == 3
            assert bytes(entry.bytes).decode(errors="replace") == entry.token
        drawn = {"model": name, "prompt": prompt, "max_tokens": 20, "temperature": 1.5, "n": 2}
        seeded = [await client.completions.create(**drawn, seed=5) for _ in range(2)]
        first, second = ([choice.text for choice in answer.choices] for answer in seeded)
        assert first == second and first[0] != first[1]
        with pytest.raises(openai.BadRequestError, match=f"expected ids below {VOCABULARY}, got {VOCABULARY}"):
            await client.completions.create(model=name, prompt=[VOCABULARY])
