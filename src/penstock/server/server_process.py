"""A server process: takes connections from the socket that all of them share, and answers them from one event loop.

Leaves to `app` what is answered, and to the launcher that it lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import sys
from typing import Any

from penstock.engine.client.client import Client
from penstock.engine.cluster.logs import LOGGER, event
from penstock.engine.cluster.process import starting
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.topology import Cluster, ProcessId
from penstock.engine.media.media_budget import STAGES, MediaBudget
from penstock.server.chat.media_prompts import build_media_prompts
from penstock.server.chat.prompt_builder import PromptBuilder, build_tokenizer
from penstock.server.embeds.embeds_prompts import EmbedsPrompts
from penstock.server.http.app import ApiServer
from penstock.server.http.http_server import HttpServer
from penstock.server.http.loop_errors import LoopErrors
from penstock.server.http.pooling_routes import RERANK_TEMPLATE
from penstock.server.http.segment_metrics import SegmentMetrics
from penstock.server.listening import BACKLOG, ServerArgs, tls_context
from penstock.server.options import ServerOptions
from penstock.server.status.counters import ProcessCounters, ServerCounters
from penstock.server.status.history import EventRecorder, ServerHistory

CONNECTIONS = 4  # for each request that may be open
WORD = "a"  # its last id stands in prompts for embeddings: an ordinary token, after which an answer begins with a space
OTHER_DESCRIPTORS = 128  # of a process, besides its connections
COLLECT_AFTER = 20_000  # objects more: a request makes no cycles, and scanning open ones was a fifth of a burst's time


def serve(shared: ServerArgs, cluster: Cluster, me: ProcessId) -> None:
    """Runs a server process until SIGTERM; then it answers open requests, for `shutdown_timeout` seconds at most."""
    _do_without_torch()
    asyncio.run(_serve(shared, cluster, me))


def _do_without_torch() -> None:
    """Keeps transformers from importing torch: image processors and chat templates work without it.

    The import would cost 260 MB and 5 s of a processor, for each server of a model that takes images.
    """
    modules: dict[str, Any] = sys.modules
    modules.setdefault("torch", None)  # how Python notes that there is none
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that it was not found


async def _serve(shared: ServerArgs, cluster: Cluster, me: ProcessId) -> None:
    asyncio.get_running_loop().set_exception_handler(LoopErrors())
    loop_log = logging.getLogger("asyncio")
    loop_log.handlers[:] = LOGGER.handlers
    loop_log.setLevel(logging.ERROR)  # clients cause its warnings, without limit
    tally, board = (
        ServerCounters(shared.tally, cluster.config.api_server_count, writable=True),
        StatusBoard(cluster.board),
    )
    row = tally.rows[me.index]
    row[ProcessCounters.PID], row[ProcessCounters.SERVING] = os.getpid(), 0
    row.clear_gauges()
    budget = MediaBudget(shared.options.media_nbytes_in_flight, row.set_media)
    for number, stage in enumerate(STAGES):
        row[ProcessCounters.MEDIA_LIMITS + number] = getattr(budget, stage).nbytes
    history = ServerHistory(shared.history_segment, cluster.config.api_server_count, writable=True)
    with starting():
        template = RERANK_TEMPLATE if cluster.config.pooling == "classify" else ""
        words = build_tokenizer(cluster.config, shared.options.chat_template or template)
        media = build_media_prompts(
            cluster.config, shared.options, cluster.store, words.tokenizer, budget, row, me.index
        )
        embeds = None
        if cluster.config.enable_prompt_embeds:
            embeds = EmbedsPrompts(cluster.config, cluster.store, words.encode(WORD, False)[-1], row.count_items)
    log = EventRecorder(history.events[me.index + 1], f"server {me.index}")
    with contextlib.closing(PromptBuilder(cluster.config, words, media, embeds)) as reader, log:
        async with Client(cluster, me, [served.migration for served in row.engines], row.queue) as client:
            segments = SegmentMetrics(cluster.channels, cluster.store, cluster.config, os.getppid())
            api = ApiServer(
                *(cluster.config, shared.options, client, reader, tally, board, me.index),
                *(segments, budget, shared.response_store, cluster.adapters),
            )
            server = HttpServer(api.app(), _max_connections(shared.options), shared.options.client_timeout)
            stopping = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
            gc.freeze()  # objects alive now stay alive: a collection that scanned them would delay every stream
            gc.set_threshold(COLLECT_AFTER)
            await server.start(shared.listener, BACKLOG, cluster.config.api_server_count, tls_context(shared.options))
            row[ProcessCounters.SERVING] = 1
            settling = None if api.lora is None else asyncio.ensure_future(api.lora.settle())
            await stopping.wait()
            row[ProcessCounters.SERVING] = 2
            if settling is not None:
                settling.cancel()  # the next process ends the change
            await server.stop(cluster.config.shutdown_timeout)
            api.close()


def _max_connections(options: ServerOptions) -> int:
    connections = CONNECTIONS * options.max_open_requests
    max_connections = _room_for(connections)
    if max_connections < connections:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        remedy = f"ulimit -Hn {connections + OTHER_DESCRIPTORS}, or a smaller --max-open-requests"
        event(
            "few connections",
            logging.WARNING,
            most=max_connections,
            required=connections,
            descriptors=hard,
            remedy=remedy,
        )
    return max_connections


def _room_for(connections: int) -> int:
    """Returns for how many connections this process may have descriptors, and raises its soft limit for them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = min(connections + OTHER_DESCRIPTORS, hard)
    if soft < descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, hard))
    return max(1, min(connections, max(soft, descriptors) - OTHER_DESCRIPTORS))
