"""No private name of a foreign library: it goes with the library's next release.

Private is `_x`, not `__x__`. Found in the source are imports (`from lib import _x`, `import lib._x`), attributes of
what is imported (`lib._x`), and of anything else where neither the file nor a module of ours that it imports defines
such a name, also in `getattr(…, "_x")`. Found in the classes are names that one of ours shares with its foreign base.
"""

import ast
import functools
import importlib
import importlib.util
import inspect
import itertools
import logging
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_architecture import ROOT

FOLDERS = ("src/penstock", "docs/making", "scripts", "bench", "examples", "training")
OURS = {"penstock", "bench", "examples", "training", "tests"}
DOCUMENTED = {*"os._exit _replace _asdict _fields _make".split()}  # of namedtuples: no field begins with an underscore
# Where no public name does it: file and name, and why.
EXCEPTIONS = {
    ("bench/impls/tensors_vllm.py", "_shm_cache"): "vLLM's cache, which is measured, has no public name for its buffer",
    ("src/penstock/integrations/vllm/image_caches.py", "_api_process_count"): (
        "the number of API servers, by which vLLM chooses its cache, has no public name; named in seams.py"
    ),
}
ATTRIBUTE_CALLS = ("getattr", "setattr", "hasattr", "delattr")


def is_private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != "" and not (name.startswith("__") and name.endswith("__"))


def python_files() -> list[Path]:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    return sorted(path for path in files if path.suffix == ".py" or _is_script(path))


def _is_script(path: Path) -> bool:
    if path.suffix:
        return False
    with path.open("rb") as file:
        return file.readline().startswith(b"#!") and b"python" in path.read_bytes()[:40]


class Module:
    """One file: the names that it defines, its imports, and its uses of private names."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.defined: set[str] = set()
        self.of_self: set[str] = set()  # attributes that its classes give themselves
        self.foreign: set[str] = set()  # names that are bound to something of a foreign library
        self.imported: set[str] = set()  # modules of ours
        for node in ast.walk(tree):
            self._define(node)

    def _define(self, node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self.defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            self.defined.add(node.id)
        elif isinstance(node, ast.arg):
            self.defined.add(node.arg)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _root(node) in ("self", "cls"):
            self.defined.add(node.attr)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                self._bind(alias.asname or alias.name.partition(".")[0], alias.name)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                self._bind(alias.asname or alias.name, f"{node.module or ''}.{alias.name}", is_ours=node.level > 0)

    def _bind(self, name: str, target: str, is_ours: bool = False) -> None:
        if is_ours or target.partition(".")[0] in OURS:
            self.imported |= {target, target.rpartition(".")[0]}
        else:
            self.foreign.add(name)

    def uses(self, known: set[str], all_of_ours: set[str]) -> Iterator[tuple[int, str, str]]:
        """Line, name and expression of what is no name of ours. `known`: names of this file and of those it imports."""
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                yield from self._imports(node)
                continue
            if isinstance(node, ast.Attribute):
                owner, name = node.value, node.attr
            elif isinstance(node, ast.Call) and _is_attribute_call(node):
                owner, name = node.args[0], node.args[1].value  # type: ignore[attr-defined]
            else:
                continue
            if not is_private(name) or name in DOCUMENTED:
                continue
            is_of_self = (written := ast.unparse(owner)) in ("self", "cls", "super()")
            text = f"{written}.{name}"
            if text in DOCUMENTED:
                continue
            if _root(owner) in self.foreign or name not in (all_of_ours if is_of_self else known):
                yield node.lineno, name, text

    def _imports(self, node: ast.Import | ast.ImportFrom) -> Iterator[tuple[int, str, str]]:
        base = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if base.partition(".")[0] in OURS or (isinstance(node, ast.ImportFrom) and node.level):
            return
        for alias in node.names:
            path = f"{base}.{alias.name}".strip(".").split(".")
            if path[0] not in OURS and any(map(is_private, path)):
                yield node.lineno, next(filter(is_private, path)), ".".join(path)


def _root(node: ast.AST) -> str:
    """ "torch" of torch.cuda.x; "" of what is no name."""
    while isinstance(node, (ast.Attribute, ast.Call)):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else ""


def _is_attribute_call(node: ast.Call) -> bool:
    return (
        isinstance(node.func, ast.Name)
        and node.func.id in ATTRIBUTE_CALLS
        and len(node.args) > 1
        and isinstance(node.args[1], ast.Constant)
        and isinstance(node.args[1].value, str)
    )


def name_of(path: Path) -> str:
    """ "penstock.memory.pool", "bench.impls"."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "src" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def foreign_private_names(modules: dict[str, Module]) -> Iterator[tuple[str, int, str, str]]:
    """Module, line, name, expression."""
    all_of_ours = {name for module in modules.values() for name in module.defined}
    defined: dict[str, set[str]] = {}  # by module and package
    for name, module in modules.items():
        for package in itertools.accumulate(name.split("."), "{}.{}".format):
            defined.setdefault(package, set()).update(module.defined)
    for name, module in modules.items():
        known = module.defined.union(*(defined.get(item, ()) for item in module.imported))
        for use in module.uses(known, all_of_ours):
            yield name, *use


def test_no_private_name_of_a_foreign_library_is_used() -> None:
    paths = {name_of(path): path for path in python_files()}
    assert len(paths) > 200
    modules = {name: Module(ast.parse(path.read_text())) for name, path in paths.items()}
    broken, excepted = [], set()
    for module, line, name, text in foreign_private_names(modules):
        where = str(paths[module].relative_to(ROOT))
        if (where, name) in EXCEPTIONS:
            excepted.add((where, name))
        else:
            broken.append(f"{where}:{line}: {text}")
    assert not broken, "\n".join(broken)
    assert excepted == EXCEPTIONS.keys(), "an exception that is needed no more"


# ── classes ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def written_names(tree: ast.ClassDef) -> set[str]:
    """The private names that a class defines: its methods, its attributes, and those of its instances."""
    names = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    for statement in tree.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(statement, (ast.Assign, ast.AnnAssign)):
                names |= {node.id} if isinstance(node.ctx, ast.Store) else set()
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _root(node) == "self":
                names.add(node.attr)
    return set(filter(is_private, names))


@functools.cache
def names_of_base(base: type) -> frozenset[str]:
    """The same of a foreign class; of one that is not written in Python, what it has."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
    except (OSError, TypeError):
        return frozenset(filter(is_private, vars(base)))
    assert isinstance(tree, ast.ClassDef)
    return frozenset(written_names(tree))


def names_shared_with_foreign_bases(kind: type, tree: ast.ClassDef) -> list[str]:
    return [
        f"{kind.__module__}.{kind.__qualname__}: {name} is {base.__module__}.{base.__qualname__}'s, too"
        for base in kind.__mro__[1:-1]
        if base.__module__.partition(".")[0] not in OURS
        for name in sorted(written_names(tree) & names_of_base(base))
    ]


def test_no_class_of_ours_shares_a_private_name_with_its_foreign_base() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("starlette")
    broken, observed = [], 0
    for path in sorted((ROOT / "src" / "penstock").rglob("*.py")):
        trees = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef) and node.bases]
        if not trees or "integrations" in path.parts:
            continue
        if path.parent.parts[-2:] == ("worker", "cuda") and importlib.util.find_spec("triton") is None:
            continue  # a lane of its own has Triton
        module = importlib.import_module(name_of(path))
        for tree in trees:
            broken += names_shared_with_foreign_bases(getattr(module, tree.name), tree)
            observed += 1
    assert not broken, "\n".join(broken)
    assert observed > 100


# ── the tests above can fail ─────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "source",
    [
        "from lib import _x",
        "from lib._x import y",
        "import lib._x",
        "import lib\nlib._x",
        "import lib.inner as inner\ninner.y._x(1)",
        "from lib import Y\nY()._x",
        "def f(module):\n    return module._parameters",
        "def f(value):\n    return getattr(value, '_x', None)",
        "import lib\nsetattr(lib.y, '_x', 1)",
        "from lib import Base\nclass Own(Base):\n    def f(self):\n        self._theirs()",
        "from lib import Base\nclass Own(Base):\n    def f(self):\n        super()._theirs()",
        "import lib\nclass Own:\n    _x = 1\nlib._x",
    ],
)
def test_a_private_name_of_a_foreign_library_is_found(source: str) -> None:
    assert len(list(foreign_private_names({"own": Module(ast.parse(source))}))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from penstock import _native",
        "from lib import x as _x\n_x.y",
        "import os\nos._exit(1)",
        "value.__dict__",
        "class Own:\n    def f(self, other):\n        self._x = 1\n        return self._x + other._x",
        "import penstock.other\ndef f(other):\n    return other._theirs",
    ],
)
def test_a_name_of_ours_or_a_documented_one_is_not(source: str) -> None:
    others = {"penstock.other": Module(ast.parse("class Other:\n    def _theirs(self): pass"))}
    assert not list(foreign_private_names({"own": Module(ast.parse(source)), **others}))


class Formatter(logging.Formatter):
    """Stands on two names of its base."""

    def __init__(self) -> None:
        super().__init__()
        self._style = logging.StrFormatStyle("{message}")

    def _fmt(self) -> None: ...


def test_a_private_name_that_a_class_shares_with_its_foreign_base_is_found() -> None:
    (tree,) = ast.parse(inspect.getsource(Formatter)).body
    assert isinstance(tree, ast.ClassDef)
    shared = names_shared_with_foreign_bases(Formatter, tree)
    assert [sentence.split()[1] for sentence in shared] == ["_fmt", "_style"]
