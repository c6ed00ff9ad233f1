"""Declares an option once, as a field of a config. Command line, checks and tables of the documents follow from it.

    class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
        max_num_seqs: Annotated[int, Option("scheduling", ge=1, le=65535)] = 256
        \"""Maximum number of sequences in a batch\"""

        def __post_init__(self) -> None:
            check_options(self)

The field has the name, the type and the default, and the text below it is the help. `add_options` adds
`--max-num-seqs N` to a parser, and `option_values` returns the fields that a command line gives.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import itertools
import math
import re
import sys
import typing
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, NamedTuple

import msgspec

MAX_SECONDS = 1_000_000
NUMBERS = {int: "a whole number", float: "a number"}
_HUMAN = re.compile(r"(\d+(?:\.\d+)?)([kmgt])|(\d+)([KMGT]?)")


class Unit(NamedTuple):
    """A unit of a command line."""

    name: str
    value: float  # in the unit of the field


MS, MEGAPIXELS, MIB, GIB = Unit("ms", 1e-3), Unit("megapixels", 10**6), Unit("MiB", 1 << 20), Unit("GiB", 1 << 30)


class Option(msgspec.Struct, frozen=True):
    """Facts of an option that the name, the type and the default of its field do not give."""

    group: str = ""  # of the help; "": programs set the field, and no command does
    ge: float | None = None
    le: float | None = None
    gt: float | None = None
    choices: tuple[str, ...] = ()
    name: str = ""  # of the option, without dashes; "": the field's
    short: str = ""
    metavar: str = ""
    unit: Unit | None = None  # of the option, if not the field's
    default: Any = msgspec.UNSET  # of the option, if not the field's
    if_absent: str = ""  # what takes the place of a default; "": the option has one
    parse: Callable[[str], Any] | None = None  # None: by the field's type
    nargs: str | None = None  # "?": an argument without a name
    action: str | None = None


class OptionField(NamedTuple):
    """A field of a config, with its option."""

    config: type[msgspec.Struct]
    name: str
    type: Any  # without None
    is_optional: bool
    default: Any
    option: Option

    @property
    def help(self) -> str:
        return _help_texts(self.config)[self.name]

    def __str__(self) -> str:
        return self.help  # argparse fills `%(field)s` in when help is printed: the text is parsed from the source

    @property
    def dest(self) -> str:
        return (self.option.name or self.name).replace("-", "_")

    @property
    def flag(self) -> str:
        return self.option.metavar if self.option.nargs == "?" else f"--{self.dest.replace('_', '-')}"

    @property
    def range(self) -> str:
        """Returns the allowed values in words: "a whole number from 1 to 16"."""
        option = self.option
        if self.type is bool:
            return "True or False"
        if option.choices:
            return f"{', '.join(option.choices[:-1])} or {option.choices[-1]}"
        text = NUMBERS.get(self.type, "a text" if self.type is str else "texts")
        if option.gt is not None:
            return f"{text} above {option.gt} and up to {option.le}"
        if option.ge is None:
            return text
        return f"{text} of {option.ge} or more" if option.le is None else f"{text} from {option.ge} to {option.le}"

    def check(self, value: Any) -> None:
        """Raises TypeError for a value of another type, and ValueError for a value out of range."""
        if value is None and self.is_optional:
            return
        flag = f" ({self.flag})" if self.option.name else ""
        refusal = f"expected {self.name}{flag} to be {self.range}, got {value!r}"
        if self.type is bool or self.type in NUMBERS:
            types = (int, float) if self.type is float else self.type
            if not isinstance(value, types) or (isinstance(value, bool) and self.type is not bool):
                raise TypeError(refusal)
        option = self.option
        if not (
            (not option.choices or value in option.choices)
            and (option.ge is None or value >= option.ge)
            and (option.gt is None or value > option.gt)
            and (option.le is None or value <= option.le)
        ):
            raise ValueError(refusal)

    def add_to(self, add_argument: Callable[..., Any]) -> None:
        option, default = self.option, self._command_line_default()
        unit = f" {option.unit.name}" if option.unit is not None else ""
        text = ("on" if default else "off") if self.type is bool else option.if_absent or f"%(default)s{unit}"
        settings: dict[str, Any] = {"default": default}
        if self.type is bool:
            settings["action"] = option.action or argparse.BooleanOptionalAction
        elif option.choices and not option.metavar:
            settings["choices"] = option.choices
        else:
            settings["metavar"] = option.metavar or ("N" if option.unit is None else option.unit.name.upper())
            settings["type"] = option.parse or (self.type if self.type in NUMBERS else str)
            settings |= {key: value for key in ("nargs", "action") if (value := getattr(option, key)) is not None}
        names = [self.dest] if option.nargs == "?" else [self.flag, option.short]
        action = add_argument(*filter(None, names), **settings)
        action.field, action.help = self, f"%(field)s (default: {text})"

    def _command_line_default(self) -> Any:
        """Returns the default in the option's unit; None: the option has none."""
        if self.option.default is not msgspec.UNSET:
            return self.option.default
        if self.option.if_absent:
            return None
        if self.option.unit is None:
            return self.default
        default = self.default / self.option.unit.value
        return default if self.option.parse is not None else self.type(default)

    def from_command_line(self, value: Any) -> Any:
        """Returns the field's value for the option's. Raises ValueError."""
        if isinstance(value, list):
            return tuple(item for part in value for item in (part if isinstance(part, list) else [part]))
        if self.option.unit is None:
            return value
        if not math.isfinite(value):
            raise ValueError(f"expected {self.flag} to be a finite number, got {value}")
        return round(value * self.option.unit.value) if self.type is int else value * self.option.unit.value


@functools.cache
def option_fields(config: type[msgspec.Struct]) -> tuple[OptionField, ...]:
    """Returns the fields of a config that have an `Option`."""
    fields = []
    for field in msgspec.structs.fields(config):
        option = next((item for item in getattr(field.type, "__metadata__", ()) if isinstance(item, Option)), None)
        if option is not None:
            kind = typing.get_args(field.type)[0]
            kinds = typing.get_args(kind) if NoneType in typing.get_args(kind) else (kind,)
            fields.append(OptionField(config, field.name, kinds[0], NoneType in kinds, field.default, option))
    return tuple(fields)


def option_field(config: type[msgspec.Struct], name: str) -> OptionField:
    return next(field for field in option_fields(config) if field.name == name)


@functools.cache
def _help_texts(config: type[msgspec.Struct]) -> dict[str, str]:
    """Returns the text below each field, which only the source has: it is read for help and documents alone."""
    texts = {}
    for base in config.__mro__[config.__mro__.index(msgspec.Struct) - 1 :: -1]:
        for field, text in itertools.pairwise(_class_bodies(base.__module__)[base.__name__]):
            match field, text:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(sentence))):
                    texts[name] = " ".join(sentence.split())
    return texts


@functools.cache
def _class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    """Returns the statements of each class of a module. The file of several configs is parsed once."""
    nodes = ast.parse(inspect.getsource(sys.modules[module])).body
    return {node.name: node.body for node in nodes if isinstance(node, ast.ClassDef)}


def check_options(config: msgspec.Struct) -> None:
    """Checks the type and the range of each field of a config. Raises TypeError and ValueError."""
    for field in option_fields(type(config)):
        field.check(getattr(config, field.name))


def add_options(
    parser: argparse.ArgumentParser, groups: Sequence[str], configs: Sequence[type[msgspec.Struct]]
) -> None:
    """Adds the options of `configs` in `groups`, group by group."""
    for title in groups:
        add_argument = parser.add_argument_group(title).add_argument
        for field in (field for config in configs for field in option_fields(config) if field.option.group == title):
            field.add_to(add_argument)


def option_values(config: type[msgspec.Struct], options: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of a config that a command line gives. A field without an option there keeps its default.
    Raises ValueError."""
    values = {}
    for field in option_fields(config):
        value = getattr(options, field.dest, None) if field.option.group else None
        if value is not None:
            values[field.name] = field.from_command_line(value)
    return values


def parse_object(text: str) -> dict[str, Any]:
    """Returns the object that a text in JSON says."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"expected an object in JSON: {error}") from None


def parse_human_int(text: str) -> int:
    """Returns the number that `4096`, `4k` (4,000), `4.5k` or `4K` (4,096) says, with k, m, g and t, as in vLLM."""
    match = _HUMAN.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a whole number like 4096, 4k (4,000) or 4K (4,096), got {text!r}")
    decimal, power, binary, shift = match.groups()
    if decimal is not None:
        return round(float(decimal) * 1000.0 ** ("kmgt".index(power) + 1))
    return int(binary) << 10 * " KMGT".index(shift or " ")
