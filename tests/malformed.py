"""Malformed data of every kind that is read: what happens with it.

`PYTHONPATH=tests python -m malformed 3000` prints, for as many mutations of each kind, how many were loaded, refused
(by one warning or one sentence), and what else happened. Names of kinds may follow.

A mutation changes one thing, or a few, of something that is right: a value in a tree of JSON or a column of a table, or
bytes of a file. Checksums are made right again, as whoever forges a file would. All is drawn from a seed.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import dataclasses
import gzip
import io
import itertools
import json
import math
import os
import random
import sqlite3
import sys
import tempfile
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stores import HERE, LINES, P1, P2, numbered, rows_of

import convselect
from convselect.base import lru, settings
from convselect.base import warnings as _warnings
from convselect.base.problem import conv_problem
from convselect.eager import learning, trusted
from convselect.kernels.pool import BY_NAME
from convselect.machine.environment import choice_environment, cpu_fingerprint
from convselect.measure.rows import environment_path
from convselect.model import loaded
from convselect.model.artifact import Card
from convselect.model.features import FEATURE_NAMES
from convselect.store import exchange, find_db, process
from convselect.store.decision import Decision
from convselect.store.store import Store, StoreError, export

PROBLEM = conv_problem(1, 8, 20, 20, 8, 3, 3, padding=1)
DEEP = "\x01deep"
"""Stands for a list in a list in a list, deeper than Python's stack."""
VALUES = (
    None, True, False, 0, -1, 1, 2, 5, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400, 0.0, -0.5, 64.0, 60_000.0,
    1e308, 1e-308, math.inf, -math.inf, math.nan, "", "x", "5", "NaN", "1e400", "\u00e9", "\x00", "\ud800",
    "a" * 70_000, "forward N=0 C=1 H=1 W=1 K=1 R=1 S=1", "../../x", [], [0], [[]], ["native", "native"], {}, {"a": 1},
    {"": None}, {"x": [1, {"y": math.nan}]}, DEEP,
)  # fmt: skip
TOKENS = (
    b"NaN", b"Infinity", b"1e400", b"-1", b"0", b"9" * 5000, b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b"\x00",
    b"null", b"true", b'"', b",", b"\n", b"=", b";", b"-", b"\xed\xa0\x80", b"1" * 200_000,
)  # fmt: skip

Outcome = str


# ---- mutations ------------------------------------------------------------------------------------------------------


def tree(value: Any, rng: random.Random) -> Any:
    """A copy with one to three things changed."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(_places(value, ()))
        path = rng.choice(places)
        if not path:
            value = _value(rng) if rng.random() < 0.3 else value
            continue
        parent = value
        for step in path[:-1]:
            parent = parent[step]
        what = rng.random()
        if what < 0.65:
            parent[path[-1]] = _value(rng)
        elif what < 0.75:
            del parent[path[-1]]
        elif what < 0.85:
            parent[path[-1]] = [parent[path[-1]]]
        elif isinstance(parent, dict):
            parent[rng.choice(("x", "", "\ud800", "format", "bias"))] = _value(rng)
        else:
            parent.append(_value(rng))
    return value


def _value(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(VALUES))


def _places(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(inner, (*path, key))


def as_json(value: Any) -> bytes:
    return json.dumps(value).replace(json.dumps(DEEP), "[" * 100_000 + "]" * 100_000).encode()


def raw(data: bytes, rng: random.Random) -> bytes:
    """The bytes with one to four places flipped, cut, doubled or filled with something."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        a, b = sorted(rng.randrange(len(found) + 1) for _ in range(2))
        what = rng.random()
        if what < 0.3 and found:
            found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
        elif what < 0.45:
            del found[a : min(b, a + 20)]
        elif what < 0.55:
            del found[a:]
        elif what < 0.65:
            found[a:a] = found[a : min(b, a + 200)]
        else:
            found[a : a + rng.choice((0, 1, 3))] = rng.choice(TOKENS)
    return bytes(found)


def cell(rng: random.Random) -> Any:
    """A value that SQLite can hold, of any of its types."""
    value = rng.choice(VALUES)
    if isinstance(value, list | dict) or value == DEEP:
        return rng.choice((as_json(value).decode(), as_json(value)))
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return float(min(value, 10**300))
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass") if "\ud800" in value else value
    return None if isinstance(value, float) and math.isnan(value) else value


# ---- what is done with them -----------------------------------------------------------------------------------------


def attempt(act: Callable[[], object], *, sentences: bool = False) -> Outcome:
    """ "loaded", "refused" (one warning; with `sentences` an error about values, files or stores that says something),
    or what went wrong."""
    _warnings._given.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            act()
        except (ValueError, OSError, StoreError, sqlite3.Error) as error:
            if not sentences:
                return f"raised {type(error).__name__}: {error}"[:200]
            return "refused" if len(str(error)) > 10 and str(error) != "''" else f"says nothing: {error!r}"
        except Exception as error:
            return f"raised {type(error).__name__}: {error}"[:200]
    other = [str(one.message) for one in caught if not issubclass(one.category, convselect.ConvselectWarning)]
    if other:
        return f"warned otherwise: {other[0]}"[:200]
    return ("loaded", "refused")[len(caught)] if len(caught) < 2 else f"{len(caught)} warnings: {caught[1].message}"


_X, _W = torch.linspace(-1, 1, 8 * 400).view(1, 8, 20, 20), torch.linspace(-1, 1, 8 * 72).view(8, 8, 3, 3)
_RIGHT = torch.conv2d(_X, _W, padding=1)


_turn = itertools.count()


def used() -> None:
    """Compute, explain and sum up, as a new process would."""
    lru.clear()
    learning._by_model.clear()
    trusted._known.clear()
    layer = convselect.SelectedConv2d(8, 8, 3, padding=1, bias=False)
    layer.weight.data = _W
    for policy in ("verify", "auto"):
        with convselect.use(policy), torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(layer(_X), _RIGHT, rtol=1e-4, atol=1e-4)
    explained = convselect.explain(layer, _X)
    explained.to_json(), explained.details()
    if next(_turn) % 8 == 0:  # tables take most of the time
        str(explained)
    str(convselect.summary(layer))


def commands(*lines: tuple[Any, ...]) -> None:
    """Run commands of `convselect store`: each ends with 0, 1 or a sentence."""
    from typer.testing import CliRunner

    from convselect.cli.store import app

    for line in lines:
        done = CliRunner().invoke(app, [str(one) for one in line])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code in (0, 1, 2), done.output
        assert done.exit_code != 2 or done.output.startswith("convselect store"), done.output


# ---- stores ---------------------------------------------------------------------------------------------------------

_CHECKED = {
    "choice": "algorithm, params, source, gain, revision, samples",
    "self_test": "algorithm, revision, direction, dtype, layout, version, passed",
    "correction": "model, algorithm, layer, n, mean",
}


def _store(path: Path) -> None:
    mark, description = choice_environment("cpu")
    revision = BY_NAME["im2col_gemm"].revision
    budgets = settings.current().budgets
    with Store(path) as store:
        here = store.environment(description, mark)
        choice = Decision(PROBLEM, budgets, "im2col_gemm", {"column_bytes": 2**15}, "tune", 1.5, revision, 9)
        store.put_choices(here, [choice, choice._replace(problem=P2, params=None)])
        store.add(here, rows_of(P1, "native", "im2col_gemm"), pool="p")
        store.add_sentinel(here, 0, 1.0, 1.1)
        model = loaded.identity(PROBLEM)
        layer = "forward 0 8 0 0 8 3 3 1 1 1 1 1 1 1 1 1 float32 contiguous contiguous cpu 1 False False False"
        store.put_learnt(
            here, convselect.__version__, {("im2col_gemm", revision, "forward", "float32", "contiguous"): True},
            {(model, "im2col_gemm forward", layer): (3.0, 0.2), (model, "winograd2 forward", layer): (2.0, 0.1)},
        )  # fmt: skip


def store_rows(folder: Path, rng: random.Random, count: int) -> Iterator[tuple[str, Outcome]]:
    """One or two columns of a row hold something else; the row's checksum is right."""
    path = folder / "s.sqlite"
    path.unlink(missing_ok=True)
    convselect.set_store("off")
    _store(path)
    whole = path.read_bytes()
    db = sqlite3.connect(path)
    columns = {
        table: [row[1] for row in db.execute(f"pragma table_info({table})") if row[1] not in ("id", "checksum")]
        for table in ("environment", "problem", "choice", "choice", "measurement", "sentinel", *list(_CHECKED)[1:])
    }
    db.close()
    tables = [*columns, "choice", "choice", "choice"]
    for i in range(count):
        path.write_bytes(whole)
        db = sqlite3.connect(path, isolation_level=None)
        table = rng.choice(tables)
        said = []
        for name in rng.sample(columns[table], min(len(columns[table]), rng.choice((1, 1, 2)))):
            value = cell(rng)
            if table == "choice" and name == "params" and rng.random() < 0.7:
                value = as_json(tree({"column_bytes": 2**15}, rng)).decode(errors="replace")
            with contextlib.suppress(sqlite3.IntegrityError):  # what SQLite refuses cannot be in a file
                db.execute(f"update {table} set {name} = ?", (value,))
                said.append(f"{table}.{name} = {str(value)[:30]!r}")
        if table in _CHECKED:
            _right(db, table)
        db.close()
        convselect.set_store(path)
        outcome = attempt(used)
        if outcome in ("loaded", "refused") and i % 24 == 0:
            convselect.set_store("off")
            other = folder / "other.sqlite"
            other.unlink(missing_ok=True)
            lines = (
                ("list", path), ("show", path), ("show", path, "--json"), ("verify", path),
                ("export", path, folder / "out.json"), ("export", path, folder / "out.csv", "--choices"),
                ("export", path, folder / "times.csv"), ("merge", path, "--store", other),
                ("prune", path, "--older-than", 9),
            )  # fmt: skip
            said_by = attempt(lambda lines=lines: commands(*lines), sentences=True)
            outcome = outcome if said_by in ("loaded", "refused") else f"command {said_by}"
        convselect.set_store("off")
        for one in folder.glob("s.sqlite*"):
            one.unlink()
        yield "; ".join(said), outcome


def _right(db: sqlite3.Connection, table: str) -> None:
    """Make the checksums right."""
    key = ("p.text, t.budgets, ", "join problem p on p.id = t.problem") if table == "choice" else ("", "")
    columns = ", ".join(f"t.{name.strip()}" for name in _CHECKED[table].split(","))
    rows = db.execute(f"select {key[0]}{columns}, t.checksum from {table} t {key[1]}").fetchall()
    for *values, checksum in rows:
        right = zlib.crc32(repr(tuple(values)).encode("utf-8", "surrogatepass"))
        db.execute(f"update {table} set checksum = ? where checksum = ?", (right, checksum))


# ---- files that are imported ----------------------------------------------------------------------------------------


def choices_files(folder: Path, rng: random.Random, count: int) -> Iterator[tuple[str, Outcome]]:
    """Exported choices, as JSON and as CSV."""
    source = folder / "source.sqlite"
    if not source.exists():
        _store(source)
    right = {}
    with Store(source, read_only=True) as store:
        for ending in ("json", "csv"):
            exchange.export_choices(store, folder / f"right.{ending}")
            right[ending] = (folder / f"right.{ending}").read_bytes()
    whole = json.loads(right["json"])
    header, *lines = list(csv.reader(right["csv"].decode().splitlines()))
    for i in range(count):
        what = rng.random()
        ending = "json"
        if what < 0.5:
            data = as_json(tree(whole, rng))
        elif what < 0.7:
            data = raw(right["json"], rng)
        elif what < 0.9:
            ending, cells = "csv", [list(line) for line in lines]
            cells[0][rng.randrange(len(header))] = str(cell(rng))
            text = io.StringIO()
            csv.writer(text).writerows([header, *cells])
            data = text.getvalue().encode("utf-8", "surrogatepass")
        else:
            ending, data = "csv", raw(right["csv"], rng)
        yield _imported(folder, f"choices.{ending}", data, i)


def _imported(folder: Path, name: str, data: bytes, i: int, beside: bytes | None = None) -> tuple[str, Outcome]:
    path, into = folder / name, folder / "into.sqlite"
    path.write_bytes(data)
    if beside is not None:
        environment_path(path).write_bytes(beside)
    into.unlink(missing_ok=True)

    def act() -> None:
        with Store(into) as store:
            if path.suffix != ".json" and exchange.is_measurements(path):
                exchange.import_measurements(store, path)
            else:
                exchange.import_choices(store, path)

    outcome = attempt(act, sentences=True)
    if outcome == "loaded":  # then all that reads it has to do
        outcome = attempt(lambda: _sound(into))
        convselect.set_store(into)
        outcome = attempt(used) if outcome == "loaded" else outcome
        convselect.set_store("off")
        if outcome != "loaded":
            return data[:60].decode(errors="replace"), f"imported, but {outcome}"
    if i % 24 == 0 and outcome in ("loaded", "refused"):
        said_by = attempt(lambda: commands(("import", path, "--store", into), ("show", into), ("list", into)))
        outcome = outcome if said_by == "loaded" else f"command {said_by}"
    return data[:60].decode(errors="replace"), outcome


def _sound(path: Path) -> None:
    """What an import has let in makes sense."""
    with Store(path, read_only=True) as store:
        for _, one, _, _ in store.decisions():
            p = one.problem
            assert min(*p[1:10], p.dil_h, p.dil_w, p.groups, p.threads, p.P, p.Q) >= 1 <= one.revision, one
            assert one.params is None or all(type(value) is int for value in one.params.values()), one
            assert one.gain is None or 0 < one.gain < math.inf, one
            assert one.samples >= 0, one
        for row in store.rows():
            p = row.problem
            assert min(*p[1:10], p.dil_h, p.dil_w, p.groups, p.threads, p.P, p.Q) >= 1 <= row.revision, row
            assert all(0 < us < math.inf for us in (row.min_us, row.median_us, row.wall_us) if us == us), row


def measurement_files(folder: Path, rng: random.Random, count: int) -> Iterator[tuple[str, Outcome]]:
    """Exported measurements, and the file of their environment."""
    source = folder / "measured.sqlite"
    source.unlink(missing_ok=True)
    with Store(source) as store:
        store.add(store.environment(HERE), rows_of(P1, "native", "im2col_gemm"), pool="p")
        export(store, folder / "times.csv")
    data, beside = (folder / "times.csv").read_bytes(), environment_path(folder / "times.csv").read_bytes()
    header, *lines = list(csv.reader(data.decode().splitlines()))
    about = json.loads(beside)
    for i in range(count):
        what, name, now, env = rng.random(), "m.csv", data, beside
        if what < 0.35:
            cells = [list(line) for line in lines]
            cells[0][rng.randrange(len(header))] = str(cell(rng))
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows([header, *cells])
            now = text.getvalue().encode("utf-8", "surrogatepass")
        elif what < 0.6:
            now = raw(data, rng)
        elif what < 0.7:
            name, now = "m.csv.gz", raw(gzip.compress(data), rng)
        elif what < 0.9:
            env = as_json(tree(about, rng))
        else:
            env = raw(beside, rng)
        yield _imported(folder, name, now, i, env)


def find_dbs(folder: Path, rng: random.Random, count: int) -> Iterator[tuple[str, Outcome]]:
    """MIOpen's find-db."""
    right = LINES.replace("\\\n", "").encode()
    names = ("gfx90a68.HIP.fdb.txt", "gfx1030_36.HIP.2_19_0.ufdb.txt")
    into = folder / "found.sqlite"
    for i in range(count):
        path = folder / rng.choice(names)
        path.write_bytes(data := raw(right, rng))

        def act(path: Path = path) -> None:
            find_db.read(path)

        outcome = attempt(act, sentences=True)
        if i % 24 == 0 and outcome in ("loaded", "refused"):
            into.unlink(missing_ok=True)
            said = attempt(lambda path=path: commands(("import", "--find-db", path, "--store", into), ("show", into)))
            outcome = outcome if said == "loaded" else f"command {said}"
        yield data[:60].decode(errors="replace"), outcome


# ---- models ---------------------------------------------------------------------------------------------------------

_NAMES = ("im2col_gemm", "native", "winograd2", "winograd4")


def _arrays(rng: random.Random) -> dict[str, np.ndarray]:
    draw, d = np.random.default_rng(3), len(FEATURE_NAMES)
    made = {"mean": draw.normal(size=d), "scale": draw.uniform(0.2, 1, d)}
    made |= {"low": np.full(d, -50.0), "high": np.full(d, 50.0)}
    for i, (hidden, out) in enumerate(((6, 5), (4, 3))):
        made[f"hidden_{i}"] = draw.normal(size=(hidden, d + 1)) / 5
        made[f"out_{i}"] = draw.normal(size=(out, d + 1 + hidden)) / 5
        d = out
    made["head"] = draw.normal(size=(len(_NAMES), d + 1))
    return {name: array.astype(np.float32) for name, array in made.items()}


def _card() -> dict[str, Any]:
    return {
        **dataclasses.asdict(Card("cpu-test", _NAMES, 4.0, 0.0, ("float32",), threads=(1, 2))),
        "revisions": {"native": 1}, "host_flags": {"avx512_bf16": False}, "sharpness": 3.0,
        "figures": {"held_out": {"split": "by model", "overall": {"top1": 0.5}}}, "versions": {"torch": "2.13"},
        "data": {"device": "x", "problems": 3},
    }  # fmt: skip


def artifacts(folder: Path, rng: random.Random, count: int) -> Iterator[tuple[str, Outcome]]:
    """Artifacts: the card, the arrays, the bytes."""
    path = folder / "model.npz"
    arrays, card = _arrays(rng), json.loads(json.dumps(_card()))
    with _environment(CONVSELECT_ARTIFACT=str(path), CONVSELECT_CALIBRATION=str(folder / "none")):
        for _ in range(count):
            what, made, text, said = rng.random(), dict(arrays), as_json(card), "bytes"
            if what < 0.45:
                text = as_json(changed := tree(card, rng))
                said = f"card {str(changed)[:80]}"
            elif what < 0.55:
                text = raw(text, rng)
            elif what < 0.9:
                name = rng.choice((*made, "new"))
                made, said = {**made, name: _array(made.get(name, made["head"]), rng)}, f"array {name}"
            buffer = io.BytesIO()
            whole = np.frombuffer(text, np.uint8) if rng.random() < 0.05 else np.array(text.decode(errors="replace"))
            np.savez(buffer, card=whole, **made)
            path.write_bytes(raw(buffer.getvalue(), rng) if what >= 0.9 else buffer.getvalue())
            yield said, _with_model()


@np.errstate(over="ignore")
def _array(array: np.ndarray, rng: random.Random) -> np.ndarray:
    what = rng.randrange(9)
    if what == 0:
        return array * np.float32(rng.choice((60_000.0, 1e30, 0.0, -1e5, 1e38)))
    if what == 1:
        changed = array.copy()
        changed.flat[rng.randrange(array.size)] = rng.choice((60_000.0, -1e38, math.nan, math.inf, 1e-45))
        return changed
    if what == 2:
        return array[:-1]
    if what == 3:
        return array.reshape(-1)
    if what == 4:
        return array.astype(rng.choice((np.float64, np.int8, np.complex64, np.bool_, "U4")))
    if what == 5:
        return np.zeros(rng.choice(((), (0,), (1, 1, 1), (0, 5))), np.float32)
    if what == 6:
        return np.full_like(array, 60_000.0)
    if what == 7:
        return np.asfortranarray(array)
    return np.concatenate([array, array])


def calibrations(folder: Path, rng: random.Random, count: int) -> Iterator[tuple[str, Outcome]]:
    """Calibrations."""
    path, model = folder / "calibration.json", folder / "right.npz"
    buffer = io.BytesIO()
    np.savez(buffer, card=np.array(json.dumps(_card())), **_arrays(rng))
    model.write_bytes(buffer.getvalue())
    right = {
        "fingerprint": cpu_fingerprint(), "artifact": "right", "digest": loaded.digest(model), "problems": 20,
        "bias": {"im2col_gemm": 0.2, "winograd2": -0.1},
    }  # fmt: skip
    with _environment(CONVSELECT_ARTIFACT=str(model), CONVSELECT_CALIBRATION=str(path)):
        for _ in range(count):
            data = as_json(tree(right, rng)) if rng.random() < 0.6 else raw(as_json(right), rng)
            path.write_bytes(data)
            yield data[:80].decode(errors="replace"), _with_model()


def _with_model() -> Outcome:
    loaded.unload()
    outcome = attempt(used)
    if outcome in ("loaded", "refused"):
        from convselect.doctor.doctor import _Examination

        said = attempt(lambda: _Examination().model(["native"]))
        outcome = outcome if said == "loaded" else f"doctor {said}"
    loaded.unload()
    return outcome


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _within(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


# ---- settings -------------------------------------------------------------------------------------------------------

_TEXTS = (
    "", " ", "0", "1", "-1", "1e400", "1e308GiB", "nan", "inf", "-inf", "NaN%", "101%", "-5%", "1.2.3MiB", "1,2,3",
    ",", "25%,25%", "512MiB", "512 MiB", "2e8", "1e-3", "9" * 5000, "9" * 400 + "%", "true", "maybe", "\u00e9",
    "\u0661\u0662", "winograd,fft", "winograd,,", "native", "no such", "exact", "fast", "verify", "1_000", "0x10",
    "a" * 5000, "1e5", "../" * 3000, "/dev/null", "/dev/zero", "/proc/self/mem", "/", "/nonexistent/x", "~nobody/x",
    "off", "[]", "{}", "\udcff", "info", "x.log", "x/" * 3000 + "x.log",
)  # fmt: skip


def variables(folder: Path, rng: random.Random, count: int) -> Iterator[tuple[str, Outcome]]:
    """Environment variables: settings are read when the package is imported, the others when something is needed."""
    numbers = ("POLICY", "PRECISION", "WORKSPACE", "BATCH_INVARIANT", "DISABLE", "AUDIT", "CACHE_ENTRIES")
    paths = ("ARTIFACT", "CALIBRATION", "CACHE", "STORE", "SYSTEM_STORE", "LOG")
    texts = (*_TEXTS, str(folder), str(folder / "new" / "x"))
    every = [(name, text) for name in (*numbers, *paths) for text in texts]
    rng.shuffle(every)
    drawn = [(rng.choice(every)[0], _text(rng)) for _ in range(max(0, count - len(every)))]
    for name, text in (*every, *drawn)[:count]:
        with _environment(**{f"CONVSELECT_{name}": text}), _within(folder):
            if name in numbers:
                yield f"{name}={text[:40]!r}", _of_settings(name)
            elif name == "LOG":
                from convselect.eager import log

                handlers = list(log.logger.handlers)
                yield f"{name}={text[:40]!r}", attempt(lambda text=text: log.install(text))
                for handler in set(log.logger.handlers) - set(handlers):
                    handler.close()
                    log.logger.removeHandler(handler)
            else:
                convselect.set_store(None)
                outcome = _with_model() if name in ("ARTIFACT", "CALIBRATION", "CACHE") else attempt(used)
                if outcome in ("loaded", "refused"):
                    process.remember(Decision(numbered(3), "x", "native"))
                    outcome = attempt(process.flush)
                convselect.set_store("off")
                yield f"{name}={text[:40]!r}", outcome


def _text(rng: random.Random) -> str:
    return raw(rng.choice(_TEXTS).encode("utf-8", "surrogatepass"), rng).decode("utf-8", "replace").replace("\0", "")


def _of_settings(name: str) -> Outcome:
    # What module level does, without another process.
    read = {"CACHE_ENTRIES": "_cache_entries"}.get(name, "_from_environment")
    if not hasattr(settings, read):
        return attempt(lambda: int(os.environ["CONVSELECT_CACHE_ENTRIES"]), sentences=True)
    found: list[Any] = []
    outcome = attempt(lambda: found.append(getattr(settings, read)()), sentences=True)
    if outcome != "loaded" or name == "CACHE_ENTRIES":
        return outcome
    before = settings.defaults()
    settings.set_default_settings(found[0])
    try:
        # A policy or an algorithm that does not exist is an explicit request: it is never replaced by something else.
        return attempt(used, sentences=name in ("POLICY", "DISABLE"))
    finally:
        settings.set_default_settings(before)


def values(folder: Path, rng: random.Random, count: int) -> Iterator[tuple[str, Outcome]]:
    """Arguments of `use`, and settings as text, as they are in exported programs."""
    names = ("policy", "precision", "workspace_bytes", "workspace_share", "batch_invariant", "disable", "audit")
    more = (object(), 1j, b"x", {1}, range(3), np.int64(5), np.float32(0.5), torch.tensor(3), math.pi)
    right = json.loads(str(settings.current()))
    for i in range(count):
        if i % 2:
            name, value = rng.choice(names), rng.choice((*VALUES, *more))

            def act(name: str = name, value: Any = value) -> None:
                with convselect.use(**{name: value}):
                    str(settings.current()), hash(settings.current()), settings.current().budgets
                    assert settings.parse(str(settings.current())) == settings.current()

            yield f"{name}={str(value)[:40]!r}", attempt(act, sentences=True)
        else:
            text = (as_json(tree(right, rng)) if rng.random() < 0.6 else raw(as_json(right), rng)).decode(
                errors="replace"
            )
            yield text[:80], attempt(lambda text=text: settings.parse(text), sentences=True)


# ---- logs of programs -----------------------------------------------------------------------------------------------


def program_logs(folder: Path, rng: random.Random, count: int) -> Iterator[tuple[str, Outcome]]:
    """What `convselect tune` has measured: lines that are not right are passed over."""
    from convselect.tune.programs import Program
    from convselect.tune.records import Log, Measured

    path = folder / "x.programs.jsonl"
    path.unlink(missing_ok=True)
    log = Log(path, "mark", {"winograd2": 1})
    log.add(
        PROBLEM, [Measured(Program("winograd2", (("tile", 4),)), "ok", 3.5), Measured(Program("native"), "ok", 2.0)]
    )
    data = path.read_bytes()
    first = json.loads(data.splitlines()[0])
    for _ in range(count):
        now = data + as_json(tree(first, rng)) + b"\n" if rng.random() < 0.6 else raw(data, rng)
        path.write_bytes(now)

        def act() -> None:
            for of_problem in log.read().values():
                for program, one in of_problem.items():
                    str(program), hash(program), program.values
                    assert one.status in ("ok", "wrong", "failed")
                    assert one.time_us is None or 0 < one.time_us < math.inf

        yield now[-80:].decode(errors="replace"), attempt(act)


KINDS: dict[str, Callable[[Path, random.Random, int], Iterator[tuple[str, Outcome]]]] = {
    function.__name__: function
    for function in (
        store_rows, choices_files, measurement_files, find_dbs, artifacts, calibrations, variables, values,
        program_logs,
    )
}  # fmt: skip


def run(kind: str, folder: Path, count: int, seed: int = 0) -> tuple[Counter[str], list[tuple[str, Outcome]]]:
    """How often it was loaded, refused, or something else ("wrong"); and what those were."""
    counts: Counter[str] = Counter(loaded=0, refused=0, wrong=0)
    wrong: list[tuple[str, Outcome]] = []
    for what, outcome in KINDS[kind](folder, random.Random(seed), count):
        right = outcome in ("loaded", "refused")
        counts[outcome if right else "wrong"] += 1
        if not right:
            wrong.append((what, outcome))
    return counts, wrong


def main() -> None:
    count, kinds = int(sys.argv[1]), sys.argv[2:] or list(KINDS)
    os.environ["CONVSELECT_CACHE"] = tempfile.mkdtemp()
    torch.set_num_threads(1)
    convselect.set_store("off")
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            counts, wrong = run(kind, Path(folder), count)
        print(f"{kind}: {dict(counts)}", flush=True)
        groups = Counter(" ".join(outcome.split()[:5]) for _, outcome in wrong)
        for group, n in groups.most_common(12):
            what, outcome = next(one for one in wrong if " ".join(one[1].split()[:5]) == group)
            print(f"    {n} x {outcome[:110]!r}, such as {what[:110]!r}", flush=True)


if __name__ == "__main__":
    main()
