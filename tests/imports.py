"""What a test module imports, by itself and through modules of ours, found without running it.

It decides what a stage of scripts/test collects: `--only=core` what calls the compiled core, under sanitizers, and
`--only=torch` and `--without=torch` what imports torch at its beginning, which costs each process seconds.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = {"tests": ROOT, "penstock": ROOT / "src"}
TORCH = {"torch", "transformers"}
# What stands above the core is guarded by the tests of what it stands on: under a sanitizer it is five times slower,
# and shows nothing.
ABOVE = {"engine", "server", "load", "top"}


@cache
def file_of(module: str) -> Path | None:
    """The file of a module of ours."""
    first, *_ = module.split(".")
    if first not in FOLDERS:
        return None
    path = FOLDERS[first].joinpath(*module.split("."))
    return next((item for item in (path.with_suffix(".py"), path / "__init__.py") if item.exists()), None)


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def statements(node: ast.AST, within_functions: bool) -> Iterator[ast.AST]:
    """All that is run, when a module is imported or at any time."""
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if not is_for_types(child) and (within_functions or not is_function):
            yield child
            yield from statements(child, within_functions)


@cache
def imports(path: Path, within_functions: bool = False) -> frozenset[str]:
    """Names of modules, and of what is taken from them, as in `from penstock import _native`."""
    result: set[str] = set()
    for node in statements(ast.parse(path.read_text()), within_functions):
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = path.relative_to(ROOT / "src").parts[: -node.level] if node.level else ()
            name = ".".join([*base, *filter(None, [node.module])])
            result |= {name, *(f"{name}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "importorskip":
            result |= {argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)}
    return frozenset(result)


@cache
def imports_torch(path: Path) -> bool:
    """At its beginning, or at that of any module that it imports there."""
    known, waiting = {path}, [path]
    while waiting:
        names = imports(waiting.pop())
        if any(name.split(".")[0] in TORCH for name in names):
            return True
        more = {file for name in names if (file := file_of(name))} - known
        known |= more
        waiting += more
    return False


@cache
def calls_core(path: Path) -> bool:
    """Imports a compiled module; or penstock, and nothing that stands above the core."""
    known, waiting, names = {path}, [path], set[str]()
    while waiting:  # with what the test has for itself in tests/; the fixtures of all tests say nothing of one
        here = imports(waiting.pop(), True)
        names |= here
        more = {file for name in here if name.startswith("tests.") and (file := file_of(name))} - known
        more = {file for file in more if file.name not in ("conftest.py", "__init__.py")}
        known |= more
        waiting += more
    ours = {tuple(name.split(".")) for name in names if name.split(".")[0] == "penstock"}
    if any(is_compiled(name) for name in ours):
        return True
    return bool(ours) and not any(set(name[1:]) & ABOVE for name in ours)


def is_compiled(name: tuple[str, ...]) -> bool:
    """Only these have types in a file of their own."""
    source = FOLDERS["penstock"]
    return any(source.joinpath(*name[:end]).with_suffix(".pyi").exists() for end in range(2, len(name) + 1))
