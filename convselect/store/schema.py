"""What the rows of a store, and the files that are imported into one, may hold. msgspec compares them with these types.

SQLite keeps any type in any column, and JSON any value anywhere: what is read is compared before it is used. msgspec is
quick to import (3 ms, once per process, as its classes and a store's file are needed) and to compare (0.7 us a choice).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from convselect.store.file import InvalidRowError as InvalidRowError

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Revision = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Line = Annotated[str, Meta(max_length=20_000)]
Params = dict[Name, Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]]
Gain = Annotated[float, Meta(gt=0, le=1e6)]
"""Speed relative to native."""
Us = Annotated[float, Meta(gt=0, le=1e12)]
Time = Annotated[str, Meta(pattern=r"^[0-9]{4}[0-9T:.+Z -]{0,36}$")]
"""Date and time in UTC; sorts as text."""
Fingerprint = Annotated[str, Meta(pattern="^[0-9a-z_-]{1,64}$")]
Description = dict[str, Any]


class ChoiceRow(Struct, array_like=True, forbid_unknown_fields=True):
    """The columns of a choice, in `Choices.decision`'s order."""

    algorithm: Name
    params: Line | None
    source: Name
    gain: Gain | None
    revision: Revision
    samples: Count
    made: Time
    used: Time


class Made(Struct, array_like=True):
    """When a row was made."""

    made: Time


class Budgets(Struct, array_like=True):
    """The budgets of a choice: a text that is only compared."""

    text: Line


class MeasurementRow(Struct, array_like=True, forbid_unknown_fields=True):
    """A measurement's columns behind its problem's."""

    model: Annotated[str, Meta(max_length=1000)]
    algorithm: Name
    revision: Revision
    status: Literal["ok", "wrong", "failed", "censored"]
    clock: Name
    min_us: Us | None
    median_us: Us | None
    p20_us: Us | None
    p80_us: Us | None
    wall_us: Us | None
    rounds: Count
    repeat: Count
    block: Count
    pool: Line


class SentinelRow(Struct, array_like=True, forbid_unknown_fields=True):
    """A fixed problem's time before and after a block of measurements."""

    block: Count
    before_us: Us
    after_us: Us


class Block(Struct, array_like=True, forbid_unknown_fields=True):
    """The number of a block."""

    block: Count


class SelfTestRow(Struct, array_like=True, forbid_unknown_fields=True):
    """The columns of a self-test, in the table's order."""

    algorithm: Name
    revision: Revision
    direction: Name
    dtype: Name
    layout: Name
    version: Name
    passed: Literal[0, 1]


class CorrectionRow(Struct, array_like=True, forbid_unknown_fields=True):
    """The columns of a correction, in the table's order."""

    model: Name
    algorithm: Name
    layer: Line
    n: Annotated[float, Meta(gt=0, le=1e9)]
    mean: Annotated[float, Meta(ge=-10, le=10)]


class ExportedChoice(Struct, forbid_unknown_fields=True):
    """A choice in a file."""

    problem: Line
    budgets: Line
    algorithm: Name
    params: Params | None
    source: Name
    gain: Gain | None
    revision: Revision
    samples: Count
    made: Time


class ExportedGroup(Struct, forbid_unknown_fields=True):
    """The choices of one environment."""

    fingerprint: Fingerprint
    description: Description
    choices: list[ExportedChoice]


class ExportedChoices(Struct, forbid_unknown_fields=True):
    """A whole file, as JSON."""

    format: Literal["convselect choices"]
    version: Literal[1]
    environments: list[ExportedGroup]


class ExportedLine(Struct, forbid_unknown_fields=True):
    """A line of the same as CSV, with empty cells as None."""

    fingerprint: Fingerprint
    description: Line
    problem: Line
    budgets: Line
    algorithm: Name
    params: Line | None
    source: Name
    gain: Gain | None
    revision: Revision
    samples: Count
    made: Time


class MeasuredWhere(Struct):
    """The file beside a CSV file of measurements; it may say more."""

    machine: Description
    environments: list[Description] = []


Found = TypeVar("Found")
params_in = msgspec.json.Decoder(Params).decode
description_in = msgspec.json.Decoder(Description).decode
choices_in = msgspec.json.Decoder(ExportedChoices).decode
measured_where_in = msgspec.json.Decoder(MeasuredWhere).decode


def read(decode: Callable[[Any], Found], data: Any) -> Found:
    """What a decoder makes of JSON.

    Raises:
        ValueError: if it is not JSON, nested too deeply, or has other types or values; the message says where.
    """
    try:
        return decode(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except TypeError as error:  # neither a text nor bytes
        raise ValueError(str(error)) from None


def row(kind: type[Found], columns: Any, what: str) -> Found:
    """The columns of a row as an object of this kind.

    Raises:
        InvalidRowError: if they have other types or values; the message says which column of `what`.
    """
    try:
        return msgspec.convert(columns, kind)
    except ValueError as error:
        raise InvalidRowError(f"{what}: {_with_name(str(error), kind)}") from None


def line(kind: type[Found], cells: Any) -> Found:
    """The cells of a CSV file as an object of this kind: numbers are written as text there.

    Raises:
        ValueError: if they have other types or values.
    """
    return msgspec.convert(cells, kind, strict=False)


def _with_name(text: str, kind: Any) -> str:
    """msgspec names the columns of a row by number: "at `$[3]`"."""
    names = kind.__struct_fields__
    for i, name in enumerate(names):
        text = text.replace(f"`$[{i}]`", f"`{name}`")
    return text
