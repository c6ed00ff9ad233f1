"""Tensors of torch: every dtype, every kind of view, the ones that are refused, and what a stray write does."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from penstock import Empty, Scope, Store, UnsupportedTensor
from penstock.lowlevel import Pool
from penstock.tensor import plan, read, views
from penstock.tensor.kinds import KIND_OF_NAME, KINDS, kind_of, torch_dtype
from tests.support.cuda_double import CudaDouble
from tests.support.libcuda import has_device
from tests.support.values import MB, blocks, through
from tests.unit.tensor.test_tensors import Foreign

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def bytes_of(tensor: Any) -> bytes:
    """C-contiguous, whatever the dtype: by way of lists of single numbers where torch copies none of it."""
    flat = tensor.detach().resolve_conj().resolve_neg()
    if flat.element_size() <= 8 and not flat.is_complex():
        flat = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    return flat.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_dtype_of_torch_has_a_kind_or_is_refused_with_advice() -> None:
    dtypes = {value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)}
    refused = {str(dtype) for dtype in dtypes if str(dtype).removeprefix("torch.") not in {kind.name for kind in KINDS}}
    assert refused == {
        f"torch.{name}" for name in ("quint8", "qint8", "qint32", "quint4x2", "quint2x4", "bits8", "bits16")
    } | {"torch.bits1x8", "torch.bits2x4", "torch.bits4x2"}
    for dtype in dtypes:
        if str(dtype) in refused:
            with pytest.raises(UnsupportedTensor, match=r"expected a tensor of numbers.*: (send \.int|convert it)"):
                kind_of(dtype)
        else:
            kind = kind_of(dtype)
            assert (kind.name, kind.itemsize) == (str(dtype).removeprefix("torch."), dtype.itemsize)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_tensor_of_any_dtype_comes_back_bit_by_bit(kind: Any, seed: int) -> None:
    dtype = getattr(torch, kind.name)
    raw = torch.from_numpy(
        np.random.default_rng(seed).integers(0, 2 if kind.name == "bool" else 256, 96 * kind.itemsize, np.uint8)
    )
    whole = raw.view(dtype).reshape(4, 4, 6)
    views = whole, whole[1], whole[::2, 1:3, ::3], whole.permute(2, 0, 1), whole[0, 0, 0], whole[:, :0]
    store = Store(MB)
    for source, where in itertools.product(views, (store, None)):
        back = through(where, source, "torch")
        assert back.dtype == dtype
        assert back.shape == source.shape
        assert back.is_contiguous()
        assert bytes_of(back) == bytes_of(source)
        own = through(where, source, "torch", writable=True)
        assert bytes_of(own) == bytes_of(source)
        array = through(where, source)
        assert array.shape == tuple(source.shape)
        assert array.tobytes() == bytes_of(source)
        assert not array.flags.writeable
        del back, own, array
    assert blocks(store) == 0


def test_conjugate_and_negative_views_are_resolved_before_put() -> None:
    store = Store(MB)
    numbers = torch.complex(torch.arange(6.0), torch.arange(6.0) + 1).reshape(2, 3)
    for source in (
        numbers.conj(),
        numbers.conj().t(),
        numbers.conj().imag,
        numbers.conj().imag[:, 1:],
        numbers.conj()[0],
    ):
        assert source.is_conj() or source.is_neg()
        back = through(store, source, "torch")
        assert not back.is_conj()
        assert not back.is_neg()
        assert torch.equal(back, source)
    half = numbers.to(torch.complex32).conj()
    assert torch.equal(through(store, half, "torch").to(torch.complex64), numbers.conj())


def test_only_what_a_tensor_shows_of_its_storage_is_copied() -> None:
    store = Store(MB)
    whole = torch.zeros(100_000)
    lease = store.put(whole[500:510])
    assert lease.nbytes == 64 + 40  # the layout has 64
    assert lease.value("torch").untyped_storage().nbytes() == 40
    assert store.put(whole[:1].expand(100)).nbytes == 64 + 400


def test_a_tensor_that_requires_grad_is_refused_and_can_be_detached() -> None:
    store = Store(MB)
    parameter = torch.nn.Parameter(torch.ones(3))
    result = torch.ones(3, requires_grad=True) * 2
    for source in (parameter, result, result[1:]):
        with pytest.raises(UnsupportedTensor, match=r"without gradient, got .* requires grad: send \.detach\(\) of it"):
            store.put(source)
        back = through(store, source.detach(), "torch")
        assert torch.equal(back, source.detach())
        assert not back.requires_grad
        assert type(back) is torch.Tensor
    with pytest.raises(UnsupportedTensor, match=r"\.detach\(\) of it at \$\['w'\]"):
        plan({"w": parameter})
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    assert through(store, frozen, "torch").sum() == 3
    with torch.inference_mode():
        assert through(store, torch.ones(3) * 2, "torch").sum() == 6


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
        (lambda: torch.ones(3, 3).to_sparse(), r"dense tensor, .* of layout torch.sparse_coo: send .to_dense\(\)"),
        (lambda: torch.ones(3, 3).to_sparse_csr(), "dense tensor, .* of layout torch.sparse_csr"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "expected a dense tensor"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "expected a dense tensor",
        ),
        (lambda: torch.empty(3, device="meta"), "lies on meta, not in host memory"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8), r"send .int_repr\(\) and the scales"),
        (lambda: torch.empty(3, dtype=torch.bits8), "convert it"),
        (lambda: torch.ones((1,) * 33), "at most 32 dimensions"),
        (lost, "has lost its storage"),
        (fake, "wraps other tensors|lies on"),
    ],
)
def test_unsupported_tensor_is_refused_with_advice(make: Callable[[], Any], words: str) -> None:
    store = Store(MB)
    for put in (store.put, Scope(store).put, Scope().put):
        with pytest.raises(UnsupportedTensor, match=words):
            put(make())
    assert blocks(store) == 0


@pytest.mark.skipif(torch.version.cuda is not None and not has_device(), reason="needs a CUDA device")
def test_a_tensor_of_a_device_is_refused_with_the_name_of_what_sends_it() -> None:
    device = contextlib.nullcontext() if has_device() else CudaDouble()
    with (
        device,
        pytest.raises(UnsupportedTensor, match=r"lies on cuda:0, .*: penstock.tensor.cuda sends device tensors"),
    ):
        Store(MB).put(torch.ones(3, device="cuda:0"))


WRITING: list[Callable[[Any], Any]] = [
    lambda tensor: tensor,
    lambda tensor: tensor.t(),
    lambda tensor: tensor[3:5],
    lambda tensor: tensor.view(torch.uint8).numpy()[3],
    lambda tensor: tensor.untyped_storage(),
]


def test_a_tensor_of_any_dtype_is_made_in_the_store_without_a_copy() -> None:
    store = Store(MB)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex32, torch.bool):
        with store.loan(None, Empty((20, 30), dtype)) as loan:
            tensor = loan.value("torch")
            assert (tensor.dtype, tensor.shape) == (dtype, (20, 30))
            tensor.zero_()
            tensor[3].view(torch.uint8).fill_(1)
            takes = store.stats().pool.takes
            expected, address = bytes_of(tensor), tensor.data_ptr()
            for way in WRITING:
                left = way(tensor)
                del tensor
                with pytest.raises(BufferError, match="drop them"):
                    loan.commit()
                del left
                tensor = loan.value("torch")
                assert tensor.data_ptr() == address
            del tensor
            lease = loan.commit()
        assert bytes_of(lease.value("torch")) == expected
        row = dtype.itemsize * 30
        assert bytes_of(lease.value("torch")[3]) == b"\1" * row
        assert lease.value("torch").data_ptr() % 64 == 0
        assert store.stats().pool.takes == takes
        del lease
        assert blocks(store) == 0


def test_the_block_is_free_with_the_last_view_of_it() -> None:
    def bound(tensor: Any) -> Any:
        return torch.nn.Parameter(tensor, requires_grad=False)

    ways: list[Callable[[Any], Any]] = [
        lambda tensor: tensor,
        lambda tensor: tensor[10:20],
        lambda tensor: tensor.reshape(10, -1).t()[::2],
        lambda tensor: tensor.view(torch.int32)[5:],
        lambda tensor: tensor.numpy()[3:],
        lambda tensor: torch.from_dlpack(tensor.numpy()),
        lambda tensor: np.from_dlpack(tensor),
        lambda tensor: tensor.detach().expand(3, 100),
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: list(tensor.unbind())[7],
        bound,
        lambda tensor: memoryview(tensor.numpy()),
    ]
    store = Store(MB)
    for index, way in enumerate(ways):
        view = way(through(store, torch.arange(100.0), "torch"))
        assert blocks(store) == 1, index
        del view
        assert blocks(store) == 0, index


def test_a_tensor_that_came_inline_is_a_copy_of_its_own() -> None:
    handle = Scope().put(np.frombuffer(b"x", np.uint8))
    handle.open().value("torch").fill_(0)
    assert handle.open().value("torch").tolist() == [ord("x")]
    assert handle.open().value().tobytes() == b"x"


def test_torch_gets_a_copy_of_writable_memory() -> None:
    """A block seen through a writable lease, or plain bytes: a write through torch would be one in the original."""
    pool = Pool.create(MB)
    planned = plan([torch.arange(8)])
    with pool.take(planned.nbytes) as lease:
        planned.write(lease)
        (tensor,) = read(planned.layout, lease, as_="torch")
        tensor.fill_(0)
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
    lease = Store(MB).put(torch.arange(100))
    first, second = lease.value("torch"), lease.value("torch")
    assert first.data_ptr() == second.data_ptr() == lease.value().ctypes.data


def test_numbers_that_only_torch_has_come_by_dlpack_of_another_library() -> None:
    source = torch.arange(4, dtype=torch.bfloat16)
    assert torch.equal(through(Store(MB), Foreign(source), as_="torch"), source)


def test_an_inline_tensor_reaches_torch_where_numpy_cannot_say_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(array: Any) -> Any:
        raise BufferError("an array that is read-only has no DLPack")

    monkeypatch.setattr(torch, "from_dlpack", refuse)
    array = np.arange(3)
    array.flags.writeable = False
    assert views._tensor(array).tolist() == [0, 1, 2]


def test_a_kind_that_this_torch_lacks_is_refused() -> None:
    lacking = KIND_OF_NAME["bfloat16"]._replace(name="float3")
    with pytest.raises(UnsupportedTensor, match="has no float3: view it as numpy"):
        torch_dtype.__wrapped__(lacking)
