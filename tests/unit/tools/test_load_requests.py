"""`penstock bench serve` against a server that answers by a script, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httptools")
pytest.importorskip("rich")

from penstock import cli
from penstock.tools.load import http_client
from penstock.tools.load.chat_request import Outcome, Stream
from penstock.tools.load.http_client import Failure
from penstock.tools.load.sse_events import MAX_EVENT, SseParser
from tests.conftest import eventually
from tests.support.loads import END, HEAD, Script, bench, chunk, ending, event, faked_in_a_thread, refusal, text, usage

GOOD: Script = [HEAD, text(), text(), text(), ending(3)]


def run(url: str, *options: str) -> int:
    """Runs the command in this process. Returns its status."""
    return cli.main(["bench", "serve", "--base-url", url, *" ".join(options).split()])


def answering(script: Script) -> Any:
    return faked_in_a_thread(lambda index, body: script)


# ── times ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_measured_times_are_the_delays_of_the_server(tmp_path: Path) -> None:
    """Least times only: a busy machine adds to them. A first token that is read late shortens what follows it."""
    script: Script = [HEAD, 0.2, text(), 0.1, text(), 0.1, text(), 0.3, ending(3)]
    with answering(script) as (_, url):
        status, output = bench(url, tmp_path, "--num-prompts", 4, "--max-concurrency", 4)
    result = output["figures"]
    assert status == 0 and result["requests"] == 4 and result["output_tokens"] == 12
    assert 195 < result["ttft"]["p50"] and 50 < result["tpot"]["p50"] and 695 < result["latency"]["p50"]
    assert result["latency"]["p50"] - result["ttft"]["p50"] > 300  # the end of the answer is not its last token
    assert result["tpot"]["mean"] == pytest.approx(result["itl"]["mean"])
    assert result["prompt_tokens"] == 20 and result["counted_by_events"] == 0


def test_split_and_joined_sse_events_are_parsed_alike(tmp_path: Path) -> None:
    whole = text() + text(" ünd") + ending(2)
    pieces: Script = [HEAD]
    for at in range(0, len(whole), 7):
        pieces += [whole[at : at + 7], 0.001]
    for script in (pieces, [HEAD + whole]):
        with answering(script) as (_, url):
            status, output = bench(url, tmp_path, "--num-prompts", 1)
        assert status == 0 and output["figures"]["output_tokens"] == 2
        assert output["figures"]["tokens_per_event"] == 1


def test_a_running_count_says_which_event_brought_how_many(tmp_path: Path) -> None:
    first, second, third = text(" a", usage=usage(1)), text(" b c d e", usage=usage(5)), text(" f", usage=usage(6))
    with answering([HEAD, first, 0.2, second, 0.4, third, ending(6)]) as (_, url):
        _, output = bench(url, tmp_path, "--num-prompts", 1)
    # A gap of 200 ms for four tokens, and one of 400 for one, each as long as the client reads at once; spread over
    # events, they would be 200 and 400.
    assert 20 < output["figures"]["itl"]["p50"] < 150
    assert output["figures"]["itl"]["p99"] > 300
    assert output["figures"]["tokens_per_event"] == 2


def test_sse_data_is_parsed_as_in_the_standard() -> None:
    stream = b": a comment\ndata: one\n\ndata:two\r\nid: 4\r\n\r\nevent: x\n\ndata: a\ndata: b\n\ndata: half"
    for size in range(1, len(stream)):
        data, result = SseParser(), []
        for at in range(0, len(stream), size):
            result += data.feed(stream[at : at + size])
        assert result == [b"one", b"two", b"a\nb"]


def test_an_event_that_does_not_end_is_not_awaited() -> None:
    for more in (b"x" * 1000, b"data: " + b"x" * 1000 + b"\n"):
        stream = Stream(Outcome(0.0))
        stream.begin(200, {"content-type": "text/event-stream"})
        with pytest.raises(Failure, match=f"an event is longer than {MAX_EVENT} bytes") as caught:
            for _ in range(MAX_EVENT // 1000 + 1):
                assert not stream.take(more, 0.0)
        assert caught.value.kind == "no events"


# ── what is asked, and when ──────────────────────────────────────────────────────────────────────────────────────────
def test_load_keeps_to_max_concurrency_and_reuses_connections(tmp_path: Path) -> None:
    with answering([HEAD, text(), 0.01, ending(1)]) as (fake, url):
        status, output = bench(url, tmp_path, "--num-prompts", 30, "--max-concurrency", 3)
    assert status == 0 and fake.most_open == fake.connections == output["figures"]["most_open"] == 3
    assert len(fake.requests) == 30


def test_arrivals_at_a_rate_do_not_wait_for_answers(tmp_path: Path) -> None:
    with answering([HEAD, text(), 1.0, ending(1)]) as (fake, url):
        status, output = bench(url, tmp_path, "--num-prompts", 40, "--request-rate", 200)
    assert status == 0 and fake.most_open > 20
    assert output["figures"]["seconds"] >= 1.0


def test_arrivals_follow_their_seed_and_rate() -> None:
    from penstock.tools.load.arrivals import Load

    class Wire:
        async def post(self, path: str, body: bytes, taker: Any) -> None:
            taker.begin(503, {})

    def dues(seed: int) -> list[float]:
        load = Load(Wire(), [("/", b"")] * 200, lambda outcome: None)  # type: ignore[arg-type]
        asyncio.run(load.open(2000.0, seed))
        outcomes: list[Outcome] = load.outcomes
        return [round(item.due - outcomes[0].due, 9) for item in outcomes]

    first = dues(7)
    assert first == pytest.approx(dues(7), abs=1e-6) and first != pytest.approx(dues(8), abs=1e-4)
    assert first[-1] == pytest.approx(199 / 2000, rel=0.3)
    gaps = sorted(b - a for a, b in itertools.pairwise(first))
    assert gaps[20] < 0.0001 < 0.001 < gaps[-10]  # not a steady beat


def test_prompts_have_the_requested_number_of_tokens(tmp_path: Path) -> None:
    """Two to a word, and seven in each prompt."""

    def script(index: int, body: dict[str, Any]) -> Script:
        if not body:
            return [refusal("200 OK", b'{"object":"list","data":[{"id":"theirs"}]}')]
        tokens = 7 + 2 * len(body["messages"][0]["content"].split())
        return [HEAD, text(), event(choices=[], usage=usage(1, tokens)), text("", "length"), END]

    for seed in (1, 1, 2):
        with faked_in_a_thread(script) as (fake, url):
            options = f"--api-key sesame --backend openai-chat --input-len 47-87 --output-len 5-9 --seed {seed}"
            more = f"--num-prompts 20 --num-warmups 3 --result-filename {tmp_path}/x --ignore-eos"
            assert run(f"{url}/v1", options, more) == 0
        assert fake.requests[0] == ("/v1/models", {}) and "authorization: Bearer sesame" in fake.heads[-1]
        assert len(fake.requests) == 1 + 2 + 3 + 20
        bodies = [body for _, body in fake.requests[6:]]
        sizes = [7 + 2 * len(body["messages"][0]["content"].split()) for body in bodies]
        assert {path for path, _ in fake.requests[1:]} == {"/v1/chat/completions"}
        assert 46 <= min(sizes) < 60 and 74 < max(sizes) <= 88
        assert {body["max_tokens"] for body in bodies} <= {5, 6, 7, 8, 9}
        assert all(body["ignore_eos"] and body["stream"] and body["model"] == "theirs" for body in bodies)
        output = json.dumps(sorted(map(str, bodies)))
        saved = tmp_path / f"bodies{seed}"
        assert not saved.exists() or saved.read_text() == output, "the same seed, and other prompts"
        saved.write_text(output)
        assert json.loads((tmp_path / "x").read_text())["figures"]["prompt_tokens"] == sum(sizes)
    assert (tmp_path / "bodies1").read_text() != (tmp_path / "bodies2").read_text()


def test_images_are_png_files_of_the_size_asked_for(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    import base64
    import io

    with answering(GOOD) as (fake, url):
        assert run(url, "--images 2 --image-size 50x33 --num-prompts 2 --model m") == 0
    parts = [body["messages"][0]["content"] for _, body in fake.requests[2:]]
    assert [[part["type"] for part in entry] for entry in parts] == [["image_url", "image_url", "text"]] * 2
    urls = [part["image_url"]["url"] for entry in parts for part in entry[:2]]
    assert len(set(urls)) == 4
    for item in urls:
        result = image.open(io.BytesIO(base64.b64decode(item.removeprefix("data:image/png;base64,"))))
        result.load()
        assert (result.size, result.mode) == ((50, 33), "RGB") and len(result.getcolors(50 * 33)) == 4 * 3


def test_videos_are_mp4_files_of_the_size_and_duration_asked_for() -> None:
    av = pytest.importorskip("av")
    import base64
    import io

    with answering(GOOD) as (fake, url):
        options = "--videos 1 --images 1 --video-size 48x32 --video-fps 5 --video-seconds 1-3 --num-prompts 3 --model m"
        assert run(url, options) == 0
    parts = [body["messages"][0]["content"] for _, body in fake.requests[2:]]
    assert [[part["type"] for part in entry] for entry in parts] == [["image_url", "video_url", "text"]] * 3
    urls = [entry[1]["video_url"]["url"] for entry in parts]
    assert len(set(urls)) == 3
    for item in urls:
        with av.open(io.BytesIO(base64.b64decode(item.removeprefix("data:video/mp4;base64,")))) as container:
            stream = container.streams.video[0]
            assert (stream.width, stream.height, stream.average_rate) == (48, 32, 5)
            assert stream.frames in (5, 10, 15) and len(list(container.decode(stream))) == stream.frames


def test_load_sends_the_lines_of_a_file_in_order(tmp_path: Path) -> None:
    lines = ('"one"', "", "[1, 2]", '{"prompt": "three", "max_tokens": 9, "temperature": 1.5}')
    (tmp_path / "lines").write_text("\n".join(lines))
    with answering(GOOD) as (fake, url):
        assert run(url, f"--dataset-path {tmp_path}/lines --num-prompts 4 --max-concurrency 1 --model m") == 0
    request = [(body["prompt"], body["max_tokens"], body["temperature"]) for _, body in fake.requests]
    assert request == [("one", 128, 0), ([1, 2], 128, 0), ("three", 9, 1.5), ("one", 128, 0)]


def test_prompts_may_come_through_a_pipe() -> None:
    ours, own = os.pipe()
    try:
        os.write(own, b'"one"\n"two"\n')
        os.close(own)
        with answering(GOOD) as (fake, url):
            assert run(url, f"--dataset-path /dev/fd/{ours} --num-prompts 3 --max-concurrency 1 --model m") == 0
    finally:
        os.close(ours)
    assert [body["prompt"] for _, body in fake.requests] == ["one", "two", "one"]


def test_invalid_load_options_are_refused_before_any_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad").write_text('"fine"\n{"text": 1}\n')
    (tmp_path / "empty").write_text("\n")
    for options, words in (
        (["--dataset-path", tmp_path / "bad"], "line 2: expected a text, a list of ids, or an object with 'prompt'"),
        (["--dataset-path", tmp_path / "empty"], "has no lines"),
        (["--dataset-path", tmp_path / "none"], "No such file"),
        (["--base-url", "ftp://x"], "expected a URL like http://"),
        (["--images", 1, "--backend", "openai"], "--images are for --backend openai-chat"),
        (["--videos", 1, "--backend", "openai"], "--videos are for --backend openai-chat"),
        (["--videos", 1, "--video-size", "33x32"], "--video-size has even numbers of pixels"),
    ):
        assert cli.main(["bench", "serve", *map(str, options)]) == 2
        assert words in capsys.readouterr().err
    for options in (
        ["--request-rate", 0],
        ["--request-rate", 1, "--max-concurrency", 1],
        ["--image-size", "5"],
        ["--input-len", "9-3"],
    ):
        with pytest.raises(SystemExit):
            cli.main(["bench", "serve", *map(str, options)])


# ── servers that misbehave ───────────────────────────────────────────────────────────────────────────────────────────
BUSY = refusal("429 Too Many Requests", b'{"error":{"message":"come again"}}', b"Retry-After: 1")
BROKEN = b'data: {"error": {"message": "the device is gone", "type": "server_error"}}\n\n'
MISDEEDS: list[tuple[Script, str, str]] = [
    ([0.1, None], "closed", "before it answered"),
    ([HEAD, text(), None], "closed", "in the middle of its answer"),
    ([HEAD, text(), b"5\r\nda", None], "closed", "in the middle of its answer"),
    ([60.0], "silent", "no event came for 0.5 s"),
    ([HEAD, text(), 60.0], "silent", "no event came for 0.5 s"),
    ([HEAD, *[chunk(b": still here\n\n"), 0.05] * 60], "silent", "no event came for 0.5 s"),
    ([BUSY], "status 429", "come again"),
    ([refusal("503 Service Unavailable", b"<html>overloaded</html>")], "status 503", "<html>overloaded</html>"),
    ([refusal("500 X", b"")], "status 500", "no reason is given"),
    ([HEAD, text(), chunk(b'data: {"choices": [{"te\n\n')], "not JSON", '{"choices": [{"te'),
    ([HEAD, text(), chunk(b"data: \xff\xfe\n\n")], "not JSON", ""),
    ([HEAD, text(), chunk(b'data: {"choices": 3}\n\n')], "not JSON", "$.choices"),
    ([HEAD, text(), chunk(b"data: " + b"[" * 100_000 + b"\n\n")], "not JSON", ""),
    ([HEAD, text(), chunk(BROKEN), END], "error event", "the device is gone"),
    ([HEAD, text(), event(object="error", message="an older way"), END], "error event", "an older way"),
    ([HEAD, text(), END], "cut off", "the stream ended before its answer did"),
    ([refusal("200 OK", b'{"choices":[{"text":"all at once"}]}')], "no stream", "all at once"),
    ([b"SSH-2.0-OpenSSH_9.2\r\n"], "not HTTP", "SSH-2.0"),
    ([b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000], "not HTTP", "longer than 65536 bytes"),
    ([HEAD, b"zz\r\n"], "not HTTP", ""),
]


@pytest.mark.parametrize(
    ("script", "kind", "words"), MISDEEDS, ids=[f"{misdeed[1]}-{at}" for at, misdeed in enumerate(MISDEEDS)]
)
def test_faulty_answers_are_counted_by_kind(
    script: Script, kind: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with faked_in_a_thread(lambda index, body: GOOD if index % 2 else script) as (_, url):
        timeout = 0.5 if kind == "silent" else 10  # seconds without an event
        status, output = bench(url, tmp_path, "--num-prompts", 6, "--max-concurrency", 1, "--timeout", timeout)
    result = output["figures"]
    assert status == 1 and (result["requests"], result["failed"]) == (3, 3)
    (error,) = result["errors"]
    assert (error["kind"], error["requests"]) == (kind, 3) and words in error["example"]
    assert len(error["example"]) < 400
    assert kind in capsys.readouterr().out


def test_connection_that_is_refused_fails_each_request(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        status, output = bench(f"http://127.0.0.1:{taken.getsockname()[1]}", tmp_path, "--num-prompts", 5)
    assert status == 1 and [item["kind"] for item in output["figures"]["errors"]] == ["not connected"]


def test_a_kept_connection_that_the_server_closes_is_nobodys_fault(tmp_path: Path) -> None:
    with faked_in_a_thread(lambda index, body: [*GOOD, None]) as (fake, url):
        status, output = bench(url, tmp_path, "--num-prompts", 20, "--max-concurrency", 2)
    assert status == 0 and output["figures"]["requests"] == 20 and fake.connections >= 20


def test_a_connection_that_was_idle_for_long_is_not_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "KEPT", 0.0)
    with answering(GOOD) as (fake, url):
        status, _ = bench(url, tmp_path, "--num-prompts", 5, "--max-concurrency", 1)
    assert status == 0 and fake.connections == 5


def test_connection_that_closes_at_once_is_not_retried(tmp_path: Path) -> None:
    with answering([None]) as (fake, url):
        status, output = bench(url, tmp_path, "--num-prompts", 5)
    assert status == 1 and output["figures"]["failed"] == len(fake.requests) == 5


def test_an_answer_may_end_with_its_connection(tmp_path: Path) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    bare = [b'data: {"choices":[{"text":"x","finish_reason":"stop"}]}\n\n', b"data: [DONE]\n\n"]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                with listener.accept()[0] as client:
                    client.recv(65536)
                    client.sendall(head + b"".join(bare))

        thread = threading.Thread(target=serve)
        thread.start()
        status, output = bench(f"http://127.0.0.1:{listener.getsockname()[1]}", tmp_path, "--num-prompts", 2)
        thread.join(10)
    assert status == 0 and output["figures"]["counted_by_events"] == 2


def test_load_stops_without_a_model_or_when_the_first_prompt_fails(capsys: pytest.CaptureFixture[str]) -> None:
    for script, words in (
        ([BUSY], "/v1/models: status 429"),
        ([refusal("200 OK", b"{}")], "name the model with --model"),
        ([refusal("200 OK", b'{"data":[{"id":"m"}]}'), None], "a request of 16 words: "),
    ):
        with faked_in_a_thread(lambda index, body, script=script: script if not index else [BUSY]) as (_, url):
            assert cli.main(["bench", "serve", "--base-url", url]) == 2
        assert words in capsys.readouterr().err


# ── signals ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "numbers", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGTERM] * 20], ids=["SIGINT", "SIGTERM", "twenty"]
)
def test_signal_prints_a_partial_table(numbers: list[signal.Signals], tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text('"x"\n')
    with faked_in_a_thread(lambda index, body: GOOD if index < 5 else [HEAD, text(), 60.0]) as (fake, url):
        options = f"--model m --dataset-path {tmp_path}/prompts --result-filename {tmp_path}/x --max-concurrency 2"
        command = [sys.executable, "-m", "penstock", "bench", "serve", "--base-url", url, *options.split()]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                eventually(lambda: len(fake.requests) == 7, within=30)
                time.sleep(0.1)
                for number in numbers:
                    process.send_signal(number)
                    time.sleep(0.03)
                out, err = process.communicate(timeout=20)
            finally:
                process.kill()
    assert process.returncode == 128 + numbers[0], err
    assert f"partial: ended by {numbers[0].name}" in " ".join(out.split())
    assert re.search(r"answered +5", out) and "interrupted: 2 requests were open" in out and not err
    parsed = json.loads((tmp_path / "x").read_text())
    assert parsed["interrupted"] == numbers[0].name and parsed["figures"]["unfinished"] == 2


def test_load_command_imports_neither_engine_nor_torch() -> None:
    code = "import sys, penstock.tools.load.command; print(*sys.modules)"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert not [word for word in completed.stdout.split() if re.match(r"penstock\.(engine|server)|torch|httpx", word)]
