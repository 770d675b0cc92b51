"""Whether an algorithm may run on a user's call before anything has been measured: it has passed a self-test here."""

from __future__ import annotations

from convselect.base.problem import ConvProblem
from convselect.base.warnings import warn_once
from convselect.kernels._contract import Algorithm

_known: dict[tuple[str, int, str, str, str], bool] = {}
"""(algorithm, revision, direction, dtype, layout) -> whether it passed. Bounded by the pool. No lock, which a fork
might find taken: threads that meet here each make the test."""


def trusted(algorithm: Algorithm, problem: ConvProblem) -> bool:
    """Whether this algorithm has passed its self-test on this machine, in this revision, for this direction, element
    type and layout.

    If no process knows yet it is tested now, in a millisecond or two (`measure/self_test.py`), and the result kept: in
    this process, and if it passed, in the store for later ones. A failure is warned about, and the next process tests
    again. What cannot be tested is not trusted: if neither a small problem like this one, nor a probe, nor this problem
    itself, if it is small, is one that the algorithm does; while operators are watched (a dispatch mode, a tracer, a
    functorch transform); or if memory is short. Of that nothing is remembered. On GPUs nothing is trusted, and nothing
    is run.

    Raises nothing, but the warning if the user has turned warnings into errors.
    """
    if problem.device != "cpu":
        return False
    key = (algorithm.name, algorithm.revision, problem.direction, problem.dtype, problem.layout)
    found = _known.get(key)
    return _ask(algorithm, problem, key) if found is None else found


def _ask(algorithm: Algorithm, problem: ConvProblem, key: tuple[str, int, str, str, str]) -> bool:
    from convselect.store import lessons

    key = (*key[:2], str(key[2]), *key[3:])  # as in the store: a text, and not a Direction, which is equal to it
    if key in lessons.self_tests():
        _known[key] = True
        return True
    from convselect.measure.self_test import self_test

    try:
        passed, wrong = self_test(algorithm, problem)
    except Exception:  # of `why_not`, or of PyTorch
        return False
    if passed is None:
        return False
    _known[key] = passed
    lessons.remember_self_test(key, passed)
    if not passed:
        warn_once(
            f"self-test:{algorithm.name}",
            f"convselect: {algorithm.name} failed its self-test ({wrong}); it is not used. Please report this.",
        )
    return passed
