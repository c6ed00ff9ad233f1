"""Tensors of torch: every dtype, every kind of view, the ones that are refused, and what a stray write does."""

import itertools
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from penstock import lowlevel
from penstock.lowlevel import Pool
from penstock.tensor import TensorRef, Tensors, UnsupportedTensor, plan, read
from penstock.tensor.kinds import KINDS, kind_of
from tests.support.processes import DYING, program

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def new_pool() -> tuple[Pool, Tensors]:
    pool = Pool.create(1 << 20, name="tensors")
    pool.join()
    return pool, Tensors(pool, inline_nbytes=0)


def blocks(pool: Pool) -> int:
    return pool.stats().blocks


def bytes_of(tensor: Any) -> bytes:
    """C-contiguous, whatever the dtype: by way of lists of single numbers where torch copies none of it."""
    flat = tensor.detach().resolve_conj().resolve_neg()
    if flat.element_size() <= 8 and not flat.is_complex():
        flat = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    return flat.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def there_and_back(tensors: Tensors, given: Any, **options: Any) -> Any:
    assert tensors.pool is not None
    return tensors.view(tensors.put(given, [tensors.pool.peer]), "torch", **options)


def test_every_dtype_of_torch_has_a_kind_of_number_or_is_refused_with_advice() -> None:
    dtypes = {one for name in dir(torch) if isinstance(one := getattr(torch, name), torch.dtype)}
    refused = {str(one) for one in dtypes if str(one).removeprefix("torch.") not in {kind.name for kind in KINDS}}
    assert refused == {
        f"torch.{name}" for name in ("quint8", "qint8", "qint32", "quint4x2", "quint2x4", "bits8", "bits16")
    } | {"torch.bits1x8", "torch.bits2x4", "torch.bits4x2"}
    for dtype in dtypes:
        if str(dtype) in refused:
            with pytest.raises(UnsupportedTensor, match=r"cannot be sent: (a quantised one is more|no other process)"):
                kind_of(dtype)
        else:
            kind = kind_of(dtype)
            assert (kind.name, kind.itemsize) == (str(dtype).removeprefix("torch."), dtype.itemsize)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_tensor_of_any_dtype_comes_back_bit_by_bit(kind: Any, seed: int) -> None:
    pool, in_pool = new_pool()
    dtype = getattr(torch, kind.name)
    raw = torch.from_numpy(
        np.random.default_rng(seed).integers(0, 2 if kind.name == "bool" else 256, 96 * kind.itemsize, np.uint8)
    )
    whole = raw.view(dtype).reshape(4, 4, 6)
    views = whole, whole[1], whole[::2, 1:3, ::3], whole.permute(2, 0, 1), whole[0, 0, 0], whole[:, :0]
    for given, tensors in itertools.product(views, (in_pool, Tensors(pool))):
        back = there_and_back(tensors, given)
        assert back.dtype == dtype
        assert back.shape == given.shape
        assert back.is_contiguous()
        assert bytes_of(back) == bytes_of(given)
        own = there_and_back(tensors, given, writable=True)
        assert bytes_of(own) == bytes_of(given)
        seen = tensors.view(tensors.put(given, [pool.peer]))
        assert seen.shape == tuple(given.shape)
        assert seen.tobytes() == bytes_of(given)
        assert not seen.flags.writeable
        del back, own, seen
    assert blocks(pool) == 0


def test_numbers_that_are_only_promised_are_made_before_they_are_sent() -> None:
    _, tensors = new_pool()
    numbers = torch.complex(torch.arange(6.0), torch.arange(6.0) + 1).reshape(2, 3)
    for given in (
        numbers.conj(),
        numbers.conj().t(),
        numbers.conj().imag,
        numbers.conj().imag[:, 1:],
        numbers.conj()[0],
    ):
        assert given.is_conj() or given.is_neg()
        back = there_and_back(tensors, given)
        assert not back.is_conj()
        assert not back.is_neg()
        assert torch.equal(back, given)
    half = numbers.to(torch.complex32).conj()
    assert torch.equal(there_and_back(tensors, half).to(torch.complex64), numbers.conj())


def test_only_what_a_tensor_shows_of_its_storage_is_copied() -> None:
    pool, tensors = new_pool()
    whole = torch.zeros(100_000)
    ref = tensors.put(whole[500:510], [pool.peer])
    assert ref.nbytes == 40
    back = tensors.view(ref, "torch")
    assert back.untyped_storage().nbytes() == 40
    ref = tensors.put(whole[:1].expand(100), [pool.peer])
    assert ref.nbytes == 400


def test_a_tensor_that_requires_grad_is_refused_or_detached() -> None:
    pool, tensors = new_pool()
    parameter = torch.nn.Parameter(torch.ones(3))
    result = torch.ones(3, requires_grad=True) * 2
    for given in (parameter, result, result[1:]):
        with pytest.raises(UnsupportedTensor, match="requires grad, which no other process could follow: say detach"):
            tensors.put(given, [pool.peer])
        back = tensors.view(tensors.put(given, [pool.peer], detach=True), "torch")
        assert torch.equal(back, given.detach())
        assert not back.requires_grad
        assert type(back) is torch.Tensor
    with pytest.raises(UnsupportedTensor, match=r"detach=True at \$\['w'\]"):
        plan({"w": parameter})
    assert plan({"w": parameter}, detach=True).nbytes == 12
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    assert there_and_back(tensors, frozen).sum() == 3
    with torch.inference_mode():
        assert there_and_back(tensors, torch.ones(3) * 2).sum() == 6


def lost() -> Any:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.ones(3, 3).to_sparse(), r"layout torch.sparse_coo is several: send .to_dense\(\)"),
        (lambda: torch.ones(3, 3).to_sparse_csr(), "layout torch.sparse_csr is several"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "is several"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "is several"),
        (lambda: torch.empty(3, device="meta"), "lies on meta, not in host memory"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8), r"send .int_repr\(\) and its scales"),
        (lambda: torch.empty(3, dtype=torch.bits8), "convert it"),
        (lambda: torch.ones((1,) * 33), "at most 32 dimensions"),
        (lost, "has lost its storage"),
        (fake, "stands for other tensors|lies on"),
    ],
)
def test_what_cannot_be_sent_is_refused_and_the_error_says_what_to_do(make: Callable[[], Any], words: str) -> None:
    pool, tensors = new_pool()
    with pytest.raises((UnsupportedTensor, ValueError), match=words):
        tensors.put(make(), [pool.peer])
    assert blocks(pool) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_tensor_of_a_device_is_refused_with_the_name_of_what_sends_it() -> None:
    pool, tensors = new_pool()
    with pytest.raises(UnsupportedTensor, match=r"lies on cuda:0, .*: penstock.tensor.cuda sends device tensors"):
        tensors.put(torch.ones(3, device="cuda:0"), [pool.peer])


def test_a_tensor_made_in_the_pool_is_shared_without_a_copy() -> None:
    pool, tensors = new_pool()
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex32, torch.bool):
        made = tensors.empty((20, 30), dtype, as_="torch")
        assert (made.dtype, made.shape) == (dtype, (20, 30))
        made.zero_()
        made[3].view(torch.uint8).fill_(1)
        takes = pool.stats().takes
        ref = tensors.share(made, [pool.peer])
        part = tensors.share(made[3:5], [pool.peer])
        by_numpy = tensors.share(made.view(torch.uint8).numpy()[3], [pool.peer])
        assert pool.stats().takes == takes
        with pytest.raises(ValueError, match="not contiguous"):
            tensors.share(made.t())
        expected = bytes_of(made)
        del made
        assert bytes_of(tensors.view(ref, "torch")) == expected
        row = dtype.itemsize * 30
        assert bytes_of(tensors.view(part, "torch")) == expected[3 * row : 5 * row]
        assert tensors.view(by_numpy).tobytes() == b"\1" * row
        assert blocks(pool) == 0


def test_a_conjugate_of_what_lies_in_the_pool_is_not_what_lies_there() -> None:
    _, tensors = new_pool()
    made = tensors.empty(4, torch.complex64, as_="torch")
    made.fill_(1j)
    with pytest.raises(ValueError, match="put\\(\\) copies it"):
        tensors.share(made.conj())


def test_the_block_is_free_with_the_last_view_of_it() -> None:
    def bound(tensor: Any) -> Any:
        return torch.nn.Parameter(tensor, requires_grad=False)

    ways: list[Callable[[Any], Any]] = [
        lambda seen: seen,
        lambda seen: seen[10:20],
        lambda seen: seen.reshape(10, -1).t()[::2],
        lambda seen: seen.view(torch.int32)[5:],
        lambda seen: seen.numpy()[3:],
        lambda seen: torch.from_dlpack(seen.numpy()),
        lambda seen: np.from_dlpack(seen),
        lambda seen: seen.detach().expand(3, 100),
        lambda seen: seen.untyped_storage(),
        lambda seen: list(seen.unbind())[7],
        bound,
        lambda seen: memoryview(seen.numpy()),
    ]
    pool, tensors = new_pool()
    for index, way in enumerate(ways):
        view = way(there_and_back(tensors, torch.arange(100.0)))
        assert blocks(pool) == 1, index
        del view
        assert blocks(pool) == 0, index


def test_a_small_tensor_that_came_inline_is_a_copy_of_its_own() -> None:
    ref = TensorRef.of(torch.uint8, (1,), b"x")
    tensors = Tensors(None)
    tensors.view(ref, "torch").fill_(0)
    assert ref.where == b"x"
    assert tensors.view(ref).tobytes() == b"x"


def test_what_no_mapping_guards_is_copied_for_torch() -> None:
    """A block seen through a writable lease, or plain bytes: a write through torch would be one in the original."""
    pool, _ = new_pool()
    planned = plan([torch.arange(8)])
    with pool.take(planned.nbytes) as lease:
        planned.write(lease)
        (seen,) = read(planned.layout, lease, as_="torch")
        seen.fill_(0)
        assert read(planned.layout, lease)[0].tolist() == list(range(8))
        opened = pool.open(pool.share(lease))
        (guarded,) = read(planned.layout, opened, as_="torch")
        assert guarded.data_ptr() == read(planned.layout, opened)[0].ctypes.data
        del guarded, opened


def test_a_tree_of_torch_comes_back_as_torch_or_as_numpy() -> None:
    pixels = torch.ones(2, 3, dtype=torch.bfloat16)
    tree = {"pixels": pixels, "grid": (torch.tensor([1, 2]), 3), "size": torch.Size([4])}
    planned = plan(tree)
    buffer = bytearray(planned.nbytes)
    planned.write(buffer)
    back = read(planned.layout, buffer, as_="torch")
    assert torch.equal(back["pixels"], pixels)
    assert torch.equal(back["grid"][0], torch.tensor([1, 2]))
    assert back["grid"][1] == 3
    assert back["size"] == (4,)
    assert read(planned.layout, buffer, as_="bits")["pixels"].dtype == np.uint16


def test_a_view_is_a_view_and_makes_no_copy() -> None:
    pool, tensors = new_pool()
    ref = tensors.put(torch.arange(100), [pool.peer])
    first, second = tensors.view(ref, "torch"), tensors.view(ref, "torch")
    assert first.data_ptr() == second.data_ptr() == tensors.view(ref).ctypes.data


STRAY = """
    import os, torch
    from penstock.tensor import Tensors, TensorRef
    from penstock import Ref
    pool = lowlevel.Pool.attach(sys.argv[1], peer_name="stray")
    tensors = Tensors(pool)
    seen = tensors.view(TensorRef.of("float32", (100,), Ref(*map(int, sys.argv[2:]))), "torch")
    say(seen.sum().item())
    hear()
    seen.add_(1)
    say("written")
"""


def test_a_stray_write_ends_the_process_that_writes_and_nobody_else_sees_it() -> None:
    pool, tensors = new_pool()
    made = tensors.empty(100, np.float32)
    made[:] = 2
    ref = tensors.share(made)
    assert isinstance(ref.where, lowlevel.Ref)
    where = ref.where
    fields = (where.segment, where.block, where.generation, where.offset, where.nbytes)
    with program(STRAY, pool.ticket, *fields, env=DYING) as stray:
        assert stray.hear() == "200.0"
        assert "stray" in [peer.name for peer in pool.peers()]
        stray.say("write")
        assert stray.process.wait() == -signal.SIGSEGV
        assert "written" not in stray.process.stdout.read()  # type: ignore[union-attr]
    assert made.sum() == 200
    assert tensors.view(ref).sum() == 200
    del made
    with pool.take(pool.stats().nbytes, timeout=5):  # what it held has been given back
        pass
