"""What all trials of a process together may cost."""

from __future__ import annotations

import pytest

from convselect.choice.account import CALLS, SHARE, Account


def test_the_first_trial_may_begin_whatever_else_was_spent():
    account = Account()
    assert account.allows(0.0)
    account.excess_us = 1e9  # a favourite's first call, whose trial has not begun yet
    assert account.allows(0.0)


def test_another_one_may_within_forty_calls_of_native_of_the_mean_length():
    account = Account()
    account.begun(100.0)
    account.begun(300.0)
    assert (account.trials, account.native_us) == (2, 400.0)
    for excess_us, allowed in ((-1e6, True), (CALLS * 200.0, True), (CALLS * 200.0 + 1, False)):
        account.excess_us = excess_us
        assert account.allows(0.0) is allowed


def test_time_that_the_process_computes_pays_a_debt():
    account = Account()
    account.begun(100.0)
    account.excess_us = CALLS * 100.0 + 500.0
    assert not account.allows(499.0 / SHARE)
    assert account.allows(500.0 / SHARE)


def test_time_before_the_first_trial_pays_for_nothing():
    account = Account()
    account.begun(100.0, 1e9)
    account.begun(100.0, 2e9)
    account.excess_us = CALLS * 100.0 + 500.0
    assert not account.allows(1e9 + 499.0 / SHARE)
    assert account.allows(1e9 + 500.0 / SHARE)
    assert not account.allows(1e9 + 999.0 / SHARE, threads=2)
    assert account.allows(1e9 + 1000.0 / SHARE, threads=2)


def test_in_a_forked_process_time_begins_at_0():
    account = Account()
    account.begun(100.0, 1e9)
    account.excess_us = CALLS * 100.0 + 500.0
    account.forked()
    assert account.allows(500.0 / SHARE)


def test_there_is_room_for_another_loss_like_the_largest():
    account = Account()
    account.begun(100.0)
    account.begun(300.0)
    account.lost(300.0 * 26, 300.0)
    account.lost(100.0, 100.0)
    assert account.beyond_calls == 26
    for excess_us, allowed in (((CALLS - 26) * 200.0, True), ((CALLS - 26) * 200.0 + 1, False)):
        account.excess_us = excess_us
        assert account.allows(0.0) is allowed
    assert account.allows(1.0 / SHARE)
    account.lost(1e9, 1.0)
    account.excess_us = 0.0  # others have saved what it cost
    assert account.allows(0.0)
    account.clear()
    assert account.beyond_calls == 0


def test_trials_that_save_time_pay_for_others():
    account = Account()
    account.begun(100.0)
    account.excess_us += 1e5
    assert not account.allows(0.0)
    account.excess_us -= 1e5
    assert account.allows(0.0)


def test_clear():
    account = Account()
    account.begun(100.0)
    account.excess_us = 1e9
    account.clear()
    assert (account.excess_us, account.native_us, account.trials) == (0.0, 0.0, 0)
    assert account.allows(0.0)


@pytest.mark.parametrize(("calls", "overhead"), [(2_000, 0.03), (20_000, 0.012)])
def test_the_bound_that_is_promised(calls, overhead):
    """Convolutions are half of what is computed, every trial costs eight calls of native, and there is no end of new
    problems: three percent of native's time at 2,000 calls, and what one trial may cost."""
    account, native_us, each_us, computed_us = Account(), 100.0, 800.0, 0.0
    for _ in range(calls):
        if account.allows(computed_us):
            account.begun(native_us)
            account.excess_us += each_us
        computed_us += 2 * native_us
    assert account.excess_us <= overhead * calls * native_us + each_us
