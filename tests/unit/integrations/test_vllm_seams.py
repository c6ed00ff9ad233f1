"""What the integration relies on in vLLM, compared with modules that have it, or differ in one name."""

import dataclasses
import functools
import sys
import types

import pytest

from penstock.integrations.vllm import seams
from penstock.integrations.vllm.seams import Exists, Fields, HasFields, Mentions, Methods, Signature, growths, misfit


class Queue:
    def __init__(self, readers: int, arena: bool = False) -> None: ...
    def put(self, value: object, timeout: float | None = None) -> None: ...
    def get(self) -> None: ...


def close(queue: Queue) -> None:
    queue.get()


def strip(items: list[dict[str, object]]) -> list[dict[str, object]]:
    return [item for item in items if "address" in item]


@functools.wraps(strip)
def replaced_strip(*arguments: list[dict[str, object]]) -> list[dict[str, object]]:
    return strip(*arguments)


@dataclasses.dataclass
class Handle:
    ranks: list[int]
    arena: str = ""


@dataclasses.dataclass
class Named(Handle):
    name: str = dataclasses.field(default="", kw_only=True)


FITTING = (
    Exists("stand_in:INTERVAL"),
    Methods("stand_in:Queue", frozenset({"put", "get"})),
    Signature("stand_in:Queue.__init__", ("self", "readers"), optional=("arena",)),
    Signature("stand_in:Queue.put", ("self", "value", "timeout")),
    Fields("stand_in:Handle", ("ranks",), optional=("arena",)),
    HasFields("stand_in:Handle", ("arena",)),
    Mentions("stand_in:strip", "address"),
    Mentions("stand_in:replaced_strip", "address"),  # vLLM loads its plugins more than once
    Mentions("stand_in:close", "get"),
)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("stand_in")
    vars(module).update(INTERVAL=60, Queue=Queue, Handle=Handle, Named=Named, strip=strip, close=close)
    vars(module).update(replaced_strip=replaced_strip)
    monkeypatch.setitem(sys.modules, "stand_in", module)
    return module


def test_seams_fit_where_names_signatures_and_fields_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(seams.SEAMS, "queue", FITTING)
    assert misfit("queue") is None


@pytest.mark.parametrize(
    ("seam", "sentence"),
    [
        (Exists("stand_in:OTHER"), "this vLLM has no stand_in:OTHER"),
        (Exists("stand_in:Queue.peek"), "this vLLM has no stand_in:Queue.peek"),
        (Methods("stand_in:Queue", frozenset({"put", "get", "recv"})), "in this vLLM stand_in:Queue lacks recv"),
        (
            Signature("stand_in:Queue.__init__", ("self", "readers")),
            "in this vLLM stand_in:Queue.__init__ takes (self, readers, arena), not (self, readers)",
        ),
        (
            Signature("stand_in:Queue.put", ("self", "timeout", "value")),
            "in this vLLM stand_in:Queue.put takes (self, value, timeout), not (self, timeout, value)",
        ),
        (
            Fields("stand_in:Handle", ("arena", "ranks")),
            "in this vLLM stand_in:Handle has the fields (ranks, arena), not (arena, ranks)",
        ),
        (Mentions("stand_in:strip", "key"), "in this vLLM stand_in:strip does not mention 'key'"),
        (Fields("stand_in:Queue", ("ranks",)), "in this vLLM stand_in:Queue is no dataclass"),
        (HasFields("stand_in:Queue", ("ranks",)), "in this vLLM stand_in:Queue is no dataclass"),
        (HasFields("stand_in:Handle", ("rank", "arena")), "in this vLLM stand_in:Handle has no field rank"),
        (
            HasFields("stand_in:Named", ("ranks",)),
            "in this vLLM stand_in:Named does not take its fields name as positional arguments",
        ),
    ],
)
def test_seams_say_which_name_differs(seam: seams.Seam, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(seams.SEAMS, "queue", (*FITTING, seam))
    assert misfit("queue") == sentence


def test_seams_name_the_attribute_that_a_vllm_lacks(
    stand_in: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(seams.SEAMS, "queue", FITTING)
    del stand_in.INTERVAL
    assert misfit("queue") == "this vLLM has no stand_in:INTERVAL"


def test_names_that_a_newer_vllm_has_in_addition_are_no_misfit(monkeypatch: pytest.MonkeyPatch) -> None:
    grown = (Methods("stand_in:Queue", frozenset({"put"})), Fields("stand_in:Handle", ("ranks",)))
    monkeypatch.setitem(seams.SEAMS, "queue", (*FITTING, *grown))
    assert misfit("queue") is None
    assert growths("queue") == [
        "in this vLLM stand_in:Queue also has get",
        "in this vLLM stand_in:Handle also has arena",
    ]


def test_names_of_a_class_that_is_replaced_already_are_no_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(seams.SEAMS, "queue", (Methods("stand_in:Queue", frozenset({"put"})),))
    monkeypatch.setattr(Queue, "__module__", "penstock.integrations.vllm.queue")
    assert growths("queue") == []
