"""Copy choices and measurements from store to store: through JSON and CSV files, so that a team can ship them, or
directly.

Existing entries are kept unless `replace`: the user's own measurements describe the user's machine best.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from convselect.base.problem import ConvProblem
from convselect.kernels.pool import BY_NAME
from convselect.measure.rows import HEADER, environment_path, read_rows
from convselect.store.choices import Stored
from convselect.store.decision import Decision
from convselect.store.store import Store, pool_fingerprint

FORMAT = "convselect choices"
FORMAT_VERSION = 1
_FIELDS = (*Decision._fields, "made")
_COLUMNS = ("fingerprint", "description", *_FIELDS)


class Taken(NamedTuple):
    """The result of an import or a merge: numbers of rows added, and of rows left out since there was one already.
    Self-tests and corrections are only merged, not imported."""

    choices: int = 0
    choices_kept: int = 0
    measurements: int = 0
    measurements_kept: int = 0
    self_tests: int = 0
    corrections: int = 0


# ---- choices ----------------------------------------------------------------------------------------------------


def export_choices(store: Store, path: str | Path, environment: int | None = None) -> int:
    """Write choices, of one environment or of all, as JSON (`.json`) or CSV; returns their number.

    Raises:
        ValueError: if there are no choices, or the file's name has another ending.
    """
    fingerprints, about = store.fingerprints(), store.environments()
    found = list(store.decisions(environment))
    if not found:
        raise ValueError(f"{store.path} holds no choices")
    if Path(path).suffix == ".json":
        groups: dict[int, list[dict[str, Any]]] = {}
        for one in found:
            groups.setdefault(one.environment, []).append(as_record(one))
        environments = [
            {"fingerprint": fingerprints[number], "description": about[number], "choices": choices}
            for number, choices in groups.items()
        ]
        whole = {"format": FORMAT, "version": FORMAT_VERSION, "environments": environments}
        Path(path).write_text(json.dumps(whole, indent=1) + "\n")
    elif Path(path).suffix == ".csv":
        with Path(path).open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(_COLUMNS)
            for one in found:
                record = as_record(one)
                record["params"] = None if record["params"] is None else json.dumps(record["params"], sort_keys=True)
                head = (fingerprints[one.environment], json.dumps(about[one.environment], sort_keys=True))
                writer.writerow([*head, *(record[name] for name in _FIELDS)])
    else:
        raise ValueError(f"choices are written to .json or .csv, not to {path}")
    return len(found)


def as_record(one: Stored) -> dict[str, Any]:
    """A stored choice, as in a JSON file."""
    record: dict[str, Any] = one.decision._asdict()
    params = one.decision.params
    record |= {"problem": str(one.decision.problem), "params": None if params is None else dict(params)}
    return {**record, "made": one.made}


def import_choices(store: Store, path: str | Path, *, replace: bool = False) -> Taken:
    """Add choices that `export_choices` wrote; their source becomes "import".

    Args:
        replace: overwrite existing entries.

    Raises:
        ValueError: if the file is not a valid file of choices; the message says why. Then nothing is added.
        OSError: if it cannot be read.
    """
    groups: dict[str, tuple[Mapping[str, Any], list[tuple[Decision, str]]]] = {}
    for fingerprint, description, record in _records(Path(path)):
        groups.setdefault(fingerprint, (description, []))[1].append(_decision(path, record))
    taken = Taken()
    for fingerprint, (description, decisions) in groups.items():
        number = store.environment(description, fingerprint)
        there = set() if replace else {(d.problem, d.budgets) for _, d, _, _ in store.decisions(number)}
        new = [(one, made) for one, made in decisions if (one.problem, one.budgets) not in there]
        store.put_choices(number, [one for one, _ in new], made=[made for _, made in new])
        taken = taken._replace(
            choices=taken.choices + len(new), choices_kept=taken.choices_kept + len(decisions) - len(new)
        )
    return taken


def _records(path: Path) -> Iterable[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """(fingerprint, description of the environment, fields of a choice)."""
    try:
        text = path.read_text()
        if path.suffix == ".json":
            whole = json.loads(text)
            if not isinstance(whole, dict) or "format" not in whole:
                raise ValueError("it does not say what it holds")
            if whole["format"] != FORMAT or whole["version"] != FORMAT_VERSION:
                raise ValueError(f"it is {whole['format']!r} of version {whole['version']}")
            for group in whole["environments"]:
                for record in group["choices"]:
                    yield group["fingerprint"], group["description"], record
            return
        lines = csv.DictReader(text.splitlines())
        if tuple(lines.fieldnames or ()) != _COLUMNS:
            raise ValueError("its header differs")
        for line in lines:
            record = {**line, "params": json.loads(line["params"]) if line["params"] else None}
            yield line["fingerprint"], json.loads(line["description"]), {**record, "gain": line["gain"] or None}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not a file of choices of this version: {error}") from error


def _decision(path: str | Path, record: Mapping[str, Any]) -> tuple[Decision, str]:
    try:
        gain, params = record["gain"], record["params"]
        if params is not None and not isinstance(params, dict):
            raise ValueError(f"parameters are {params!r}")
        return Decision(
            ConvProblem.parse(record["problem"]), str(record["budgets"]), str(record["algorithm"]), params, "import",
            None if gain is None else float(gain), int(record["revision"]), int(record["samples"]),
        ), str(record["made"])  # fmt: skip
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} has an invalid choice: {error} in {dict(record)}") from error


# ---- measurements -----------------------------------------------------------------------------------------------


def is_measurements(path: str | Path) -> bool:
    """Whether `store.export` wrote a file, by its name or first line."""
    if Path(path).suffix == ".gz":
        return True
    with Path(path).open(errors="replace") as file:
        return file.readline().startswith(",".join(HEADER[:3]))


def import_measurements(store: Store, path: str | Path, *, replace: bool = False) -> Taken:
    """Add the measurements of a CSV file, with the environment in the file beside it.

    Args:
        replace: overwrite existing entries.

    Raises:
        ValueError: if it is not such a file.
        OSError: if it, or the file of its environment, cannot be read.
    """
    rows = read_rows(path)
    about = json.loads(environment_path(path).read_text())
    description = (about.get("environments") or [about["machine"]])[0]
    number = store.environment(description)
    there = set() if replace else {_key(row) for row in store.rows(number)}
    new = [row for row in rows if _key(row) not in there]
    if new:
        pool = pool_fingerprint({row.algorithm: row.revision for row in rows})
        store.add(number, new, pool=pool, block=store.next_block(number))
    return Taken(measurements=len(new), measurements_kept=len(rows) - len(new))


def _key(row: Any) -> tuple[Any, ...]:
    return (row.problem, row.algorithm, row.revision, row.repeat)


def merge(store: Store, other: Store, *, replace: bool = False) -> Taken:
    """Add all of another store. Of two choices for the same problem, and of two self-tests or corrections of one key,
    the later one stays (with `replace`, the other store's). Merging twice changes nothing.

    Raises:
        StoreError: if a row of the other is damaged.
    """
    fingerprints, totals = other.fingerprints(), [0] * 6
    for number, description in other.environments().items():
        here = store.environment(description, fingerprints[number])
        made = {(d.problem, d.budgets): when for _, d, when, _ in store.decisions(here)}
        theirs = list(other.decisions(number))
        new = [
            one for one in theirs
            if replace or one.made > made.get((one.decision.problem, one.decision.budgets), "")
        ]  # fmt: skip
        if new:
            store.put_choices(here, [one.decision for one in new], made=[one.made for one in new])
        added, there = store.add_from(other, number, here)
        learnt = store.add_learnt_from(other, number, here, replace=replace)
        for i, count in enumerate((len(new), len(theirs) - len(new), added, there, *learnt)):
            totals[i] += count
    return Taken(*totals)


# ---- checking ---------------------------------------------------------------------------------------------------


def verify(store: Store) -> dict[str, list[str]]:
    """Kind of fault -> the entries that have it: "pages" (SQLite's own check), "references" (broken ones), "problems"
    (texts that cannot be read), "rows" (damaged choices, self-tests and corrections), "unknown algorithms",
    "old revisions" (choices that will be measured again when next needed). Kinds without a fault are left out."""
    found: dict[str, list[str]] = {"pages": store.problems(thorough=True), "references": store.dangling()}
    found["problems"] = []
    for text in store.problem_texts():
        try:
            ConvProblem.parse(text)
        except (TypeError, ValueError):
            found["problems"].append(text)
    rows: list[str] = []
    unknown: dict[str, None] = {}
    old: list[str] = []
    for _, decision, _, _ in store.decisions(damaged=rows):
        algorithm = BY_NAME.get(decision.algorithm)
        if algorithm is None:
            unknown[decision.algorithm] = None
        elif algorithm.revision != decision.revision:
            old.append(f"{decision.algorithm} {decision.revision} for {decision.problem}")
    rows += store.damaged_learnt()
    found |= {"rows": rows, "unknown algorithms": list(unknown), "old revisions": old}
    return {kind: faults for kind, faults in found.items() if faults}
