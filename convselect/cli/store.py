"""`convselect store ...`. Annotations are evaluated here, by typer."""

import datetime
import json
import os
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convselect.cli.console import Json, own_store, print_table, refusing, say_counts, say_json

if TYPE_CHECKING:
    from convselect.base.problem import ConvProblem
    from convselect.store.store import Store

app = typer.Typer(help="Look at stores of choices and measured times, and carry them about.", no_args_is_help=True)
_Path = Annotated[Path | None, typer.Argument(help="The store; default: your own.", show_default=False)]
_Into = Annotated[Path | None, typer.Option("--store", help="The store to write to; default: your own.")]
_Environment = Annotated[int | None, typer.Option(help="Only the environment of this number (`store list`).")]


_LEARNT = ("self_tests", "corrections")


def _opened(path: Path | None, *, make: bool = False) -> "Store":
    """The store at a path, by default the user's; read-only if it may not be written.

    Args:
        make: make it, and its folder, if there is none.

    Raises:
        OSError, StoreError: if there is none, or it cannot be opened.
    """
    from convselect.store.process import user_path
    from convselect.store.store import Store

    if path is None:
        path = user_path() if make else own_store()
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, not a store")
    if make:
        path.absolute().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    elif not path.exists():
        raise FileNotFoundError(f"there is no {path}")
    writable = make or (os.access(path, os.W_OK) and os.access(path.absolute().parent, os.W_OK))
    return Store(path, read_only=not writable)


def _say(as_json: bool, values: dict[str, Any], line: str) -> None:
    typer.echo(json.dumps(values, indent=1) if as_json else line)


# ---- looking ----------------------------------------------------------------------------------------------------


@app.command("list")
def list_(path: _Path = None, as_json: Json = False) -> None:
    """The environments of a store, with how many choices, measurements, self-tests and corrections each has."""
    with refusing("store list"), _opened(path) as store:
        choices: dict[int, int] = {}
        for one in store.decisions(damaged=[]):
            choices[one.environment] = choices.get(one.environment, 0) + 1
        marks = store.fingerprints()
        found: list[dict[str, Any]] = [
            {
                "number": number, "fingerprint": marks[number], "description": about,
                "choices": choices.get(number, 0), "measurements": store.measurements(number),
                **dict(zip(_LEARNT, store.learnt_counts(number), strict=True)),
            }
            for number, about in store.environments().items()
        ]  # fmt: skip
        whole: dict[str, Any] = {
            "path": str(store.path),
            "journal": store.journal,
            "bytes": store.used_bytes,
            "environments": found,
        }
    if as_json:
        say_json(whole)
        return
    names, counts = ("device", "family", "torch"), ("choices", "measurements", *_LEARNT)
    print_table(
        {"number": "right", **dict.fromkeys(names, "left"), **{n.replace("_", " "): "right" for n in counts}},
        [
            [one["number"], *(one["description"].get(n) or "?" for n in names), *(one[n] for n in counts)]
            for one in found
        ],
    )
    typer.echo(f"{whole['path']}: {whole['bytes'] / 2**20:.1f} MiB")


@app.command()
def show(
    path: _Path = None,
    problem: Annotated[str | None, typer.Option(help='Only this problem: "forward N=1 C=64 ..".')] = None,
    environment: _Environment = None,
    as_json: Json = False,
) -> None:
    """Whose times a store holds, and how many; what is known of one problem or environment."""
    from convselect import ConvProblem

    with refusing("store show"), _opened(path) as store:
        if environment is not None and environment not in store.environments():
            raise ValueError(f"{store.path} has no environment {environment}")
        if problem is None and environment is None and not as_json:
            _show_whole(store)
            return
        parsed = None if problem is None else ConvProblem.parse(problem)
        found = _details(store, environment, parsed)
    if as_json:
        say_json(found)
        return
    for one in found:
        typer.echo(f"environment {one['number']}: {json.dumps(one['description'])}")
        for kind, names in _SHOWN.items():
            if one[kind]:
                print_table(dict.fromkeys(names, "left"), [[row[name] for name in names] for row in one[kind]])


_SHOWN = {
    "choices": ("problem", "budgets", "algorithm", "gain", "source", "revision", "samples", "made", "used"),
    "measurements": ("problem", "algorithm", "revision", "status", "clock", "min_us", "median_us", "rounds"),
}


def _show_whole(store: "Store") -> None:
    rows: list[list[object]] = []
    for number, environment in store.environments().items():
        times, drift = store.rows(number), store.drift(number)
        rows.append([
            *(environment.get(name, "?") for name in ("device", "family", "torch")),
            len({row.problem for row in times}), len({row.problem for row in times if row.repeat}),
            len(times), len(drift), sum(ratio > 1.05 for ratio in drift.values()),
        ])  # fmt: skip
    left = dict.fromkeys(("device", "family", "torch"), "left")
    print_table(left | dict.fromkeys(("problems", "measured twice", "times", "blocks", "drifting"), "right"), rows)


def _details(store: "Store", environment: int | None, problem: "ConvProblem | None") -> list[dict[str, Any]]:
    from convselect.store.exchange import as_record

    found, marks = [], store.fingerprints()
    for number, about in store.environments().items():
        if environment is not None and number != environment:
            continue
        choices = [{**as_record(one), "used": one.used} for one in store.decisions(number, problem)]
        rows = [row for row in store.rows(number) if problem is None or row.problem == problem]
        # JSON has no NaN.
        times = [
            {k: None if v != v else v for k, v in {**r._asdict(), "problem": str(r.problem)}.items()} for r in rows
        ]
        if choices or times or problem is None:
            found.append(
                {
                    "number": number, "fingerprint": marks[number], "description": about,
                    "choices": choices, "measurements": times,
                }
            )  # fmt: skip
    return found


@app.command()
def verify(path: _Path = None, as_json: Json = False) -> None:
    """Whether a store is whole, and its choices are of algorithms as they are now. Exit status 1 if not."""
    from convselect.store.exchange import verify as check
    from convselect.store.store import DamagedStoreError

    found: dict[str, list[str]] = {}
    choices = 0
    with refusing("store verify"):
        try:
            with _opened(path) as store:
                found, choices = check(store), store.counts()[0]
        except (DamagedStoreError, sqlite3.DatabaseError) as error:
            found = {"pages": [str(error)]}
    if as_json:
        say_json({"healthy": not found, "faults": found, "choices": choices})
    else:
        for kind, faults in found.items():
            typer.echo(f"{kind}: {len(faults)}")
            for fault in faults[:10]:
                typer.echo(f"  {fault}")
        typer.echo(f"{choices} choices, {'something is wrong' if found else 'nothing wrong'}")
    if found:
        raise typer.Exit(1)


# ---- carrying ---------------------------------------------------------------------------------------------------


@app.command()
def export(
    path: Annotated[Path, typer.Argument(help="The store; left out, it is your own.")],
    out: Annotated[
        Path | None, typer.Argument(help="File to write: .json has choices, .csv measurements; .gz compresses those.")
    ] = None,
    max_drift: Annotated[
        float | None,
        typer.Option(min=1, help="Leave out blocks of measurements in which the machine changed by more, say 1.05."),
    ] = None,
    choices: Annotated[bool, typer.Option("--choices", help="Choices, as CSV as well.")] = False,
    environment: _Environment = None,
    as_json: Json = False,
) -> None:
    """Choices for others to import; measurements as CSV, with their environments beside them, for `train` and
    `evaluate`."""
    from convselect.store import store as stores
    from convselect.store.exchange import export_choices

    with refusing("store export"):
        source, target = (None, path) if out is None else (path, out)
        with _opened(source) as store:
            if choices or target.suffix == ".json":
                what, count = "choices", export_choices(store, target, environment)
            elif environment is not None:
                raise ValueError("--environment is for choices")
            else:
                what, count = "measurements", stores.export(store, target, max_drift=max_drift)
    _say(as_json, {what: count, "path": str(target)}, f"{count} {what} written to {target}")


@app.command("import")
def import_(
    files: Annotated[list[Path] | None, typer.Argument(help="What `store export` wrote.", show_default=False)] = None,
    find_db: Annotated[
        list[Path] | None, typer.Option(help="A find-db of MIOpen, named as MIOpen names them; may be repeated.")
    ] = None,
    into: _Into = None,
    replace: Annotated[bool, typer.Option("--replace", help="Overwrite existing entries.")] = False,
    as_json: Json = False,
) -> None:
    """Take over choices and measurements that were exported elsewhere, or MIOpen's."""
    from convselect.store.process import ROWS

    with refusing("store import"):
        if not files and not find_db:
            raise ValueError("name a file, or --find-db one")
        for file in (*(files or ()), *(find_db or ())):  # before a store is made for them
            file.stat()
            if not file.is_file():
                raise ValueError(f"{file} is not a regular file")
        with _opened(into, make=True) as store:
            told = [_import_file(store, file, replace) for file in files or ()]
            told += [_import_find_db(store, file) for file in find_db or ()]
            held = sum(store.counts())
    if into is None and held > ROWS:
        typer.echo(f"your own store keeps {ROWS} rows of these {held}; --store names one that keeps all", err=True)
    _say_taken(told, as_json)


def _import_file(store: "Store", file: Path, replace: bool) -> dict[str, Any]:
    from convselect.store import exchange
    from convselect.store.store import is_store

    if is_store(file):
        raise ValueError(f"{file} is a store: `convselect store merge` takes it over")
    measurements = file.suffix != ".json" and exchange.is_measurements(file)
    take = exchange.import_measurements if measurements else exchange.import_choices
    return {"path": str(file), **take(store, file, replace=replace)._asdict()}


def _import_find_db(store: "Store", file: Path) -> dict[str, Any]:
    from convselect.store import find_db
    from convselect.store.store import pool_fingerprint

    found = find_db.read(file)
    if found.rows:
        number = store.environment(found.environment)
        store.add(number, found.rows, pool=pool_fingerprint({row.algorithm: row.revision for row in found.rows}))
    return {
        "path": str(file), "environment": found.environment["device"], "problems": found.problems,
        "measurements": len(found.rows), "skipped": dict(found.skipped.most_common()),
    }  # fmt: skip


def _say_taken(told: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        say_json(told)
        return
    for one in told:
        say_counts(one, one["path"])
        for reason, count in one.get("skipped", {}).items():
            typer.echo(f"  left out {count}: {reason}")


@app.command()
def merge(
    others: Annotated[list[Path], typer.Argument(help="Stores whose contents are taken over.")],
    into: _Into = None,
    replace: Annotated[bool, typer.Option("--replace", help="Overwrite entries of yours that are later.")] = False,
    as_json: Json = False,
) -> None:
    """Take over all of another store; of two choices for one problem the later stays, and so for corrections."""
    from convselect.store import exchange

    told: list[dict[str, Any]] = []
    with refusing("store merge"):
        for path in others:
            with _opened(path) as other, _opened(into, make=True) as store:
                if os.path.samefile(other.path, store.path):
                    raise ValueError(f"{path} is the store itself")
                told.append({"path": str(path), **exchange.merge(store, other, replace=replace)._asdict()})
    _say_taken(told, as_json)


@app.command()
def prune(
    path: _Path = None,
    rows: Annotated[int | None, typer.Option(min=0, help="How many choices and measurements to keep.")] = None,
    size: Annotated[str | None, typer.Option("--bytes", help="Size to keep, for example 16MiB.")] = None,
    older_than: Annotated[int | None, typer.Option(min=0, help="Forget what was not used for this many days.")] = None,
    environment: Annotated[int | None, typer.Option(help="Forget the environment of this number.")] = None,
    as_json: Json = False,
) -> None:
    """Forget choices and measurements, least recently used first, and give their space back. Self-tests and corrections
    go by age, with their environment, or with `--rows 0`."""
    from convselect.base.settings import parse_workspace

    with refusing("store prune"):
        if rows is None and size is None and older_than is None and environment is None:
            raise ValueError("say what to keep: --rows, --bytes, --older-than or --environment")
        size_bytes = None if size is None else parse_workspace(size)[0]
        since = None
        if older_than is not None:
            time = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=older_than)
            since = time.isoformat(timespec="seconds")
        with _opened(path) as store:
            if environment is not None and environment not in store.environments():
                raise ValueError(f"{store.path} has no environment {environment}")
            gone = store.prune(rows=rows, size_bytes=size_bytes, unused_since=since, environment=environment)
            store.compact()
            left, size_left = sum(store.counts()), store.used_bytes
    _say(as_json, {"forgotten": gone, "left": left, "bytes": size_left}, f"{gone} forgotten, {left} left")
