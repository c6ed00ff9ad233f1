"""Options from a file: `--config FILE`, a mapping in YAML as vLLM has it. The command line takes precedence."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.cli.argument_parser import ArgumentParser
from penstock.installing import how_to_install

OPTION = "--config"


def with_config_file(words: list[str], parser: ArgumentParser) -> list[str]:
    """Returns the words of a command line, behind the words of the file of options. Raises ValueError."""
    rest, paths = [], []
    iterator = iter(words)
    for word in iterator:
        if word == OPTION:
            paths.append(next(iterator, ""))
        elif word.startswith(f"{OPTION}="):
            paths.append(word.partition("=")[2])
        else:
            rest.append(word)
    if not paths:
        return rest
    if len(paths) > 1 or not paths[0]:
        raise ValueError(f"{OPTION}: expected a single FILE, got {', '.join(map(repr, paths))}")
    fields = _read(paths[0])
    model = fields.pop("model", None)
    actions = {name: action for action in parser.arguments for name in action.option_strings}
    words_of_file = [word for name, value in fields.items() for word in _words(f"--{name}", value, actions)]
    has_model = bool(rest) and not rest[0].startswith("-")
    models = rest[:1] if has_model else [] if model is None else [str(model)]
    return [*models, *words_of_file, *rest[has_model:]]


def _read(path: str) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise ValueError(f"{OPTION}: {error}: {how_to_install('engine')}") from None
    try:
        with open(path, encoding="utf-8") as file:
            fields = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{OPTION} {path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise ValueError(f"{OPTION} {path}: expected options by name, as in 'port: 8000'")
    return {name.replace("_", "-"): value for name, value in fields.items()}


def _words(flag: str, value: Any, actions: Mapping[str, argparse.Action]) -> Iterator[str]:
    """Yields the words of an option: none for null, and none for false without a `--no-` option."""
    if value is None or value == []:
        return
    if isinstance(value, bool):
        no = f"--no-{flag[2:]}"
        if value or no in actions:
            yield flag if value else no
    elif isinstance(value, list) and getattr(actions.get(flag), "nargs", None) == "+":
        yield flag
        yield from map(str, value)
    elif isinstance(value, list):
        yield from (f"{flag}={item}" for item in value)
    else:
        yield f"{flag}={json.dumps(value) if isinstance(value, Mapping) else value}"
