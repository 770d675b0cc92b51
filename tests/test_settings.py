"""Settings: from the environment, from contexts, to text and back."""

from __future__ import annotations

import os
import pickle

import fresh
import pytest

from convselect.base import settings
from convselect.base.settings import Settings, parse, parse_workspace, use


@pytest.mark.parametrize(
    ("text", "size", "share"),
    [
        ("1000", 1000, 1.0),
        ("2e8", 200_000_000, 1.0),
        ("512MiB", 512 * 2**20, 1.0),
        ("1.5 GB", 1_500_000_000, 1.0),
        ("25%", 2**63 - 1, 0.25),
        ("1GiB, 10%", 2**30, 0.1),
    ],
)
def test_workspaces_are_bytes_a_share_or_both(text, size, share):
    assert parse_workspace(text) == (size, share)


@pytest.mark.parametrize("text", ["", "much", "12 parsecs", "-3", "25%%", "1GiB;2%"])
def test_other_workspaces_are_refused(text):
    with pytest.raises(ValueError, match="a workspace is written"):
        parse_workspace(text)


def in_a_process(**variables: str) -> str:
    code = "from convselect.base.settings import current; print(current())"
    env = {**os.environ, **{f"CONVSELECT_{name}": value for name, value in variables.items()}}
    return fresh.run(["-c", code], env=env, check=True).stdout


def test_the_environment_sets_the_defaults():
    found = parse(
        in_a_process(
            POLICY="verify",
            PRECISION="exact",
            WORKSPACE="64MiB,50%",
            BATCH_INVARIANT="1",
            DISABLE=" fft,winograd ",
            AUDIT="256",
        )
    )
    with use(
        "verify",
        precision="exact",
        workspace_bytes=64 * 2**20,
        workspace_share=0.5,
        batch_invariant=True,
        disable=["winograd", "fft"],
        audit=256,
    ) as expected:
        assert found is expected


def test_what_is_not_given_stays_as_outside():
    with use("measure", disable="fft", batch_invariant=True) as outer, use(precision="fast") as inner:
        assert (inner.policy, inner.disabled, inner.batch_invariant) == ("measure", ("fft",), True)
        with use(disable=(), batch_invariant=False) as freed:
            assert (freed.disabled, freed.batch_invariant, freed.precision) == ((), False, "fast")
    assert outer.precision == settings.current().precision


@pytest.mark.parametrize(
    "wrong", [{"workspace_share": 1.5}, {"workspace_share": -0.1}, {"audit": -1}, {"workspace_bytes": -1}]
)
def test_values_outside_their_ranges(wrong):
    before = settings.defaults()
    with pytest.raises(ValueError, match=next(iter(wrong))), use(**wrong):
        pass
    with pytest.raises(ValueError, match=next(iter(wrong))):
        settings.set_defaults(**wrong)
    assert settings.defaults() is before


def test_text_and_pickles_come_back_as_the_same_object():
    with use("winograd4", disable="fft", audit=7) as one:
        assert parse(str(one)) is one
        assert pickle.loads(pickle.dumps(one)) is one
    assert parse("{}") is settings._intern()
    for wrong in ("[]", '{"colour": "red"}'):
        with pytest.raises(ValueError, match="not settings"):
            parse(wrong)


def test_budgets_tell_apart_what_allows_different_choices_and_nothing_else():
    base = Settings()
    with use("auto") as a, use("verify", audit=3) as b:
        assert a.budgets == b.budgets == base.budgets
    lines = {base.budgets}
    for change in (
        {"precision": "fast"},
        {"workspace_bytes": 1},
        {"workspace_share": 0.5},
        {"batch_invariant": True},
        {"disable": "fft"},
    ):
        with use(**change) as changed:
            lines.add(changed.budgets)
    assert len(lines) == 6


def test_verify_is_the_default_where_nobody_says_otherwise():
    env = {name: value for name, value in os.environ.items() if not name.startswith("CONVSELECT_")}
    code = "import convselect; print(convselect.base.settings.current().policy)"
    assert fresh.run(["-c", code], env=env, check=True).stdout == "verify\n"
