"""Memory laid out for values: none overlap while both are alive."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from convselect.freeze.arena import Wanted, laid_out

LIVES = st.builds(
    lambda n_bytes, first, length: Wanted(n_bytes, first, first + length),
    st.integers(0, 1000), st.integers(0, 12), st.integers(0, 6),
)  # fmt: skip


@given(st.lists(LIVES, max_size=12))
def test_values_that_are_alive_together_do_not_overlap(lives):
    wanted = dict(enumerate(lives))
    starts, size = laid_out(wanted)
    assert starts.keys() == wanted.keys()
    for a, one in wanted.items():
        assert starts[a] % 64 == 0
        assert 0 <= starts[a] <= starts[a] + one.n_bytes <= size
        for b, other in wanted.items():
            if a < b and one.first <= other.last and other.first <= one.last:
                apart = starts[a] + one.n_bytes <= starts[b] or starts[b] + other.n_bytes <= starts[a]
                assert apart
    most = max((sum(-(-v.n_bytes // 64) * 64 for v in lives if v.first <= i <= v.last) for i in range(20)), default=0)
    assert size >= most


def test_a_chain_needs_two_places():
    assert laid_out({i: Wanted(640, i, i + 1) for i in range(10)}) == ({i: 640 * (i % 2) for i in range(10)}, 1280)


def test_the_largest_decides():
    """Placed in the order of the steps, the middle one would find two holes that are too small."""
    wanted = {"a": Wanted(64, 0, 1), "b": Wanted(64, 0, 2), "c": Wanted(128, 2, 3)}
    assert laid_out(wanted)[1] == 192


def test_nothing():
    assert laid_out({}) == ({}, 0)
