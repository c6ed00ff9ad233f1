"""What options there are, what their help says, and what a misspelled one is answered with."""

import errno
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock import Ring, cli
from penstock.cli.vllm_options import ALWAYS_ON, DIFFERENCES, UNSUPPORTED
from penstock.engine.protocol.config import EngineConfig
from penstock.errors import MemoryExhausted
from penstock.server import cli_args as server_args
from penstock.server.cli_args import server_options


@pytest.mark.parametrize(
    ("words", "command", "text"),
    [
        (["serv"], "penstock", "did you mean serve?"),
        (["serve", "--prot", "80"], "penstock serve", "unrecognized arguments: --prot: did you mean --port?"),
        (["serve", "--prot=80"], "penstock serve", "did you mean --port?"),
        (["serve", "--prot", "--hots"], "penstock serve", "did you mean --port, --host?"),
        (["serve", "--zzz"], "penstock serve", "unrecognized arguments: --zzz\n"),
        (["serve", "model", "other"], "penstock serve", "unrecognized arguments: other\n"),
        (["serve", "--log-format", "jsn"], "penstock serve", "did you mean json?"),
        (["bench", "srve"], "penstock bench", "did you mean serve?"),
        (["bench", "serve", "--confg", "x"], "penstock bench serve", "unrecognized arguments: --confg x"),
        (["--versoin", "serve"], "penstock", "did you mean --version?"),
        (["zzz"], "penstock", "invalid choice: 'zzz'"),
        (["serve", "--tensor-parallel", "2"], "penstock serve", "did you mean --tensor-parallel-size?"),
        (["serve", "--max-num-seq", "2"], "penstock serve", "did you mean --max-num-seqs?"),
        (["doctor", "--prot", "80"], "penstock doctor", "did you mean --port?"),
    ],
)
def test_misspelled_word_is_answered_with_the_nearest_in_one_line(
    words: list[str], command: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{command}: error: ") and text in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--kv-cache-memory-bytes", "1"], "--num-gpu-blocks-override"),
        (["--seed=1"], "the field `seed` of a request"),
        (["--mm-tensor-ipc", "torch_shm"], "--tensor-transport"),
        (["--max-cpu-loras", "2"], "all adapters are in memory"),
        (["--no-async-scheduling"], "always on"),
        (["--scheduling-policy", "random"], "always on"),
        (["--zzz", "--middleware", "x"], "a proxy in front of the server"),
    ],
)
def test_option_of_vllm_alone_is_answered_with_what_there_is_instead(
    words: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", *words])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and answer in error, error
    assert "is an option of vLLM and not of penstock" in error and "did you mean" not in error


def test_table_of_vllm_names_no_option_that_serve_has() -> None:
    parser = cli.parser().commands["serve"][1]
    ours = {name for action in parser.arguments for name in action.option_strings}
    names = [name for row in (*ALWAYS_ON, *UNSUPPORTED) for name in row.options.split()]
    assert len(names) == len(set(names)) > 100 and not ours & set(names)
    assert DIFFERENCES.keys() - {"MODEL"} == set(VLLM_SERVE)


def test_data_plane_alone_has_the_commands_that_need_no_engine() -> None:
    hide = "import sys; sys.modules['penstock.server'] = sys.modules['penstock.engine'] = None"
    program = f"{hide}; from penstock.cli import parser; print(*parser().commands)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["inspect", "trace", "measure", "bench", "doctor"]


# ── help ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
REQUIRED = {"measure": ["1"], "trace": ["1"], "migrate": ["1"]}  # the arguments without which a command does not parse
COMMANDS = ("inspect", "trace", "measure", "generate", "serve", "migrate", "top", "bench serve", "doctor")
ENTRY = re.compile(r"^  (\S.*?)(?:  |\n {8}) *(\S.*)$", re.MULTILINE)  # where help is not broken into lines


HEAVY = {"torch", "transformers", "starlette", "httptools", "rich", "rapidfuzz", "prometheus_client"}
HELP_ALONE = """
import sys, contextlib
from penstock.cli import main
for command in sys.argv[1:]:
    with contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
print(*sys.modules, file=sys.stderr)
"""


def test_help_of_every_command_imports_no_package_of_an_extra() -> None:
    commands = ["", *COMMANDS]
    words = [sys.executable, "-c", HELP_ALONE, *commands]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    imported = set(done.stderr.split())
    assert done.stdout.count("usage: penstock") == len(commands) and "penstock.cli" in imported
    assert not HEAVY & imported


def test_inspect_of_channels_alone_imports_no_engine() -> None:
    """The time until a hang is named begins with the start of the command."""
    program = "import sys; from penstock.cli import main; main(['inspect', sys.argv[1]]); print(*sys.modules)"
    with Ring().open_sender():
        words = [sys.executable, "-c", program, str(os.getpid())]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    modules = done.stdout.splitlines()[-1].split()
    assert "penstock.tools.inspect" in modules
    assert not [name for name in modules if name.startswith(("penstock.engine", "penstock.server"))]


def help_of(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "4000")
    with pytest.raises(SystemExit) as ended:
        cli.main([*command.split(), "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def entries_of(text: str) -> dict[str, str]:
    """The help of each option and argument, by the first of its names."""
    _, _, groups = text.partition("\n\n")
    result = {re.split(r"[ ,]", name)[0]: output for name, output in ENTRY.findall(groups)}
    named = set(re.findall(r"^  ([^\s,]+)", groups, re.MULTILINE))
    assert result.keys() == named, f"without help: {named - result.keys()}"
    del result["-h"]
    return result


def test_each_command_has_its_help_looked_at(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    for command in ("", "bench"):
        listed = re.findall(r"^    (\w+)", help_of(command, capsys, monkeypatch), re.MULTILINE)
        known = [name.removeprefix(command).split()[0] for name in COMMANDS if name.startswith(command)]
        assert listed == known


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_an_option_is_a_sentence_that_ends_with_its_default(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = cli.parser().parse_args([*command.split(), *REQUIRED.get(command, [])])
    for name, text in entries_of(help_of(command, capsys, monkeypatch)).items():
        match = re.fullmatch(r"[A-Z].+ \((?:default: (.+)|required.*)\)", text)
        assert match is not None, f"{name}: {text!r}"
        default = getattr(options, name.removeprefix("--").replace("-", "_"), None)
        if isinstance(default, bool):
            assert match[1] == ("on" if default else "off"), name
        elif isinstance(default, int | float) or (isinstance(default, str) and default):
            assert str(default) in match[1], f"{name}: {text!r}, but it is {default!r}"


def test_help_of_serve_comes_in_groups(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    groups = re.findall(r"^(\w+):$", help_of("serve", capsys, monkeypatch), re.MULTILINE)
    engine, server = (
        "model parallelism scheduling cache migration lora".split(),
        "nodes server multimodal limits logging".split(),
    )
    assert groups == ["options", *engine, *server]


# ── vLLM's names ─────────────────────────────────────────────────────────────────────────────────────────────────────
VLLM_SERVE = (
    "--allow-credentials --allowed-headers --allowed-local-media-path --allowed-media-domains --allowed-methods "
    "--allowed-origins --api-key --api-server-count --block-size --chat-template --config --convert "
    "--data-parallel-size --default-chat-template-kwargs --download-dir --dtype --enable-log-requests "
    "--enable-prefix-caching --enable-lora --enable-prompt-embeds --enforce-eager --generation-config "
    "--gpu-memory-utilization --headless --host --limit-mm-per-prompt --lora-modules --master-addr --master-port "
    "--max-logprobs --max-lora-rank --max-loras --max-model-len --max-num-batched-tokens --max-num-seqs "
    "--mm-encoder-tp-mode --mm-processor-cache-gb --nnodes --node-rank --num-gpu-blocks-override "
    "--otlp-traces-endpoint --override-generation-config --port --reasoning-parser --revision --root-path --runner "
    "--served-model-name "
    "--shutdown-timeout --ssl-certfile --ssl-keyfile --stream-interval --tensor-parallel-size --tool-call-parser "
    "--uds"
).split()
OURS_SERVE = (
    "--client-timeout --collectives --device --device-model --devices --encoder-cache-gb --fork-server --huge-pages "
    "--image-processor-device --keep-kv-cache --log-format --log-level --max-body-mb "
    "--max-concurrent-videos --max-image-mb --max-image-megapixels --max-open-requests --max-stored-responses "
    "--max-video-frames --response-store-mb --response-store-seconds "
    "--max-video-mb --max-video-megapixels --max-video-seconds --media-mb-in-flight --migration-limit "
    "--migration-max-seq-len --migration-timeout --nodes-tls-ca --nodes-tls-cert "
    "--nodes-tls-key --numa-node --output-processors --queue-timeout --ray-address --share-weights --step-ms "
    "--tensor-parallel-over-nodes --tensor-transport --threads --video-decode-timeout"
).split()
VLLM_BENCH = (
    "--backend --base-url --dataset-path --ignore-eos --input-len --max-concurrency --model --num-prompts "
    "--num-warmups --output-len --request-rate --result-filename --seed"
).split()
OURS_BENCH = ("--api-key --image-size --images --timeout --video-fps --video-seconds --video-size --videos").split()


@pytest.mark.parametrize(
    ("command", "expected"), [("serve", VLLM_SERVE + OURS_SERVE), ("bench serve", VLLM_BENCH + OURS_BENCH)]
)
def test_options_are_those_of_vllm_and_ours(
    command: str, expected: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = entries_of(help_of(command, capsys, monkeypatch)).keys() - {"MODEL"}
    assert result == set(expected)


@pytest.mark.parametrize(
    ("words", "outputs"),
    [
        ((), 1),
        (("--max-num-seqs", "64"), 0),
        (("--max-num-seqs", "65"), 1),
        (("--max-num-seqs", "64", "--output-processors", "2"), 2),
        (("--output-processors", "0"), 0),
        (("--output-processors", "auto", "--max-num-seqs", "8"), 0),
    ],
)
def test_few_sequences_are_detokenized_in_the_core(words: tuple[str, ...], outputs: int) -> None:
    options = cli.parser().parse_args(["serve", "--device-model", "simulated", *words])
    assert server_args.engine_config(options).output_processors == outputs


def test_short_names_are_those_of_vllm() -> None:
    options = cli.parser().parse_args(["serve", "-tp", "2", "-dp", "3", "-asc", "4", "-n", "5", "-r", "1"])
    assert (options.tensor_parallel_size, options.data_parallel_size, options.api_server_count) == (2, 3, 4)
    assert (options.nnodes, options.node_rank) == (5, 1)


def test_engines_over_nodes_are_all_on_each_of_them() -> None:
    words = ["serve", "--device-model", "simulated", "-tp", "4", "--tensor-parallel-over-nodes"]
    config = server_args.engine_config(cli.parser().parse_args([*words, "-n", "2"]))
    assert (config.data_parallel_size, config.all_groups, config.ranks) == (1, 1, range(2))
    config = server_args.engine_config(
        cli.parser().parse_args([*words, "-n", "2", "-r", "1", "--headless", "-dp", "3"])
    )
    assert (config.data_parallel_size, config.all_groups, config.ranks) == (3, 3, range(2, 4))
    with pytest.raises(ValueError, match="is for several nodes: --nnodes 2, or more"):
        server_args.engine_config(cli.parser().parse_args(words))


@pytest.mark.parametrize(
    ("text", "number"), [("4096", 4096), ("4k", 4000), ("4.5k", 4500), ("4K", 4096), ("1m", 10**6), ("2M", 1 << 21)]
)
def test_numbers_of_tokens_may_have_a_suffix(text: str, number: int) -> None:
    options = cli.parser().parse_args(["serve", "--max-model-len", text, "--max-num-batched-tokens", text])
    assert options.max_model_len == options.max_num_batched_tokens == number


@pytest.mark.parametrize(
    ("text", "images", "videos"),
    [('{"image": 5}', 5, 4), ("image=5", 5, 4), ('{"image": 0, "video": 0}', 0, 0), ("video=2,audio=0", 16, 2)],
)
def test_limits_of_images_and_videos_are_written_as_for_vllm(text: str, images: int, videos: int) -> None:
    options = server_options(cli.parser().parse_args(["serve", "--limit-mm-per-prompt", text]))
    assert (options.image_limits.count, options.video_limits.count) == (images, videos)


NO_NUMBERS = ["", "-1", "4.5", "4.5K", "k", "4x", "auto"]
NO_LIMITS = ["4", '{"image": "x"}', "image=x", "{", '{"audio": 2}', "image=1,audio=1"]


@pytest.mark.parametrize(
    ("option", "values", "text"),
    [
        ("--max-model-len", NO_NUMBERS, "a whole number like 4096"),
        ("--limit-mm-per-prompt", NO_LIMITS, "argument --limit-mm-per-prompt: expected numbers"),
    ],
)
def test_value_that_an_option_does_not_take_is_refused(
    option: str, values: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in values:
        with pytest.raises(SystemExit):
            cli.main(["serve", f"{option}={value}"])
        assert text in capsys.readouterr().err, value


def test_synonyms_of_types_are_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    output: list[EngineConfig] = []
    monkeypatch.setattr("penstock.server.server_launcher.run", lambda config, *_: output.append(config) or 0)
    for name in ("half", "float", "bfloat16"):
        assert cli.main(["serve", "--device-model", "simulated", "--dtype", name]) == 0
    assert [config.dtype for config in output] == ["float16", "float32", "bfloat16"]


def test_a_model_that_was_taken_for_one_more_name_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--served-model-name", "a", str(tmp_path)]) == 2
    assert "is a directory, and no MODEL is given" in capsys.readouterr().err


def test_inspect_ends_with_status_0_when_its_reader_has_ended() -> None:
    """As in `penstock inspect PID | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        with Ring() as ring:  # so that there is more to print than the first line
            command = [sys.executable, "-m", "penstock", "inspect", str(os.getpid())]
            done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
            assert (done.returncode, done.stderr) == (0, ""), ring
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([""], "expected MODEL to be a directory or a name of the hub, got ''"),
        (["--device-model", "simulated", "--served-model-name="], "expected served_model_name that are not empty"),
        (["--device-model", "simulated", "--uds", "/tmp/" + "x" * 108], "AF_UNIX path too long"),
    ],
)
def test_empty_names_and_a_socket_path_too_long_are_refused_in_one_line(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", *words]) != 0
    error = capsys.readouterr().err
    assert error.startswith("penstock serve: ") and text in error and "None" not in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (MemoryExhausted("mapping 20 MiB of segment 'tokens 0.0'"), "mapping 20 MiB of segment 'tokens 0.0'"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "[Errno 12] Cannot allocate memory"),
        (MemoryError(), "out of memory"),
    ],
    ids=lambda failure: type(failure).__name__,
)
@pytest.mark.parametrize(
    ("command", "runner"),
    [
        (["serve", "--device-model=simulated"], "penstock.server.server_launcher"),
        (["generate", "--device-model=simulated", "prompts"], "penstock.engine.offline"),
        (["bench", "serve"], "penstock.tools.load.command"),
    ],
    ids=["serve", "generate", "bench"],
)
def test_want_of_memory_is_told_in_one_line_with_status_1(
    command: list[str],
    runner: str,
    failure: Exception,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(*_: Any) -> int:
        raise failure

    monkeypatch.setattr(f"{runner}.run", run)
    assert cli.main(command) == 1
    words = " ".join(word for word in command if word.isalpha() and word != "prompts")
    assert capsys.readouterr().err == f"penstock {words}: {text}\n"


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_output_on_a_full_disk_is_told_in_one_line(unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    commands = [["--version"], ["inspect", str(os.getpid())]]
    if not unbuffered:  # argparse drops the error of an unbuffered write
        commands.append(["--help"])
    for words in commands:
        with Ring() as ring, open("/dev/full", "w") as full:
            command = [sys.executable, "-m", "penstock", *words]
            done = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
            expected = f"penstock: [Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}\n"
            assert (done.returncode, done.stderr) == (2, expected), ring


@pytest.mark.parametrize(
    ("redirection", "encoding"), [(">&-", "utf-8"), (">/dev/null", "ascii")], ids=["closed", "ascii"]
)
def test_inspect_prints_into_whatever_standard_output_is(redirection: str, encoding: str) -> None:
    with Ring(name="µ") as ring:
        command = f"{shlex.quote(sys.executable)} -m penstock inspect {os.getpid()} {redirection}"
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run(command, shell=True, env=environment, stderr=subprocess.PIPE, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, ""), ring
