"""How much of each seeded test runs in each tier. PENSTOCK_TIER names the tier; CONTRIBUTING has the guards of each.

push    `make test`: before a push, on 2 cores, within 12 minutes. The default
all     `make test-all`: before a release. Every test, every family, every seed
soak    hours: PENSTOCK_TIER=soak scripts/test PATH
"""

import os
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

TIERS = ("push", "all", "soak")
TIER = os.environ.get("PENSTOCK_TIER") or "push"
if TIER not in TIERS:
    raise ValueError(f"PENSTOCK_TIER is {TIER!r}, and there are {', '.join(TIERS)}")

needs_all = pytest.mark.skipif(TIER == "push", reason="in make test-all (PENSTOCK_TIER=all)")
needs_soak = pytest.mark.skipif(TIER != "soak", reason="in a soak (PENSTOCK_TIER=soak)")


def only_in_all(*parameters: object) -> list[Any]:
    """Returns parameters for `make test-all` alone: the other parameters of a test stand for these."""
    return [
        pytest.param(*(parameter if isinstance(parameter, tuple) else (parameter,)), marks=needs_all)
        for parameter in parameters
    ]


def choose(push: T, everything: T, soak: T) -> T:
    return {"push": push, "all": everything, "soak": soak}[TIER]


def limit(seconds: float, soak: float) -> float:
    """Of a test, in seconds: a soak may take longer."""
    return choose(seconds, seconds, soak)


# fmt: off
#                                push     all      soak
# crash: processes that are killed
CAMPAIGN_DEATHS         = choose(100,     1_200,   10_000)     # test_campaign: at random points of channels and pool
STORE_DEATHS            = choose(40,      150,     2_000)      # test_kept: of processes that write to the store
TREE_DEATHS             = choose(15,      100,     100)        # test_trees: of whole trees
HANDLE_DEATHS           = choose(4,       8,       400)        # test_handles: of servers, cores and workers …
HANDLE_ABORTS           = choose(400,     1_000,   100_000)    # … and of requests
CHAOS_SECONDS           = choose(6.0,     12.0,    60.0)       # test_server_chaos: blows to a served cluster
MIGRATED_REQUESTS       = choose(60,      2_000,   20_000)     # test_migration: requests, while processes are killed
STRUCTURED_DEATHS       = choose(0,       200,     2_000)      # test_grammar_campaign: under structured streams
KEPT_KV_ROUNDS          = choose(1,       33,      300)        # test_kept_kv: of 30 requests, kept and not kept
FORK_DEATHS             = choose(8,       1_000,   10_000)     # test_fork_server_deaths: of processes, and the server
DEVICE_DEATHS           = choose(12,      1_000,   10_000)     # test_device_memory_deaths: of either end
KEPT_KV_CUTS            = choose(4,       64,      64)         # test_kept_kv: places at which an answer is cut
BLAME_SIGNALS           = choose(3,       200,     2_000)      # test_blame_campaign: SIGSEGV and SIGABRT from outside
BLAME_POISONS           = choose(1,       9,       200)        # test_blame_campaign: requests that make an engine fail
NODE_BLOWS              = choose(7,       300,     3_000)      # test_node_campaign: to a node, and to the link to it
NODE_RESETS             = choose(3,       100,     1_000)      # test_remote_groups: of the connection to a node
BRIDGE_DEATHS           = choose(1,       40,      1_000)      # test_bridge: of each side of a link
PIPE_DEATHS             = choose(20,      1_000,   10_000)     # test_wake_up_pipes: of receivers in event loops
SERVED_DEATHS           = choose(0,       34,      1_000)      # test_server_descriptors: of each kind of process
VLLM_DEATHS             = choose(20,      1_000,   10_000)     # test_queue_deaths: of users of vLLM's queue
VLLM_WORKER_DEATHS      = choose(8,       200,     1_000)      # test_executor_deaths: of workers of vLLM's executor
VLLM_SERVER_DEATHS      = choose(0,       24,      1_000)      # test_server_deaths: of processes of vllm serve
VLLM_IMAGE_ABORTS       = choose(60,      1_000,   10_000)     # test_serving_images: requests with clients that go
# property: examples of hypothesis, and seeds of traces
CHANNELS_EXAMPLES       = choose(100,     500,     5_000)      # test_channels: of each of three channels
POOL_EXAMPLES           = choose(80,      400,     4_000)      # test_pool
TENSORS_EXAMPLES        = choose(80,      300,     3_000)      # test_tensors: of arrays, and of trees
STOPS_EXAMPLES          = choose(300,     2_000,   20_000)     # test_stops
EMBEDS_MUTATIONS        = choose(10_000,  20_000,  1_000_000)  # test_prompt_embeds: of tiny files
WEIGHT_MUTATIONS        = choose(3_000,   30_000,  1_000_000)  # test_weight_files: of tiny files of weights
VIDEO_MUTATIONS         = choose(300,     10_000,  1_000_000)  # test_video_file: of tiny containers
REQUEST_MUTATIONS       = choose(300,     10_000,  1_000_000)  # test_server_mutations: of chats
SCHEDULE_SEEDS          = choose(4,       20,      200)        # test_schedule: of 5,000 steps each
BROKEN_STEPS            = choose(20,      60,      600)        # test_schedule: runs with broken steps, and frames
SCHEDULER_SEEDS         = choose(4,       12,      120)        # test_scheduler
OUTPUTS_SEEDS           = choose(12,      25,      250)        # test_outputs: at each depth
RESUMED_SEEDS           = choose(2,       100,     1_000)      # test_resumed
GROWTH_SEEDS            = choose(8,       20,      200)        # test_prefix_hasher
# unit
LINK_RESETS             = choose(100,     1_000,   100_000)    # test_resumption: in a row, under traffic
LINK_CUTS               = choose(6,       200,     5_000)      # test_resumption: resets at a random byte, each way
DAMAGES                 = choose(2,       50,      500)        # test_resumption: packets with a flipped bit, each way
FRAMES_MUTATIONS        = choose(6_000,   30_000,  300_000)    # test_frames
FLOODS                  = choose((1_000,), (200, 256, 257, 1_000, 10_000), (10_000, 18_000))  # test_floods: strangers
REFUSALS                = choose(300,     30_000,  300_000)    # test_floods: strangers with different lengths
BIT_FLIPS               = choose(20,      1_000,   10_000)     # test_bit_flips: in each direction of a link
# stress
ABORTS                  = choose(300,     1_000,   10_000)     # test_aborts: with and without an output processor
STORE_OPERATIONS        = choose(8_000,   20_000,  100_000)    # test_kept
# test_server_soak: requests before the first measurement and after it, and bytes that each of the latter may leave
SOAK_REQUESTS           = choose((1_500, 1_500, 2_000), (10_000, 90_000, 10), (10_000, 990_000, 10))
PATIENCE_BURSTS         = choose(12,      12,      1_000)      # test_patience
PATIENCE_SECONDS        = choose(3.0,     6.0,     3_600.0)
STREAMS_SCALE           = choose(0.25,    1,       20)         # test_streams: between processes in Python
NATIVE_STREAMS_SCALE    = choose(0,       1,       50)         # native ones; in push, `native` runs them
ORDINARY_REQUESTS       = choose(((10, 1),), ((100, 1),), ((2_000, 1), (400, 2)))  # test_ordinary_use; of ranks
# faults
FAULTS_CASES            = choose(250,     500,     20_000)     # system calls that fail
# e2e
DEATH_EXAMPLES          = choose(1,       20,      200)        # test_documents: runs of examples/death.py
SCHEMA_EXAMPLES         = choose(0,       15,      1_000)      # test_server_document: of each route; not in push at all
# fmt: on
