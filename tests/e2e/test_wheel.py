"""What is given to others: the source distribution has what a wheel is built from, no more; the wheel works alone."""

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests import tiers
from tests.support.documents import ROOT

TOP = {*"CHANGELOG.md CMakeLists.txt CONTRIBUTING.md DESIGN.md LICENSE PKG-INFO README.md pyproject.toml".split()}
FOLDERS = {"examples", "native", "src"}
MAX_NBYTES = 16 << 20  # of any file: the weights that ship are half of that
pytestmark = pytest.mark.timeout(900)  # the whole core is compiled, perhaps beside others
NO_INDEX = "no index has {}: {}"


def run(*command: object, folder: Path, within: float = 60) -> subprocess.CompletedProcess[str]:
    """Without what would lead it back here."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [str(word) for word in command], cwd=folder, env=environment, capture_output=True, text=True, timeout=within
    )


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    build = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    done = run(sys.executable, "-c", build, folder, folder=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the source distribution, so that nothing is missing there; with the build backend of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-build-isolation", "--no-deps")
    done = run(*pip, "--no-index", "--wheel-dir", folder, sdist, folder=folder, within=800)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_the_source_distribution_has_what_is_needed_and_nothing_twice(sdist: Path) -> None:
    contents: dict[str, list[str]] = {}
    tops = set()
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            name = member.name.partition("/")[2]
            tops.add(name.partition("/")[0])
            assert member.size <= MAX_NBYTES, f"{name}: {member.size} bytes"
            assert not re.search(r"__pycache__|\.so$|\.pyc$|^native/(engine/)?tests|^tests|^training", name), name
            file = archive.extractfile(member)
            if file is not None and member.size > 4096:
                contents.setdefault(hashlib.sha256(file.read()).hexdigest(), []).append(name)
    assert tops - {".gitignore"} == TOP | FOLDERS
    assert not [names for names in contents.values() if len(names) > 1]


# The kernels that are compiled for some processors, with their options; at run time the processor is asked.
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma")
AVX512_BF16 = (*AVX512, "-mavx512bf16")
KERNELS = {
    "paged_attention_avx2": ("-mavx2", "-mfma"),
    "resize_avx2": ("-mavx2", "-mfma"),
    "paged_attention_avx512": AVX512,
    "rms_norm_avx2": ("-mavx2", "-mfma"),
    "rms_norm_avx512_bf16": AVX512_BF16,
    "rotary_avx2": ("-mavx2", "-mfma"),
    "rotary_avx512_bf16": AVX512_BF16,
    "prefill_attention_avx2": ("-mavx2", "-mfma"),
    "prefill_attention_avx512": AVX512,
    "prefill_attention_avx512_bf16": AVX512_BF16,
    "packed_linear_avx2": ("-mavx2", "-mfma"),
    "packed_linear_avx512": AVX512,
    "packed_linear_avx512_bf16": AVX512_BF16,
    "packed_linear_amx": (*AVX512_BF16, "-mamx-tile", "-mamx-bf16"),
    "token_choice_avx2": ("-mavx2", "-mfma"),
    "token_choice_avx512": AVX512,
}
OF_AARCH64 = {"packed_linear_bfdot": ("-march=armv8.2-a+bf16",)}


def test_an_older_machine_can_load_what_is_compiled() -> None:
    """Only these kernels are compiled for some processors, and no other file for the processor that compiles."""
    flags = (ROOT / "CMakeLists.txt").read_text()
    assert not re.findall(r"-m(?:tune|cpu)=|-march=native|-msse|-ffast-math", flags)
    values = dict(re.findall(r"set\((PENSTOCK_AVX\w+) (-m[^)]*)\)", flags))
    compiled = {}
    for name, options in re.findall(r"penstock_kernel\((\w+) ?([^)]*)\)", flags):
        for variable, value in values.items():
            options = options.replace(f"${{{variable}}}", value)
        compiled[name] = tuple(options.split())
    portable = {name: () for name in compiled if name.endswith("_portable")}
    assert compiled == {**KERNELS, **OF_AARCH64, **portable}
    outside = re.sub(r"penstock_kernel\([^)]*\)|set\(PENSTOCK_AVX[^)]*\)|check_cxx_compiler_flag\([^)]*\)", "", flags)
    assert not re.findall(r"-m(?:arch=|avx|fma|amx)", outside)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="for x86-64 alone")
# Without inlining, each function of an included header is exported; -O3 exports a part of them.
@pytest.mark.parametrize("optimized", ["-O0", *tiers.only_in_all("-O3")])
@pytest.mark.parametrize("kernel", KERNELS)
def test_processor_specific_objects_export_nothing_shared(kernel: str, optimized: str, tmp_path: Path) -> None:
    compiler = os.environ.get("CXX", "g++")
    source, target = ROOT / "native" / "engine" / f"{kernel}.cpp", tmp_path / "kernel.o"
    options = (
        "-std=c++20",
        optimized,
        *KERNELS[kernel],
        "-Wno-psabi",
        "-I",
        ROOT / "native",
        "-c",
        source,
        "-o",
        target,
    )
    done = run(compiler, *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = run("nm", "--demangle", "--extern-only", "--defined-only", target, folder=tmp_path).stdout
    names = {line.partition("(")[0].split()[-1].rpartition("::")[2] for line in shown.splitlines()}
    assert {line.split()[1] for line in shown.splitlines()} <= {"T", "D"}, shown  # code, or a table of functions
    allowed = {kernel, f"{kernel}_sums"}  # a name has the processor in it
    if kernel == "packed_linear_amx":
        allowed.add("allow_amx")  # asks the operating system for tile registers
    assert kernel in names and names <= allowed, shown


@tiers.needs_all
def test_the_wheel_installs_into_an_empty_environment_and_works_there(wheel: Path, tmp_path: Path) -> None:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{tag}-{tag}-linux_" in wheel.name, wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert [name for name in names if name.endswith(".so")] == [
            name for name in names if re.match(r"penstock/(engine/)?_native\.cpython-.*\.so$", name)
        ]
        assert all(name.startswith(("penstock/", "penstock-")) for name in names)
        assert {"penstock/py.typed", "penstock/_native.pyi", "penstock/engine/_native.pyi"} <= set(names)
        metadata = next(archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    needed = re.findall(r"^Requires-Dist: (\S+?)(?=[\s;]|$)(?!.*extra ==)", metadata, re.MULTILINE)
    assert sorted(re.split(r"[<>=~]", requirement)[0] for requirement in needed) == ["msgspec", "numpy"]

    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    fetched = run(*pip, "download", "--dest", tmp_path / "deps", *needed, folder=tmp_path, within=200)
    if fetched.returncode:
        pytest.skip(NO_INDEX.format(" or ".join(needed), fetched.stderr.strip().splitlines()[-1]))
    done = run(*pip, "install", "--no-index", "--find-links", tmp_path / "deps", wheel, folder=tmp_path, within=200)
    assert done.returncode == 0, done.stdout + done.stderr

    installed = json.loads(run(*pip, "list", "--format", "json", folder=tmp_path).stdout)
    assert {package["name"] for package in installed} - {"pip", "setuptools"} == {"msgspec", "numpy", "penstock"}
    version = next(package["version"] for package in installed if package["name"] == "penstock")
    penstock = tmp_path / "venv" / "bin" / "penstock"
    assert run(penstock, "--version", folder=tmp_path).stdout == f"penstock {version}\n"
    doctor = run(penstock, "doctor", folder=tmp_path)
    assert doctor.returncode == 0 and "missing" not in doctor.stdout, doctor.stdout + doctor.stderr
    example = run(python, ROOT / "examples" / "data_plane.py", folder=tmp_path)
    assert example.returncode == 0 and example.stdout.startswith("200704.0\nPeerDied: "), example.stderr
    where = run(python, "-c", "import penstock; print(penstock.__file__)", folder=tmp_path).stdout
    assert where.startswith(str(tmp_path)), where


@tiers.needs_all
def test_the_wheel_of_the_data_plane_has_neither_engine_nor_model(sdist: Path, tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-build-isolation", "--no-deps")
    command = ("env", "PENSTOCK_DATA_PLANE=1", *pip, "--no-index", "--wheel-dir", tmp_path, sdist)
    done = run(*command, folder=tmp_path, within=800)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < 2 << 20
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    folders = {name.split("/")[1] for name in names if name.startswith("penstock/")}
    assert not folders & {"shipped", "engine", "server", "integrations"}
    assert {"memory", "channel", "codec", "tensor", "bridge", "tools", "cli"} <= folders
    program = (
        "import sys; sys.path[:0] = [sys.argv.pop(1), sys.argv.pop(1)]; import penstock; "
        "assert penstock.__file__.startswith(sys.path[0]); from penstock.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    # -S: the finder of an editable installation would come first.
    packages = sysconfig.get_path("purelib")
    shown = run(sys.executable, "-S", "-c", program, tmp_path / "site", packages, "inspect", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
