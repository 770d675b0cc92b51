"""Programs, their evolution, and searches on times made by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest
from _toy_space import Toy, problems, programs, recorded, space, time_us

from convselect.base import settings
from convselect.base.problem import conv_problem
from convselect.choice.choose import NATIVE
from convselect.kernels._space import STRUCTURE
from convselect.kernels.pool import BY_NAME
from convselect.tune import evolution
from convselect.tune.cost_model import CostModel
from convselect.tune.programs import Program, Programs
from convselect.tune.search import Evolution, Search
from convselect.tune.tuning import Tuning

P = problems()[0]
ALL = programs(P)


def test_programs_are_read_as_they_are_written():
    program = ALL.default("blocked")
    assert str(program) == "blocked packed=0 rows=4 columns=4 depth=4 ahead=0"
    assert Program.parse(str(program)) == program
    assert Program.parse("native") == Program(NATIVE)
    with pytest.raises(ValueError, match="invalid literal"):
        Program.parse("blocked rows=many")


def test_programs_of_a_problem_are_those_of_all_that_may_be_chosen():
    problem = conv_problem(1, 16, 14, 14, 16, 3, 3, padding=1)
    used = settings.current()
    of = Programs.of(problem, used)
    assert NATIVE in of.spaces
    assert "reference" not in of.spaces
    assert "depthwise" not in of.spaces
    assert {p.algorithm for p in of.defaults()} == set(of.spaces)
    assert all(of.is_valid(p) for p in of.defaults())
    assert not of.is_valid(Program("reference"))
    with settings.use(disable="winograd"):
        assert not any(name.startswith("winograd") for name in Programs.of(problem, settings.current()).spaces)


def test_what_has_no_parameters_has_one_program():
    alone = Programs(P, {NATIVE: None, "plain": None})
    assert alone.defaults() == [Program(NATIVE), Program("plain")]
    assert alone.sample(random.Random(0)) is None
    assert not alone.is_valid(Program("plain", (("rows", 4),)))
    search = Search(alone, random.Random(0))
    assert search.propose(8) == alone.defaults()
    for program in alone.defaults():
        search.learn(program, 1.0)
    assert search.propose(8) == []


def test_offspring_are_valid_and_of_every_kind():
    source = random.Random(0)
    parents = [ALL.sample(source) for _ in range(30)]
    kinds = set()
    for _ in range(800):
        mother, father = source.choices(parents, k=2)
        child = evolution.offspring(ALL, mother, father, source)
        if child is None:
            continue
        assert ALL.is_valid(child)
        assert child != mother
        before, after = mother.values, child.values
        if child.algorithm != mother.algorithm:
            kinds.add("algorithm")
        elif before["packed"] != after["packed"]:
            kinds.add("structure")
        else:
            changed = {n for n in before if before[n] != after[n]}
            kinds.add(len(changed))
    assert {"algorithm", "structure", 1, 2} <= kinds


def test_tiles_change_and_their_product_stays():
    source, kept = random.Random(1), 0
    for _ in range(300):
        program = ALL.sample(source)
        child = evolution.with_other_sizes(ALL, program, source)
        before, after = program.values, child.values
        changed = [n for n in before if before[n] != after[n]]
        assert len(changed) in (1, 2)
        if len(changed) == 2:
            a, b = changed
            assert before[a] * before[b] == after[a] * after[b]
            kept += 1
        else:
            (name,) = changed
            values = next(p.values for p in space().parameters if p.name == name)
            assert abs(values.index(before[name]) - values.index(after[name])) == 1
    assert kept > 50


def test_structure_comes_from_the_sketches():
    few = programs(problems()[4])  # too few channels to be packed
    source = random.Random(0)
    for _ in range(50):
        child = evolution.with_other_structure(few, few.sample(source), source)
        assert child.values["packed"] == 0
        assert few.is_valid(child)
    assert next(p for p in space().parameters if p.kind == STRUCTURE).name == "packed"


def test_crossover_takes_every_parameter_from_a_parent():
    source = random.Random(0)
    a, b = (ALL.made("blocked", space().sample(P, source)) for _ in range(2))
    children = [evolution.crossed(ALL, a, b, source) for _ in range(40)]
    assert all(c.values[n] in (a.values[n], b.values[n]) for c in children for n in c.values)
    assert len(set(children)) > 3


def test_evolution_climbs_what_it_is_told():
    """With the truth as the score it comes near the best of a space of thousands while it looks at a small part."""
    asked = set()

    def score(of):
        asked.update(of)
        return np.array([1 / time_us(P, p) for p in of])

    source = random.Random(0)
    start = [ALL.sample(source) for _ in range(32)]
    found = evolution.evolve(ALL, score, source, start, population=64, generations=8)
    times = recorded(P).times_us
    assert times[found[0]] < 1.03 * min(times.values())
    drawn = [ALL.sample(source) for _ in range(len(asked))]
    assert times[found[0]] < 0.95 * min(times[p] for p in drawn)
    assert len(asked) < len(times) / 4
    assert [times[p] for p in found] == pytest.approx(sorted(times[p] for p in found))
    assert not set(evolution.evolve(ALL, score, source, start, exclude=found[:5], generations=1)) & set(found[:5])


def run(strategy: str, seed: int, trials: int = 64, of=None) -> Tuning:
    own = problems()[:3] if of is None else of
    model = None if strategy == "random" else CostModel(seed, trees=60)
    prepared = [(programs(p), {"toy": 1}, programs(p).default("blocked")) for p in own]
    tuning = Tuning(prepared, Toy(), model=model, batch=8, equal_split=True, seed=seed)
    tuning.run(trials=trials * len(own))
    return tuning


def test_the_defaults_are_measured_first_and_nothing_twice():
    for strategy in ("random", "evolution"):
        tuning = run(strategy, 0, 40, problems()[:1])
        ran = [program for _, program in tuning.runner.ran]
        assert ran[:4] == ALL.defaults()
        assert len(ran) == len(set(ran)) == tuning.trials == 40


@pytest.mark.slow
def test_evolution_with_a_cost_model_beats_random_search():
    gains, reached = [], []
    for seed in range(2):
        blind, led = run("random", seed), run("evolution", seed)
        for a, b in zip(blind.tasks, led.tasks, strict=True):
            gains.append(a.best_us / b.best_us)
            curve = np.minimum.accumulate(list(b.search.times_us.values()))
            reached.append(int(np.argmax(curve <= a.best_us)) + 1 if b.best_us <= a.best_us else 64)
    assert np.exp(np.mean(np.log(gains))) > 1.05
    assert np.median(reached) <= 64 * 0.5


def test_a_search_is_the_same_for_the_same_seed():
    of = problems()[:1]
    first, second, other = (run("evolution", seed, 32, of).runner.ran for seed in (3, 3, 4))
    assert first == second != other


def test_some_of_each_batch_is_drawn():
    search = Evolution(ALL, random.Random(0), CostModel(), epsilon=1.0)
    for program in ALL.defaults():
        search.learn(program, time_us(P, program))
    drawn = {p for _ in range(20) for p in search.propose(8)}
    assert len(drawn) > 120  # led by anything they would repeat


def test_the_programs_of_real_algorithms_can_be_drawn():
    problem = conv_problem(1, 32, 14, 14, 32, 3, 3, padding=1)
    of = Programs.of(problem, settings.current())
    source = random.Random(0)
    for name in of.tunable:
        for _ in range(20):
            program = of.made(name, of.spaces[name].sample(problem, source))
            assert of.is_valid(program)
            assert BY_NAME[name].space(problem).is_valid(problem, program.values)
