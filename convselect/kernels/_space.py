"""Spaces of parameters: what an algorithm lets its caller choose (structure, tile and block sizes), and which
combinations are allowed.

A program is an algorithm with a value for each of its parameters: what `params` of `Algorithm.run` holds. As in Ansor
(Zheng et al. 2020, arXiv 2006.06762), programs come in two steps. *Rules*, each a condition and an action, derive
sketches: values for the parameters of structure, such as whether weights are packed or a reduction is split. The rest
is *annotation*: sizes, drawn from what is left.

Parameters are decided in order, and `is_partially_valid` says whether values of the first few can be completed to a
valid program. It must be exact: then code that completes a program one parameter at a time, and asks at each, ends with
a valid one and never has to go back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from convselect.base.problem import ConvProblem

Values = Mapping[str, int]
STRUCTURE, TILE, ANNOTATION = "structure", "tile", "annotation"


class Parameter(NamedTuple):
    """One parameter.

    Attributes:
        name: never changes, since it is stored on disk.
        values: possible values, ascending.
        kind: "structure" (set by rules), "tile" (sizes whose products with other sizes matter), "annotation".
    """

    name: str
    values: tuple[int, ...]
    kind: str = TILE


class Rule(NamedTuple):
    """A step in the derivation of sketches: if `condition(problem, so_far)` holds, `action(problem, so_far)` returns
    the values by which the structure parameters so far may be extended; an empty list ends this branch."""

    name: str
    condition: Callable[[ConvProblem, Values], bool]
    action: Callable[[ConvProblem, Values], Sequence[Values]]


@dataclass(frozen=True)
class Space:
    """The programs of one algorithm.

    Attributes:
        parameters: in the order in which they are decided; structure parameters first.
        default: problem -> the complete and valid program that runs by default, which is what `params=None` means.
        allowed: (problem, values of the first few parameters) -> whether they fit the hardware: caches, registers,
            alignment. Has to be True for every beginning of a valid program.
        rules: the rules of the sketches, applied in order; without any, structure parameters take every allowed
            combination.
    """

    parameters: tuple[Parameter, ...]
    default: Callable[[ConvProblem], Values]
    allowed: Callable[[ConvProblem, Values], bool] = lambda problem, values: True
    rules: tuple[Rule, ...] = field(default=())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(parameter.name for parameter in self.parameters)

    def is_partially_valid(self, problem: ConvProblem, values: Values) -> bool:
        """Whether these values of the first few parameters can be completed to a valid program.

        Raises:
            ValueError: if the names are not those of the first parameters, in order.
        """
        if tuple(values) != self.names[: len(values)]:
            raise ValueError(f"{tuple(values)} are not the first of {self.names}")
        return self._allowed_so_far(problem, values) and self._has_end(problem, dict(values))

    def is_valid(self, problem: ConvProblem, values: Values) -> bool:
        """Whether this is a complete and allowed program."""
        if set(values) != set(self.names):
            return False
        ordered = {name: values[name] for name in self.names}
        return self._allowed_so_far(problem, ordered)

    def _allowed_so_far(self, problem: ConvProblem, values: Values) -> bool:
        if any(values[p.name] not in p.values for p in self.parameters[: len(values)]):
            return False
        structure = {p.name: values[p.name] for p in self.parameters if p.kind == STRUCTURE and p.name in values}
        if self.rules and not any(_agree(sketch, structure) for sketch in self.sketches(problem)):
            return False
        return self.allowed(problem, values)

    def _has_end(self, problem: ConvProblem, values: dict[str, int]) -> bool:
        if len(values) == len(self.parameters):
            return True
        parameter = self.parameters[len(values)]
        for value in parameter.values:
            longer = {**values, parameter.name: value}
            if self._allowed_so_far(problem, longer) and self._has_end(problem, longer):
                return True
        return False

    def choices(self, problem: ConvProblem, values: Values) -> list[int]:
        """Possible values of the next parameter after these."""
        parameter = self.parameters[len(values)]
        return [v for v in parameter.values if self.is_partially_valid(problem, {**values, parameter.name: v})]

    def sketches(self, problem: ConvProblem) -> list[Values]:
        """All combinations of structure parameters that the rules derive; a single empty one if there are no rules."""
        found: list[Values] = [{}]
        for rule in self.rules:
            extended: list[Values] = []
            for sketch in found:
                if rule.condition(problem, sketch):
                    extended += [{**sketch, **more} for more in rule.action(problem, sketch)]
                else:
                    extended.append(sketch)
            found = extended
        return found

    def sample(self, problem: ConvProblem, source: random.Random) -> dict[str, int]:
        """A valid program, drawn one parameter at a time."""
        values: dict[str, int] = {}
        for parameter in self.parameters:
            values[parameter.name] = source.choice(self.choices(problem, values))
        return values

    def programs(self, problem: ConvProblem) -> Iterator[dict[str, int]]:
        """Every valid program."""

        def complete(values: dict[str, int]) -> Iterator[dict[str, int]]:
            if len(values) == len(self.parameters):
                yield values
                return
            parameter = self.parameters[len(values)]
            for value in parameter.values:
                longer = {**values, parameter.name: value}
                if self._allowed_so_far(problem, longer):
                    yield from complete(longer)

        return complete({})


def _agree(a: Values, b: Values) -> bool:
    return all(a[name] == b[name] for name in a.keys() & b.keys())
