"""Prompts, and what stands on the command line."""

import argparse
import asyncio
import contextlib
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from penstock import cli
from penstock.engine.config import SHIPPED, EngineConfig, SimulatedDevice
from penstock.server import arguments
from penstock.server.errors import ApiError
from penstock.server.words import LONG, BytesWords, Reader

SIMULATED = EngineConfig(simulated=SimulatedDevice(vocabulary=200))


class Slow(BytesWords):
    """Done when the loop has had a turn."""

    def __init__(self) -> None:
        super().__init__(200)
        self.loop_goes_on = threading.Event()

    def encode(self, text: str, add_special: bool) -> list[int]:
        assert self.loop_goes_on.wait(10), "the loop was held up"
        return super().encode(text, add_special)


def test_a_long_prompt_does_not_hold_up_the_loop() -> None:
    async def scene() -> None:
        words = Slow()
        with contextlib.closing(Reader(SIMULATED, words)) as reader:
            asking = asyncio.ensure_future(reader.ids("x" * (LONG + 1)))
            asyncio.get_running_loop().call_later(0.01, words.loop_goes_on.set)
            assert len(await asking) == LONG + 1
            assert await reader.ids("abc") == [97, 98, 99]  # a short one is done at once

    asyncio.run(scene())


def test_ids_for_which_the_model_has_no_place_are_refused() -> None:
    async def scene() -> None:
        with contextlib.closing(Reader(SIMULATED, BytesWords(200))) as reader:
            assert await reader.ids([0, 199]) == [0, 199]
            with pytest.raises(ApiError, match="below 200, got 200"):
                await reader.ids([1, 200, 3])
            too_long = [1] * SIMULATED.max_model_len + [200]  # which is told of it by whoever looks at lengths
            assert await reader.ids(too_long) == too_long

    asyncio.run(scene())


def test_there_is_a_store_where_the_model_takes_images(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    arguments.add(parser)

    def store_nbytes(*options: str) -> int:
        return arguments.engine_config(parser.parse_args([str(tmp_path), *options])).store_nbytes

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert store_nbytes() == 0 and store_nbytes("--image-store-mb", "3") == 3 << 20
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    assert store_nbytes() == 256 << 20 and store_nbytes("--image-store-mb", "0") == 0
    assert store_nbytes("--device-model", "simulated") == 0
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json is not what was expected"):
        store_nbytes()


def test_without_a_model_the_one_that_ships_is_served() -> None:
    parser = argparse.ArgumentParser()
    arguments.add(parser)
    assert arguments.engine_config(parser.parse_args([])).model == SHIPPED
    assert arguments.engine_config(parser.parse_args(["--device-model", "simulated"])).model == ""
    assert Path(SHIPPED, "config.json").exists()


def test_what_cannot_be_served_is_said_before_anything_starts(capfd: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        simulated = ("--device-model", "simulated")
        for options, words in (
            ((*simulated, "--port", "99999"), "port is between"),
            ((*simulated, "--port", str(taken.getsockname()[1])), "in use"),
            ((*simulated, "--api-servers", "0"), "api_servers is between"),
            ((*simulated, "--port", "0", "--host", "no such host"), "penstock serve:"),
            (("/nowhere", "--port", "0"), "not '/nowhere'"),
            ((*simulated, "--allowed-local-media-path", "/nowhere"), "media_folders are folders, not '/nowhere'"),
            ((*simulated, "--allowed-media-domains", "a.org,http://b.org"), "expected a host as in example.org"),
            ((*simulated, "--max-images", "0"), "count is 1 or more, not 0"),
            ((*simulated, "--image-store-mb", "-1"), "store_nbytes is between"),
        ):
            assert cli.main(["serve", *options]) == 2
            said = capfd.readouterr().err
            assert words in said and "process started" not in said, options
