"""The options of `vllm serve` that are used most, and `--config`: each works, or is answered with its own line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock import cli
from penstock.cli.vllm_options import MANUAL
from penstock.engine.model_dir import with_model_defaults
from penstock.engine.protocol.config import EngineConfig
from penstock.server.options import ServerOptions

# Of the recipes and documents of vLLM 0.33, each with a value as they have it; "": a switch.
WORKS = {
    "--allowed-local-media-path": "/tmp",
    "--allowed-media-domains": "example.org",
    "--allowed-origins": '["*"]',
    "--api-key": "sesame",
    "--api-server-count": "2",
    "--async-scheduling": "",
    "--block-size": "32",
    "--chat-template": "{{ messages }}",
    "--data-parallel-size": "2",
    "--default-chat-template-kwargs": '{"enable_thinking": false}',
    "--disable-log-requests": "",
    "--disable-uvicorn-access-log": "",
    "--dtype": "bfloat16",
    "--enable-chunked-prefill": "",
    "--enable-log-requests": "",
    "--enable-prefix-caching": "",
    "--enable-prompt-embeds": "",
    "--enable-prompt-tokens-details": "",
    "--enable-request-id-headers": "",
    "--enforce-eager": "",
    "--generation-config": "vllm",
    "--gpu-memory-utilization": "0.9",
    "--host": "127.0.0.1",
    "--limit-mm-per-prompt": '{"image": 2}',
    "--max-logprobs": "50",
    "--max-model-len": "2048",
    "--max-num-batched-tokens": "4096",
    "--max-num-seqs": "64",
    "--mm-encoder-tp-mode": "data",
    "--mm-processor-cache-gb": "0.25",
    "--no-enable-prefix-caching": "",
    "--num-gpu-blocks-override": "512",
    "--override-generation-config": '{"temperature": 0.5, "max_new_tokens": 9}',
    "--port": "0",
    "--root-path": "/models/a",
    "--runner": "generate",
    "--scheduling-policy": "priority",
    "--served-model-name": "a",
    "--shutdown-timeout": "5",
    "--stream-interval": "2",
    "--tensor-parallel-size": "2",
    "--uds": "/tmp/server.sock",
    "-dp": "2",
    "-tp": "2",
}
ANSWERED = {
    "--attention-backend": "FLASH_ATTN",
    "--calculate-kv-scales": "",
    "--chat-template-content-format": "openai",
    "--compilation-config": "3",
    "--cpu-offload-gb": "4",
    "--data-parallel-address": "10.0.0.1",
    "--data-parallel-backend": "ray",
    "--data-parallel-rpc-port": "13345",
    "--data-parallel-size-local": "1",
    "--disable-custom-all-reduce": "",
    "--disable-log-stats": "",
    "--distributed-executor-backend": "ray",
    "--enable-eplb": "",
    "--enable-expert-parallel": "",
    "--enable-sleep-mode": "",
    "--guided-decoding-backend": "xgrammar",
    "--hf-overrides": "{}",
    "--kv-cache-dtype": "fp8",
    "--kv-cache-memory-bytes": "1G",
    "--kv-transfer-config": "{}",
    "--load-format": "auto",
    "--logits-processors": "a.B",
    "--logprobs-mode": "raw_logprobs",
    "--middleware": "a.b",
    "--mm-processor-kwargs": "{}",
    "--model": "a/b",
    "--model-impl": "auto",
    "--no-async-scheduling": "",
    "--pipeline-parallel-size": "2",
    "--quantization": "awq",
    "--rope-scaling": "{}",
    "--seed": "0",
    "--skip-mm-profiling": "",
    "--speculative-config": "{}",
    "--structured-outputs-config": "{}",
    "--swap-space": "4",
    "--task": "generate",
    "--tokenizer": "a/b",
    "--tokenizer-mode": "auto",
    "--trust-remote-code": "",
    "--worker-extension-cls": "a.B",
}


class Started(Exception):
    """What `penstock serve` would start."""

    def __init__(self, config: EngineConfig, options: ServerOptions, notes: Sequence[str]) -> None:
        super().__init__()
        self.config, self.options, self.notes = config, options, notes


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(config: EngineConfig, options: ServerOptions, ray_address: str | None, notes: Sequence[str]) -> int:
        raise Started(config, options, notes)

    monkeypatch.setattr("penstock.server.server_launcher.run", run)

    def start(*words: str) -> Started:
        with pytest.raises(Started) as started:
            cli.main(["serve", *words, "--device-model", "simulated"])
        return started.value

    return start


@pytest.mark.parametrize("option", WORKS)
def test_option_of_vllm_works(option: str, serve: Any) -> None:
    started = serve(*filter(None, [option, WORKS[option]]))
    is_note = [note for note in started.notes if note.split()[0] == option]
    parser = cli.parser().commands["serve"][1]
    is_option = option in {name for action in parser.arguments for name in action.option_strings}
    assert bool(is_note) != is_option


@pytest.mark.parametrize("option", ANSWERED)
def test_option_of_vllm_is_answered_with_its_own_line(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", *filter(None, [option, ANSWERED[option]])])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and "did you mean" not in error
    assert f"{option} is an option of vLLM and not of penstock: " in error and MANUAL in error


def test_value_of_an_always_on_option_is_not_taken_for_the_model(serve: Any) -> None:
    started = serve("--scheduling-policy", "fcfs", "--async-scheduling")
    assert started.config.model == "" and started.notes == ["--scheduling-policy fcfs", "--async-scheduling"]


def test_overridden_sampling_defaults_take_precedence(serve: Any) -> None:
    words = ["--override-generation-config", '{"temperature": 0.5, "max_new_tokens": 9, "top_k": -1}']
    defaults = with_model_defaults(serve(*words).config).sampling_defaults
    assert defaults.explicit == {"temperature": 0.5, "max_tokens": 9, "top_k": 0}
    with pytest.raises(ValueError, match="override_generation_config, got 'length_penalty'"):
        with_model_defaults(serve(words[0], '{"length_penalty": 1}').config)
    with pytest.raises(ValueError, match="override_generation_config is invalid"):
        with_model_defaults(serve(words[0], '{"temperature": "warm"}').config)


def test_chat_template_is_a_file_or_a_template(tmp_path: Path, serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages }}!")
    assert serve("--chat-template", str(tmp_path / "chat.jinja")).options.chat_template == "{{ messages }}!"
    assert serve("--chat-template", "{{ messages }}?").options.chat_template == "{{ messages }}?"
    assert cli.main(["serve", "--device-model=simulated", f"--chat-template={tmp_path}/none"]) == 2
    assert "expected chat_template, a file or a template" in capsys.readouterr().err


# ── --config ─────────────────────────────────────────────────────────────────────────────────────────────────────────
CONFIG = """
model: somewhere
served-model-name: [a, b]
api_key: [c, d]
max-num-seqs: 32
tensor-parallel-size: 2
limit-mm-per-prompt: {image: 2}
enable-prefix-caching: false
async-scheduling: true
headless: false
otherwise: null
"""


def test_options_of_a_file_come_before_those_of_the_command_line(tmp_path: Path, serve: Any) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(CONFIG)
    started = serve("--config", str(path), "-tp", "4")
    config, options = started.config, started.options
    assert (config.model, config.max_num_seqs, config.tensor_parallel_size) == ("somewhere", 32, 4)
    assert not config.enable_prefix_caching and started.notes == ["--async-scheduling"]
    assert (options.served_model_name, options.api_keys) == (("a", "b"), ("c", "d"))
    assert options.image_limits.count == 2
    assert serve("elsewhere", f"--config={path}").config.model == "elsewhere"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("prot: 1", "unrecognized arguments: --prot=1: did you mean --port?"),
        ("seed: 1", "--seed is an option of vLLM and not of penstock"),
        ("port: many", "argument --port: invalid int value: 'many'"),
        ("- port", "expected options by name"),
        ("port: [", "cannot be read"),
    ],
)
def test_file_of_options_that_misfits_is_refused_in_one_line(
    text: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text(text)
    for words in (["--config", str(tmp_path / "a.yaml")], ["--config", str(tmp_path / "none.yaml")], ["--config"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["serve", *words])
        lines = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2 and len(lines) == 1
        assert (error if "a.yaml" in words[-1] else "--config") in lines[0]
