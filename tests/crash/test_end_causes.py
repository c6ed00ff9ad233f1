"""How an end of a channel ends decides what the other side is told: end of channel, or PeerDied with the cause."""

import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import penstock
from penstock import DeathCause, EndOfChannel, PeerDied, PenstockError
from tests import tiers
from tests.support.loops import in_a_loop
from tests.support.processes import program

TOLD_S = 0.1  # README: survivors learn of a death within this time
CLEAN = "end of channel"
NOT_CLOSED = "exited with status 0 without closing"
GARBAGE = "garbage collected without closing"
# How the program ends, and what the other side of an open end is told.
WAYS = {
    "return": ("return", NOT_CLOSED),
    "exception": ("raise RuntimeError('no such layer')", "RuntimeError: no such layer"),
    "sys.exit": ("sys.exit(3)", "exit status 3"),
    "sys.exit with text": ("sys.exit('no such layer')", "exit status 1"),
    "sys.exit of success": ("sys.exit(0)", NOT_CLOSED),
    "os._exit": ("os._exit(3)", "exit status 3"),
    "SIGKILL": ("os.kill(os.getpid(), 9)", "killed by SIGKILL"),
    "SIGTERM": ("os.kill(os.getpid(), 15); time.sleep(10)", "killed by SIGTERM"),
    "interrupt": ("signal.raise_signal(signal.SIGINT)", "KeyboardInterrupt"),
}
ALL_WAYS = ("with", "bare")  # forms: the end's block decides the cause, or the end of the process
OF_EACH_FORM = ("return", "exception", "sys.exit", "SIGKILL", "interrupt")
PRELUDE = """
import asyncio, signal, time
channel = penstock.attach(sys.argv[1])
"""
# The end is a global name of the program, so it is open when the interpreter ends.
SENDERS = {
    "with": """
def main():
    with channel.open_sender() as end:
        end.send(b"x")
        {}
main()
""",
    "bare": """
end = channel.open_sender()
end.send(b"x")
def main():
    {}
main()
""",
    "local": """
def main():
    end = channel.open_sender()
    end.send(b"x")
    {}
main()
""",
    "async with": """
async def main():
    async with channel.open_async_sender() as end:
        await end.send(b"x")
        {}
asyncio.run(main())
""",
    "async bare": """
async def main():
    global end
    end = channel.open_async_sender()
    await end.send(b"x")
    {}
asyncio.run(main())
""",
}
RECEIVERS = {
    "with": """
def main():
    with channel.open_receiver() as end:
        end.receive()
        {}
main()
""",
    "for": """
def main():
    for record in channel.open_receiver():
        {}
main()
""",
    "bare": """
end = channel.open_receiver()
end.receive()
def main():
    {}
main()
""",
    "async with": """
async def main():
    async with channel.open_async_receiver() as end:
        await end.receive()
        {}
asyncio.run(main())
""",
    "async for": """
async def main():
    async for record in channel.open_async_receiver():
        {}
asyncio.run(main())
""",
}
CHANNELS = {
    "ring": lambda: penstock.Ring(),
    "broadcast": lambda: penstock.Broadcast(receivers=1),
    "inbox": lambda: penstock.Inbox(senders=1),
}


def causes(form: str, way: str) -> set[str]:
    """What the other side may be told. asyncio turns an interrupt into a cancellation of the task."""
    cause = WAYS[way][1]
    if way == "return" and form in ("with", "async with"):
        return {CLEAN}
    if way == "return" and form in ("local", "for", "async for"):
        return {GARBAGE, NOT_CLOSED}  # the end goes with the function, a moment before the process does
    if way == "interrupt" and form in ("async with", "async for"):
        return {"CancelledError", "KeyboardInterrupt"}  # the latter before Python 3.11
    return {cause}


@contextlib.contextmanager
def ending(source: str, way: str, channel: Any) -> Iterator[Any]:
    action = WAYS[way][0]
    if way == "interrupt" and "async def" in source:
        action += "; await asyncio.sleep(10)"
    with program(PRELUDE + source.format(action), channel.ticket) as other:
        yield other


def cause_of(call: Any) -> str:
    """What the call is told about the other side."""
    try:
        while True:
            call()
    except EndOfChannel:
        return CLEAN
    except PeerDied as death:
        assert death.how in str(death) and death.cause == DeathCause(death.how)
        return death.how


def cases(forms: dict[str, str]) -> list[Any]:
    """Channel, form and way. `make test` runs all ways of two forms and five ways of each form of the ring, and two
    ways of two forms for the other channels."""
    every = [(style, form, way) for style in CHANNELS for form in forms for way in WAYS]
    of_ring = {(form, way) for form in forms for way in WAYS if form in ALL_WAYS or way in OF_EACH_FORM}
    few = [(form, way) for form in ("with", "async with") for way in ("exception", "SIGKILL")]
    chosen = [case for case in every if case[1:] in (of_ring if case[0] == "ring" else few)]
    return [*chosen, *tiers.only_in_all(*(case for case in every if case not in chosen))]


@pytest.mark.parametrize(("style", "form", "way"), cases(SENDERS))
def test_receiver_gets_the_cause_of_a_senders_end(style: str, form: str, way: str) -> None:
    with CHANNELS[style]() as channel, channel.open_receiver() as receiver, ending(SENDERS[form], way, channel):
        assert receiver.receive(timeout=20) == b"x"
        assert cause_of(lambda: receiver.receive(timeout=20)) in causes(form, way)


@pytest.mark.parametrize(("style", "form", "way"), cases(RECEIVERS))
def test_sender_gets_the_cause_of_a_receivers_end(style: str, form: str, way: str) -> None:
    with CHANNELS[style]() as channel, channel.open_sender() as sender, ending(RECEIVERS[form], way, channel):
        sender.send(b"x")

        def send() -> None:
            sender.send(b"x", timeout=20)
            time.sleep(0.001)

        assert cause_of(send) in causes(form, way)


def test_exception_in_one_worker_reaches_the_core_in_time() -> None:
    """The program of README, with a `raise` in worker 0."""
    source = """
        import time
        steps, done = penstock.attach(sys.argv[1]), penstock.attach(sys.argv[2])
        rank = int(sys.argv[3])
        with done.open_sender(rank, name=f"worker {rank}") as sender:
            for step in steps.open_receiver(rank, name=f"worker {rank}"):
                if rank == 0 and step == b"2":
                    say("raising", time.monotonic())
                    raise RuntimeError("no such layer")
                sender.send(step)
    """
    with (
        penstock.Broadcast(receivers=2) as steps,
        penstock.Inbox(senders=2) as done,
        steps.open_sender() as core,
        done.open_receiver() as results,
        program(source, steps.ticket, done.ticket, 0) as worker,
        program(source, steps.ticket, done.ticket, 1),
    ):
        core.send(b"1", timeout=20)
        assert [results.receive(timeout=20) for _ in range(2)] == [b"1", b"1"]
        core.send(b"2", timeout=20)
        raised_at = float(worker.hear().split()[1])
        with pytest.raises(PeerDied, match="RuntimeError: no such layer") as death:
            while True:
                results.receive(timeout=20)
        assert time.monotonic() - raised_at < TOLD_S + 0.4  # under load; the figure for a quiet machine is in RESULTS
        assert (death.value.index, death.value.name) == (0, "worker 0")
        with pytest.raises(PeerDied, match="RuntimeError: no such layer"):
            while True:
                core.send(b"3", timeout=20)
        core.send(b"4", timeout=20)  # for the worker that is left
        results.receive(timeout=20)


def test_end_that_failed_can_be_taken_again_while_its_process_lives() -> None:
    with penstock.Ring() as ring, ring.open_sender() as sender:
        for number in range(3):
            with contextlib.suppress(ZeroDivisionError), ring.open_receiver():
                1 / 0  # noqa: B018
            with pytest.raises(PeerDied, match="ZeroDivisionError: division by zero"):
                sender.send(b"lost", timeout=5)
            with ring.open_receiver() as receiver:
                sender.send(b"%d" % number, timeout=5)
                assert receiver.receive(timeout=5) == b"%d" % number


def fail(ring: penstock.Ring[Any], views: list[memoryview]) -> None:
    receiver = ring.open_receiver()
    views.append(receiver.receive(timeout=5).view)
    receiver.fail(RuntimeError("no such layer"))


def raise_in_a_loop(ring: penstock.Ring[Any], views: list[memoryview]) -> None:
    with contextlib.suppress(RuntimeError):
        for record in ring.open_receiver():
            views.append(record.view)
            raise RuntimeError("no such layer")


def drop(ring: penstock.Ring[Any], views: list[memoryview]) -> None:
    views.append(ring.open_receiver().receive(timeout=5).view)


@pytest.mark.parametrize("nbytes", [4, 100_000], ids=["in the ring", "in the pool"])
@pytest.mark.parametrize(
    ("end", "cause"), [(fail, "RuntimeError: no such layer"), (raise_in_a_loop, "no such layer"), (drop, GARBAGE)]
)
def test_record_of_a_failed_receiver_keeps_its_room_while_viewed(end: Any, cause: str, nbytes: int) -> None:
    views: list[memoryview] = []
    with penstock.Ring(penstock.Buffer) as ring, ring.open_sender() as sender:
        sender.send(b"x" * nbytes)
        end(ring, views)
        with pytest.raises(PeerDied, match=cause):
            sender.send(b"y", timeout=5)
        if nbytes == 4:  # of a record in the ring, the view holds the end, too
            with pytest.raises(ValueError, match="taken"):
                ring.open_receiver()
        assert bytes(views.pop()) == b"x" * nbytes
        with ring.open_receiver() as second:
            sender.send(b"next", timeout=5)
            assert bytes(second.receive(timeout=5)) == b"next"


def test_ends_that_are_garbage_leave_their_places_to_the_next_ends() -> None:
    with penstock.Inbox(senders=1, max_peers=3) as inbox, inbox.open_receiver() as receiver:
        for number in range(20):
            inbox.open_sender().send(b"%d" % number)
            assert receiver.receive(timeout=5) == b"%d" % number
            with pytest.raises(PeerDied, match=GARBAGE):
                receiver.receive(timeout=5)


def test_exception_is_reported_before_children_are_awaited() -> None:
    """multiprocessing joins its children when the interpreter ends, and this child waits for the end of its parent."""
    source = """
        import multiprocessing
        ring = penstock.attach(sys.argv[1])
        def child():
            with ring.open_receiver() as receiver:
                receiver.receive()
                try:
                    receiver.receive()
                except penstock.PeerDied as death:
                    say(death.how)
        sender = ring.open_sender()
        multiprocessing.get_context("fork").Process(target=child).start()
        sender.send(b"x")
        raise RuntimeError("no such layer")
    """
    with penstock.Ring() as ring, program(source, ring.ticket) as parent:
        assert parent.hear() == "RuntimeError: no such layer"


def test_iterator_that_is_exhausted_has_closed_its_end_and_break_has_not() -> None:
    with penstock.Ring() as ring:
        with ring.open_sender() as sender:
            sender.send(b"1")
            sender.send(b"2")
        receiver = ring.open_receiver()
        for _ in receiver:
            break
        assert not receiver.is_closed
        assert list(receiver) == [b"2"] and receiver.is_closed


@in_a_loop
async def test_exhausted_async_iterator_has_closed_its_end() -> None:
    with penstock.Ring() as ring:
        ring.open_sender().close()
        receiver = ring.open_async_receiver()
        assert [record async for record in receiver] == [] and receiver.is_closed


class Odd(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "arguments", "text"),
    [
        (Odd, (), "Odd"),
        (GeneratorExit, (), "GeneratorExit"),
        (KeyboardInterrupt, (), "KeyboardInterrupt"),
        (ValueError, ("ä" * 300,), "ValueError: " + "ä" * 94),  # 12 bytes, and 94 characters of 2
        (ValueError, ("two\nlines\0\x1b[2J",), "ValueError: two lines  [2J"),
        (OSError, ("no weights in caf\udce9",), r"OSError: no weights in caf\udce9"),  # a file name that is no UTF-8
        (PenstockError, (), "PenstockError"),
        (SystemExit, (258,), "exit status 2"),
        (SystemExit, (1 << 70,), "exit status 255"),
        (SystemExit, (None,), NOT_CLOSED),
    ],
)
def test_text_of_an_error_has_one_line_and_at_most_200_bytes(
    error: type[BaseException], arguments: tuple[object, ...], text: str
) -> None:
    with penstock.Ring() as ring, ring.open_receiver() as receiver:
        with contextlib.suppress(error), ring.open_sender():
            raise error(*arguments)
        with pytest.raises(PeerDied) as death:
            receiver.receive(timeout=5)
        assert death.value.how == text and len(text.encode()) <= 200


@pytest.mark.parametrize("error", ["no such layer", RuntimeError, None])
def test_end_fails_by_an_exception_only(error: Any) -> None:
    with penstock.Ring() as ring, ring.open_sender() as sender:
        with pytest.raises(TypeError):
            sender.fail(error)
        sender.send(b"open")


class Number(msgspec.Struct, array_like=True):
    value: int


@pytest.mark.parametrize("message", [b"1", Number(1)], ids=["native", "typed"])
@pytest.mark.parametrize("delegates", [False, True], ids=["receive", "yield from"])
def test_generator_that_is_closed_counts_as_a_death_of_its_end(delegates: bool, message: Any) -> None:
    def messages(ring: Any) -> Iterator[Any]:
        with ring.open_receiver() as receiver:
            if delegates:
                yield from receiver
            while True:
                yield receiver.receive()

    with penstock.Ring(type(message)) as ring, ring.open_sender() as sender:
        sender.send(message)
        for received in messages(ring):
            assert received == message
            break
        with pytest.raises(PeerDied, match="GeneratorExit"):
            sender.send(message, timeout=5)


def test_unhandled_exception_of_a_thread_is_reported_with_its_block() -> None:
    source = """
        import threading, time
        threading.excepthook = lambda _: None
        def work():
            with penstock.attach(sys.argv[1]).open_sender():
                raise RuntimeError("in a thread")
        threading.Thread(target=work).start()
        time.sleep(30)
    """
    with penstock.Ring() as ring, ring.open_receiver() as receiver, program(source, ring.ticket):
        with pytest.raises(PeerDied, match="RuntimeError: in a thread"):
            receiver.receive(timeout=20)


def raise_in_a_block(ticket: str) -> None:
    with penstock.attach(ticket).open_sender():
        raise RuntimeError("no such layer")


@pytest.mark.parametrize("context", ["spawn", "fork"])
def test_exception_of_a_multiprocessing_worker_is_reported(context: str) -> None:
    with penstock.Ring() as ring, ring.open_receiver() as receiver:
        worker = multiprocessing.get_context(context).Process(target=raise_in_a_block, args=(str(ring.ticket),))
        worker.start()
        try:
            with pytest.raises(PeerDied, match="RuntimeError: no such layer"):
                receiver.receive(timeout=20)
        finally:
            worker.join()


def test_missing_senders_of_an_inbox_are_named() -> None:
    with penstock.Inbox(senders=12) as inbox, inbox.open_receiver() as receiver, inbox.open_sender(1):
        with pytest.raises(penstock.Timeout, match=r"senders 0, 2, 3, 4, 5, 6, 7, 8 and 3 more have never opened"):
            receiver.receive(timeout=0.01)
        assert [end["state"] for end in inbox.snapshot()["senders"]].count("expected") == 11


@pytest.mark.parametrize(
    ("text", "exception", "status", "signal"),
    [
        ("RuntimeError: no such layer", "RuntimeError", None, None),
        ("KeyboardInterrupt", "KeyboardInterrupt", None, None),
        ("exit status 3", None, 3, None),
        (NOT_CLOSED, None, 0, None),
        ("killed by SIGKILL", None, None, 9),
        ("killed by SIGSEGV, sent by pid 7", None, None, 11),
        ("how is not known", None, None, None),
        (GARBAGE, None, None, None),
        ("", None, None, None),
    ],
)
def test_cause_has_the_parts_of_its_text(
    text: str, exception: str | None, status: int | None, signal: int | None
) -> None:
    cause = DeathCause(text)
    assert (cause.exception, cause.status, cause.signal) == (exception, status, signal)


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (0, DeathCause("exited with status 0")),
        (255, DeathCause("exit status 255")),
        (-9, DeathCause("killed by SIGKILL")),
        (-35, DeathCause("killed by signal 35")),
    ],
)
def test_cause_of_an_exit_code(code: int, cause: DeathCause) -> None:
    assert DeathCause.of_exit_code(code) == cause
