"""The dashboard that Grafana imports: chosen panels, and a panel for each further declared metric.

Prints the dashboard when run as a program.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from penstock.engine.cluster.counter import CounterSpec
from penstock.server.http.segment_metrics import declared_metrics

WIDTH, HEIGHT, COLUMNS = 8, 8, 3
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
METRIC = re.compile(r"\b((?:vllm:|penstock_)\w+)(\{.*?\})?")
GROWTH = re.compile(r"\b(rate|increase)\(((?:vllm:|penstock_)\w+)(\{.*?\})?\)")
Query = tuple[str, str]  # an expression with `rate(NAME)` of a counter, and a legend


class Panel:
    def __init__(self, title: str, description: str, unit: str, *queries: Query) -> None:
        self.title, self.description, self.unit, self.queries = title, description, unit, queries


def quantiles(histogram: str) -> list[Query]:
    buckets, total, count = (f"rate({histogram}_{part})" for part in ("bucket", "sum", "count"))
    shares = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
    return [
        *((f"histogram_quantile({share}, sum by (le) ({buckets}))", name) for share, name in shares),
        (f"sum({total}) / sum({count})", "mean"),
    ]


def ratio(part: str, whole: str) -> str:
    """Returns the quotient of the growth of two counters, of each engine."""
    return f"sum by (engine) (rate({part})) / sum by (engine) (rate({whole}))"


PANELS = (
    Panel(
        "Running and waiting",
        "Sequences in batches, and those that wait for one or were preempted.",
        "short",
        ("sum by (engine) (vllm:num_requests_running)", "running, engine {{engine}}"),
        ("sum by (engine) (vllm:num_requests_waiting)", "waiting, engine {{engine}}"),
    ),
    Panel(
        "Tokens per second",
        "Prompt tokens of sequences that have their first token, and generated tokens.",
        "short",
        ("sum by (engine) (rate(vllm:prompt_tokens))", "prompt, engine {{engine}}"),
        ("sum by (engine) (rate(vllm:generation_tokens))", "generated, engine {{engine}}"),
    ),
    Panel(
        "KV cache in use",
        "Near 1, requests wait or are preempted.",
        "percentunit",
        ("vllm:kv_cache_usage_perc", "engine {{engine}}"),
    ),
    *(
        Panel(title, description, "s", *quantiles(histogram))
        for title, description, histogram in (
            ("Time to first token", "Seconds from a request to its first token.", "vllm:time_to_first_token_seconds"),
            ("Inter-token latency", "Seconds from a token to the next.", "vllm:inter_token_latency_seconds"),
            ("Time per output token", "Mean of each finished sequence.", "vllm:request_time_per_output_token_seconds"),
            ("End-to-end latency", "Seconds from a request to its last token.", "vllm:e2e_request_latency_seconds"),
            ("Queue time", "Seconds from the arrival in the core to a batch.", "vllm:request_queue_time_seconds"),
        )
    ),
    Panel(
        "Finished sequences per second",
        "By reason. abort: the client has gone; error: the engine gave up.",
        "reqps",
        ("sum by (finished_reason) (rate(vllm:request_success))", "{{finished_reason}}"),
    ),
    Panel(
        "Prefix cache hit rate",
        "Share of looked-up prompt tokens that the cache had.",
        "percentunit",
        (ratio("vllm:prefix_cache_hits", "vllm:prefix_cache_queries"), "engine {{engine}}"),
    ),
    Panel(
        "Preemptions per second",
        "Sequences that lost their blocks to others and are computed again.",
        "short",
        ("sum by (engine) (rate(vllm:num_preemptions))", "engine {{engine}}"),
    ),
    Panel(
        "HTTP answers per second",
        "499: the client has gone; 429: --max-open-requests; 503: no engine serves.",
        "reqps",
        ("sum by (status) (rate(penstock_requests))", "{{status}}"),
    ),
    Panel(
        "Open HTTP requests, and new ones that wait for an engine",
        "Near --max-open-requests, clients are refused.",
        "short",
        ("penstock_open_requests", "server {{server}}"),
        ("penstock_new_requests_waiting", "server {{server}} waiting"),
    ),
    Panel(
        "Where a step's time goes",
        "Seconds per step: the device runs, the device waits, the core's own work.",
        "s",
        (
            ratio("penstock_engine_busy_seconds", "penstock_engine_steps"),
            "busy, engine {{engine}}",
        ),
        (
            ratio("penstock_engine_idle_seconds", "penstock_engine_steps"),
            "idle, engine {{engine}}",
        ),
        (
            ratio("penstock_engine_core_seconds", "penstock_engine_steps"),
            "core, engine {{engine}}",
        ),
    ),
    Panel(
        "Incarnation of each engine",
        "It grows when the engine was started again; 0: it does not serve.",
        "short",
        ("penstock_engine_incarnation", "engine {{engine}}"),
    ),
    Panel(
        "Resumed and refused requests per second",
        "Requests that an engine has lost, by cause, those that ended with an error so, and new requests that no "
        "engine took in time.",
        "reqps",
        ("sum by (cause) (rate(penstock_migrations))", "{{cause}}"),
        ("sum(rate(penstock_requests_given_up))", "given up"),
        ("sum(rate(penstock_queue_timeouts))", "queue timeout"),
        ("sum(rate(penstock_engine_link_resumptions))", "connections made again"),
    ),
    Panel(
        "Pause of a resumed request",
        "Seconds from the loss of an engine to the next token.",
        "s",
        *quantiles("penstock_migration_pause_seconds")[:3],
    ),
    Panel(
        "Requests to resume, and kept tokens",
        "Requests that wait for an engine; tokens that servers keep of open requests.",
        "short",
        ("penstock_requests_waiting_to_resume", "to resume, engine {{engine}}"),
        ("penstock_kept_tokens", "kept tokens, engine {{engine}}"),
    ),
    Panel(
        "Records behind",
        "Records sent that a receiver has not received; it stays above 0 where a process is slow or stuck.",
        "short",
        ("max by (channel, end) (penstock_channel_behind_records) > 0", "{{channel}} {{end}}"),
    ),
    Panel(
        "Records per second",
        "Messages between processes, by channel.",
        "short",
        ('sum by (channel) (rate(penstock_channel_records{end=~"sender.*"}))', "{{channel}}"),
    ),
    Panel(
        "Bytes per second between processes",
        "By channel; what lies in the store is not among them.",
        "Bps",
        ('sum by (channel) (rate(penstock_channel_bytes{end=~"sender.*"}))', "{{channel}}"),
    ),
    Panel(
        "Store for images and videos",
        "Memory that values take, that is claimed, and that there can be.",
        "bytes",
        ("max by (kind) (penstock_store_bytes)", "{{kind}}"),
    ),
    Panel(
        "Hit rate of the store",
        "Share of keys that were found.",
        "percentunit",
        (
            "max(rate(penstock_store_hits)) / (max(rate(penstock_store_hits)) + max(rate(penstock_store_misses)))",
            "hits",
        ),
    ),
    Panel(
        "Images and videos by how they travel",
        "In the store (hit, put), or inline in messages.",
        "short",
        ("sum by (how) (rate(penstock_items))", "{{how}}"),
    ),
    Panel(
        "Longest wait of an end",
        "By channel; a sender's is how long receivers held it up.",
        "s",
        ("max by (channel, end) (penstock_channel_longest_wait_seconds)", "{{channel}} {{end}}"),
    ),
    Panel(
        "Sleeps, long records and full pools per second",
        "By channel.",
        "short",
        ("sum by (channel) (rate(penstock_channel_parks))", "{{channel}} sleeps"),
        ("sum by (channel) (rate(penstock_channel_spills))", "{{channel}} long records"),
        ("sum by (channel) (rate(penstock_channel_exhaustions))", "{{channel}} full pool"),
    ),
    Panel(
        "Values of the store",
        "Values that are kept, leases that processes hold, and what changes per second.",
        "short",
        ("max(penstock_store_values)", "values"),
        ("max(penstock_store_leases)", "leases"),
        ("max(rate(penstock_store_puts))", "puts per second"),
        ("max(rate(penstock_store_evictions))", "evictions per second"),
        ("max(rate(penstock_store_fills_awaited))", "waits for a writer per second"),
    ),
    Panel(
        "Encodings per second",
        "By the vision encoder, and found in the store of encodings.",
        "short",
        ("sum(rate(penstock_encodings))", "encoded"),
        ("sum(rate(penstock_encodings_found))", "found"),
        ("sum(rate(penstock_encodings_unshared))", "not shared"),
    ),
    Panel(
        "Grammars and adapters",
        "Sequences in batches that follow a grammar, or have a LoRA adapter.",
        "short",
        ("sum by (engine) (penstock_grammars_open)", "with a grammar, engine {{engine}}"),
        ("sum by (engine) (penstock_requests_with_adapter)", "with an adapter, engine {{engine}}"),
    ),
    Panel(
        "Time of grammars",
        "Seconds to compile a grammar, beside the steps, and to fill the masks of a step.",
        "s",
        (ratio("penstock_grammar_compile_seconds", "penstock_grammars_compiled"), "compile, engine {{engine}}"),
        (ratio("penstock_grammar_mask_seconds", "penstock_engine_steps"), "masks of a step, engine {{engine}}"),
    ),
    Panel(
        "Tool calls per second",
        "Calls in answers that have ended.",
        "short",
        ("sum by (engine) (rate(penstock_tool_calls))", "engine {{engine}}"),
    ),
    Panel(
        "Media in flight",
        "Bytes of images, videos and long bodies that servers hold, by stage, and their limits (--media-mb-in-flight).",
        "bytes",
        ("sum by (stage) (penstock_media_bytes)", "{{stage}}"),
        ("sum by (stage) (penstock_media_limit_bytes)", "limit of {{stage}}"),
    ),
    Panel(
        "Media and videos that wait",
        "For bytes, by stage, and for a decoder (--max-concurrent-videos).",
        "short",
        ("sum by (stage) (penstock_media_waiting)", "{{stage}}"),
        ("sum(penstock_videos_decoding)", "being decoded"),
        ("sum(penstock_videos_waiting)", "waiting for a decoder"),
    ),
    Panel(
        "Videos per second",
        "By how their decoders ended.",
        "short",
        ("sum by (end) (rate(penstock_videos))", "{{end}}"),
    ),
    Panel(
        "Decoders in use",
        "Seconds of decoders per second: videos that are decoded at a time, on average.",
        "short",
        ("sum by (server) (rate(penstock_video_decoder_seconds))", "server {{server}}"),
    ),
    Panel(
        "Requests that make engines fail",
        "Suspects, failures while one request ran alone, convictions, and requests that were refused for them.",
        "reqps",
        ("sum(penstock_suspects)", "suspects"),
        ("sum(increase(penstock_trials))", "failed trials"),
        ("sum(increase(penstock_trials_refused))", "trials refused"),
        ("sum(increase(penstock_convictions))", "convictions"),
        ("sum(increase(penstock_quarantined_requests))", "quarantined"),
    ),
)


def build() -> dict[str, Any]:
    """Builds the dashboard."""
    metrics = declared_metrics()
    labels = {spec.name: names for spec, names in metrics.items()}
    text = " ".join(query for panel in PANELS for query, _ in panel.queries)
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name, _ in METRIC.findall(text)}
    panels = [*PANELS, *(_panel_of(spec, metrics[spec]) for spec in metrics if spec.name not in shown)]
    return {
        "title": "Penstock",
        "uid": "penstock",
        "description": "penstock serve: vLLM's metrics, and those that only Penstock has.",
        "tags": ["penstock", "vllm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                    "current": {},
                },
                _variable("model_name", "Model", "vllm:num_requests_running"),
                {
                    **_variable("engine", "Engine", 'vllm:num_requests_running{model_name="$model_name"}'),
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".*",
                },
            ]
        },
        "annotations": {"list": []},
        "links": [],
        "panels": [_encoded(number, panel, labels) for number, panel in enumerate(panels)],
    }


def _variable(name: str, label: str, metric: str) -> dict[str, Any]:
    query = f"label_values({metric}, {name})"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": query,
        "refresh": 2,
        "sort": 1,
        "multi": False,
        "includeAll": False,
        "current": {},
    }


def _panel_of(spec: CounterSpec, labels: tuple[str, ...]) -> Panel:
    title = spec.key.replace("_", " ").capitalize()
    if spec.kind == "histogram":
        return Panel(title, spec.help, "s", *quantiles(spec.name))
    by = [label for label in labels if label != "model_name"]
    number = f"rate({spec.name})" if spec.kind == "counter" else spec.name
    title = f"{title} per second" if spec.kind == "counter" else title
    legend = " ".join(f"{label} {{{{{label}}}}}" for label in by) or spec.key
    return Panel(
        title, spec.help, "short", (f"sum by ({', '.join(by)}) ({number})" if by else f"sum({number})", legend)
    )


def _encoded(number: int, panel: Panel, labels: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + place),
            "datasource": SOURCE,
            "expr": _expression(query, labels),
            "legendFormat": legend,
        }
        for place, (query, legend) in enumerate(panel.queries)
    ]
    row, column = divmod(number, COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": WIDTH * column, "y": HEIGHT * row},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def _expression(query: str, labels: dict[str, tuple[str, ...]]) -> str:
    """Returns the query with the names of samples, and with the chosen model and engines where a metric has them."""

    def selected(match: re.Match[str]) -> str:
        name, selector = match[1], match[2]
        base = re.sub(r"_(bucket|sum|count|total)$", "", name)
        chosen = {"model_name": 'model_name="$model_name"', "engine": 'engine=~"$engine"'}
        filters = ",".join(chosen[label] for label in labels.get(name, labels.get(base, ())) if label in chosen)
        return name + (selector or (f"{{{filters}}}" if filters else ""))

    def grown(match: re.Match[str]) -> str:
        function, name, selector = match.groups(default="")
        sample = name if re.search(r"_(bucket|sum|count)$", name) else f"{name}_total"
        return f"{function}({sample}{selector}[$__rate_interval])"

    return METRIC.sub(selected, GROWTH.sub(grown, query))


@functools.cache
def encoded() -> bytes:
    return json.dumps(build(), indent=2).encode() + b"\n"


if __name__ == "__main__":
    print(encoded().decode(), end="")
