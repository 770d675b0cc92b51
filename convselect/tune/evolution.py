"""Evolutionary search: random changes of programs, selected by predicted speed.

    tile        change two tile sizes and keep their product, or move one size to a neighbouring value
    structure   another sketch, keeping the other parameters if they are allowed there; or another algorithm
    crossover   each parameter from one of two parents

Invalid children are thrown away. Parents are drawn with a probability proportional to their predicted speed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence

import numpy as np

from convselect.kernels._space import STRUCTURE, TILE, Parameter, Space
from convselect.tune.programs import Floats, Program, Programs

POPULATION, GENERATIONS = 128, 4
CROSSOVER, STRUCTURAL = 0.25, 0.15
"""Probabilities of a crossover and of a change of structure or algorithm; otherwise sizes change."""
_ATTEMPTS = 4

Score = Callable[[Sequence[Program]], Floats]


def evolve(
    programs: Programs,
    score: Score,
    source: random.Random,
    start: Sequence[Program],
    *,
    population: int = POPULATION,
    generations: int = GENERATIONS,
    exclude: Collection[Program] = (),
) -> list[Program]:
    """Programs that are predicted to be fast, best first, without duplicates and without `exclude`.

    Args:
        score: programs -> predicted speed of each, larger is faster, none below 0.
        start: the first generation; valid programs.
    """
    excluded = set(exclude)
    current = list(dict.fromkeys(start))
    seen: dict[Program, float] = {}
    for generation in range(generations + 1):
        if not current:
            break
        scores = score(current)
        seen.update(zip(current, scores.tolist(), strict=True))
        if generation == generations:
            break
        weights = np.maximum(scores, 1e-6)
        children: dict[Program, None] = {}
        for _ in range(population):
            mother, father = source.choices(current, weights.tolist(), k=2)
            child = offspring(programs, mother, father, source)
            if child is not None:
                children[child] = None
        # Keep the best so far: an unlucky generation must not lose them.
        best = sorted(seen, key=seen.__getitem__, reverse=True)[: population // 4]
        current = list(dict.fromkeys([*best, *children]))
    ranked = sorted(seen, key=seen.__getitem__, reverse=True)
    return [program for program in ranked if program not in excluded]


def offspring(programs: Programs, mother: Program, father: Program, source: random.Random) -> Program | None:
    """A valid program made from one parent or both; None if `_ATTEMPTS` attempts found none."""
    for _ in range(_ATTEMPTS):
        chance = source.random()
        if chance < CROSSOVER and mother.algorithm == father.algorithm and mother != father:
            child: Program | None = crossed(programs, mother, father, source)
        elif chance < CROSSOVER + STRUCTURAL:
            child = with_other_structure(programs, mother, source)
        else:
            child = with_other_sizes(programs, mother, source)
        settled = None if child is None else programs.settle(child)
        if settled is not None and settled != mother:
            return settled
    return None


def crossed(programs: Programs, mother: Program, father: Program, source: random.Random) -> Program:
    """Each parameter from one of two programs of the same algorithm. The result may be invalid."""
    a, b = mother.values, father.values
    return programs.made(mother.algorithm, {name: source.choice((a, b))[name] for name in a})


def with_other_sizes(programs: Programs, program: Program, source: random.Random) -> Program | None:
    """Change two tile sizes and keep their product, or move one parameter to a neighbouring value.

    The result may be invalid. None if there is nothing to change."""
    space = programs.spaces[program.algorithm]
    if space is None:
        return None
    values = program.values
    tiles = [p for p in space.parameters if p.kind == TILE and len(p.values) > 1]
    if len(tiles) > 1 and source.random() < 0.5:
        first, second = source.sample(tiles, 2)
        trades = _trades(first, second, values[first.name], values[second.name])
        if trades:
            values[first.name], values[second.name] = source.choice(trades)
            return programs.made(program.algorithm, values)
    movable = [p for p in space.parameters if p.kind != STRUCTURE and len(p.values) > 1]
    if not movable:
        return None
    parameter = source.choice(movable)
    values[parameter.name] = _stepped(parameter, values[parameter.name], source)
    return programs.made(program.algorithm, values)


def _trades(first: Parameter, second: Parameter, a: int, b: int) -> list[tuple[int, int]]:
    """Other values of two parameters that have the same product as `a` and `b`."""
    others = set(second.values)
    return [(v, a * b // v) for v in first.values if v and v != a and a * b % v == 0 and a * b // v in others]


def _stepped(parameter: Parameter, value: int, source: random.Random) -> int:
    place = parameter.values.index(value)
    near = [i for i in (place - 1, place + 1) if 0 <= i < len(parameter.values)]
    return parameter.values[source.choice(near)]


def with_other_structure(programs: Programs, program: Program, source: random.Random) -> Program | None:
    """Another sketch of the same algorithm, or another algorithm. Parameters of the same name keep their values if
    those are allowed there; the others are drawn at random. None if there is no other sketch or algorithm."""
    space = programs.spaces[program.algorithm]
    sketches = [] if space is None else _other_sketches(space, programs, program)
    others = [name for name in programs.tunable if name != program.algorithm]
    if sketches and (not others or source.random() < 0.5):
        assert space is not None
        return programs.made(program.algorithm, _completed(space, programs, source.choice(sketches), program, source))
    if not others:
        return None
    name = source.choice(others)
    other = programs.spaces[name]
    assert other is not None
    return programs.made(name, _completed(other, programs, {}, program, source))


def _other_sketches(space: Space, programs: Programs, program: Program) -> list[dict[str, int]]:
    names = [p.name for p in space.parameters if p.kind == STRUCTURE]
    if not names:
        return []
    own = {name: program.values[name] for name in names}
    if space.rules:
        derived = [dict(sketch) for sketch in space.sketches(programs.problem)]
        return [sketch for sketch in derived if any(own[n] != v for n, v in sketch.items())]
    structural = [p for p in space.parameters if p.kind == STRUCTURE]
    return [{**own, p.name: value} for p in structural for value in p.values if value != own[p.name]]


def _completed(
    space: Space, programs: Programs, fixed: dict[str, int], like: Program, source: random.Random
) -> dict[str, int]:
    """The values of a valid program: those in `fixed`, then those of `like`, if allowed; others drawn at random."""
    kept, values = like.values, dict[str, int]()
    for parameter in space.parameters:
        allowed = space.choices(programs.problem, values)
        wanted = fixed.get(parameter.name, kept.get(parameter.name))
        values[parameter.name] = wanted if wanted in allowed and wanted is not None else source.choice(allowed)
    return values
