"""Run by pytest of the interpreter that has vLLM: caches of images that processes share, with vLLM's own values."""

import multiprocessing
import os
import pickle
import resource
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.cache import factories
from vllm.multimodal.cache.base import MultiModalCacheMissError
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem
from vllm.multimodal.processing.processor import PromptUpdateDetails, ResolvedPromptUpdate, UpdateMode
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from penstock import ClosedError
from penstock.integrations.vllm import image_caches, settings
from penstock.integrations.vllm.image_caches import SharedCoreCache, SharedSenderCache, SharedWorkerCache, share_store
from penstock.integrations.vllm.issues import Issues
from penstock.integrations.vllm.signed_store import SHARED_IMAGES

MIB = 1 << 20


def model_config(**more: Any) -> Any:
    config = SimpleNamespace(
        mm_processor_cache_type="shm", mm_processor_cache_gb=8 / 1024, mm_shm_cache_max_object_size_mb=4, **more
    )
    return SimpleNamespace(
        multimodal_config=config, get_multimodal_config=lambda: config, supports_multimodal_inputs=True
    )


def parallel_config(servers: int = 2, **more: Any) -> Any:
    fields = {
        "data_parallel_size": 1,
        "data_parallel_size_local": 1,
        "data_parallel_external_lb": False,
        "data_parallel_backend": "mp",
        "distributed_executor_backend": None,
        "local_engines_only": False,
        "nnodes": 1,
        "world_size": 2,
    }
    return SimpleNamespace(_api_process_count=servers, **{**fields, **more})


CONFIG = SimpleNamespace(model_config=model_config(), parallel_config=parallel_config())


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv(SHARED_IMAGES, raising=False)
    monkeypatch.setattr(settings, "fall_backs", type(settings.fall_backs)())
    yield
    os.environ.pop(SHARED_IMAGES, None)
    image_caches.shared = None


def share() -> None:
    share_store(CONFIG.model_config, CONFIG.parallel_config)
    assert SHARED_IMAGES in os.environ


def image(value: int, nbytes: int = MIB) -> MultiModalKwargsItem:
    pixels = torch.full((nbytes // 4,), value, dtype=torch.float32)
    grid = torch.tensor([1, 2, 3])
    return MultiModalKwargsItem(
        {
            "pixel_values": MultiModalFieldElem(data=pixels, field=MultiModalBatchedField()),
            "image_grid_thw": MultiModalFieldElem(data=grid, field=MultiModalBatchedField(keep_on_cpu=True)),
        }
    )


def updates(count: int, *, has_closure: bool = True) -> list[ResolvedPromptUpdate]:
    details = PromptUpdateDetails.select_token_id([7] * count, 7) if has_closure else PromptUpdateDetails([7] * count)
    return [ResolvedPromptUpdate("image", 0, UpdateMode.REPLACE, [7], details)]


def as_request(item: Any) -> Any:
    """What a core decodes of the message in which an API server sends it."""
    return MsgpackDecoder(MultiModalKwargsItem).decode(MsgpackEncoder().encode(item))


def as_step(item: Any) -> Any:
    """What a worker has of the step in which a core sends it."""
    return pickle.loads(pickle.dumps(item))


def test_image_is_put_once_and_found_by_another_server_with_its_updates() -> None:
    share()
    first, second = SharedSenderCache(CONFIG), SharedSenderCache(CONFIG)
    core, worker = SharedCoreCache(), SharedWorkerCache()
    assert first.is_cached(["a"]) == [False]
    first.get_and_update_item((image(3), updates(5)), "a")
    assert second.is_cached(["a", "b"]) == [True, False]
    item, changed = second.get_and_update_item(None, "a")
    assert changed[0].content.full == [7] * 5
    assert changed[0].content.is_embed([7, 8]).tolist() == [True, False]  # type: ignore[misc]
    received = worker.get_and_update_item(as_step(core.get_and_update_item(as_request(item), "a")), "a")
    assert received == image(3)
    assert second.make_stats(delta=True) == (1, 1)
    assert second.make_stats(delta=True) == (0, 0)
    assert second.store.stats().puts == 1


def test_a_cache_closed_for_a_death_raises_the_error_of_that_death(monkeypatch: pytest.MonkeyPatch) -> None:
    share()
    server = SharedSenderCache(CONFIG)
    server.close()
    with pytest.raises(ClosedError):  # the server was told to end
        server.is_cached(["a"])
    monkeypatch.setattr(image_caches, "first_death", lambda: "EngineCore (pid 7) died: killed by SIGKILL")
    for ask in (
        lambda: server.is_cached(["a"]),
        lambda: server.touch_sender_cache_item("a"),
        lambda: server.get_and_update_item((image(3), updates(5)), "a"),
    ):
        with pytest.raises(EngineDeadError):
            ask()


def test_image_is_held_from_the_server_to_the_end_of_its_request() -> None:
    share()
    sender, core, worker = SharedSenderCache(CONFIG), SharedCoreCache(), SharedWorkerCache()
    item, _ = sender.get_and_update_item((image(1), []), "first")
    message = as_request(item)
    del item
    for number in range(10):  # 10 MiB through a store of 8: all others are evicted, and this one is not
        sent, _ = sender.get_and_update_item((image(number), []), f"passing {number}")
        core.get_and_update_item(as_request(sent), f"passing {number}")
    held = core.get_and_update_item(message, "first")
    for number in range(10, 20):
        sent, _ = sender.get_and_update_item((image(number), []), f"passing {number}")
        if "address" in sent:
            core.get_and_update_item(as_request(sent), f"passing {number}")
    step = as_step(held)
    assert worker.get_and_update_item(step, "first") == image(1)
    del held
    for number in range(20, 40):
        sent, _ = sender.get_and_update_item((image(number), []), f"passing {number}")
        assert "address" in sent
        core.get_and_update_item(as_request(sent), f"passing {number}")
    with pytest.raises(MultiModalCacheMissError) as missed:
        core.get_and_update_item(message, "first")
    assert missed.value.mm_hashes == ["first"]
    assert len(sender.issues) <= 1


def test_1000_requests_aborted_before_a_worker_opens_leave_nothing_held() -> None:
    share()
    sender, core, worker = SharedSenderCache(CONFIG), SharedCoreCache(), SharedWorkerCache()
    sender.issues = Issues(sender.store, image_caches.CORE, timeout=0.0)
    worker.signed.store.peers()
    for number in range(1000):  # 62 MiB through a store of 8
        sent, _ = sender.get_and_update_item((image(number, MIB // 16), []), f"image {number}")
        assert "address" in sent
        if number % 3:  # else the server gives it up before it sends the request
            held = core.get_and_update_item(as_request(sent), f"image {number}")
            if number % 3 == 2:
                as_step(held)  # which the worker never reads
            del held
        del sent
    sender.issues.release_opened()
    assert len(sender.issues) == 0
    assert not settings.fall_backs
    holders = sender.store.stats().pool.holders
    assert [(holder.name, holder.granted) for holder in holders if holder.granted] == []
    sender.store.clear()
    assert sender.store.stats().pool.blocks == 1  # the secret


def test_a_miss_is_put_again_by_the_server() -> None:
    share()
    sender, core = SharedSenderCache(CONFIG), SharedCoreCache()
    sender.issues = Issues(sender.store, image_caches.CORE, timeout=0.0)
    item, _ = sender.get_and_update_item((image(1), []), "a")
    message = as_request(item)
    del item
    sender.clear_cache()
    sender.issues.release_opened()  # too late for the message, which is still on its way
    with pytest.raises(MultiModalCacheMissError):
        core.get_and_update_item(message, "a")
    assert sender.is_cached(["a"]) == [False]
    item, _ = sender.get_and_update_item((image(2), []), "a")
    assert "address" in core.get_and_update_item(as_request(item), "a")


def test_a_server_finds_what_it_asked_for_although_others_want_its_room() -> None:
    share()
    first, second = SharedSenderCache(CONFIG), SharedSenderCache(CONFIG)
    core = SharedCoreCache()
    core.get_and_update_item(as_request(first.get_and_update_item((image(1), []), "a")[0]), "a")
    assert second.is_cached(["a"]) == [True]
    for number in range(20):
        sent, _ = first.get_and_update_item((image(number), []), f"passing {number}")
        core.get_and_update_item(as_request(sent), f"passing {number}")
    assert second.get_and_update_item(None, "a")[0] is not None
    second.release_sender_touches()


def test_a_store_full_of_values_in_use_sends_the_image_itself() -> None:
    share()
    sender = SharedSenderCache(CONFIG)
    sent = [sender.get_and_update_item((image(number), []), f"image {number}")[0] for number in range(10)]
    assert [number for number, item in enumerate(sent) if "address" not in item] == [8, 9] or "address" not in sent[-1]
    assert sent[-1] == image(9)
    assert [sentence.partition(" ")[0] for _, sentence in settings.fall_backs] == ["MemoryExhausted"]
    large, _ = sender.get_and_update_item((image(1, 5 * MIB), []), "large")
    assert "address" not in large
    assert any("--mm-shm-cache-max-object-size-mb" in sentence for _, sentence in settings.fall_backs)


def test_a_reference_without_its_signature_is_refused_by_every_process() -> None:
    share()
    sender, core, worker = SharedSenderCache(CONFIG), SharedCoreCache(), SharedWorkerCache()
    item, _ = sender.get_and_update_item((image(1), []), "a")
    sender.validate_input_item(as_request(item), "a")
    sender.validate_input_item(image(1), "a")
    for change in ("signature", "address", "nothing"):
        forged = as_request(item)
        if change == "nothing":
            del forged["signature"]
        else:
            forged[change].data[-1] ^= 1
        for check in (sender.validate_input_item, core.get_and_update_item, worker.get_and_update_item):
            with pytest.raises(ValueError, match="has issued"):
                check(forged, "a")
    with pytest.raises(ValueError, match="has issued"):
        core.get_and_update_item(as_request(item), "b")


def die_with_an_image() -> None:
    sender = SharedSenderCache(CONFIG)
    for number in range(6):
        sender.get_and_update_item((image(number), []), f"image {number}")
    sender.is_cached(["image 0"])
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_server_held_and_granted_can_be_evicted() -> None:
    share()
    core = SharedCoreCache()
    core.signed.store.peers()
    process = multiprocessing.get_context("spawn").Process(target=die_with_an_image)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    sender = SharedSenderCache(CONFIG)
    assert sum(sender.is_cached([f"image {number}" for number in range(6)])) == 6  # they are there for the others
    sender.release_sender_touches()
    for number in range(10, 20):
        sent, _ = sender.get_and_update_item((image(number), []), f"image {number}")
        assert "address" in sent
        core.get_and_update_item(as_request(sent), f"image {number}")
    granted = {holder.name: holder.granted for holder in sender.store.stats().pool.holders}
    assert granted.get("vllm engine core", 0) <= 1


def test_a_core_that_starts_again_opens_what_is_sent_to_it() -> None:
    share()
    sender, core = SharedSenderCache(CONFIG), SharedCoreCache()
    core.signed.close()
    del core
    item, _ = sender.get_and_update_item((image(1), []), "a")
    assert "address" in SharedCoreCache().get_and_update_item(as_request(item), "a")


def check_configuration(pipe: Any, depth: int) -> None:
    share_store(CONFIG.model_config, CONFIG.parallel_config)
    if depth:
        process = multiprocessing.get_context("spawn").Process(target=check_configuration, args=(pipe, depth - 1))
        process.start()
        process.join()
    else:
        pipe.send(os.environ[SHARED_IMAGES])


def test_worker_that_rechecks_its_config_keeps_the_store_of_its_server() -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    share()
    check = multiprocessing.get_context("spawn").Process(target=check_configuration, args=(sender, 1))  # a core
    check.start()
    check.join()
    assert receiver.recv() == os.environ[SHARED_IMAGES]


@pytest.mark.parametrize(
    ("servers", "more", "is_shared"),
    [
        (1, {}, True),
        (2, {}, True),
        (1, {"data_parallel_size": 2, "data_parallel_size_local": 2}, True),
        (1, {"data_parallel_size": 2, "data_parallel_external_lb": True, "local_engines_only": True}, True),
        (1, {"distributed_executor_backend": "ray"}, False),
        (2, {"data_parallel_size": 2, "data_parallel_size_local": 1}, False),
        (2, {"nnodes": 2}, False),
        (2, {"distributed_executor_backend": "ray"}, False),
        (60, {"world_size": 8}, False),
    ],
)
def test_a_store_is_shared_where_all_processes_are_on_one_machine(
    servers: int, more: dict[str, Any], is_shared: bool
) -> None:
    share_store(model_config(), parallel_config(servers, **more))
    assert (SHARED_IMAGES in os.environ) == is_shared
    assert bool(settings.fall_backs) == image_caches.is_refused == (not is_shared)


@pytest.mark.parametrize(("limit", "is_shared"), [(64 * MIB, True), (64 * MIB - 1, False)])
def test_a_store_takes_at_most_an_eighth_of_a_limit_on_addresses(
    limit: int, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    share_store(model_config(), parallel_config())
    assert (SHARED_IMAGES in os.environ) == is_shared
    assert image_caches.is_refused == (not is_shared)


def test_the_factories_return_our_caches_where_a_store_is_shared() -> None:
    image_caches.replace(False)
    share()
    assert isinstance(factories.processor_cache_from_config(CONFIG), SharedSenderCache)
    assert isinstance(factories.engine_receiver_cache_from_config(CONFIG), SharedCoreCache)
    assert isinstance(factories.worker_receiver_cache_from_config(CONFIG, None), SharedWorkerCache)
    assert EngineArgs.create_engine_config.__code__.co_filename == image_caches.__file__
