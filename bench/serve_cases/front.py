"""What the processes before the device cost: a burst of chats, a step, a token. The device is simulated."""

from __future__ import annotations

import contextlib
import re
import selectors
import socket
import statistics
import time
from collections.abc import Iterable, Sequence

from bench.harness.figures import Figures, quantile
from bench.harness.output import short
from bench.serve_cases.cases import Servers
from bench.serve_cases.servers import NAME, OURS, Failed, Ours, post_of

ROLES = ("server", "core", "worker", "output")
WORDS = "What do you see in this picture, and which of them is the largest? "  # 68 tokens of bytes
FIRST_ID = re.compile(rb'"content": ?"[^"]')
END = b"data: [DONE]"
ANSWER_TOKENS = 4  # of a chat of the burst
PATIENCE_S = 120.0
STEP_WARM_UP_S, STEP_S = 1.5, 6.0
TOKEN_STEP_MS = 5.0
READ_POLL_S = 0.05  # of many streams: a program that each chunk wakes would take the processors
GENERATED = re.compile(rb"^vllm:generation_tokens_total\{.*\} (\S+)$", re.MULTILINE)


def burst(servers: Servers, chats: int, rounds: int) -> Figures:
    """Sends that many chats at once, over connections that are open. Raises Failed if a chat is not answered."""
    sizes = ("--max-num-seqs", str(chats), "--max-num-batched-tokens", str(chats * 128))
    server = Ours.simulated(chats, servers.scratch / "burst.log", options=sizes)
    try:
        server.wait_for_an_answer()
        bursts = [_one_burst(server, chats) for _ in range(rounds + 1)][1:]  # without the first: nothing is warm
    finally:
        server.stop()
    medians = [statistics.median(times) for times, _ in bursts]
    figures = {
        "ttft_ms": statistics.median(medians) * 1e3,
        "ttft_least_ms": min(medians) * 1e3,
        "ttft_p99_ms": statistics.median(quantile(sorted(times), 0.99) for times, _ in bursts) * 1e3,
        "server_cpu_ms": statistics.median(cpu["server"] for _, cpu in bursts) * 1e3,
        "cpu_ms": statistics.median(sum(cpu.values()) for _, cpu in bursts) * 1e3,
    }
    servers.output.record("burst", OURS, chats=chats, rounds=rounds, **figures)
    columns = ["TTFT p50, ms: median", "least", "p99", "CPU of the server, ms", "of all processes"]
    row = (OURS, [short(value) for value in figures.values()])
    servers.output.table(f"{chats:,} chats at once, one server, {rounds} bursts", columns, [row])
    return figures


def _one_burst(server: Ours, chats: int) -> tuple[list[float], dict[str, float]]:
    """Returns the time to the first token of each chat, and the processor time of each role."""
    before = server.cpu_seconds()
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        connections = [_connect(stack, server.port) for _ in range(chats)]
        begins = []
        for number, connection in enumerate(connections):
            begins.append(time.perf_counter())
            connection.sendall(_chat(ANSWER_TOKENS))
            selector.register(connection, selectors.EVENT_READ, number)
        times = _read_answers(selector, begins)
    return times, {role: cpu - before.get(role, 0.0) for role, cpu in server.cpu_seconds().items()}


def _read_answers(selector: selectors.BaseSelector, begins: Sequence[float]) -> list[float]:
    """Returns when the first token of each chat arrived, after its begin, in order of their ends."""
    texts, firsts, times = [b""] * len(begins), [0.0] * len(begins), list[float]()
    deadline = time.perf_counter() + PATIENCE_S
    while len(times) < len(begins):
        ready = selector.select(deadline - time.perf_counter())
        if not ready:
            raise Failed(f"{len(begins) - len(times)} of {len(begins)} chats have no answer after {PATIENCE_S:g} s")
        arrived = time.perf_counter()
        for key, _ in ready:
            number, data = key.data, key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            texts[number] += data
            if not firsts[number] and FIRST_ID.search(texts[number]):
                firsts[number] = arrived
            if END in texts[number] or not data:
                if not firsts[number]:
                    raise Failed(f"a chat has no token: {texts[number][:300]!r}")
                times.append(firsts[number] - begins[number])
                selector.unregister(key.fileobj)
    return times


def light_step(servers: Servers, rounds: int) -> Figures:
    """Measures the processor time of a step with one stream. Raises Failed if the stream ends."""
    server = Ours.simulated(1, servers.scratch / "step.log", options=("--max-model-len", "8192"))
    try:
        server.wait_for_an_answer()
        streams = [_one_stream(server) for _ in range(rounds)]
    finally:
        server.stop()
    figures = {role: statistics.median(cpu[role] for cpu in streams) for role in (*ROLES, "sum")}
    servers.output.record("step", OURS, rounds=rounds, **figures)
    row = (OURS, [f"{value:.3f}" for value in figures.values()])
    servers.output.table("processor time of a step with one stream, ms", list(figures), [row])
    return figures


def _one_stream(server: Ours) -> Figures:
    with contextlib.ExitStack() as stack:
        connection = _connect(stack, server.port)
        connection.sendall(_chat(4_000))
        _count_tokens(connection, STEP_WARM_UP_S)
        before = server.cpu_seconds()
        tokens = _count_tokens(connection, STEP_S)
        after = server.cpu_seconds()
    figures = {role: (after.get(role, 0.0) - before.get(role, 0.0)) * 1e3 / tokens for role in ROLES}
    return {**figures, "sum": sum(figures.values())}


def _count_tokens(connection: socket.socket, seconds: float) -> int:
    deadline, tokens = time.perf_counter() + seconds, 0
    while time.perf_counter() < deadline:
        data = connection.recv(1 << 16)
        if not data or END in data:
            raise Failed("the stream ended before it was measured")
        tokens += len(FIRST_ID.findall(data))
    return max(tokens, 1)


def streamed_tokens(servers: Servers, streams: int, rounds: int) -> Figures:
    """Measures the processor time of a token of many streams, by process. Raises Failed."""
    server = Ours.simulated(streams, servers.scratch / "tokens.log", step_ms=TOKEN_STEP_MS)
    try:
        server.wait_for_an_answer()
        costs = [_cost_of_tokens(server, streams) for _ in range(rounds)]
    finally:
        server.stop()
    figures = {role: statistics.median(cost[role] for cost in costs) for role in (*ROLES, "front")}
    costs_ms = {f"{role}_ms": value for role, value in figures.items()}
    servers.output.record("tokens", OURS, rounds=rounds, streams=streams, **costs_ms)
    row = (OURS, [f"{value:.2f}" for value in figures.values()])
    title = f"processor time of 1,000 tokens of {streams} streams, ms; front: without the worker"
    servers.output.table(title, list(figures), [row])
    return figures


def _cost_of_tokens(server: Ours, streams: int) -> Figures:
    with contextlib.ExitStack() as stack:
        connections = [_connect(stack, server.port) for _ in range(streams)]
        for connection in connections:
            connection.sendall(_chat(4_000))
        _read_all(connections, STEP_WARM_UP_S)
        before, tokens = server.cpu_seconds(), _generated(server)
        _read_all(connections, STEP_S)
        after, tokens = server.cpu_seconds(), _generated(server) - tokens
    costs = {role: (after.get(role, 0.0) - before.get(role, 0.0)) * 1e6 / tokens for role in ROLES}
    return {**costs, "front": sum(costs.values()) - costs["worker"]}


def _read_all(connections: Iterable[socket.socket], seconds: float) -> None:
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        time.sleep(READ_POLL_S)
        for connection in connections:
            with contextlib.suppress(BlockingIOError):
                data = connection.recv(1 << 20, socket.MSG_DONTWAIT)
                if not data or END in data:
                    raise Failed("a stream ended before it was measured")


def _generated(server: Ours) -> float:
    """Returns the tokens that the server has passed on."""
    return sum(map(float, GENERATED.findall(server.request("GET", "/metrics")[1])))


def _connect(stack: contextlib.ExitStack, port: int) -> socket.socket:
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _chat(tokens: int) -> bytes:
    chat = {"model": NAME, "messages": [{"role": "user", "content": WORDS}], "max_tokens": tokens}
    return post_of("/v1/chat/completions", {**chat, "stream": True, "ignore_eos": True})
