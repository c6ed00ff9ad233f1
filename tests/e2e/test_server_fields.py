"""Fields of vLLM in requests to a tiny real model, as lm-eval-harness and other clients send them; its routes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("torch")
pytest.importorskip("penstock.engine.worker.stock")
pytest.importorskip("httptools")

import penstock  # noqa: E402
from tests.e2e.test_prompt_logprobs import reference  # noqa: E402
from tests.e2e.test_server import Served, run_server  # noqa: E402
from tests.e2e.test_server_models import save_tokenizer  # noqa: E402
from tests.support.loops import in_a_loop  # noqa: E402
from tests.support.models import ENGINE_SIZES, build_family  # noqa: E402

TEXT = "hello, aaabac world"
TOKEN_A = 3 + 1 + ord("a") - 0x21  # of `save_tokenizer`


async def sent(served: Served, path: str, **body: Any) -> tuple[int, Any]:
    """Returns the status, and the JSON of the answer or of each event."""
    status, text = await served.exchange("POST", path, body)
    events = re.findall(r"^data: (\{.*)$", text, re.MULTILINE)
    return status, [json.loads(event) for event in events] if events else json.loads(text)


async def completed(served: Served, **body: Any) -> Any:
    status, answer = await sent(
        served, "/v1/completions", **{"prompt": TEXT, "temperature": 0, "max_tokens": 1, **body}
    )
    assert status == 200, answer
    return answer


async def loglikelihoods_are_those_of_transformers(served: Served, path: Path, ids: list[int]) -> None:
    """As lm-eval-harness asks for them: of a text, and of ids."""
    expected = reference(path, ids)
    for prompt in (TEXT, ids):
        for max_tokens in (0, 1):
            answer = await completed(served, prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens)
            (choice,), usage = answer["choices"], answer["usage"]
            logprobs = choice["logprobs"]
            values, tops = logprobs["token_logprobs"], logprobs["top_logprobs"]
            assert len(values) == len(tops) == len(logprobs["tokens"]) == len(ids) + max_tokens
            assert values[0] is tops[0] is None and usage["completion_tokens"] == max_tokens
            for position, token in enumerate(ids[1:], 1):
                row = expected[position - 1]
                assert values[position] == pytest.approx(float(row[token]), abs=1e-4)
                assert max(tops[position].values()) == pytest.approx(float(row.max()), abs=1e-4)
                assert tops[position][logprobs["tokens"][position]] == values[position] and len(tops[position]) <= 2
            assert choice["text"].startswith(TEXT) and "".join(logprobs["tokens"]) == choice["text"]
            starts = zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
            assert all(choice["text"].startswith(token, offset) for offset, token in starts)
            assert choice["finish_reason"] == "length" and "prompt_logprobs" not in choice


async def prompt_logprobs_have_ids_ranks_and_texts(served: Served, path: Path, ids: list[int]) -> None:
    row = reference(path, ids)[0]
    (choice,) = (await completed(served, prompt_logprobs=2, max_tokens=0))["choices"]
    first, second, *rest = choice["prompt_logprobs"]
    assert first is None and len(rest) == len(ids) - 2 and choice["text"] == "" and choice["logprobs"] is None
    entry = second[str(ids[1])]
    assert entry["decoded_token"] == TEXT[1] and entry["rank"] == 1 + int((row > row[ids[1]]).sum())
    best = sorted(second.values(), key=lambda value: value["rank"])[:2]
    assert [value["rank"] for value in best] == [1, 2]
    assert [value["logprob"] for value in best] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
    ends = {"allowed_token_ids": [TOKEN_A], "stop_token_ids": [TOKEN_A]}  # the token that is dropped ends an answer
    (choice,) = (await completed(served, echo=True, max_tokens=0, **ends))["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (TEXT, "length", None)
    messages = [{"role": "user", "content": "hi"}]
    status, answer = await sent(served, "/v1/chat/completions", messages=messages, prompt_logprobs=0, max_tokens=2)
    assert status == 200 and len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert [len(entry) for entry in answer["prompt_logprobs"][1:]] == [1] * (answer["usage"]["prompt_tokens"] - 1)


async def ids_of_prompt_and_answer_are_returned(served: Served, path: Path, ids: list[int]) -> None:
    answer = await completed(served, prompt=[TEXT, TEXT[:5]], return_token_ids=True, max_tokens=3, n=2, seed=1)
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [ids, ids, ids[:5], ids[:5]]
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [3] * 4
    text = (await sent(served, "/detokenize", tokens=answer["choices"][0]["token_ids"]))[1]["prompt"]
    assert text == answer["choices"][0]["text"]
    messages = [{"role": "user", "content": "hi"}]
    _, chat = await sent(
        served, "/v1/chat/completions", messages=messages, return_token_ids=True, max_tokens=2, ignore_eos=True
    )
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    assert len(chat["choices"][0]["token_ids"]) == 2 and "token_ids" not in chat


async def streams_begin_with_an_echoed_prompt(served: Served, path: Path, ids: list[int]) -> None:
    body = {"echo": True, "max_tokens": 4, "n": 2, "prompt": [ids, ids[:3]], "stream": True, "seed": 1}
    texts = ["", "", "", ""]
    for event in await completed(served, **body):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    whole = await completed(served, **{**body, "stream": False})
    assert texts == [choice["text"] for choice in whole["choices"]] and texts[2].startswith(TEXT[:3])
    for name, value in (("prompt_logprobs", 1), ("logprobs", 1), ("max_tokens", 0)):
        status, answer = await sent(served, "/v1/completions", **{"prompt": TEXT, **body, name: value})
        assert status == 400 and answer["error"]["param"] == name and "stream" in answer["error"]["message"]


async def streams_count_and_have_the_ids_of_each_chunk(served: Served, path: Path, ids: list[int]) -> None:
    usage = {"include_usage": True, "continuous_usage_stats": True}
    body = {"max_tokens": 9, "n": 2, "seed": 1, "return_token_ids": True, "stop": ["~"], "ignore_eos": True}
    whole = (await completed(served, **body))["choices"]
    *events, last = await completed(served, **body, stream=True, stream_options=usage)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 18
    assert "prompt_tokens_details" in last["usage"]
    received: list[list[int]] = [[], []]
    for event in events:
        (choice,) = event["choices"]
        received[choice["index"]] += choice.get("token_ids", [])
        if "prompt_token_ids" in choice:
            assert choice["prompt_token_ids"] == ids and not choice["text"]
        else:
            count = len(received[choice["index"]])
            expected = {"prompt_tokens": len(ids), "completion_tokens": count, "total_tokens": len(ids) + count}
            assert event["usage"] == expected
    assert received == [choice["token_ids"] for choice in whole]
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    first, *events = (await sent(served, "/v1/chat/completions", **chat, return_token_ids=True, stream=True))[1]
    _, answer = await sent(served, "/v1/chat/completions", **chat, return_token_ids=True)
    assert first["prompt_token_ids"] == answer["prompt_token_ids"]
    streamed = [token for event in events for token in event["choices"][0]["token_ids"]]
    assert streamed == answer["choices"][0]["token_ids"] and "usage" not in events[0]
    plain = [event async for event in await served.client.completions.create(model=path.name, prompt="a", stream=True)]
    assert not hasattr(plain[0].choices[0], "token_ids") and plain[0].usage is None


async def final_message_of_a_chat_is_continued(served: Served, path: Path, ids: list[int]) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello wor"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 3, "continue_final_message": True, "best_of": 1}
    status, answer = await sent(served, "/v1/chat/completions", **body)
    same = await completed(served, prompt="<s>u:hi;a:hello wor", max_tokens=3)
    assert status == 200 and answer["choices"][0]["message"]["content"] == same["choices"][0]["text"]
    _, tokens = await sent(served, "/tokenize", messages=messages, continue_final_message=True)
    assert tokens["count"] == answer["usage"]["prompt_tokens"]
    for more, param in (({"add_generation_prompt": True}, "continue_final_message"), ({"best_of": 2}, "best_of")):
        status, answer = await sent(served, "/v1/chat/completions", **{**body, **more})
        assert status == 400 and answer["error"]["param"] == param


async def bad_words_are_not_generated(served: Served, path: Path, ids: list[int]) -> None:
    """Here an id is a character: the tokenizer has pairs that begin with an a."""

    def present(text: str) -> list[str]:
        return [word for word in words if word in text]

    characters = [token_id for token_id in range(4, 98) if token_id != TOKEN_A]
    body: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "allowed_token_ids": characters}
    words: list[str] = []
    for _ in range(4):  # each answer has a word that the next one may not have
        text = (await completed(served, **body, bad_words=words))["choices"][0]["text"]
        assert not present(text), (words, text)
        words.append(text[2:4])
    assert len(set(words)) == 4
    events = await completed(served, **body, bad_words=words, stream=True)
    assert not present("".join(event["choices"][0]["text"] for event in events))


async def refusals_of_the_history_are_texts(served: Served, path: Path, ids: list[int]) -> None:
    parts = [{"type": "refusal", "refusal": "I will not."}]
    messages = [{"role": "assistant", "content": parts}, {"role": "user", "content": "why"}]
    status, tokens = await sent(served, "/tokenize", messages=messages)
    messages[0]["content"] = "I will not."
    assert (status, tokens) == await sent(served, "/tokenize", messages=messages)


async def fields_that_misfit_are_refused_by_name(served: Served, path: Path, ids: list[int]) -> None:
    for body, param in (
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
    ):
        status, answer = await sent(served, "/v1/completions", prompt=TEXT, **body)
        assert status == 400 and answer["error"]["param"] == param, answer
    status, answer = await sent(served, "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], echo=True)
    assert status == 400 and answer["error"]["param"] == "echo"


async def routes_of_vllm_answer(served: Served, path: Path, ids: list[int]) -> None:
    _, tokens = await sent(served, "/tokenize", prompt=TEXT)
    assert (await sent(served, "/detokenize", tokens=tokens["tokens"])) == (200, {"prompt": TEXT})
    status, answer = await sent(served, "/detokenize", tokens=[1 << 20])
    assert status == 400 and answer["error"]["param"] == "tokens"
    assert json.loads((await served.get("/version"))[1]) == {"version": penstock.__version__}
    assert json.loads((await served.get("/load"))[1]) == {"server_load": 0}
    assert [(await served.get("/ping"))[0], (await sent(served, "/ping"))[0]] == [200, 200]
    (model,) = json.loads((await served.get("/v1/models"))[1])["data"]
    assert model["root"] == str(path) and model["parent"] is None


SCENES = (
    loglikelihoods_are_those_of_transformers,
    prompt_logprobs_have_ids_ranks_and_texts,
    ids_of_prompt_and_answer_are_returned,
    streams_begin_with_an_echoed_prompt,
    streams_count_and_have_the_ids_of_each_chunk,
    final_message_of_a_chat_is_continued,
    bad_words_are_not_generated,
    refusals_of_the_history_are_texts,
    fields_that_misfit_are_refused_by_name,
    routes_of_vllm_answer,
)


@in_a_loop
async def test_fields_of_vllm_are_honoured(tmp_path: Path) -> None:
    build_family("llama", tmp_path)
    ids = save_tokenizer(tmp_path).encode(TEXT).ids
    async with run_server(simulated=None, model=str(tmp_path), api_server_count=1, **ENGINE_SIZES) as served:
        for scene in SCENES:
            await scene(served, tmp_path, ids)
