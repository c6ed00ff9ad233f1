"""The server as its clients see it: OpenAI's own client, and what no good client does, on a simulated device."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("httptools")

from penstock.engine.cluster.status_board import StatusBoard  # noqa: E402
from penstock.engine.launcher.launcher import STOP_TIMEOUT  # noqa: E402
from penstock.engine.protocol.config import EngineConfig  # noqa: E402
from penstock.engine.worker.simulated_device import TokenRule  # noqa: E402
from penstock.server.listening import listen  # noqa: E402
from penstock.server.options import ServerOptions  # noqa: E402
from penstock.server.server_launcher import ServerLauncher  # noqa: E402
from tests.support.engine import START, Running, simulated_device  # noqa: E402
from tests.support.loops import in_a_loop  # noqa: E402

KEY = "sesame"
MAX_OPEN = 8
MAX_BODY = 100_000


class Served(Running):
    """A server with servers, and a client for them."""

    def __init__(self, launcher: ServerLauncher, port: int) -> None:
        self.launcher = launcher
        self.config = launcher.cluster.config
        self.rule = TokenRule(self.config.simulated or simulated_device())
        self.port = port
        self.client = self.with_key(KEY)

    def with_key(self, key: str) -> Any:
        return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, max_retries=0)

    def answer(self, prompt: str, count: int, sample: int = 0) -> str:
        ids = np.array(list(prompt.encode()), np.int32)
        return "".join(f" {token}" for token in self.rule.answer(ids, count, sample))

    async def connect(self, path: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(posted(path, body))
        return reader, writer

    async def get(self, path: str) -> tuple[int, str]:
        return await self.exchange("GET", path)

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Returns the status and the JSON of the answer."""
        status, text = await self.exchange("POST", path, body)
        return status, json.loads(text)

    async def exchange(self, method: str, path: str, body: Any = None, header: str | None = None) -> tuple[int, str]:
        """Sends a request by a connection of its own. Returns the status and the body, in chunks if it is a stream."""
        payload = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        header = AUTHORIZED if header is None else header
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{header}content-length: {len(payload)}"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(f"{head}\r\n\r\n".encode() + payload)
            answer, _, text = (await reader.read()).decode(errors="replace").partition("\r\n\r\n")
            return int(answer.split()[1]), text
        finally:
            writer.close()

    async def total(self, name: str, label: str = "") -> float:
        """Of a metric, over all processes."""
        lines = (await self.get("/metrics"))[1].splitlines()
        return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}[{{ ]", line) and label in line)


AUTHORIZED = f"authorization: Bearer {KEY}\r\n"


def posted(path: str, body: dict[str, Any]) -> bytes:
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{AUTHORIZED}content-length: {len(payload)}\r\n\r\n"
    return head.encode() + payload


@contextlib.asynccontextmanager
async def run_server(
    limits: dict[str, Any] | None = None, start: float = START, **options: Any
) -> AsyncIterator[Served]:
    usual = {"api_keys": (KEY,), "max_open_requests": MAX_OPEN, "max_body_nbytes": MAX_BODY, "client_timeout": 1.0}
    server_options = ServerOptions(port=0, **{**usual, **(limits or {})})
    config = EngineConfig(**{"simulated": simulated_device(), "max_model_len": 4096, "api_server_count": 2, **options})
    with contextlib.closing(listen(server_options)) as listener:
        port = listener.getsockname()[1]
        launcher = ServerLauncher(config, server_options, listener)
        try:
            launcher.start()
            await launcher.serving(start)
            served = Served(launcher, port)
            async with served.client:
                yield served
        finally:
            late = await launcher.stop()
        assert not late, f"had to be killed: {late}"


def refused(kind: str) -> Any:
    return pytest.raises(getattr(openai, kind))


# ── completions and chats ────────────────────────────────────────────────────────────────────────────────────────────
async def a_completion_is_what_the_rule_says(served: Served) -> None:
    done = await served.client.completions.create(model="simulated", prompt="hello", max_tokens=7)
    (choice,) = done.choices
    assert (choice.text, choice.finish_reason, choice.index) == (served.answer("hello", 7), "length", 0)
    assert (done.object, done.model) == ("text_completion", "simulated")
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (5, 7, 12)


async def a_stream_says_the_same_and_then_its_usage(served: Served) -> None:
    body = {"model": "simulated", "prompt": "hello stream", "max_tokens": 30}
    stream = await served.client.completions.create(**body, stream=True, stream_options={"include_usage": True})
    *events, last = [event async for event in stream]
    assert "".join(event.choices[0].text for event in events) == served.answer("hello stream", 30)
    assert [event.choices[0].finish_reason for event in events][-1] == "length"
    assert len({event.id for event in (*events, last)}) == 1 and not any(event.usage for event in events)
    assert last.choices == [] and last.usage.completion_tokens == 30 and last.usage.prompt_tokens == 12


async def a_chat_is_streamed_with_its_role_first(served: Served) -> None:
    body = {"model": "simulated", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    body["max_completion_tokens"] = 6
    expected = served.answer("user: hi\nassistant:", 6)
    whole = await served.client.chat.completions.create(**body)
    assert whole.choices[0].message.content == expected and whole.choices[0].message.role == "assistant"
    events = [event async for event in await served.client.chat.completions.create(**body, stream=True)]
    assert [event.choices[0].delta.role for event in events] == ["assistant", *[None] * (len(events) - 1)]
    assert "".join(event.choices[0].delta.content or "" for event in events) == expected
    assert events[-1].choices[0].finish_reason == "length" and events[0].object == "chat.completion.chunk"


async def samples_and_prompts_have_choices_of_their_own(served: Served) -> None:
    prompts = ["one", "another"]
    done = await served.client.completions.create(model="simulated", prompt=prompts, max_tokens=4, n=2)
    expected = [served.answer(prompt, 4, sample) for prompt in prompts for sample in range(2)]
    assert [choice.text for choice in done.choices] == expected
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (10, 16)
    texts = {0: "", 1: ""}
    stream = await served.client.completions.create(model="simulated", prompt="one", max_tokens=4, n=2, stream=True)
    async for event in stream:
        texts[event.choices[0].index] += event.choices[0].text
    assert list(texts.values()) == expected[:2]


async def several_prompts_are_streamed_with_the_indices_of_a_whole_answer(served: Served) -> None:
    prompts = ["one", "another", "third"]
    body = {"model": "simulated", "prompt": prompts, "max_tokens": 4, "n": 2}
    stream = await served.client.completions.create(**body, stream=True, stream_options={"include_usage": True})
    texts, ends = dict.fromkeys(range(6), ""), []
    *events, last = [event async for event in stream]
    for event in events:
        (choice,) = event.choices
        texts[choice.index] += choice.text
        ends += [choice.index] if choice.finish_reason else []
    assert list(texts.values()) == [served.answer(prompt, 4, sample) for prompt in prompts for sample in range(2)]
    assert sorted(ends) == list(range(6)) and len({event.id for event in events}) == 1
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (15, 24)
    with refused("BadRequestError") as caught:
        await served.client.completions.create(**{**body, "prompt": ["one", "x" * 5000]}, stream=True)
    assert caught.value.param == "prompt"


async def a_stop_string_across_tokens_is_not_shown(served: Served) -> None:
    whole = served.answer("stop me", 40)
    words = whole.split()
    stop = f"{words[9][-1]} {words[10][0]}"
    shown = whole[: whole.index(stop)]
    body = {"model": "simulated", "prompt": "stop me", "max_tokens": 40, "stop": ["never", stop]}
    done = await served.client.completions.create(**body)
    assert (done.choices[0].text, done.choices[0].finish_reason) == (shown, "stop")
    events = [event async for event in await served.client.completions.create(**body, stream=True)]
    assert "".join(event.choices[0].text for event in events) == shown
    assert events[-1].choices[0].finish_reason == "stop"


async def a_truncated_prompt_is_its_end_or_its_beginning(served: Served) -> None:
    prompt = "hello world"
    for options, expected in (
        ({"truncate_prompt_tokens": 5}, "world"),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, "hello"),
        ({"truncate_prompt_tokens": 11}, prompt),
        ({"truncate_prompt_tokens": -1}, prompt),
        ({"truncate_prompt_tokens": None}, prompt),
    ):
        done = await served.client.completions.create(
            model="simulated", prompt=prompt, max_tokens=3, extra_body=options
        )
        assert done.choices[0].text == served.answer(expected, 3), options
        assert done.usage.prompt_tokens == len(expected)
    long = "x" * 5000
    done = await served.client.completions.create(
        model="simulated", prompt=long, max_tokens=6, extra_body={"truncate_prompt_tokens": -1}
    )
    assert done.usage.prompt_tokens == 4090 and done.choices[0].text == served.answer(long[:4090], 6)
    for tokens, most in ((4096, 16), (4081, 16), (1, 5000), (-1, 4096), (-2, 16)):
        with refused("BadRequestError") as caught:
            await served.client.completions.create(
                model="simulated", prompt=long, max_tokens=most, extra_body={"truncate_prompt_tokens": tokens}
            )
        assert caught.value.param == "truncate_prompt_tokens", (tokens, most)


async def prompts_share_a_cache_only_with_those_of_the_same_salt(served: Served) -> None:
    async def cached(**options: Any) -> int:
        done = await served.client.completions.create(
            model="simulated", prompt="salted " * 20, max_tokens=1, extra_body=options
        )
        cached: int = done.usage.prompt_tokens_details.cached_tokens
        return cached

    for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}):
        assert await cached(**salt) == 0
        assert await cached(**salt) == 128
    with refused("BadRequestError") as caught:
        await cached(cache_salt="")
    assert caught.value.param == "cache_salt"


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────
async def what_makes_no_sense_is_refused_with_its_field(served: Served) -> None:
    for options, param in (
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"prompt": [1 << 40]}, "prompt[0]"),
        ({"prompt": [1000]}, "prompt"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
    ):
        with refused("BadRequestError") as caught:
            await served.client.completions.create(**{"model": "simulated", "prompt": "x", **options})
        assert (caught.value.type, caught.value.param) == ("invalid_request_error", param), options


async def fields_that_change_the_answer_are_refused_and_unknown_ones_are_named(served: Served) -> None:
    messages = [{"role": "user", "content": "hi"}]
    for field in ({"regex": "a+"}, {"stop_regex": "a"}, {"prompt_embeds": "AAAA"}, {"tool_choice": "required"}):
        for create in (
            lambda field: served.client.completions.create(model="simulated", prompt="x", extra_body=field),
            lambda field: served.client.chat.completions.create(model="simulated", messages=messages, extra_body=field),
        ):
            with refused("BadRequestError") as caught:
                await create(field)
            assert caught.value.param == next(iter(field))
    for stream in (False, True):
        raw = await served.client.chat.completions.with_raw_response.create(
            model="simulated", messages=messages, stream=stream, max_tokens=2, extra_body={"bad_word": ["a"], "zz": 1}
        )
        assert raw.headers["x-ignored-fields"] == "bad_word (did you mean bad_words?), zz"
        raw = await served.client.chat.completions.with_raw_response.create(
            model="simulated", messages=messages, stream=stream, max_tokens=2, tool_choice="none", store=True
        )
        assert "x-ignored-fields" not in raw.headers


async def a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_look_for(served: Served) -> None:
    for prompt, tokens in (("x" * 4096, "4096"), ("x" * 5000, "at least 5000"), ([1] * 4097, "4097")):
        for stream in (False, True):
            with refused("BadRequestError") as caught:
                await served.client.completions.create(model="simulated", prompt=prompt, max_tokens=10, stream=stream)
            assert caught.value.code == "context_length_exceeded"
            words = "This model's maximum context length is 4096 tokens. However, you requested"
            assert words in caught.value.message and f"({tokens} in the prompt, 10 in the comp" in caught.value.message
    with refused("BadRequestError") as caught:
        messages = [{"role": "user", "content": "x" * 5000}]
        await served.client.chat.completions.create(model="simulated", messages=messages)
    assert "maximum context length is 4096 tokens" in caught.value.message and caught.value.param == "messages"


async def an_image_is_refused_by_a_device_that_sees_nothing(served: Served) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, image]}]
    with refused("BadRequestError") as caught:
        await served.client.chat.completions.create(model="simulated", messages=messages)
    assert caught.value.param == "messages[0].content[1]"


async def another_model_another_key_and_too_much_are_refused(served: Served) -> None:
    with refused("NotFoundError") as caught:
        await served.client.completions.create(model="other", prompt="x")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    async with served.with_key("wrong") as stranger:
        with refused("AuthenticationError") as caught:
            await stranger.models.list()
        assert caught.value.code == "invalid_api_key"
    with refused("APIStatusError") as caught:
        await served.client.completions.create(model="simulated", prompt="x" * MAX_BODY)
    assert caught.value.status_code == 413
    assert [model.id for model in (await served.client.models.list()).data] == ["simulated"]
    status, body = await served.get("/v1/nowhere")
    assert status == 404 and json.loads(body)["error"]["type"] == "not_found_error"


async def more_than_may_be_open_are_told_to_come_again(served: Served) -> None:
    body = {"model": "simulated", "prompt": "x", "max_tokens": 4000, "stream": True}
    streams = []
    with refused("RateLimitError") as caught:
        for _ in range(2 * MAX_OPEN + 1):
            streams.append(await served.client.completions.create(**body))
    assert int(caught.value.response.headers["retry-after"]) >= 1 and len(streams) >= MAX_OPEN
    for stream in streams:
        await stream.close()
    await served.must_be_empty()


# ── clients that go, or do not read ──────────────────────────────────────────────────────────────────────────────────


async def a_client_that_does_not_read_holds_up_nobody_and_loses_its_answer(served: Served) -> None:
    async def lost() -> float:
        return await served.total("penstock_requests_total", 'status="499"')

    for samples in (16, 64):  # the kernel's patience ends before the stream's room does, and the other way round
        before = await lost()
        with socket.socket() as listless:
            listless.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            listless.connect(("127.0.0.1", served.port))
            listless.sendall(
                posted("/v1/completions", {"prompt": "x", "max_tokens": 4000, "n": samples, "stream": True})
            )
            await served.until(lambda: served.number(StatusBoard.OPEN) == 1)
            done = await served.client.completions.create(model="simulated", prompt="hello", max_tokens=7)
            assert done.choices[0].text == served.answer("hello", 7)
            await served.until(
                lambda: served.number(StatusBoard.OPEN) == 0, within=6.0
            )  # the whole answer takes 8 s and more
            while await lost() == before:
                await asyncio.sleep(0.05)
    await served.must_be_empty()


# ── what is known ────────────────────────────────────────────────────────────────────────────────────────────────────
async def health_and_metrics_tell_of_all_processes(served: Served) -> None:
    status, body = await served.get("/health")
    health = json.loads(body)
    assert status == 200 and health["status"] == "ready"
    assert {server["pid"] for server in health["servers"]} == {served.child("server", index).pid for index in range(2)}
    assert (await served.get("/health/live"))[0] == (await served.get("/health/ready"))[0] == 200
    total = served.total
    before = await total("vllm:generation_tokens_total"), await total("penstock_requests_total")
    await served.client.completions.create(model="simulated", prompt="hello", max_tokens=7)
    await served.until(lambda: served.number(StatusBoard.OPEN) == 0)
    assert await total("vllm:generation_tokens_total") == before[0] + 7
    assert await total("penstock_requests_total") == before[1] + 1
    assert await total("penstock_open_requests") == 0 and await total("penstock_engine_incarnation") == 1
    first = await total("vllm:time_to_first_token_seconds_count")
    assert 0 < first and await total("vllm:inter_token_latency_seconds_count") > first
    ended = await total("vllm:request_success_total", 'finished_reason="length"')
    assert 0 < ended <= first <= await total("vllm:request_queue_time_seconds_count")
    assert ended <= await total("vllm:e2e_request_latency_seconds_count")
    assert await total("vllm:request_success_total", 'finished_reason="abort"') > 0  # of the clients that went
    assert await total("vllm:num_requests_running") == await total("vllm:num_requests_waiting") == 0
    assert 0 < await total("vllm:prefix_cache_hits_total") < await total("vllm:prefix_cache_queries_total")
    assert await total("vllm:prompt_tokens_total", 'model_name="simulated"') > 0
    assert await total("vllm:kv_cache_usage_perc") == 0


async def tokens_of_a_text_and_of_messages(served: Served) -> None:
    _, answer = await served.post("/tokenize", {"prompt": "hello"})
    assert (answer["count"], answer["tokens"], answer["max_model_len"]) == (5, [*b"hello"], 4096)


async def a_server_that_dies_comes_again_and_the_other_one_answers(served: Served) -> None:
    dead = served.child("server", 0).pid
    os.kill(dead, signal.SIGKILL)
    for _ in range(5):
        status, _ = await served.get("/v1/models")
        assert status == 200
    await served.until(lambda: served.launcher.units and [child for child in served.children() if child.pid != dead])

    async def pids() -> set[int]:
        _, body = await served.get("/health")
        return {server["pid"] for server in json.loads(body)["servers"] if server["serves"]}

    deadline = asyncio.get_running_loop().time() + 2
    while dead in await pids():  # until a new process has its place
        assert asyncio.get_running_loop().time() < deadline, "who is dead is said to serve"
        await asyncio.sleep(0.01)
    deadline += 20
    while dead in await pids() or len(await pids()) < 2:
        assert asyncio.get_running_loop().time() < deadline, "it did not come again"
        await asyncio.sleep(0.05)


SCENES: tuple[Callable[[Served], Any], ...] = (
    a_completion_is_what_the_rule_says,
    a_stream_says_the_same_and_then_its_usage,
    a_chat_is_streamed_with_its_role_first,
    samples_and_prompts_have_choices_of_their_own,
    several_prompts_are_streamed_with_the_indices_of_a_whole_answer,
    a_stop_string_across_tokens_is_not_shown,
    a_truncated_prompt_is_its_end_or_its_beginning,
    prompts_share_a_cache_only_with_those_of_the_same_salt,
    what_makes_no_sense_is_refused_with_its_field,
    fields_that_change_the_answer_are_refused_and_unknown_ones_are_named,
    a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_look_for,
    an_image_is_refused_by_a_device_that_sees_nothing,
    another_model_another_key_and_too_much_are_refused,
    more_than_may_be_open_are_told_to_come_again,
    a_client_that_does_not_read_holds_up_nobody_and_loses_its_answer,
    tokens_of_a_text_and_of_messages,
    health_and_metrics_tell_of_all_processes,
)


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest, warmed_up: None) -> Iterator[Any]:
    """A server with so many output processors."""
    from tests.shared_server import shared_server  # which imports this module

    with shared_server(run_server(output_processors=request.param)) as shared:
        yield shared


@pytest.mark.parametrize("shared", [1], indirect=True, ids=["1 output"])
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_a_served_tree(shared: Any, scene: Callable[[Served], Any]) -> None:
    shared.play(scene)


@pytest.mark.parametrize("shared", [0], indirect=True, ids=["no output"])
@pytest.mark.parametrize("scene", SCENES[:6], ids=lambda scene: scene.__name__)
def test_a_served_tree_whose_core_makes_text(shared: Any, scene: Callable[[Served], Any]) -> None:
    shared.play(scene)


@in_a_loop
async def test_a_server_that_dies_comes_again_and_the_other_one_answers() -> None:
    async with run_server() as served:
        await asyncio.wait_for(a_server_that_dies_comes_again_and_the_other_one_answers(served), 60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_it_loads_ends_the_command_at_once(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "penstock", "serve", "--device-model", "simulated", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stderr is not None
            line, output = "", ""
            while 'child="server 0.0' not in line:
                line = process.stderr.readline()
                output += line
                assert line, output
            began = time.monotonic()
            os.killpg(process.pid, number)  # as a terminal does, or an init system
            output += process.communicate(timeout=20)[1]
            assert time.monotonic() - began < STOP_TIMEOUT / 2, output
            assert process.returncode == 0 and "killed=none" in output and "level=error" not in output, output
            for child in re.findall(r"child_pid=(\d+)", output):
                with pytest.raises(ProcessLookupError):
                    os.kill(int(child), 0)
        finally:
            process.kill()
