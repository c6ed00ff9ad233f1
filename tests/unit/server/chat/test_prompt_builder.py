"""Prompts, and what stands on the command line."""

import argparse
import asyncio
import contextlib
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httptools")

from penstock import cli
from penstock.engine import model_dir
from penstock.engine.cli_args import GROUPS
from penstock.engine.protocol.config import SHIPPED, EngineConfig, SimulatedDevice
from penstock.engine.protocol.option import option_fields
from penstock.server import cli_args as arguments
from penstock.server.chat.prompt_builder import LONG, NumberTokenizer, PromptBuilder, _most_ids, build_tokenizer
from penstock.server.errors import ApiError, Limit
from penstock.server.options import ServerOptions
from tests.support.loops import in_a_loop

SIMULATED = EngineConfig(simulated=SimulatedDevice(vocabulary=200))


class Slow(NumberTokenizer):
    """Done when the loop has had a turn."""

    def __init__(self) -> None:
        super().__init__(200)
        self.loop_goes_on = threading.Event()

    def encode(self, text: str, add_special: bool) -> list[int]:
        assert self.loop_goes_on.wait(10), "the loop was held up"
        return super().encode(text, add_special)


@in_a_loop
async def test_a_long_prompt_does_not_hold_up_the_loop() -> None:
    words = Slow()
    with contextlib.closing(PromptBuilder(SIMULATED, words)) as reader:
        asking = asyncio.ensure_future(reader.ids("x" * (LONG + 1)))
        asyncio.get_running_loop().call_later(0.01, words.loop_goes_on.set)
        assert len(await asking) == LONG + 1
        assert await reader.ids("abc") == [97, 98, 99]  # a short one is done at once


@in_a_loop
async def test_a_text_that_must_be_too_long_is_refused_before_it_is_tokenized() -> None:
    class Untouched(NumberTokenizer):
        encode = pytest.fail

    with contextlib.closing(PromptBuilder(SIMULATED, Untouched(200))) as reader:
        for completion, words in (
            (16, "you requested at least 7000016 tokens (at least 7000000 in the prompt, 16 in the completion)"),
            (None, "your prompt resulted in at least 7000000 tokens"),
        ):
            with pytest.raises(ApiError) as caught:
                await reader.ids("x" * 7_000_000, limit=Limit(4095, "prompt", completion))
            assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
            assert caught.value.message.startswith("This model's maximum context length is 4096 tokens. However, ")
            assert words in caught.value.message
    with contextlib.closing(PromptBuilder(SIMULATED, NumberTokenizer(200))) as reader:
        assert len(await reader.ids("x" * 5000, limit=Limit(5000, "prompt", 16))) == 5000
        assert len(await reader.ids("x" * 5000)) == 5000


@in_a_loop
async def test_ids_for_which_the_model_has_no_place_are_refused() -> None:
    with contextlib.closing(PromptBuilder(SIMULATED, NumberTokenizer(200))) as reader:
        assert await reader.ids([0, 199]) == [0, 199]
        with pytest.raises(ApiError, match="below 200, got 200"):
            await reader.ids([1, 200, 3])
        too_long = [1] * SIMULATED.max_model_len + [200]  # which the check of lengths reports
        assert await reader.ids(too_long, limit=Limit(SIMULATED.max_model_len - 1, "prompt", 1)) == too_long
        with pytest.raises(ApiError, match="below 200, got 200"):  # it is going to be cut
            await reader.ids(too_long)


@in_a_loop
async def test_vocabulary_reads_no_tokenizer_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    config = EngineConfig(model=SHIPPED)
    with contextlib.closing(PromptBuilder(config, build_tokenizer(config))) as reader:
        monkeypatch.setattr(model_dir, "load_tokenizer", pytest.fail)
        result = await reader.vocabulary()
        assert b"".join(map(result.token_bytes, await reader.ids("a red circle", add_special=False))) == b"a red circle"


def test_vocab_size_is_that_of_text_config_if_present(tmp_path: Path) -> None:
    for more, many in (("", 9), (', "text_config": null', 9), (', "text_config": {"vocab_size": 7}', 7)):
        (tmp_path / "config.json").write_text(f'{{"vocab_size": 9{more}}}')
        assert _most_ids(EngineConfig(model=str(tmp_path))) == many


def parsed(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    arguments.add(parser)
    return parser.parse_args(list(options))


def config_of(*options: str) -> EngineConfig:
    return arguments.engine_config(parsed(*options))


def test_store_has_bytes_by_default_only_for_models_of_images(tmp_path: Path) -> None:
    def store_nbytes(*options: str) -> int:
        return config_of(str(tmp_path), *options).store_nbytes

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert store_nbytes() == 0 and store_nbytes("--mm-processor-cache-gb", "0.5") == 1 << 29
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    assert store_nbytes() == 256 << 20 and store_nbytes("--mm-processor-cache-gb", "0") == 0
    assert store_nbytes("--device-model", "simulated") == 0
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json is invalid"):
        store_nbytes()


def test_tensor_transport_is_checked_once_for_option_and_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(*options: str) -> tuple[str, int]:
        result = config_of(str(tmp_path), *options)
        return result.tensor_transport, result.store_nbytes

    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    assert config() == ("auto", 256 << 20)
    assert config("--tensor-transport", "inline") == ("inline", 0)
    assert config("--tensor-transport", "store", "--mm-processor-cache-gb", "1") == ("store", 1 << 30)
    assert config("--tensor-transport", "device", "--device", "cuda") == ("device", 256 << 20)
    monkeypatch.setenv("PENSTOCK_TENSOR_TRANSPORT", "inline")
    assert config() == ("inline", 0)
    assert config("--tensor-transport", "auto") == ("auto", 256 << 20)
    for options, words in (
        (("--mm-processor-cache-gb", "1"), "'inline' uses no store: .* got 1073741824"),
        (("--tensor-transport", "store", "--mm-processor-cache-gb", "0"), "'store' needs a store: .* is 0"),
        (("--tensor-transport", "device"), "'device' needs device 'cuda', and a store"),
        (
            ("--tensor-transport", "device", "--device", "cuda", "--mm-processor-cache-gb", "0"),
            "'device' needs device 'cuda', and a store",
        ),
        (("--tensor-transport", "gpu"), "expected tensor_transport to be auto, store, inline or device, got 'gpu'"),
    ):
        with pytest.raises(ValueError, match=words):
            config(*options)


def test_images_are_encoded_once_where_they_are_in_a_store_on_a_cpu(tmp_path: Path) -> None:
    def mode(*options: str) -> tuple[str, int]:
        result = config_of(str(tmp_path), *options)
        return result.encoder_tp_mode, result.encoder_cache_nbytes

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert mode() == ("weights", 256 << 20)
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    assert mode() == ("store", 256 << 20)
    assert mode("--encoder-cache-gb", "2") == ("store", 2 << 30)
    assert mode("--encoder-cache-gb", "0") == ("weights", 0)
    for options in (("--tensor-transport", "inline"), ("--device-model", "simulated")):
        assert mode(*options) == ("weights", 256 << 20)
    assert mode("--device", "cuda") == ("data", 256 << 20)
    for chosen in ("weights", "data", "store"):
        assert mode("--mm-encoder-tp-mode", chosen)[0] == chosen
        assert mode("--mm-encoder-tp-mode", chosen, "--mm-processor-cache-gb", "0")[0] == chosen


def test_generate_and_serve_build_the_same_engine_config(monkeypatch: pytest.MonkeyPatch) -> None:
    output: list[EngineConfig] = []
    monkeypatch.setattr("penstock.engine.offline.run", lambda config, *_: output.append(config))
    monkeypatch.setattr("penstock.server.server_launcher.run", lambda config, *_: output.append(config))
    options = ("--max-model-len", "512", "--max-num-seqs", "3", "--output-processors", "0", "--dtype", "float32")
    for more in ((), ("--device-model", "simulated", "--step-ms", "2")):
        for command in ("generate", "serve"):
            namespace = cli.parser().parse_args([command, *options, *more])
            namespace.run(namespace)
    common = [field.name for field in option_fields(EngineConfig) if field.option.group in (*GROUPS, "logging")]
    for item, other in (output[:2], output[2:]):
        assert all(getattr(item, name) == getattr(other, name) for name in ("simulated", *common))
        assert (item.max_model_len, item.max_num_seqs, item.output_processors, item.dtype) == (512, 3, 0, "float32")
    assert [config.model for config in output[1:3]] == [SHIPPED, ""]
    assert output[2].simulated == SimulatedDevice(step_seconds=0.002)


def test_allowed_origins_are_a_json_list_or_separated_by_commas() -> None:
    def options_of(*options: str) -> ServerOptions:
        return arguments.server_options(parsed(*options))

    assert options_of().allowed_origins == () and options_of().allowed_methods == ("*",)
    for text in ('["https://a.example", "http://b:1"]', "https://a.example,http://b:1"):
        result = options_of("--allowed-origins", text, "--allowed-methods", "GET", "--allow-credentials")
        assert result.allowed_origins == ("https://a.example", "http://b:1")
        assert result.allowed_methods == ("GET",) and result.allow_credentials
    assert options_of("--allowed-origins", "*").allowed_origins == ("*",)


def test_wrong_options_are_one_line_before_a_process_starts(capfd: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        simulated = ("--device-model", "simulated")
        for options, words in (
            ((*simulated, "--port", "99999"), "expected port to be a whole number from 0 to 65535, got 99999"),
            ((*simulated, "--port", str(taken.getsockname()[1])), "in use"),
            (
                (*simulated, "--api-server-count", "0"),
                "expected api_server_count to be a whole number from 1 to 32, got 0",
            ),
            ((*simulated, "--nnodes", "2", "--node-rank", "1"), "--node-rank 1 needs --headless"),
            ((*simulated, "--nnodes", "2", "--headless"), "--node-rank 0 takes no --headless"),
            (
                (*simulated, "--nnodes", "2", "--node-rank", "2", "--headless"),
                "expected rank (--node-rank) from 0 to 1, got 2",
            ),
            (
                (*simulated, "--nnodes", "2", "-dp", "3"),
                "expected --data-parallel-size to be a multiple of --nnodes (2), got 3",
            ),
            ((*simulated, "--nnodes", "0"), "expected --data-parallel-size to be a multiple of --nnodes (0)"),
            ((*simulated, "--nnodes", "2", "--port", "0"), "hexadecimal digits in PENSTOCK_NODE_SECRET"),
            ((*simulated, "--nodes-tls-cert", "a.pem"), "for several nodes: --nnodes is 1"),
            ((*simulated, "--nnodes", "2", "--nodes-tls-cert", "a.pem"), "needs all of tls_cert, tls_key and tls_ca"),
            (
                (*simulated, "--nnodes", "2", *(f"--nodes-tls-{name}=/nowhere" for name in ("cert", "key", "ca"))),
                "No such file or directory: '/nowhere'",
            ),
            ((*simulated, "--port", "0", "--host", "no such host"), "penstock serve:"),
            (("/nowhere", "--port", "0"), "got '/nowhere'"),
            (
                (*simulated, "--allowed-local-media-path", "/nowhere"),
                "expected allowed_local_media_path to be a folder, got '/nowhere'",
            ),
            ((*simulated, "--allowed-media-domains", "a.org,http://b.org"), "expected a host as in example.org"),
            ((*simulated, "--allowed-origins", "https://a.example/"), "got 'https://a.example/'"),
            ((*simulated, "--allowed-origins", "*", "--allow-credentials"), "needs allowed_origins by name"),
            (
                (*simulated, "--limit-mm-per-prompt", "image=-1"),
                "expected count (--limit-mm-per-prompt) to be a whole number of 0 or more, got -1",
            ),
            (
                (*simulated, "--mm-processor-cache-gb", "-1"),
                "expected store_nbytes (--mm-processor-cache-gb) to be a whole number from 0",
            ),
            (
                (*simulated, "--tensor-transport", "device"),
                "tensor_transport 'device' needs device 'cuda', and a store (--mm-processor-cache-gb)",
            ),
            (
                (*simulated, "--image-processor-device", "cuda"),
                "image_processor_device 'cuda' needs tensor_transport 'device', and workers on one node",
            ),
            (
                (*simulated, "--encoder-cache-gb", "-1"),
                "expected encoder_cache_nbytes (--encoder-cache-gb) to be a whole number from 0",
            ),
            (
                (*simulated, "--encoder-cache-gb", "nan"),
                "expected --encoder-cache-gb to be a finite number, got nan",
            ),
            (
                (*simulated, "--mm-encoder-tp-mode", "store", "--encoder-cache-gb", "0"),
                "mm_encoder_tp_mode 'store' needs a store of encodings: encoder_cache_nbytes (--encoder-cache-gb) is 0",
            ),
            (
                (*simulated, "--mm-processor-cache-gb", "inf"),
                "expected --mm-processor-cache-gb to be a finite number",
            ),
        ):
            assert cli.main(["serve", *options]) == 2
            output = capfd.readouterr().err
            assert words in output and "process started" not in output, options
