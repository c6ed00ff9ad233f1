"""An option is declared once, as a field of a config: parser, checks and documents follow from the declaration."""

import argparse
from typing import Annotated, Any

import msgspec
import pytest

from penstock import cli
from penstock.engine import cli_args
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.option import MIB, Option, add_options, check_options, option_fields, option_values
from penstock.integrations.ray_serve.engine_options import EngineOptions
from penstock.server import cli_args as server_args
from tests.support.documents import load_making


class LongerConfig(EngineConfig, frozen=True, kw_only=True):
    max_new_things: Annotated[int, Option("scheduling", ge=1, le=9)] = 3
    """Maximum number of new
    things"""


def test_new_option_is_one_declaration(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for module in (cli_args, server_args):
        monkeypatch.setattr(module, "EngineConfig", LongerConfig)
    words = ["--device-model", "simulated", "--max-new-things"]
    for command, engine_config in (("serve", server_args.engine_config), ("generate", cli_args.engine_config)):
        assert engine_config(cli.parser().parse_args([command, *words, "4"])).max_new_things == 4
        assert engine_config(cli.parser().parse_args([command, *words[:2]])).max_new_things == 3
        assert cli.main([command, *words, "10"]) == 2
        assert "expected max_new_things to be a whole number from 1 to 9, got 10" in capfd.readouterr().err
    row = "| `--max-new-things N` | Maximum number of new things (default: 3) |"
    assert load_making("commands").page().count(row) == 2
    assert "`--max-new-things`" in load_making("tables").both().partition("Only Penstock has:")[2]
    assert "--max-new-things=5" in EngineOptions.parse("", {"max_new_things": 5}).arguments


# ── each kind of declaration ─────────────────────────────────────────────────────────────────────────────────────────
class ThingConfig(msgspec.Struct, frozen=True, kw_only=True):
    nbytes: Annotated[int, Option("things", name="max-thing-mb", unit=MIB, ge=1)] = 4 << 20
    """Maximum size of a thing"""
    share: Annotated[float, Option("things", metavar="SHARE", gt=0, le=1)] = 0.5
    """Share of things"""
    names: Annotated[tuple[str, ...], Option("things", metavar="NAME", action="append", if_absent="none")] = ()
    """Names of things"""
    color: Annotated[str | None, Option("things", choices=("red", "green", "blue"), if_absent="any")] = None
    """Color of things"""
    is_fast: Annotated[bool, Option("things")] = False
    """Process things fast"""
    internal: Annotated[int, Option(ge=0)] = 7
    """Number that programs set"""

    def __post_init__(self) -> None:
        check_options(self)


def parse(*words: str) -> ThingConfig:
    parser = argparse.ArgumentParser()
    add_options(parser, ("things",), (ThingConfig,))
    return ThingConfig(**option_values(ThingConfig, parser.parse_args(words)))


def test_command_line_gives_fields_in_their_units() -> None:
    assert parse() == ThingConfig()
    options = ("--max-thing-mb=2", "--share=1", "--names=a", "--names=b", "--color=red", "--is-fast")
    assert parse(*options) == ThingConfig(nbytes=2 << 20, share=1.0, names=("a", "b"), color="red", is_fast=True)
    assert not parse("--no-is-fast").is_fast


def test_field_without_a_group_is_no_option_of_a_command() -> None:
    with pytest.raises(SystemExit):
        parse("--internal=8")
    namespace = argparse.Namespace(internal=8, share=0.25)
    assert option_values(ThingConfig, namespace) == {"share": 0.25}


def test_help_is_the_text_below_the_field_with_the_default_in_its_unit() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, ("things",), (ThingConfig,))
    help_text = " ".join(parser.format_help().split())
    for text in (
        "--max-thing-mb MIB Maximum size of a thing (default: 4 MiB)",
        "--share SHARE Share of things (default: 0.5)",
        "--color {red,green,blue} Color of things (default: any)",
        "--is-fast, --no-is-fast Process things fast (default: off)",
    ):
        assert text in help_text
    assert [field.help for field in option_fields(ThingConfig)][-1] == "Number that programs set"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"nbytes": 0}, "expected nbytes (--max-thing-mb) to be a whole number of 1 or more, got 0"),
        ({"share": 0}, "expected share to be a number above 0 and up to 1, got 0"),
        ({"share": float("nan")}, "expected share to be a number above 0 and up to 1, got nan"),
        ({"color": "pink"}, "expected color to be red, green or blue, got 'pink'"),
        ({"nbytes": 1.5}, "expected nbytes (--max-thing-mb) to be a whole number of 1 or more, got 1.5"),
        ({"nbytes": True}, "expected nbytes (--max-thing-mb) to be a whole number of 1 or more, got True"),
        ({"is_fast": 1}, "expected is_fast to be True or False, got 1"),
        ({"internal": None}, "expected internal to be a whole number of 0 or more, got None"),
    ],
)
def test_value_out_of_range_is_refused_with_field_option_and_range(fields: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        ThingConfig(**fields)
    assert str(caught.value) == text
