"""What a channel, a pool and a segment may be asked for. What is impossible is refused where it is said."""

import inspect
import types
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

import penstock
from penstock import MemoryExhausted, _native, lowlevel
from penstock.memory import segment


def options_of(**options: Any) -> dict[str, Any]:
    """Puts options of the memory and of long records into their structs."""
    structs = {"memory": penstock.MemoryOptions, "long_records": penstock.LongRecords}
    for name, struct in structs.items():
        fields = {field: options.pop(field) for field in struct.__struct_fields__ if field in options}
        if fields:
            options[name] = struct(**fields)
    return options


WRONG = [
    {"capacity": 0},
    {"capacity": -4096},
    {"capacity": 2048},
    {"capacity": 5000},
    {"capacity": 1 << 32},
    {"capacity": 1 << 70},
    {"inline_limit": 63},
    {"inline_limit": -1},
    {"inline_limit": (1 << 18) + 1},
    {"pool_nbytes": 0},
    {"pool_nbytes": -1},
    {"max_records": 0},
    {"max_records": -1},
    {"max_records": 65537},
    {"max_records": (1 << 32) + 1},
    {"max_peers": -1},
    {"max_peers": 129},
    {"max_peers": (1 << 32) + 4},
    {"latency": "fast"},
    {"latency": None},
    {"on_receiver_death": "die"},
    {"on_sender_death": True},
    {"huge_pages": "maybe"},
    {"huge_pages": 2},
    {"numa_node": -2},
    {"numa_node": 1 << 40},
]


@pytest.mark.parametrize("options", WRONG, ids=repr)
def test_an_impossible_option_of_a_channel_is_a_value_error(options: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        penstock.Ring(**options_of(**options))


MAKE = {
    "ring": lambda **options: penstock.Ring(**options_of(**options)),
    "broadcast": lambda **options: penstock.Broadcast(receivers=2, **options_of(**options)),
    "inbox": lambda **options: penstock.Inbox(senders=3, **options_of(**options)),
}
REACHED = [  # an option, and what it changes in what the core is given
    ({"name": "other"}, {"name": "other"}),
    ({"capacity": 1 << 19}, {"lane_nbytes": 1 << 19}),
    ({"latency": "eco"}, {"latency": 0}),
    ({"latency": "spin"}, {"latency": 2}),
    ({"on_receiver_death": "ignore"}, {"receiver_death": 1}),
    ({"on_sender_death": "ignore"}, {"sender_death": 1}),
    ({"max_peers": 8}, {"max_peers": 8}),
    ({"inline_limit": 100}, {"inline_limit": 100}),
    ({"pool_nbytes": 1 << 20}, {"pool_nbytes": 1 << 20}),
    ({"max_records": 7}, {"max_blocks": 7}),
    ({"huge_pages": True}, {"huge_nbytes": 2 << 20, "granule_nbytes": 0}),
    ({"huge_pages": "require"}, {"huge_nbytes": 2 << 20, "granule_nbytes": 0, "huge_required": True}),
    ({"numa_node": 3}, {"numa_node": 3}),
    ({"numa_required": True}, {"numa_required": True}),
    ({"prefault": False}, {"prefault": False}),
]


class Reached(Exception):
    """Instead of a segment: what it would have been made of."""


@pytest.fixture
def segment_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """What a channel of these options would be made of."""

    def create(name: str, shape: dict[str, int], **options: Any) -> NoReturn:
        raise Reached({"name": name, **shape, **options})

    native_segment = types.SimpleNamespace(create=create)
    native = types.SimpleNamespace(**{**vars(_native), "Segment": native_segment})
    monkeypatch.setattr(segment, "_native", native)

    def look(shape: str, **options: Any) -> dict[str, Any]:
        with pytest.raises(Reached) as reached:
            MAKE[shape](**options)
        return reached.value.args[0]  # type: ignore[no-any-return]

    return look


@pytest.mark.parametrize("shape", MAKE)
@pytest.mark.parametrize(("options", "changed"), REACHED, ids=repr)
def test_each_option_of_each_channel_reaches_its_segment(
    shape: str, options: dict[str, Any], changed: dict[str, Any], segment_of: Callable[..., dict[str, Any]]
) -> None:
    without = segment_of(shape)
    with_it = segment_of(shape, **options)
    assert with_it == {**without, **changed}
    assert with_it != without


@pytest.mark.parametrize("cls", [penstock.Ring, penstock.Broadcast, penstock.Inbox])
def test_no_option_of_a_channel_is_left_out_above(cls: type) -> None:
    taken = set(inspect.signature(cls).parameters) - {"type", "receivers", "senders", "memory", "long_records"}
    taken |= {*penstock.MemoryOptions.__struct_fields__, *penstock.LongRecords.__struct_fields__}
    assert taken == {name for options, _ in REACHED for name in options}


def test_default_options_of_each_channel(segment_of: Callable[..., dict[str, Any]]) -> None:
    for shape, style, lanes, receivers, capacity in (
        ("ring", 1, 1, 1, 1 << 20),
        ("broadcast", 2, 1, 2, 1 << 20),
        ("inbox", 3, 3, 1, 256 << 10),
    ):
        result = segment_of(shape)
        assert (result["name"], result["style"], result["lanes"], result["receivers"]) == (
            shape,
            style,
            lanes,
            receivers,
        )
        assert (result["lane_nbytes"], result["inline_limit"], result["schema"]) == (capacity, 64 << 10, b"")
        assert (result["latency"], result["receiver_death"], result["sender_death"], result["prefault"]) == (
            1,
            0,
            0,
            True,
        )


@pytest.mark.parametrize("shape", MAKE)
def test_snapshot_has_the_options_of_the_channel(shape: str) -> None:
    options = {"capacity": 1 << 13, "latency": "eco", "max_peers": 8, "inline_limit": 100}
    with MAKE[shape](name="other", pool_nbytes=1 << 16, max_records=7, **options) as channel:
        result = channel.snapshot()
    assert (result["name"], result["kind"], result["lane_nbytes"], result["latency"]) == (
        "other",
        shape,
        1 << 13,
        "eco",
    )
    assert (result["max_peers"], result["inline_limit"]) == (8, 100)
    assert (result["pool"][0]["nbytes"], result["pool"][0]["max_blocks"]) == (1 << 16, 7)
    counts = {"ring": (1, 1), "broadcast": (1, 2), "inbox": (3, 1)}[shape]
    assert (len(result["senders"]), len(result["receivers"])) == counts


@pytest.mark.parametrize("options", [{"capacity": 4096.0}, {"capacity": "4096"}, {"pool_nbytes": 1.5}], ids=repr)
def test_a_size_that_is_no_whole_number_is_refused(options: dict[str, object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        MAKE["ring"](**options)


def test_an_option_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="colour"):
        penstock.Ring(colour="red")


@pytest.mark.parametrize("count", [0, -1, 65, 1 << 40])
def test_broadcast_and_inbox_have_1_to_64_ends(count: int) -> None:
    with pytest.raises(ValueError, match=f"receivers from 1 to 64, got {count}"):
        penstock.Broadcast(receivers=count)
    with pytest.raises(ValueError, match=f"senders from 1 to 64, got {count}"):
        penstock.Inbox(senders=count)


@pytest.mark.parametrize("count", ["2", 1.5, None])
def test_count_of_ends_that_is_no_whole_number_is_refused(count: Any) -> None:
    with pytest.raises(TypeError, match=f"receivers to be a whole number, got {count!r}"):
        penstock.Broadcast(receivers=count)
    with pytest.raises(TypeError, match=f"senders to be a whole number, got {count!r}"):
        penstock.Inbox(senders=count)


@pytest.mark.parametrize(
    "options",
    [
        {"max_blocks": 0},
        {"max_blocks": -1},
        {"max_blocks": 65537},
        {"max_blocks": (1 << 32) + 1},
        {"max_peers": 0},
        {"max_peers": -1},
        {"max_peers": 129},
        {"max_peers": (1 << 32) + 1},
        {"huge_pages": "maybe"},
        {"numa_node": -2},
    ],
    ids=repr,
)
def test_an_impossible_option_of_a_pool_is_a_value_error(options: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        lowlevel.Pool.create(4096, **options_of(**options))


@pytest.mark.parametrize("create", [lowlevel.Pool.create, lowlevel.Segment.create])
@pytest.mark.parametrize("nbytes", [0, -1, -(1 << 70)])
def test_a_segment_and_a_pool_have_at_least_one_byte(create: object, nbytes: int) -> None:
    with pytest.raises(ValueError, match=f"at least one byte for .*, got {nbytes}"):
        create(nbytes)  # type: ignore[operator]


@pytest.mark.parametrize("create", [lowlevel.Pool.create, lowlevel.Segment.create])
@pytest.mark.parametrize(
    "nbytes", [1 << 42, (1 << 44) - 4096, 1 << 44, (1 << 44) + 1, 1 << 50, (1 << 63) - 1, 1 << 64, 1 << 70]
)
def test_impossible_size_raises_memory_exhausted_with_both_numbers(create: object, nbytes: int) -> None:
    with pytest.raises(MemoryExhausted) as output:
        create(nbytes)  # type: ignore[operator]
    assert output.value.requested >= nbytes
    assert 0 < output.value.free < 1 << 42
    assert isinstance(output.value, MemoryError)


def test_the_smallest_and_the_largest_ring_work() -> None:
    for options in ({"capacity": 4096, "inline_limit": 64, "pool_nbytes": 64, "max_records": 1}, {"capacity": 1 << 26}):
        with MAKE["ring"](**options) as channel, channel.open_sender() as sender, channel.open_receiver() as receiver:
            for record in (b"", b"x" * 64):
                sender.send(record, timeout=1)
                assert receiver.receive(timeout=1) == record


def test_a_channel_of_one_block_spills_one_record_at_a_time() -> None:
    with MAKE["ring"](max_records=1) as channel, channel.open_sender() as sender, channel.open_receiver() as receiver:
        for _ in range(3):
            sender.send_nowait(bytes(100_000))
            with pytest.raises(penstock.WouldBlock):
                sender.send_nowait(bytes(100_000))
            assert receiver.receive(timeout=1) == bytes(100_000)


NAMES = [
    "",
    "x",
    "a" * 31,
    "a" * 32,
    "a" * 300,
    "ü" * 16,
    "日本語" * 11,
    "🚰" * 9,
    "with space/and:colon%s%n",
    "q'q\"\\",
]


@pytest.mark.parametrize("name", NAMES)
def test_long_names_are_cut_where_they_are_shown(name: str) -> None:
    with penstock.Ring(name=name) as channel, channel.open_receiver(name=name) as receiver:
        for shown in (channel.name, receiver.name, penstock.attach(channel.ticket).name):
            assert name.startswith(shown)
            assert len(shown.encode()) >= min(28, len(name.encode()))
        with pytest.raises(penstock.Timeout) as output:
            receiver.receive(timeout=0)
        assert channel.name in str(output.value)
        peer = channel.peers()[0].name
        assert peer.startswith("pid ") if name == "" else len(peer) > 0
    pool = lowlevel.Pool.create(4096, name=name, peer_name=name)
    with pool.take(10):
        assert name == "" or name.startswith(pool.stats().holders[0].name)
        with pytest.raises(MemoryExhausted) as exhausted:
            pool.take(5000)
        assert pool.name in str(exhausted.value)


@pytest.mark.parametrize("name", [5, None, b"bytes"], ids=repr)
def test_a_name_that_is_no_text_is_refused(name: object) -> None:
    with pytest.raises(TypeError, match="expected a name of type str"):
        penstock.Ring(name=name)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["lone \ud800 surrogate", "two\nlines", "a NUL\0", "\x1b[31mred"], ids=repr)
def test_names_are_refused_that_a_terminal_would_not_print(name: str) -> None:
    with pytest.raises(ValueError, match="expected a name of printable characters"):
        penstock.Ring(name=name)
    with penstock.Ring() as channel, pytest.raises(ValueError, match="expected a name of printable characters"):
        channel.open_receiver(name=name)


@pytest.mark.parametrize("options", [{"memory": {"prefault": True}}, {"long_records": 64}])
def test_options_of_another_class_are_refused_by_name(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(TypeError, match=f"expected {name} to be a "):
        penstock.Ring(**options)
