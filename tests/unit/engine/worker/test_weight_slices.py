"""Which part of a parameter a rank has: together all of it, and heads stand beside those that they look at."""

import itertools

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'penstock[engine]'")

from penstock.engine.worker.tensor_parallel import TPGroup, outputs_are_summed, shard  # noqa: E402
from penstock.engine.worker.weight_slices import HeadSlices, WeightSlice  # noqa: E402

HEAD = 4  # columns of one


def cut(rank: int, size: int, plan: str, length: int) -> WeightSlice:
    """Of a layer that has so many outputs, or, row-wise, inputs."""
    ranks = TPGroup()
    ranks.rank, ranks.size = rank, size
    with torch.device("meta"):
        layer = torch.nn.Linear(length, 3) if plan == "rowwise" else torch.nn.Linear(3, length)
    return shard(torch.nn.ModuleDict({"up": layer}), {"up": plan}, ranks, HeadSlices(size, size))["up.weight"]


@pytest.mark.parametrize("length", [48, 50, 2])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("plan", "parts"), [("rowwise", 1), ("colwise", 1), ("packed_colwise", 2)])
def test_weight_slices_of_all_ranks_are_the_whole_and_zeros(size: int, length: int, plan: str, parts: int) -> None:
    whole = torch.randn(length, length) + 9
    slices = [cut(rank, size, plan, length) for rank in range(size)]
    pieces = [part_of_rank.of(whole, whole.shape, "up") for part_of_rank in slices]
    assert {tuple(piece.shape) for piece in pieces} == {tuple(slices[0].shape(whole.shape))}
    dimension, own = slices[0].dimension, length // parts
    together = [
        torch.cat([piece.chunk(parts, dimension)[part] for piece in pieces], dimension) for part in range(parts)
    ]
    assert all(not piece.narrow(dimension, own, piece.shape[dimension] - own).any() for piece in together)
    assert torch.equal(torch.cat([piece.narrow(dimension, 0, own) for piece in together], dimension), whole)


def test_the_first_part_is_cut_as_the_whole() -> None:
    whole = torch.arange(80).view(40, 2)
    half = cut(1, 2, "packed_colwise", 40)
    both = torch.cat([half.first().of(part, part.shape, "up") for part in whole.chunk(2)])
    assert torch.equal(half.of(whole, whole.shape, "up"), both)
    assert torch.equal(both.chunk(2)[0], torch.nn.functional.pad(whole[16:20], [0, 0, 0, 12]))  # 16 and 4 of 20


def test_another_length_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"up: expected 10 in dimension 0, got a shape of \(9, 3\)"):
        cut(0, 2, "colwise", 10).of(torch.zeros(9, 3), [9, 3], "up")


SHARED = [
    (heads, size)
    for heads in (
        HeadSlices(*shape) for shape in [(4, 4), (4, 2), (4, 1), (9, 3), (14, 2), (15, 5), (16, 8), (32, 8), (7, 1)]
    )
    for size in (1, 2, 3, 4, 5, 6, 7, 8, 14, 16)
]


def are_enough(heads: HeadSlices, size: int) -> bool:
    try:
        heads.require(size)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(("heads", "size"), [case for case in SHARED if are_enough(*case)])
def test_each_head_is_on_one_rank_beside_the_keys_that_it_looks_at(heads: HeadSlices, size: int) -> None:
    heads_of_ranks = []
    for rank in range(size):
        queries, keys = (
            own(-2, count * HEAD, rank, size)
            for own, count in ((heads.of_queries, heads.queries), (heads.of_keys, heads.keys))
        )
        looking = queries.width // keys.width  # at each of the rank's keys, as attention will have it
        assert looking * keys.width == queries.width and queries.width % HEAD == 0 and keys.width % HEAD == 0
        ((begin, end),), ((first, last),) = queries.ranges, keys.ranges
        assert begin < end, "a rank without a head"
        for number, head in enumerate(range(begin // HEAD, end // HEAD)):
            key = first // HEAD + number // looking
            assert key == head // (heads.queries // heads.keys) and key < last // HEAD
            heads_of_ranks.append(head)
        if size > heads.keys:
            assert keys.width == HEAD
    assert heads_of_ranks == list(range(heads.queries))


def test_as_many_ranks_as_have_a_head_each_are_enough() -> None:
    def most(*of: int) -> list[int]:
        return [size for size in range(1, 17) if are_enough(HeadSlices(*of), size)]

    assert most(8, 4) == [1, 2, 4, 8]
    assert most(8, 1) == [1, 2, 3, 4, 8]  # 3, 3 and 2 heads
    assert most(9, 3) == [1, 2, 3, 6, 9]
    assert most(14, 2) == [1, 2, 4, 6, 8, 14]
    for heads, size in itertools.product([HeadSlices(8, 4), HeadSlices(9, 3)], range(10, 17)):
        with pytest.raises(ValueError, match=f"which cannot be cut for {size} ranks: use {most(*heads)[-1]}"):
            heads.require(size)


@pytest.mark.parametrize(("layers", "is_summed"), [(("0", "1"), True), (("0",), False), ((), False)])
def test_outputs_are_summed_where_each_layer_is_cut(layers: tuple[str, ...], is_summed: bool) -> None:
    model = torch.nn.ModuleDict(
        {
            name: torch.nn.ModuleDict({"self_attn": torch.nn.ModuleDict({"o_proj": torch.nn.Linear(4, 4)})})
            for name in "01"
        }
    )
    slices = {f"{name}.self_attn.o_proj.weight": WeightSlice(-1, 4, ((0, 2),), 2) for name in layers}
    assert outputs_are_summed(model, slices) == is_summed
