"""What is refused before a process starts: each mistake in files, options or devices, by its subject."""

import errno
import importlib.util
import json
import math
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.cluster import cuda_devices
from penstock.engine.cluster.adapter_files import base_shapes
from penstock.engine.cluster.cuda_devices import Devices, TorchBuild
from penstock.engine.launcher import preflight
from penstock.engine.launcher.preflight import require_startable, require_tokenizer
from penstock.engine.model_dir import FAMILIES, TEXT, VIDEO, VISION, with_model_defaults
from penstock.engine.protocol.config import SHIPPED, EngineConfig, SimulatedDevice
from penstock.engine.protocol.lora import LoraConfig
from tests.support.documents import ROOT


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the model that ships, of links that a test replaces."""
    for path in Path(SHIPPED).iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def replace(path: Path, content: str | bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def edit(path: Path, **changes: Any) -> None:
    replace(path, json.dumps({**json.loads(path.read_text()), **changes}))


def refusal(model: Path, **options: Any) -> str:
    with pytest.raises((ValueError, OSError)) as caught:
        config = with_model_defaults(EngineConfig(model=str(model), **options))
        require_startable(config)
        require_tokenizer(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_model_that_ships_can_be_started(model: Path) -> None:
    config = with_model_defaults(EngineConfig(model=str(model)))
    require_startable(config)
    require_tokenizer(config)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("config.json", None, "{}/config.json is missing"),
        ("config.json", "{", "{}/config.json is invalid"),
        ("config.json", '{"model_type": "llama", "architectures": 3}', "architectures of {}/config.json"),
        ("tokenizer.json", None, "{}/tokenizer.json is missing: a server needs the model's tokenizer"),
        ("tokenizer.json", "{}", "{}/tokenizer.json is invalid: Object missing required field `model`"),
        ("tokenizer.json", "<html>", "{}/tokenizer.json is invalid"),
        ("tokenizer_config.json", "[]", "{}/tokenizer_config.json is invalid"),
        ("processor_config.json", "{,}", "{}/processor_config.json is invalid"),
        ("generation_config.json", "{", "{}/generation_config.json is invalid"),
        ("model.safetensors", None, "{}: no model.safetensors and no model.safetensors.index.json"),
        ("model.safetensors", b"", "{}/model.safetensors is not a file of safetensors"),
        ("model.safetensors", b"<!doctype html>", "{}/model.safetensors is not a file of safetensors"),
        ("model.safetensors", b"\2\0\0\0\0\0\0\0no", "{}/model.safetensors is not a file of safetensors"),
        ("model.safetensors", b"\7\0\0\0\0\0\0\0{", "{}/model.safetensors is cut off: it has 9 bytes of 15"),
        (
            "model.safetensors",
            b"version https://git-lfs.github.com/spec/v1\n",
            "is a pointer of Git LFS instead of the file",
        ),
        ("model.safetensors.index.json", '{"weight_map": 1}', "weight_map of {}/model.safetensors.index.json"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "b.safetensors"}}', "1 of 1 files"),
    ],
)
def test_a_broken_file_of_a_model_is_refused_by_its_path(
    model: Path, name: str, content: str | bytes | None, text: str
) -> None:
    (model / name).unlink(missing_ok=True)
    if content is not None:
        replace(model / name, content)
    assert text.format(model) in refusal(model)


# ── headers of safetensors ───────────────────────────────────────────────────────────────────────────────────────────
Tensors = dict[str, dict[str, Any]]


def rewrite_header(path: Path, change: Callable[[Tensors], None]) -> None:
    """Writes a file anew with another header, and the same data."""
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    tensors = json.loads(raw[8:end])
    tensors.pop("__metadata__", None)
    change(tensors)
    header = json.dumps(tensors).encode()
    replace(path, len(header).to_bytes(8, "little") + header + raw[end:])


def by_offset(tensors: Tensors) -> list[str]:
    return sorted(tensors, key=lambda name: tensors[name]["data_offsets"])


def overlap(tensors: Tensors) -> None:
    first, second, *_ = by_offset(tensors)
    tensors[first] = tensors[second]


def overlap_by_a_byte(tensors: Tensors) -> None:
    begin, end = tensors[by_offset(tensors)[5]]["data_offsets"]
    tensors[by_offset(tensors)[5]]["data_offsets"] = [begin - 1, end - 1]


def leave_a_gap(tensors: Tensors) -> None:
    del tensors[by_offset(tensors)[3]]


def leave_a_tail(tensors: Tensors) -> None:
    del tensors[by_offset(tensors)[-1]]


def point_beyond(tensors: Tensors) -> None:
    last = tensors[by_offset(tensors)[-1]]
    last["data_offsets"][1] += 2**40
    last["shape"], last["dtype"] = [last["data_offsets"][1] - last["data_offsets"][0]], "U8"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (overlap, "leaves a gap after the header"),
        (overlap_by_a_byte, "overlaps the tensor"),
        (leave_a_gap, "leaves a gap after the tensor"),
        (leave_a_tail, "bytes after its last tensor"),
        (point_beyond, "is cut off: it has"),
        (lambda tensors: tensors[by_offset(tensors)[0]].update(shape=[3]), "its data_offsets [0, "),
        (lambda tensors: tensors[by_offset(tensors)[0]].update(shape=[-1]), "is not a file of safetensors: Expected"),
        (lambda tensors: tensors[by_offset(tensors)[0]].update(dtype="F31"), "has the dtype 'F31', which is not known"),
        (lambda tensors: tensors[by_offset(tensors)[0]].update(data_offsets=[9, 4]), "its data_offsets [9, 4]"),
        (lambda tensors: tensors[by_offset(tensors)[0]].pop("shape"), "missing required field `shape`"),
    ],
)
def test_a_header_that_lies_is_refused_by_file(model: Path, change: Callable[[Tensors], None], text: str) -> None:
    rewrite_header(model / "model.safetensors", change)
    message = refusal(model)
    assert text in message and str(model / "model.safetensors") in message


def test_a_name_that_comes_twice_in_a_header_is_refused(model: Path) -> None:
    raw = (model / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    tensors = json.loads(raw[8:end])
    name = by_offset({key: value for key, value in tensors.items() if key != "__metadata__"})[0]
    header = raw[8:end].rstrip()[:-1] + f', "{name}": {json.dumps(tensors[name])}}}'.encode()
    replace(model / "model.safetensors", len(header).to_bytes(8, "little") + header + raw[end:])
    message = refusal(model)
    assert f"the name '{name}' comes twice" in message and str(model / "model.safetensors") in message


def test_a_tensor_that_only_the_index_has_is_named_with_its_file(model: Path) -> None:
    raw = (model / "model.safetensors").read_bytes()
    names = [name for name in json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")]) if name != "__metadata__"]
    index = model / "model.safetensors.index.json"
    replace(index, json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    require_startable(with_model_defaults(EngineConfig(model=str(model))))
    replace(index, json.dumps({"weight_map": dict.fromkeys([*names, "lm.more"], "model.safetensors")}))
    assert f"{model}/model.safetensors has no tensor 'lm.more', which model.safetensors.index.json" in refusal(model)
    replace(index, '{"weight_map": {"a": "model.safetensors", "a": "model.safetensors"}}')
    assert f"{index} is invalid: the name 'a' comes twice" in refusal(model)


def test_truncated_weights_are_refused_with_both_sizes(model: Path) -> None:
    whole = (model / "model.safetensors").read_bytes()
    replace(model / "model.safetensors", whole[: len(whole) // 2])
    assert f"is cut off: it has {len(whole) // 2} bytes of {len(whole)}" in refusal(model)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3ForConditionalGenerat"),
        ({"model_type": "mamba", "architectures": None}, "(model_type 'mamba') are not supported"),
        (
            {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
            "LlamaForSequenceClassification",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "weights quantized by 'awq' are not supported"),
        (
            {"model_type": "llava", "text_config": {"model_type": "phi"}},
            "'llava' with text of model_type 'phi' is not supported; supported are gemma2, gemma3_text, gpt_oss, ",
        ),
    ],
)
def test_a_family_that_is_not_served_is_named(model: Path, changes: dict[str, Any], text: str) -> None:
    edit(model / "config.json", **changes)
    assert text in refusal(model)


def test_an_architecture_that_is_only_misspelt_is_served(model: Path) -> None:
    edit(model / "config.json", architectures=["LLaVAForCausalLM"])
    require_startable(with_model_defaults(EngineConfig(model=str(model))))


def test_ranks_blocks_types_and_devices_are_held_against_the_model(model: Path) -> None:
    assert "num_attention_heads is 6 and num_key_value_heads 2" in refusal(model, tensor_parallel_size=7)
    assert "max seq len (1024)" in refusal(
        model, num_gpu_blocks_override=63
    ) and "--num-gpu-blocks-override 64 or more" in refusal(model, num_gpu_blocks_override=63)
    require_startable(with_model_defaults(EngineConfig(model=str(model), num_gpu_blocks_override=64)))
    assert "expected dtype to be auto, float32, bfloat16 or float16, got 'int8'" in refusal(model, dtype="int8")
    assert "expected device to be cpu, cuda, or cuda:N" in refusal(model, device="tpu")
    with pytest.raises(ValueError, match=r"stored in KV cache \(16\)"):
        require_startable(with_model_defaults(EngineConfig(simulated=SimulatedDevice(blocks=1))))


def test_heads_missing_in_config_json_are_left_to_the_worker(model: Path) -> None:
    edit(model / "config.json", text_config={"model_type": "llama"})
    require_startable(with_model_defaults(EngineConfig(model=str(model), tensor_parallel_size=7)))


def test_a_package_that_is_not_installed_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="a model needs torch, not installed here"):
        require_startable(with_model_defaults(EngineConfig(model=str(model))))


# ── CUDA ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
UUIDS = ("00112233445566778899aabbccddeeff", "ff112233445566778899aabbccddeeff")
PAIR = {"device": "cuda", "tensor_parallel_size": 2}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Devices], None]:
    """Installs Triton and a torch for CUDA 13.0, and returns a function that installs devices."""
    monkeypatch.setitem(sys.modules, "triton", importlib.util.module_from_spec(ModuleSpec("triton", None)))
    monkeypatch.setattr(preflight, "torch_build", lambda: TorchBuild("2.13.0", "13.0", None))
    return lambda devices: monkeypatch.setattr(preflight, "cuda_devices", lambda: devices)


@pytest.mark.parametrize(
    ("devices", "options", "text"),
    [
        (0, {}, "--device cuda: no CUDA device can be used: because"),
        (
            0,
            {"tensor_transport": "device", "store_nbytes": 1 << 20},
            "because; --device cpu and --tensor-transport auto do without",
        ),
        (1, PAIR, "the number 1 names no device: because"),
        (3, {**PAIR, "data_parallel_size": 2}, "the number 3 names no device"),
        (1, {"device": "cuda:1"}, "--device cuda:1: the number 1 names no device"),
        (3, {"device": "cuda:2", "tensor_parallel_size": 2}, "--device cuda:2: the number 3 names no device"),
        (2, {"devices": "2"}, "--devices 2: the number 2 names no device"),
        (2, {"devices": "GPU-00112244"}, "--devices GPU-00112244: the UUID GPU-00112244 names no device"),
        (
            Devices(1, ""),
            {"max_num_seqs": 5000, "max_num_batched_tokens": 8192},
            "--max-num-seqs 5000: a CUDA device computes at most 4096",
        ),
        (Devices(1, "", cuda=(12, 8)), {}, "it knows CUDA 12.8, and torch 2.13.0 is built for CUDA 13.0"),
        (
            Devices(2, "", UUIDS),
            {**PAIR, "devices": "0,GPU-00112233"},
            "two workers have device 0, which NCCL refuses: expected a device for each worker, or --collectives gloo",
        ),
        (Devices(2, "", UUIDS, apart=frozenset({(0, 1)})), PAIR, "device 0 cannot reach the memory of device 1"),
    ],
)
def test_devices_that_cannot_be_used_so_are_refused(
    model: Path, devices: Devices | int, options: dict[str, Any], text: str, install: Callable[[Devices], None]
) -> None:
    install(Devices(devices, "because", UUIDS[:1] * devices) if isinstance(devices, int) else devices)
    assert text in refusal(model, **{"device": "cuda", **options})


@pytest.mark.parametrize(
    ("module", "function", "result", "text"),
    [
        (
            *(preflight, "torch_build", TorchBuild("2.10.1+cu128", "12.8", None)),
            "torch 2.10.1+cu128 is too old for a CUDA device: 2.11 or later",
        ),
        (preflight.shutil, "which", None, "no C compiler is found"),
        (preflight.importlib.metadata, "version", "3.5.1", "Triton 3.5.1 is too old for the kernels"),
    ],
)
def test_cuda_without_the_packages_of_kernels_is_refused(
    *, model: Path, module: Any, function: str, result: Any, text: str, install: Callable[[Devices], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    install(Devices(1, ""))
    monkeypatch.setattr(module, function, lambda *_: result)
    assert text in refusal(model, device="cuda")


def test_cuda_without_triton_is_refused_before_weights_are_read(
    model: Path, install: Callable[[Devices], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(Devices(1, ""))
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "Triton is not installed" in refusal(model, device="cuda")


@pytest.mark.parametrize("number", [None, 2])
def test_present_or_uncountable_devices_are_left_to_the_worker(
    model: Path, number: int | None, install: Callable[[Devices], None]
) -> None:
    install(Devices(number, "because"))
    for devices in ("", "1,0", "GPU-00112233,GPU-11112233-4455-6677-8899-aabbccddeeff"):
        require_startable(with_model_defaults(EngineConfig(model=str(model), devices=devices, **PAIR)))


def test_unreachable_devices_are_used_where_the_user_knows(
    model: Path, install: Callable[[Devices], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(Devices(4, "", apart=frozenset({(0, 1), (1, 2)})))
    ways: list[dict[str, Any]] = [
        {"collectives": "gloo", "tensor_parallel_size": 2},
        {"data_parallel_size": 2},
        {"devices": "0,2,1,3", "tensor_parallel_size": 2, "data_parallel_size": 2},
    ]
    for options in ways:
        require_startable(with_model_defaults(EngineConfig(model=str(model), device="cuda", **options)))
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    require_startable(with_model_defaults(EngineConfig(model=str(model), **PAIR)))


def test_devices_of_workers_are_known_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_devices, "cuda_devices", lambda: Devices(2, "because", UUIDS))
    config = EngineConfig(model="m", device="cuda", devices="1,GPU-00112233", tensor_parallel_size=2)
    assert cuda_devices.worker_devices(config) == [bytes.fromhex(UUIDS[1]), bytes.fromhex(UUIDS[0])]
    for options in ({"device": "cuda:2"}, {}, {"device": "cuda", "devices": "GPU-99112233"}):
        with pytest.raises(ValueError, match="expected CUDA devices of workers"):
            cuda_devices.worker_devices(EngineConfig(model="m", **options))


def driver(answer: str) -> Callable[..., Any]:
    return lambda command, **_: subprocess.CompletedProcess(command, 0, answer, "")


@pytest.mark.parametrize(
    ("answer", "number", "reason"),
    [
        ("absent\n", 0, "there is no NVIDIA driver"),
        ("0 2 13020\n00ff 1 whole\n11ff 0 slice\n", 2, "finds 2 devices"),
        ("100 0 13020\n", 0, "finds no device"),
        ("999 0 0\n", None, "answers with error 999"),
        ("libcuda.so.1: cannot allocate memory\n", None, "cannot allocate memory"),
        ("", None, "exit status 0"),
    ],
)
def test_number_of_cuda_devices_is_known_only_from_nvidia_smi(
    answer: str, number: int | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_devices, "torch_build", lambda: TorchBuild("2.13.0", "13.0", None))
    monkeypatch.setattr(subprocess, "run", driver(answer))
    devices = cuda_devices.cuda_devices()
    assert devices.number == number and reason in devices.reason
    assert devices.uuids == (("00ff", "11ff") if number else ())
    assert devices.cuda == ((13, 2) if number else None)
    assert devices.apart == ({(0, 1), (1, 0)} if number else set())
    assert devices.has_slices == bool(number)


@pytest.mark.parametrize("options", [{"devices": "1"}, {"tensor_parallel_size": 2}])
def test_second_slice_of_a_device_is_refused(
    model: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA shows a process one slice, chosen by CUDA_VISIBLE_DEVICES or not."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-0011")
    monkeypatch.setattr(cuda_devices, "torch_build", lambda: TorchBuild("2.13.0", "13.0", None))
    monkeypatch.setattr(subprocess, "run", driver("0 1 13020\n00ff - slice\n"))
    text = refusal(model, device="cuda", **options)
    assert "the number 1 names no device (a process uses one slice, by CUDA_VISIBLE_DEVICES=MIG-…" in text
    assert "finds 1 device (CUDA_VISIBLE_DEVICES='MIG-0011')" in text


def test_slice_that_is_not_there_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-0011")
    monkeypatch.setattr(cuda_devices, "torch_build", lambda: TorchBuild("2.13.0", "13.0", None))
    monkeypatch.setattr(subprocess, "run", driver("100 0 13020\n"))
    assert "the driver finds no device (CUDA_VISIBLE_DEVICES='MIG-0011'); --device cpu" in refusal(model, device="cuda")


def test_a_driver_that_cannot_be_asked_is_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: Any, **_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(cuda_devices, "torch_build", lambda: TorchBuild("2.13.0", "13.0", None))
    monkeypatch.setattr(subprocess, "run", fail)
    assert cuda_devices.cuda_devices().number is None


def test_torch_without_cuda_has_no_devices_and_rocm_may_have_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_devices, "torch_build", lambda: TorchBuild("2.13.0+cpu", None, None))
    assert cuda_devices.cuda_devices() == Devices(0, "torch 2.13.0+cpu is built without CUDA")
    monkeypatch.setattr(cuda_devices, "torch_build", lambda: TorchBuild("2.13.0", None, "7.0"))
    assert cuda_devices.cuda_devices().number is None


def test_the_build_of_torch_is_read_without_importing_it() -> None:
    torch = pytest.importorskip("torch")
    assert cuda_devices.torch_build() == TorchBuild(torch.__version__, torch.version.cuda, torch.version.hip)


# ── the registry ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_families_have_the_classes_of_transformers() -> None:
    names = pytest.importorskip("transformers.models.auto.modeling_auto")
    assert {name: names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name] for name in TEXT} == TEXT
    assert {name: names.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[name] for name in VISION} == VISION


def test_the_table_of_families_says_exactly_what_is_served() -> None:
    page = (ROOT / "docs" / "howto" / "serve.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if "For" in line and line.startswith("| `")]
    table = {kind.strip(" `"): (name.strip(" `"), *(cell.strip() for cell in cells)) for name, kind, *cells in rows}
    assert table == {
        kind: (name, "yes" if kind in VISION else "", "yes" if kind in VIDEO else "") for kind, name in FAMILIES.items()
    }


# ── the commands ─────────────────────────────────────────────────────────────────────────────────────────────────────
COMMAND = "import sys; from penstock.cli import main; status = main(sys.argv[1:]); assert not {0} & set(sys.modules)"
NOT_IMPORTED = {"torch", "transformers"}


@pytest.mark.parametrize("command", ["serve", "generate"])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--dtype", "int8"), "expected dtype to be"),
        (("--tensor-parallel-size", "7"), "num_attention_heads"),
        (("--max-model-len", "2048"), "User-specified max_model_len (2048) is greater than the model's (max_position"),
        (("--device", "tpu"), "expected device to be cpu, cuda"),
    ],
)
def test_a_mistake_is_one_line_and_status_2_without_torch(command: str, options: tuple[str, ...], text: str) -> None:
    code = COMMAND.format(NOT_IMPORTED) + "; sys.exit(status)"
    arguments = [sys.executable, "-c", code, command, *options]
    done = subprocess.run(arguments, input="[1]\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"penstock {command}: ") and text in done.stderr


def test_a_port_that_is_taken_is_named_and_only_after_the_model(model: Path) -> None:

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "penstock", "serve", str(model), "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert f"[Errno {errno.EADDRINUSE}] cannot listen on port {port} of '127.0.0.1'" in done.stderr
        (model / "tokenizer.json").unlink()
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "is missing" in done.stderr and "tokenizer.json" in done.stderr


# ── LoRA adapters ────────────────────────────────────────────────────────────────────────────────────────────────────
SETTINGS = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "modules_to_save": None}
LAYER = "base_model.model.model.language_model.layers.0.self_attn.q_proj"


def write_adapter(folder: Path, tensors: dict[str, tuple[int, ...]], **settings: Any) -> None:
    """Writes an adapter with zeros."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in tensors.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    (folder / "adapter_config.json").write_text(json.dumps({**SETTINGS, **settings}))


def q_proj_shape() -> tuple[int, int]:
    return base_shapes(Path(SHIPPED))["layers.0.self_attn.q_proj"]  # type: ignore[return-value]


def low_rank(layer: str = LAYER, rank: int = 4, more: int = 0) -> dict[str, tuple[int, ...]]:
    outputs, inputs = q_proj_shape()
    return {f"{layer}.lora_A.weight": (rank, inputs + more), f"{layer}.lora_B.weight": (outputs, rank)}


def lora_of(folder: Path, **options: Any) -> LoraConfig:
    return LoraConfig(enable_lora=True, lora_modules=(f"sql={folder}",), **options)


def test_adapter_that_fits_the_model_can_be_started(tmp_path: Path) -> None:
    write_adapter(tmp_path, low_rank())
    config = with_model_defaults(EngineConfig(model=SHIPPED, lora=lora_of(tmp_path)))
    require_startable(config)
    (adapter,) = config.lora.adapters
    assert (adapter.name, adapter.path, len(adapter.digest)) == ("sql", str(tmp_path), 32)
    assert with_model_defaults(config).lora == config.lora


@pytest.mark.parametrize(
    ("tensors", "settings", "text"),
    [
        (low_rank, {"use_dora": True}, "adapter_config.json: use_dora True is not supported"),
        (low_rank, {"modules_to_save": ["lm_head"]}, "modules_to_save ['lm_head'] is not supported"),
        (low_rank, {"bias": "all"}, "bias 'all' is not supported"),
        (low_rank, {"peft_type": "IA3"}, "peft_type 'IA3' is not supported: expected 'LORA'"),
        (low_rank, {"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not supported"),
        (low_rank, {"r": 8}, "expected A [8, …] and B […, 8] of layers.0.self_attn.q_proj"),
        (low_rank, {"r": "x"}, "adapter_config.json is invalid"),
        (lambda: low_rank(rank=0), {"r": 0}, "adapter_config.json is invalid"),
        (low_rank, {"rank_pattern": {"(": 4}}, "'(' is no pattern"),
        pytest.param(
            *(low_rank, {"rank_pattern": {"(?i)q_proj": 4}}, "'(?i)q_proj' is no pattern"),
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="a flag within a pattern is a warning there"),
        ),
        (lambda: low_rank(rank=32), {"r": 32}, "has rank 32, more than --max-lora-rank 16"),
        (lambda: low_rank(more=1), {}, "inputs and"),
        (lambda: low_rank(LAYER.replace(".0.", ".99.")), {}, "the model has no linear layer layers.99."),
        (lambda: low_rank("base_model.model.lm_head"), {}, "base_model.model.lm_head.lora_A.weight is not supported"),
        (lambda: {"base_model.model.model.embed_tokens.lora_embedding_A": (4, 4)}, {}, "is not supported"),
        (lambda: dict([*low_rank().items()][:1]), {}, "layers.0.self_attn.q_proj has lora_A alone"),
        (dict, {}, "has no tensors"),
    ],
)
def test_bad_adapter_is_refused_in_a_sentence(
    tensors: Callable[[], dict[str, tuple[int, ...]]], settings: dict[str, Any], text: str, tmp_path: Path
) -> None:
    write_adapter(tmp_path, tensors(), **settings)
    assert text in (message := refusal(Path(SHIPPED), lora=lora_of(tmp_path))) and str(tmp_path) in message


def test_directory_without_adapter_is_refused(tmp_path: Path) -> None:
    assert f"{tmp_path}/adapter_config.json is missing" in refusal(Path(SHIPPED), lora=lora_of(tmp_path))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lora_modules": ("a=b",)}, "lora_modules need enable_lora"),
        ({"enable_lora": True, "lora_modules": ("a",)}, "expected lora_modules as in NAME=DIR, got 'a'"),
        ({"enable_lora": True, "lora_modules": ("a=b", "a=c")}, "got 'a' twice"),
    ],
)
def test_wrong_options_of_adapters_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LoraConfig(**options)


def test_simulated_device_has_no_adapters(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a simulated device has no weights"):
        EngineConfig(simulated=SimulatedDevice(), lora=lora_of(tmp_path))
