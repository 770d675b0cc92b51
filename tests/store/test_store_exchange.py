"""Choices and measurements from store to store; what `verify` finds."""

from __future__ import annotations

import json

import pytest
from stores import HERE, MARK, P1, P2, A, B, rows_of

from convselect.base.volumes import volume_problem
from convselect.kernels.pool import BY_NAME
from convselect.model.dataset import read_measurements
from convselect.store import exchange
from convselect.store.store import Store, export

THERE = {**HERE, "device": "another"}


@pytest.fixture
def filled(tmp_path):
    with Store(tmp_path / "from.sqlite") as store:
        store.put_choices(store.environment(HERE), [A, B])
        store.put_choices(store.environment(THERE), [A._replace(budgets='a "b", c')])
        yield store


@pytest.fixture
def empty(tmp_path):
    with Store(tmp_path / "to.sqlite") as store:
        yield store


def comparable(store, **changes):
    """A store's choices, as text: dictionaries are not hashable."""
    return {
        (store.fingerprints()[number], str(decision._replace(**changes)), made)
        for number, decision, made, _ in store.decisions()
    }


def test_volumes_are_kept_beside_images_whose_rows_stay_as_they_were(empty, tmp_path):
    """An image's row is found again by its text, and believed by its checksum: these are from a version that knew no
    volumes."""
    volume = volume_problem(1, 8, 6, 9, 9, 8, 3, 3, 3, padding=1, stride=(2, 1, 1))
    number = empty.environment(HERE)
    empty.put_choices(number, [A, A._replace(problem=volume, params=None)])
    (image, text), (checksum, _) = empty.problem_texts(), (c for (c,) in empty._db.execute(
        "select checksum from choice order by problem"
    ))  # fmt: skip
    assert image == "forward N=1 C=8 H=9 W=9 K=8 R=3 S=3 pad_top=1 pad_bottom=1 pad_left=1 pad_right=1"
    assert checksum == 1714797078
    assert text.endswith("pad_right=1 D=6 T=3 stride_d=2 pad_front=1 pad_back=1")
    assert empty.decision(MARK, volume, A.budgets).problem == volume
    assert empty.decision(MARK, volume._replace(T=1), A.budgets) is None
    for name in ("c.json", "c.csv"):
        exchange.export_choices(empty, tmp_path / name)
        with Store(tmp_path / f"{name}.sqlite") as other:
            assert exchange.import_choices(other, tmp_path / name) == exchange.Taken(choices=2)
            assert comparable(other) == comparable(empty, source="import")


@pytest.mark.parametrize("name", ["c.json", "c.csv"])
def test_choices_are_read_back_as_they_were_written(name, filled, empty, tmp_path):
    assert exchange.export_choices(filled, tmp_path / name) == 3
    assert exchange.import_choices(empty, tmp_path / name) == exchange.Taken(choices=3)
    assert comparable(empty) == comparable(filled, source="import")
    assert sorted(map(str, empty.environments().values())) == sorted(map(str, filled.environments().values()))
    assert exchange.import_choices(empty, tmp_path / name) == exchange.Taken(choices_kept=3)


def test_what_is_there_stays_unless_it_is_to_be_replaced(filled, empty, tmp_path):
    exchange.export_choices(filled, tmp_path / "c.json", environment=1)
    empty.put_choices(empty.environment(HERE), [A._replace(algorithm="mine")])
    assert exchange.import_choices(empty, tmp_path / "c.json") == exchange.Taken(choices=1, choices_kept=1)
    assert empty.decision(MARK, P1, A.budgets).algorithm == "mine"
    assert exchange.import_choices(empty, tmp_path / "c.json", replace=True) == exchange.Taken(choices=2)
    assert empty.decision(MARK, P1, A.budgets).algorithm == A.algorithm


@pytest.mark.parametrize(
    "change",
    [
        lambda whole: whole.update(format="something else"),
        lambda whole: whole.update(version=99),
        lambda whole: whole.pop("environments"),
        lambda whole: whole["environments"][0]["choices"][1].update(problem="sideways N=1"),
        lambda whole: whole["environments"][0]["choices"][1].update(revision="x"),
        lambda whole: whole["environments"][0]["choices"][1].update(params=[1]),
        lambda whole: whole["environments"][0]["choices"][1].pop("budgets"),
    ],
)
def test_a_file_that_is_wrong_anywhere_changes_nothing(change, filled, empty, tmp_path):
    path = tmp_path / "c.json"
    exchange.export_choices(filled, path)
    whole = json.loads(path.read_text())
    change(whole)
    path.write_text(json.dumps(whole))
    with pytest.raises(ValueError, match=r"c\.json"):
        exchange.import_choices(empty, path)
    assert empty.environments() == {}
    for text in ("", "[]", "{", "a,b\n1,2\n"):
        for name in ("x.json", "x.csv"):
            (tmp_path / name).write_text(text)
            with pytest.raises(ValueError, match="is not a file of choices"):
                exchange.import_choices(empty, tmp_path / name)


def test_nothing_and_other_formats_are_refused(filled, empty, tmp_path):
    with pytest.raises(ValueError, match="no choices"):
        exchange.export_choices(empty, tmp_path / "c.json")
    with pytest.raises(ValueError, match=r"\.json or \.csv"):
        exchange.export_choices(filled, tmp_path / "c.txt")


def test_measurements_come_back_with_their_environment(empty, tmp_path):
    with Store(tmp_path / "m.sqlite") as source:
        source.add(source.environment(HERE), rows_of(P1, "a", "native"), pool="p")
        source.add(1, rows_of(P2, "native"), pool="p")
        export(source, tmp_path / "m.csv.gz")
    assert exchange.is_measurements(tmp_path / "m.csv.gz")
    assert exchange.import_measurements(empty, tmp_path / "m.csv.gz") == exchange.Taken(measurements=3)
    assert exchange.import_measurements(empty, tmp_path / "m.csv.gz") == exchange.Taken(measurements_kept=3)
    assert read_measurements([empty.path]) == read_measurements([tmp_path / "m.sqlite"])


def test_stores_are_merged_once_however_often_that_is_asked_for(filled, empty):
    here = filled.environment(HERE)
    filled.add(here, rows_of(P1, "a", "native"), pool="p", block=0)
    filled.add(here, rows_of(P2, "native"), pool="p", block=1)
    filled.add_sentinel(here, 0, 100, 101)
    filled.add_sentinel(here, 1, 100, 150)
    empty.add(empty.environment(HERE), rows_of(P1, "native", us=77), pool="q", block=0)
    empty.add_sentinel(1, 0, 100, 100)
    assert exchange.merge(empty, filled) == exchange.Taken(3, 0, 2, 1)
    assert comparable(empty) == comparable(filled)
    assert {(row.problem, row.algorithm): row.min_us for row in empty.rows()}[P1, "native"] == 77
    # A block keeps its drift under its new number.
    assert [row.problem for row in empty.rows() if row.problem == P2] == [P2]
    assert P2 not in {row.problem for row in empty.rows(max_drift=1.2)}
    before = comparable(empty), empty.drift(1)
    assert exchange.merge(empty, filled) == exchange.Taken(0, 3, 0, 3)
    assert (comparable(empty), empty.drift(1)) == before


def test_of_two_choices_the_later_stays(filled, empty):
    here = empty.environment(HERE)
    empty.put_choices(here, [A._replace(algorithm="older")], made=["2001-01-01T00:00:00+00:00"])
    empty.put_choices(here, [B._replace(algorithm="newer")], made=["2999-01-01T00:00:00+00:00"])
    exchange.merge(empty, filled)
    assert empty.decision(MARK, P1, A.budgets).algorithm == A.algorithm
    assert empty.decision(MARK, P2, B.budgets).algorithm == "newer"
    exchange.merge(empty, filled, replace=True)
    assert empty.decision(MARK, P2, B.budgets).algorithm == B.algorithm


def test_a_check_names_what_is_wrong(empty):
    here = empty.environment(HERE)
    current = BY_NAME["im2col_gemm"].revision
    good = A._replace(algorithm="im2col_gemm", revision=current)
    empty.put_choices(here, [good])
    empty.add(here, rows_of(P2, "was_here_once"), pool="p")  # a measurement may outlive its algorithm
    assert exchange.verify(empty) == {}
    empty.put_choices(
        here, [good._replace(budgets="b", revision=current + 1), good._replace(budgets="c", algorithm="gone")]
    )
    found = exchange.verify(empty)
    assert list(found) == ["unknown algorithms", "old revisions"]
    assert found["unknown algorithms"] == ["gone"]
    empty._db.execute("pragma foreign_keys = off")
    empty._db.execute("update choice set gain = 9 where budgets = 'c'")
    empty._db.execute("insert into problem (text) values ('not a problem')")
    empty._db.execute("insert into sentinel values (99, 0, 1, 1)")
    found = exchange.verify(empty)
    assert found["rows"] == [f"{P1} (c)"]
    assert found["problems"] == ["not a problem"]
    assert found["references"] == ["sentinel: a row of no environment"]
    assert "unknown algorithms" not in found
