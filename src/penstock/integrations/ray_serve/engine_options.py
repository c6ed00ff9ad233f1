"""Options of the engine as keywords, checked where they are given and turned into the command line of a replica.

The names are those of `penstock serve`, with `_` for `-`: `tensor_parallel_size=2` is `--tensor-parallel-size 2`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from typing import NoReturn, TypeAlias

from penstock.cli.argument_parser import ArgumentParser
from penstock.cli.vllm_options import explain
from penstock.engine.protocol.config import Nodes
from penstock.engine.protocol.option import option_fields
from penstock.server import cli_args as server_args
from penstock.server import node_args

OptionValue: TypeAlias = "str | int | float | Sequence[str] | Mapping[str, int] | None"
OF_SERVE = ("host", "port")  # a replica's engine listens on a free port of the loopback address
OF_NODES = {field.dest for config in (Nodes, node_args.NodeRole) for field in option_fields(config)}
# A new request that finds no group is refused after so many seconds: another replica may serve it.
DEFAULTS: dict[str, OptionValue] = {"queue_timeout": 1}
SWITCHES: dict[object, bool] = {True: True, False: False, "true": True, "false": False}  # text: of `serve run … x=true`


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """The options of each replica's engine."""

    arguments: tuple[str, ...]  # of `penstock serve`
    max_open_requests: int  # of all server processes of an engine
    workers: int  # processes that compute, each on a device of its own where there are any
    is_on_cuda: bool
    shutdown_timeout: float  # seconds for which an engine that is to end answers open requests

    @classmethod
    def parse(cls, model: str, options: Mapping[str, OptionValue]) -> EngineOptions:
        """Raises ValueError for an unknown option, and for a value of the wrong kind.

        Ranges and the model's files are checked where a replica starts, which may be another machine.
        """
        parser = _OptionParser(prog="penstock serve", add_help=False)
        server_args.add(parser)
        known = {argument.dest: argument for argument in parser.arguments if argument.option_strings}
        arguments = [model] if model else []
        for name, value in {**DEFAULTS, **options}.items():
            if name in OF_SERVE:
                raise ValueError(f"{name} is an option of Ray Serve: give it in its http_options")
            if name in OF_NODES:
                raise ValueError(f"{name} is for one server over several machines, and a replica is on one")
            if name not in known:
                if explanation := explain("--" + name.replace("_", "-")):
                    raise ValueError(explanation)
                nearest = difflib.get_close_matches(name, known, 1)
                hint = f": did you mean {nearest[0]}?" if nearest else ""
                raise ValueError(f"{name} is no option of penstock serve{hint}")
            arguments += _words(known[name], name, DEFAULTS.get(name) if value is None else value)
        parsed = parser.parse_args(arguments)
        return cls(
            arguments=tuple(arguments),
            max_open_requests=parsed.max_open_requests * parsed.api_server_count,
            workers=parsed.tensor_parallel_size * node_args.groups_of_this_node(parsed),
            is_on_cuda=parsed.device_model == "real" and parsed.device.startswith("cuda"),
            shutdown_timeout=parsed.shutdown_timeout,
        )


class _OptionParser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _words(argument: argparse.Action, name: str, value: OptionValue) -> list[str]:
    """Returns the words of the command line for one option; None leaves its default."""
    if value is None:
        return []
    flag = "--" + name.replace("_", "-")
    if isinstance(argument, argparse.BooleanOptionalAction):
        if not isinstance(value, (bool, str)) or value not in SWITCHES:
            raise ValueError(f"expected {name} to be true or false, got {value!r}")
        return [flag if SWITCHES[value] else f"--no-{flag[2:]}"]
    if isinstance(value, bool):
        raise ValueError(f"expected a value of {name}, got {value}")
    if isinstance(value, Mapping):
        value = json.dumps(dict(value))
    if isinstance(value, (str, int, float)):
        return [f"{flag}={value}"]
    values = [str(item) for item in value]
    return [flag, *values] if argument.nargs == "+" else [f"{flag}={item}" for item in values]
