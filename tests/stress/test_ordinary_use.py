"""Ordinary use of a served model for as long as it takes: short and long answers, languages, images, samples, stop
strings, clients that go. Every answer has the right shape, no process dies, nothing stays open, no process grows.

`PENSTOCK_TIER=soak` has 2,000 requests, and some on two ranks.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

psutil = pytest.importorskip("psutil")
pytest.importorskip("openai")
pytest.importorskip("torch")
pytest.importorskip("penstock.engine.worker.stock")
pytest.importorskip("httptools")

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: E402

from penstock.engine.cluster.status_board import StatusBoard  # noqa: E402
from tests import tiers  # noqa: E402
from tests.e2e.test_server import AUTHORIZED, Served, run_server  # noqa: E402
from tests.stress.test_server_soak import looks, must_not_grow  # noqa: E402
from tests.support.engine import START  # noqa: E402
from tests.support.models import ENGINE_SIZES, IMAGE, stock_of  # noqa: E402
from tests.support.serving import must_be_as_before  # noqa: E402
from tests.support.sights import TEMPLATES  # noqa: E402
from tests.unit.engine.media.test_image_processor import picture, processor_in  # noqa: E402

MAX_LENGTH, MAX_TOKENS = 2304, 2000
VOCABULARY = 400
LONGEST_WORD = 12  # bytes
CLIENTS = 10
WITHIN = tiers.limit(200.0, soak=900.0)  # seconds; the longest answer, on a busy machine
TEXTS = (
    "What do you see?",
    "Ein Satz über Straßen, Bäume und Käse.",
    "Что это такое, и почему?",
    "これは何ですか。丸い形が二つあります。",
    "ما هذا الشيء؟",
    "이것은 무엇입니까?",
    "👩‍👩‍👧‍👦 🚀 e\u0301 \u200b𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "def f(x):\n\treturn {'a': [x, None], \"b\": x ** 2}\n",
    "a" * 300,
)


def model_in(path: Path) -> Tokenizer:
    """Two layers that see, with words for every byte: answers are in no language, and often in halves of characters."""
    stock_of("llava", vocab_size=VOCABULARY, max_position_embeddings=MAX_LENGTH).save_pretrained(path)
    processor_in(path, "llava")
    special = {"<pad>": 0, "<s>": 1, "</s>": 2, "<image>": IMAGE}
    free = (number for number in range(VOCABULARY) if number not in special.values())
    ids = {**special, **{letter: next(free) for letter in sorted(pre_tokenizers.ByteLevel.alphabet())}}
    ids |= {f"<unused_{number}>": number for number in free}
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(path / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (path / "tokenizer_config.json").write_text(json.dumps({**kind, "chat_template": TEMPLATES["llava"]}))
    return tokenizer


class Ask(NamedTuple):
    """A request, and when its client goes."""

    path: str
    body: dict[str, Any]
    prompt_tokens: int | None  # None: it has images
    goes_after: int | None  # lines of its answer; None: it reads all of it

    @property
    def samples(self) -> int:
        return int(self.body.get("n", 1))


class Users:
    """Random requests, the same ones for a seed."""

    def __init__(self, seed: int, tokenizer: Tokenizer) -> None:
        self._chance = random.Random(seed)
        self._tokenizer = tokenizer
        self._images = [
            "data:image/png;base64," + base64.b64encode(picture(8 + 3 * seed, 24, seed=seed)).decode()
            for seed in range(6)
        ]

    def ask(self) -> Ask:
        chance = self._chance
        tokens = int(math.exp(chance.uniform(0, math.log(MAX_TOKENS))))
        body: dict[str, Any] = {"max_tokens": tokens, "temperature": chance.choice((0, 0, 0.7, 1, 1.5))}
        if tokens < 500 and chance.random() < 0.3:
            body["n"] = chance.randint(2, 4)
        if chance.random() < 0.3:
            body["stop"] = [chr(chance.randrange(33, 127)) * chance.randint(1, 2) for _ in range(chance.randint(1, 4))]
        if chance.random() < 0.5:
            body["ignore_eos"] = True
        if chance.random() < 0.2:
            body["min_tokens"] = chance.randint(0, tokens)
        if chance.random() < 0.2:
            body |= {"top_p": 0.9, "top_k": 50, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
        if chance.random() < 0.2:
            body["seed"] = chance.randrange(1 << 40)
        if chance.random() < 0.5:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        goes = chance.choice((0, 1, 3, 40)) if chance.random() < 0.15 else None
        text = " ".join(chance.choices(TEXTS, k=chance.choice((1, 1, 2, 4))))[: MAX_LENGTH - MAX_TOKENS - 100]
        while len(text.encode()) > MAX_LENGTH - MAX_TOKENS - 60:
            text = text[: len(text) // 2]
        if chance.random() < 0.5:
            if tokens < 300 and chance.random() < 0.3:
                body["logprobs"] = 2
            return Ask("/v1/completions", {**body, "prompt": text}, len(self._tokenizer.encode(text).ids), goes)
        parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
        for url in chance.sample(self._images, chance.choice((0, 1, 1, 2))):
            parts.append({"type": "image_url", "image_url": {"url": url}})
        return Ask("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": parts}]}, None, goes)


class Use:
    """Some clients that ask one thing after the other."""

    def __init__(self, served: Served, users: Users, count: int) -> None:
        self._tree = served
        self._users = users
        self._left = count
        self.ends: Counter[str] = Counter()
        self.longest = 0

    async def go(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(CLIENTS)))

    async def _client(self) -> None:
        while self._left:
            self._left -= 1
            ask = self._users.ask()
            try:
                await asyncio.wait_for(self._one(ask), WITHIN)
            except Exception as error:
                row = self._tree.launcher.board.row(0)
                now = {
                    name: row[getattr(StatusBoard, name)]
                    for name in ("OPEN", "WAITING", "FREE_BLOCKS", "STEPS", "SAMPLED")
                }
                raise AssertionError(
                    f"{type(error).__name__}: {error}, {now}, of {json.dumps(ask.body)[:600]}"
                ) from error

    async def _one(self, ask: Ask) -> None:
        payload = json.dumps({"model": self._tree.config.model.rpartition("/")[2], **ask.body}).encode()
        head = f"POST {ask.path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{AUTHORIZED}"
        reader, writer = await asyncio.open_connection("127.0.0.1", self._tree.port, limit=1 << 24)
        try:
            writer.write(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
            if ask.goes_after is not None:
                for _ in range(ask.goes_after):
                    await reader.readline()
                self.ends["gone"] += 1
                return
            top = await reader.readuntil(b"\r\n\r\n")
            body = (await reader.read()).decode()
            assert top.split()[1] == b"200", body[:500]
            if "stream" in ask.body:
                self._must_be_right(ask, *_of_events(body))
            else:
                whole = json.loads(body)
                ends = {choice["index"]: choice["finish_reason"] for choice in whole["choices"]}
                texts = {
                    choice["index"]: choice["text"] if "text" in choice else choice["message"]["content"] or ""
                    for choice in whole["choices"]
                }
                assert len(whole["choices"]) == len(ends)
                self._must_be_right(ask, ends, texts, whole["usage"])
        finally:
            writer.transport.abort()

    def _must_be_right(self, ask: Ask, ends: dict[int, str], texts: dict[int, str], usage: dict[str, Any]) -> None:
        most, body = ask.body["max_tokens"], ask.body
        assert sorted(ends) == list(range(ask.samples)), ends
        assert set(ends.values()) <= {"stop", "length"}
        tokens, prompt = usage["completion_tokens"], usage["prompt_tokens"]
        assert usage["total_tokens"] == tokens + prompt
        assert prompt == ask.prompt_tokens or (ask.prompt_tokens is None and 0 < prompt < MAX_LENGTH - MAX_TOKENS)
        whole = sum(end == "length" for end in ends.values())
        assert whole * most <= tokens <= ask.samples * most, (tokens, ends)
        assert tokens >= ask.samples * max(1, body.get("min_tokens", 0))
        if whole < ask.samples:
            assert "stop" in body or not body.get("ignore_eos"), "it stopped for no reason"
        for sample, text in texts.items():
            assert not any(stop in text for stop in body.get("stop", ())) or body.get("min_tokens"), (sample, text)
            assert len(text.encode()) <= LONGEST_WORD * most
        self.ends.update(ends.values())
        self.longest = max(self.longest, tokens // ask.samples)


def _of_events(body: str) -> tuple[dict[int, str], dict[int, str], dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in body.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines[-1]
    events = [json.loads(line) for line in lines[:-1]]
    assert not [event for event in events if "error" in event]
    ends: dict[int, str] = {}
    joined: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            index = choice["index"]
            assert index not in ends, "more came after the end"
            part = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            joined[index] = joined.get(index, "") + part
            if choice["finish_reason"]:
                ends[index] = choice["finish_reason"]
    return ends, joined, events[-1]["usage"]


def run(path: Path, seed: int, count: int, ranks: int) -> None:
    tokenizer = model_in(path)
    sizes = {**ENGINE_SIZES, "max_model_len": MAX_LENGTH, "max_num_batched_tokens": 256}
    limits = {"max_open_requests": 64, "max_body_nbytes": 1 << 20, "client_timeout": 30.0}
    processes = {"api_server_count": 2, "output_processors": 1, "tensor_parallel_size": ranks, "threads": 1}

    async def scene() -> None:
        async with run_server(
            limits, 3 * START, simulated=None, model=str(path), store_nbytes=1 << 20, **processes, **sizes
        ) as served:
            pids = {child.pid for child in served.children()}
            users, all_looks = Users(seed, tokenizer), []
            for _ in range(10):
                use = Use(served, users, count // 10)
                await use.go()
                all_looks.append(looks(served))
                assert {child.pid for child in served.children()} == pids, "a process has died"
                print(
                    f"{dict(use.ends)}, up to {use.longest} tokens, "
                    f"{served.number(StatusBoard.PREEMPTIONS)} preemptions"
                )
            await must_be_as_before(served, is_keeping=True)
            assert {child.pid for child in served.children()} == pids
            if tiers.TIER == "soak":
                must_not_grow(all_looks[3:6], all_looks[7:])

    asyncio.run(scene())


@pytest.mark.timeout(tiers.limit(300, soak=3600))
@pytest.mark.parametrize(("count", "ranks"), tiers.ORDINARY_REQUESTS)
def test_a_server_in_ordinary_use_answers_everything_and_keeps_nothing(
    count: int, ranks: int, tmp_path: Path, seed: int
) -> None:
    run(tmp_path, seed, count, ranks)
