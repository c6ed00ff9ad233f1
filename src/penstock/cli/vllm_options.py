"""Options of `vllm serve`: how those that `penstock serve` has, too, differ, and what replaces the others.

The tables of docs/howto/from-vllm.md are made of these, by docs/making/tables.py. Texts are in Markdown.
"""

from __future__ import annotations

from typing import NamedTuple

MANUAL = "docs/howto/from-vllm.md"

DIFFERENCES = {
    "MODEL": "a directory, or a name on a hub. It comes before the options. Without it a bundled model is served",
    "--revision": "",
    "--download-dir": "",
    "--dtype": "`auto` is the type that `config.json` names, also where that is float32",
    "--max-model-len": "at most 4,096 unless it is given; `auto` and -1 are refused",
    "--generation-config": "`auto` or `vllm`, no path",
    "--runner": "`pooling` is for models on a CPU ([which](serve.md#embeddings-and-scores))",
    "--convert": "`classify` of a causal model is the probability of yes before no, for which vLLM needs "
    "`--hf-overrides`",
    "--enforce-eager": "has an effect on a CUDA device only",
    "--gpu-memory-utilization": "of the whole memory of a CUDA device, as in vLLM; no effect on a CPU",
    "--tensor-parallel-size": "N need not divide the number of attention heads; above `num_key_value_heads` it must be "
    "a multiple of it. Only `--tensor-parallel-over-nodes` spreads it over nodes",
    "--data-parallel-size": "of all nodes, equally many on each; one on each node unless it is given. "
    "Mixture-of-experts layers are not split over engines",
    "--max-num-seqs": "256 unless it is given; preempted sequences count, too",
    "--max-num-batched-tokens": "2,048 unless it is given",
    "--stream-interval": "answers with log-probabilities have one token an event",
    "--block-size": "any number from 1 to 4,096",
    "--num-gpu-blocks-override": "also for the cache of a CPU",
    "--enable-prefix-caching": "",
    "--nnodes": "engines are whole on each node ([how](many-nodes.md)); all nodes need `PENSTOCK_NODE_SECRET`",
    "--node-rank": "",
    "--master-addr": "",
    "--master-port": "the first of as many ports as other nodes have engines",
    "--headless": "",
    "--api-server-count": "1 unless it is given, whatever the number of engines",
    "--shutdown-timeout": "30 s unless it is given; vLLM has 0",
    "--host": "127.0.0.1 unless it is given; vLLM listens on all addresses",
    "--port": "0 takes a free one",
    "--served-model-name": "",
    "--api-key": "one key each, the option is repeated; the variable is `PENSTOCK_API_KEY`. `/metrics` needs it, too",
    "--allowed-origins": "no origin is allowed unless it is given; commas will do instead of JSON",
    "--allowed-methods": "commas will do instead of JSON",
    "--allowed-headers": "commas will do instead of JSON",
    "--tool-call-parser": "`auto` unless it is given; `qwen3_coder` is `qwen3_xml`",
    "--reasoning-parser": "for gpt-oss its chat template sets `openai_gptoss`",
    "--allow-credentials": "refused together with the origin `*`",
    "--mm-processor-cache-gb": "one store in shared memory for all processes; 0.25 unless it is given",
    "--mm-encoder-tp-mode": "`store` is one more value, and the default on a CPU; `data` is the default on CUDA "
    "devices. `weights` slices what the model's plan slices; for the families served here that leaves the vision "
    "encoder whole, so each worker encodes all images",
    "--enable-prompt-embeds": "`prompt_embeds` are safetensors or npy in base64; what `torch.save` writes is refused "
    "([how](serve.md#embeddings-instead-of-text)). In completions only",
    "--allowed-local-media-path": "the option may be repeated",
    "--allowed-media-domains": "no host is allowed unless it is given, where vLLM allows all. A host may have a port. "
    "Redirects are never followed",
    "--chat-template": "",
    "--default-chat-template-kwargs": "",
    "--enable-lora": "[which adapters](serve.md#lora-adapters); `PENSTOCK_ALLOW_RUNTIME_LORA_UPDATING` is "
    "`VLLM_ALLOW_RUNTIME_LORA_UPDATING`. Steps with their tokens run without CUDA graphs",
    "--lora-modules": "NAME=DIR, no JSON",
    "--max-lora-rank": "",
    "--max-loras": "no limit unless it is given; vLLM has 1. All adapters are in memory",
    "--override-generation-config": "only the sampling parameters that Penstock reads",
    "--max-logprobs": "at most 1,024; -1 is refused",
    "--uds": "a socket to which no process listens any more is replaced",
    "--ssl-keyfile": "without a passphrase",
    "--ssl-certfile": "",
    "--root-path": "",
    "--enable-log-requests": "one line for each request that ends, without prompts, parameters and answers",
    "--otlp-traces-endpoint": "one span for each request; no times in the queue, of the prefill and of the decode",
    "--config": "",
    "--limit-mm-per-prompt": "`image` (16 unless it is given) and `video` (4); no sizes",
}


class Absent(NamedTuple):
    """Options, as words of the command line, and a text for all of them. The text may have a backtick pair and no link.

    `values`: an option with one of these values is accepted without effect; None: every value is refused."""

    options: str
    instead: str
    difference: str = ""
    values: tuple[str, ...] | None = None


ALWAYS_ON = (
    Absent("--async-scheduling --enable-chunked-prefill", "always on", values=()),
    Absent("--enable-auto-tool-choice", "always on", "the format is read from the chat template", values=()),
    Absent(
        "--scheduling-policy",
        "always on",
        "`priority` of a request counts, and within one priority clients are served fairly by tokens",
        values=("fcfs", "priority"),
    ),
    Absent("--enable-request-id-headers --enable-prompt-tokens-details", "always on", values=()),
    Absent(
        "--disable-uvicorn-access-log --disable-log-requests",
        "always on",
        "requests that fail are logged, others only with `--enable-log-requests`",
        values=(),
    ),
    Absent("--uvicorn-log-level", "`--log-level`", "for all processes; `VLLM_LOGGING_LEVEL` is not read"),
    Absent("--model", "`MODEL`"),
)
UNSUPPORTED = (
    Absent(
        "--kv-cache-memory-bytes",
        "`--num-gpu-blocks-override`, or `--gpu-memory-utilization` on a CUDA device",
    ),
    Absent("--logprobs-mode", "log-probabilities of the model's own distribution, before penalties and filters"),
    Absent("--seed", "the field `seed` of a request"),
    Absent(
        "--chat-template-content-format --trust-request-chat-template --response-role",
        "the template of the model or of `--chat-template`; its form is found by a trial",
    ),
    Absent(
        "--tokenizer --tokenizer-mode --tokenizer-revision --skip-tokenizer-init --code-revision "
        "--trust-remote-code --hf-overrides --hf-config-path --hf-token --config-format --load-format "
        "--model-loader-extra-config --ignore-patterns --model-impl --rope-scaling --rope-theta",
        "a directory with `config.json`, `tokenizer.json` and safetensors; no code of a model is run",
    ),
    Absent(
        "--enable-force-include-usage --return-tokens-as-token-ids",
        "fields of requests",
    ),
    Absent(
        "--quantization --kv-cache-dtype --calculate-kv-scales --cpu-offload-gb --kv-offloading-size --swap-space",
        "not supported",
    ),
    Absent(
        "--pipeline-parallel-size --enable-expert-parallel --enable-eplb --decode-context-parallel-size "
        "--distributed-executor-backend --worker-cls --worker-extension-cls --disable-custom-all-reduce "
        "--all2all-backend --data-parallel-rank --data-parallel-size-local --data-parallel-address "
        "--data-parallel-rpc-port --data-parallel-backend --data-parallel-hybrid-lb --data-parallel-external-lb",
        "each engine is a group of processes of one machine; `--nnodes` for several machines",
    ),
    Absent("--speculative-config --spec-method --speculative-model --num-speculative-tokens", "not supported"),
    Absent(
        "--max-cpu-loras --lora-dtype --fully-sharded-loras --lora-extra-vocab-size --default-mm-loras",
        "not supported; all adapters are in memory, in the model's dtype",
    ),
    Absent(
        "--tool-parser-plugin --tool-server --exclude-tools-when-tool-choice-none",
        "not supported; `--tool-call-parser` names a format",
    ),
    Absent("--structured-outputs-config --guided-decoding-backend", "not needed: llguidance is the library"),
    Absent("--logits-processors --logits-processor-pattern", "not supported; no code of a user is run"),
    Absent(
        "--mm-processor-kwargs --media-io-kwargs --video-pruning-rate --interleave-mm-strings --enable-mm-embeds",
        "images and videos as the model's own processor makes them",
    ),
    Absent(
        "--mm-tensor-ipc --mm-processor-cache-type --mm-shm-cache-max-object-size-mb --disable-mm-preprocessor-cache "
        "--skip-mm-profiling",
        "tensors travel through the store: `--mm-processor-cache-gb` is its size, `--tensor-transport` the way",
    ),
    Absent("--kv-transfer-config --kv-events-config --ec-transfer-config --enable-sleep-mode", "not supported"),
    Absent(
        "--compilation-config --cudagraph-capture-sizes --max-cudagraph-capture-size --max-seq-len-to-capture "
        "--attention-backend --disable-sliding-window --disable-cascade-attn",
        "not supported; `--enforce-eager` is the only choice of how a step runs",
    ),
    Absent(
        "--max-num-partial-prefills --max-long-partial-prefills --long-prefill-token-threshold --scheduler-cls "
        "--num-scheduler-steps --num-lookahead-slots --preemption-mode "
        "--disable-hybrid-kv-cache-manager --prefix-caching-hash-algo",
        "not supported; `--max-num-seqs` and `--max-num-batched-tokens` are the limits of a step",
    ),
    Absent(
        "--ssl-ca-certs --ssl-cert-reqs --ssl-ciphers --enable-ssl-refresh --middleware",
        "a proxy in front of the server",
    ),
    Absent(
        "--enable-log-outputs --disable-log-stats --max-log-len "
        "--log-config-file --collect-detailed-traces --enable-server-load-tracking "
        "--show-hidden-metrics-for-version",
        "`/metrics`, `penstock top`, `--log-format`, `--enable-log-requests`",
    ),
    Absent("--disable-frontend-multiprocessing --disable-fastapi-docs --h11-max-header-count", "not supported"),
    Absent(
        "--task --pooler-config --override-pooler-config",
        "`--runner pooling` with `--convert embed` or `classify`; the files of sentence-transformers say how it pools",
    ),
)
_ABSENT = {option: row for row in (*ALWAYS_ON, *UNSUPPORTED) for option in row.options.split()}


def explain(option: str) -> str | None:
    """Returns a sentence about `--x` or `--no-x` of vLLM for an error in one line; None: it is no such option."""
    row = _ABSENT.get(option) or _ABSENT.get(option.replace("--no-", "--", 1))
    if row is None:
        return None
    return f"{option} is an option of vLLM and not of penstock: {row.instead} ({MANUAL})"


def without_always_on(words: list[str]) -> tuple[list[str], list[str]]:
    """Returns the words of a command line without options without effect, and the removed options."""
    rest, accepted = [], []
    iterator = iter(words)
    for word in iterator:
        option, equals, value = word.partition("=")
        row = _ABSENT.get(option)
        if row is None or row.values is None or bool(equals) > bool(row.values):
            rest.append(word)
            continue
        following = [] if equals or not row.values else [next(iterator, "")]
        if row.values and (following or [value])[0] not in row.values:
            rest += [word, *following]
        else:
            accepted.append(" ".join([word, *following]))
    return rest, accepted
