"""Values made where they will lie: written by one, seen by nobody before they are whole, changed by nobody after."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock import ClosedError, Missing
from penstock.tensor import Empty, Store, UnsupportedTensor, plan
from tests.conftest import eventually
from tests.support.processes import program

MB = 1 << 20


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def spec(nbytes: int = 4000) -> dict[str, Any]:
    return {
        "pixels": Empty((nbytes // 4,), "int32"),
        "grid": [1, 2, 3],
        "mask": (Empty((2, 3), bool), None),
        "given": np.arange(5),
    }


def fill(value: Any, number: int) -> None:
    value["pixels"][:] = number
    value["mask"][0][...] = [[True, False, True], [False, True, False]]


def is_whole(value: Any, number: int) -> bool:
    return bool(
        (value["pixels"] == number).all()
        and value["grid"] == [1, 2, 3]
        and value["mask"][0].tolist() == [[True, False, True], [False, True, False]]
        and value["mask"][1] is None
        and value["given"].tolist() == [0, 1, 2, 3, 4]
    )


def test_what_was_made_in_place_is_got_by_everybody_where_it_was_written() -> None:
    with Store(MB) as store, Store.attach(store.ticket) as other:
        with store.make(key(1), spec()) as making:
            assert making.is_new
            value = making.value()
            assert value["pixels"].flags.writeable and value["pixels"].ctypes.data % 64 == 0
            fill(value, 7)
            with pytest.raises(Missing):
                other.get(key(1))
            del value
            made = making.commit()
        assert is_whole(made.value(), 7) and is_whole(other.get(key(1)).value(), 7)
        assert not made.value()["pixels"].flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            made.value()["pixels"][0] = 1
        made.release()
        assert store.stats().blocks == 1 and store.stats().puts == 1
        assert is_whole(store.put(key(1), {"other": 1}).value(), 7), "a put of what was made copies nothing"


def test_what_is_there_is_not_made_again() -> None:
    with Store(MB) as store:
        store.put(key(1), {"a": 1}).release()
        with store.make(key(1), spec()) as making:
            assert not making.is_new
            with pytest.raises(ValueError, match="ask is_new first"):
                making.value()
            assert making.commit().value() == {"a": 1}
        with store.make(key(1), spec()) as making:
            pass
        assert store.get(key(1)).value() == {"a": 1}, "leaving what somebody else has put takes nothing away"


@pytest.mark.parametrize("how", ["left", "raised", "abandoned", "dropped"])
def test_what_is_left_without_a_commit_was_never_there(how: str) -> None:
    with Store(MB) as store:
        making = store.make(key(1), spec())
        if how == "left":
            with making:
                fill(making.value(), 1)
        elif how == "raised":
            with pytest.raises(OSError, match="half-way"), making:
                making.value()["pixels"][:10] = 1
                raise OSError("half-way")
        elif how == "abandoned":
            making.abandon()
        if how != "dropped":
            with pytest.raises(ClosedError, match="committed or abandoned"):
                making.commit()
        del making
        assert store.stats().blocks == 0 and store.stats().abandoned == 1
        with store.make(key(1), spec(), timeout=0) as making:
            assert making.is_new


def test_an_array_that_outlives_its_abandoned_value_writes_where_nobody_looks() -> None:
    with Store(MB) as store:
        with store.make(key(1), spec()) as making:
            pixels = making.value()["pixels"]
        second = store.put(key(1), {"pixels": np.full(1000, 5, np.int32)}, timeout=0)
        pixels[:] = 9
        assert (second.value()["pixels"] == 5).all()
        assert store.stats().blocks == 2
        del pixels
        assert store.stats().blocks == 1


def test_a_commit_is_refused_while_an_array_could_still_write_and_works_once_it_is_gone() -> None:
    with Store(MB) as store, store.make(key(1), spec()) as making:
        fill(making.value(), 3)
        part = making.value()["pixels"][5:7]
        with pytest.raises(BufferError, match="drop them first"):
            making.commit()
        with pytest.raises(Missing):
            store.get(key(1))
        part[:] = 3
        del part
        assert is_whole(making.commit().value(), 3)
        with pytest.raises(ClosedError):
            making.commit()


def test_every_kind_and_shape_has_its_place_and_no_two_share_it(seed: int) -> None:
    from penstock.tensor.kinds import KINDS

    chance = np.random.default_rng(seed)
    shapes = [(), (0, 3), 7, (2, 3, 5), np.int64(4)]
    specs = [Empty(shapes[index % len(shapes)], kind.name) for index, kind in enumerate(KINDS)]
    with Store(MB) as store:
        with store.make(key(1), specs) as making:
            written = []
            for array in making.value("bits"):
                content = chance.integers(0, 2, array.shape, np.uint8).astype(array.dtype)
                array[...] = content
                written.append(content)
            del array
            made = making.commit()
        found = made.value("bits")
        assert [array.shape for array in found] == [one.shape for one in specs]
        for kind, array, content in zip(KINDS, found, written):
            assert array.dtype == (kind.numpy or kind.bits) and np.array_equal(array, content), kind.name


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"a": [Empty(3, "no such")]}, r"at \$\['a'\]\[0\]"),
        ({"a": Empty((3, -1), "int8")}, r"expected sizes .* at \$\['a'\]"),
        ({"a": Empty(3, object)}, r"addresses of this process at \$\['a'\]"),
        ({"a": object()}, r"at \$\['a'\]"),
    ],
)
def test_what_cannot_be_made_is_refused_with_its_path_and_takes_nothing(wrong: Any, words: str) -> None:
    with Store(MB) as store:
        with pytest.raises(UnsupportedTensor, match=words):
            store.make(key(1), wrong)
        assert store.stats().blocks == 0


def test_what_is_put_has_numbers() -> None:
    with Store(MB) as store, pytest.raises(UnsupportedTensor, match=r"has no numbers yet.* at \$\['pixels'\]"):
        store.put(key(1), spec())
    with pytest.raises(UnsupportedTensor, match="has no numbers yet"):
        plan(Empty(3, "int8"))
    with pytest.raises(TypeError):
        Empty((1.5,), "int8")


def test_who_wants_what_is_being_made_waits_and_has_it() -> None:
    with Store(MB) as store, Store.attach(store.ticket) as other:
        got: list[Any] = []

        def want(number: int) -> None:
            if number % 2:
                got.append(other.put(key(1), {"pixels": np.zeros(1000, np.int32)}, timeout=20))
            else:
                with other.make(key(1), spec(), timeout=20) as second:
                    assert not second.is_new
                    got.append(second.commit())

        threads = [threading.Thread(target=want, args=(number,)) for number in range(4)]
        with store.make(key(1), spec()) as making:
            for thread in threads:
                thread.start()
            eventually(lambda: store.stats().fills_awaited >= 4)
            assert not got
            with pytest.raises(penstock.Timeout, match="is being written by"):
                other.make(key(1), spec(), timeout=0.01)
            fill(making.value(), 6)
            made = making.commit()
        for thread in threads:
            thread.join(20)
        assert [one.ref for one in got] == [made.ref] * 4
        assert all(is_whole(one.value(), 6) for one in got)
        assert store.stats().puts == 1


def test_one_of_those_who_wait_makes_what_was_abandoned() -> None:
    with Store(MB) as store, Store.attach(store.ticket) as other:
        made: list[bool] = []

        def want() -> None:
            with other.make(key(1), spec(), timeout=20) as making:
                if making.is_new:
                    fill(making.value(), 2)
                made.append(making.is_new)
                assert is_whole(making.commit().value(), 2)

        threads = [threading.Thread(target=want) for _ in range(4)]
        with store.make(key(1), spec()):
            for thread in threads:
                thread.start()
            eventually(lambda: store.stats().fills_awaited >= 4)
        for thread in threads:
            thread.join(20)
        assert sorted(made) == [False, False, False, True]


def test_what_a_dead_process_was_making_is_made_by_another() -> None:
    source = """
        from penstock.tensor import Empty, Store
        store = Store.attach(sys.argv[1])
        making = store.make(bytes(32), {"pixels": Empty(1000, "int32")})
        making.value()["pixels"][:500] = 1
        say("half-way")
        hear()
    """
    with Store(MB) as store, program(source, store.ticket) as other:
        assert other.hear() == "half-way"
        with pytest.raises(Missing):
            store.get(bytes(32))
        os.kill(other.pid, signal.SIGKILL)
        with store.make(bytes(32), spec(), timeout=20) as making:
            assert making.is_new
            fill(making.value(), 4)
            assert is_whole(making.commit().value(), 4)
        assert store.stats().puts == 2
        eventually(lambda: store.stats().blocks == 1)


def test_what_is_taken_out_while_it_is_made_is_had_by_its_maker_alone() -> None:
    with Store(MB) as store:
        with store.make(key(1), spec()) as making:
            assert store.clear() == 1
            fill(making.value(), 8)
            made = making.commit()
        assert is_whole(made.value(), 8)
        with pytest.raises(Missing):
            store.get(key(1))
        made.release()
        assert store.stats().blocks == 0


def test_torch_fills_what_is_made_and_cannot_write_it_before_it_lets_go() -> None:
    with Store(MB) as store:
        given = torch.arange(600, dtype=torch.bfloat16).reshape(20, 30)
        with store.make(key(1), {"pixels": Empty((20, 30), torch.bfloat16), "grid": (1, 2)}) as making:
            pixels = making.value("torch")["pixels"]
            assert pixels.dtype is torch.bfloat16
            pixels.copy_(given)
            with pytest.raises(BufferError):
                making.commit()
            del pixels
            made = making.commit()
        assert torch.equal(made.value("torch")["pixels"], given)
