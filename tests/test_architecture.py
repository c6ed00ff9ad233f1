"""The layers as a test: which module may import which. Each class name is unique, too. `scripts/prose` bounds files.

That the data plane needs nothing of the engine is shown by `scripts/test dataplane`, which builds and tests it alone.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "penstock"
NATIVE = ROOT / "native"

# From the bottom up: a layer imports itself and what is below it. What shares a line may import each other.
LAYERS = [
    {"environment", "errors", "installing", "command_signals", "stack_dump", "standard_streams"},
    {"_native"},
    {"memory"},
    {"codec"},
    {"channel"},
    {"tensor"},
    # ── below this line is the data plane; "penstock" itself, the package, hands out what is below it ──
    {"penstock", "public_names", "lowlevel", "bridge", "integrations"},
    {"tools.format", "tools.tables", "tools.inspect"},
    {"engine"},
    {"server"},
    {"tools", "tools.bar_chart", "tools.capture", "tools.doctor", "tools.load", "tools.top", "tools.trace"},
    {"cli", "__main__"},
    {"integrations.ray_serve"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
LINE = LEVEL["penstock"]
BELOW = [name for name in LEVEL if LEVEL[name] < LINE]

# Modules that run what they read. An integration may import them: its host already sends such objects.
EXECUTABLE = {"pickle", "_pickle", "cloudpickle", "marshal", "shelve", "dill"}


def module_of(path: Path) -> list[str]:
    """["penstock", "memory", "pool"]; a package ends in "__init__"."""
    return list(path.relative_to(SOURCE.parent).with_suffix("").parts)


def layer_of(module: list[str]) -> str:
    if module[1:] in ([], ["__init__"]):
        return "penstock"
    inner = ".".join(module[1:3])
    return inner if (module[1] == "tools" and module[2:] != ["__init__"]) or inner in LEVEL else module[1]


def imports(module: list[str], source: str) -> Iterator[tuple[int, list[str]]]:
    """Line and absolute name of everything that a module imports, inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            base = module[: -node.level] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            for alias in node.names:
                # `from penstock import memory` means the layer; `from penstock import Ring` the package
                yield node.lineno, [*base, alias.name] if base != ["penstock"] or alias.name in LEVEL else base
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            name = node.args[0].value
            if called in ("__import__", "import_module") and isinstance(name, str):
                yield node.lineno, name.split(".")


def broken_imports(module: list[str], source: str) -> list[str]:
    """What a module imports and should not, one sentence each."""
    where, importer = ".".join(module), layer_of(module)
    if importer not in LEVEL:
        return [f"{where}: '{importer}' has no place in LAYERS"]
    broken = []
    for line, imported in imports(module, source):
        if imported[0] in EXECUTABLE and LEVEL[importer] <= LINE and importer != "integrations":
            broken.append(f"{where}:{line}: {imported[0]} runs what it reads, and reads what crosses a boundary")
        if imported[0] != "penstock":
            continue
        layer = layer_of(imported)
        if layer not in LEVEL:
            broken.append(f"{where}:{line}: '{layer}' has no place in LAYERS")
        elif LEVEL[layer] > LEVEL[importer]:
            broken.append(f"{where}:{line}: {importer} is below {layer}, and may not import it")
        elif layer.startswith("integrations") and layer != importer:
            broken.append(f"{where}:{line}: only its host imports an integration")
    return broken


def sources(*folders: Path) -> list[Path]:
    """Every file in git, in folders that may not be there yet, or single modules of that name."""
    named = [path for folder in folders for path in (folder.with_suffix(".py"), folder.with_suffix(".pyi"))]
    inside = [path for folder in folders for path in folder.rglob("*")]
    return sorted(path for path in named + inside if path.is_file() and path.suffix in {".py", ".pyi", ".h", ".cpp"})


def test_a_layer_imports_itself_and_what_is_below_and_nothing_executable() -> None:
    modules = [path for path in sources(SOURCE) if path.suffix == ".py"]
    broken = [sentence for path in modules for sentence in broken_imports(module_of(path), path.read_text())]
    assert not broken, "\n".join(broken)


# ── the engine's rooms ──
# From the bottom up. Rooms of one line do not know each other. Most are processes; `text` and `media` are shared by
# processes, and video decoders run code of `media` only. The launcher starts all of them.
ROOMS = [
    {"protocol"},
    {"cluster"},
    {"model_dir"},
    {"text", "media"},
    {"core", "worker", "output", "client", "nodes"},
    {"launcher"},
]
ROOM_LEVEL = {name: level for level, names in enumerate(ROOMS) for name in names}
MAX_FILES_BESIDE_ROOMS = 4


def room_of(module: list[str]) -> str:
    """ "core" of penstock.engine.core.scheduler; "" of a file beside the rooms, which may import all of them."""
    return module[2] if len(module) > 2 and module[2] in ROOM_LEVEL else ""


def arrows_up(module: list[str], source: str) -> list[str]:
    """Imports from a room of the engine to one beside or above it, a sentence each."""
    room, broken = room_of(module), []
    for line, imported in imports(module, source):
        if not room or imported[:2] != ["penstock", "engine"] or imported[2:3] in ([room], ["_native"], []):
            continue
        target = room_of(imported)
        if not target or ROOM_LEVEL[target] >= ROOM_LEVEL[room]:
            broken.append(f"{'.'.join(module)}:{line}: {room} imports {'.'.join(imported)}")
    return broken


def engine_modules() -> list[Path]:
    return [path for path in sources(SOURCE / "engine") if path.suffix == ".py"]


def test_a_room_of_the_engine_imports_only_rooms_below_it() -> None:
    broken = [sentence for path in engine_modules() for sentence in arrows_up(module_of(path), path.read_text())]
    assert not broken, "\n".join(broken)


def test_server_imports_no_room_of_another_process() -> None:
    foreign = {"core", "worker", "output"}
    for path in sources(SOURCE / "server"):
        module = module_of(path)
        for line, imported in imports(module, path.read_text()):
            assert room_of(imported) not in foreign, f"{path}:{line}: server imports {'.'.join(imported)}"


def test_few_files_stand_beside_the_rooms_of_the_engine() -> None:
    beside = sorted(path.name for path in (SOURCE / "engine").glob("*.py"))
    assert len(beside) <= MAX_FILES_BESIDE_ROOMS, beside
    assert {path.parent.name for path in (SOURCE / "engine").glob("*/__init__.py")} == set(ROOM_LEVEL) - {"model_dir"}


def test_an_arrow_that_runs_up_in_the_engine_is_found() -> None:
    core = ["penstock", "engine", "core", "scheduler"]
    for source in (
        "from penstock.engine.worker.worker import Worker",
        "from penstock.engine.launcher import launcher",
        "def late():\n    from penstock.engine.output.output_state import OutputState",
    ):
        assert arrows_up(core, source), f"not found: {source}"
        assert not arrows_up(["penstock", "engine", "offline"], source)
    assert arrows_up(["penstock", "engine", "protocol", "config"], "from penstock.engine.cluster.logs import event")
    for source in (
        "from penstock.engine.protocol.messages import Step",
        "from penstock.engine.core.request import Request",
        "from penstock.engine._native import BlockCache",
        "from penstock.engine.model_dir import tokenizer_of",
    ):
        assert not arrows_up(core, source), f"found: {source}"


# ── cycles ──
def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, perhaps by way of others, each group once."""
    reached = {module: set(targets) for module, targets in graph.items()}
    for between in graph:
        for targets in reached.values():
            if between in targets:
                targets |= reached[between]
    groups = {
        frozenset(other for other in reached if other in reached[item] and item in reached[other]) for item in graph
    }
    return sorted(sorted(group) for group in groups if group)


def import_graph() -> dict[str, set[str]]:
    """Returns what each module imports, inside functions and under TYPE_CHECKING, too."""
    paths = {".".join(module_of(path)): path for path in sources(SOURCE) if path.suffix == ".py"}
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        graph[name] = {
            target
            for _, imported in imports(name.split("."), path.read_text())
            for target in (".".join(imported), ".".join(imported[:-1]))
            if target in paths and target != name
        }
    return graph


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = import_graph()
    assert "penstock.engine.protocol.messages" in graph["penstock.engine.core.engine_core"], "looked at nothing"
    assert not cycles(graph)


def test_a_cycle_of_imports_is_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_an_import_from_above_is_found_however_it_is_written() -> None:
    ring = ["penstock", "channel", "ring"]
    for source in (
        "import penstock.engine.core.engine_core",
        "from penstock.engine import core",
        "from penstock import engine",
        "from .. import engine",
        "from ..engine.core import Core",
        "def late():\n    from penstock.engine import core",
        "if TYPE_CHECKING:\n    from penstock.engine import core",
        "importlib.import_module('penstock.engine')",
        "from penstock import Ring",
        "from penstock import integrations",
        "from penstock.tensor import Store",
        "import penstock.elsewhere",
    ):
        assert broken_imports(ring, source), f"not found: {source}"


def test_import_of_pickle_or_the_like_is_found() -> None:
    for name in sorted(EXECUTABLE):
        for source in (f"import {name}", f"from {name} import loads", f"__import__('{name}')"):
            assert broken_imports(["penstock", "codec", "gate"], source), f"not found: {source}"


def test_an_import_from_the_same_layer_or_from_below_is_allowed() -> None:
    ring = ["penstock", "channel", "ring"]
    for source in (
        "from . import wait",
        "from .wait import Deadline",
        "from ..memory import Pool",
        "from penstock.memory.pool import Pool",
        "from penstock import errors, memory",
        "import penstock._native",
        "import numpy, struct, multiprocessing",
    ):
        assert not broken_imports(ring, source), f"found: {source}"
    assert not broken_imports(["penstock", "__init__"], "from .channel import Ring\nimport penstock.tensor")
    assert not broken_imports(["penstock", "engine", "core"], "from penstock import Ring")


def test_the_package_and_the_integrations_see_only_what_is_below_the_line() -> None:
    assert broken_imports(["penstock", "__init__"], "from .engine import Core")
    assert broken_imports(["penstock", "__init__"], "from . import integrations")
    assert broken_imports(["penstock", "integrations", "vllm"], "from ..engine import core")
    assert broken_imports(["penstock", "integrations", "vllm", "queue"], "from penstock.server import options")
    assert not broken_imports(["penstock", "integrations", "vllm"], "import penstock\nfrom ..channel import ring")
    assert not broken_imports(["penstock", "integrations", "vllm", "records"], "import pickle")


def test_an_import_of_an_integration_is_found_in_every_layer() -> None:
    for importer in sorted({"engine", "server", "cli", "penstock", "codec", "lowlevel"}):
        module = ["penstock", importer, "x"] if importer != "penstock" else ["penstock", "__init__"]
        assert broken_imports(module, "from penstock.integrations import vllm"), importer
        assert broken_imports(module, "import penstock.integrations.vllm.queue"), importer


def test_integration_above_the_server_imports_no_other_integration() -> None:
    replica = ["penstock", "integrations", "ray_serve", "replica"]
    assert not broken_imports(replica, "from penstock.server import options\nfrom penstock.cli import argument_parser")
    assert not broken_imports(replica, "from penstock.integrations.ray_serve import forwarder")
    assert broken_imports(replica, "from penstock.integrations.vllm import queue")
    assert broken_imports(["penstock", "integrations", "vllm", "queue"], "from penstock.integrations import ray_serve")
    assert broken_imports(["penstock", "cli", "serve"], "from penstock.integrations.ray_serve import application")


def test_a_folder_without_a_layer_is_found() -> None:
    assert broken_imports(["penstock", "elsewhere", "x"], "")


# ── names ──
def class_names(sources: dict[str, str]) -> dict[str, list[str]]:
    """Returns the classes that are defined more than once, each with its modules."""
    modules: dict[str, list[str]] = {}
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name, []).append(module)
    return {name: defined_in for name, defined_in in modules.items() if len(defined_in) > 1}


def test_a_class_name_is_unique_in_the_package_apart_from_integrations() -> None:
    paths = [path for path in sources(SOURCE) if path.suffix == ".py"]
    texts = {".".join(module_of(path)): path.read_text() for path in paths}
    repeated = class_names(
        {module: text for module, text in texts.items() if layer_of(module.split(".")) != "integrations"}
    )
    assert len(texts) > 100, "looked at nothing"
    assert not repeated, repeated


def test_a_class_name_that_is_defined_twice_is_found() -> None:
    inner = "def build():\n    class Step: ..."
    assert class_names({"a": "class Step: ...", "b": inner, "c": "class Other: ..."}) == {"Step": ["a", "b"]}
    assert class_names({"a": "class Step: ...\nclass Step: ..."}) == {"Step": ["a", "a"]}
    assert not class_names({"a": "class Step: ...", "b": "from a import Step\nStep()"})
