"""How busy pipeline stages are: sums over what ranks say."""

from __future__ import annotations

import pytest

from drumline.engine.stage_meter import StageLoad, StageMeter

S = 10**9


def test_nobody_says():
    assert StageMeter(2).load([], 1.0) == StageLoad()


def test_only_time_with_steps_in_flight_counts():
    meter = StageMeter(2)
    meter.flying(True, 10.0)
    meter.flying(True, 10.2)  # one more: it goes on
    assert meter.load([S // 4, S // 8], 10.5) == (0.5, (0.25, 0.125), (0.5, 0.25))
    meter.flying(False, 11.0)
    meter.flying(False, 12.0)
    assert meter.load([S // 2, S // 8], 500.0).active_s == 1.0
    meter.flying(True, 600.0)
    assert meter.load([S // 2, S // 8], 600.5).active_s == 1.5


def test_ranks_of_a_stage_are_averaged():
    meter = StageMeter(2)
    meter.flying(True, 0.0)
    assert meter.load([S, 3 * S, 0, S], 4.0) == (4.0, (2.0, 0.5), (0.5, 0.125))


def test_the_fraction_is_that_of_the_last_second():
    meter = StageMeter(2)
    meter.flying(True, 0.0)
    assert meter.load([S, 0], 1.0).fractions == (1.0, 0.0)
    assert meter.load([S, S // 2], 1.5).fractions == (1.0, 0.0)  # not yet a second: as before
    assert meter.load([S, S], 2.0).fractions == (0.0, 1.0)
    meter.flying(False, 2.0)
    assert meter.load([S, S], 99.0).fractions == (0.0, 1.0)


def test_clocks_that_disagree_stay_within_bounds():
    meter = StageMeter(2)
    meter.flying(True, 0.0)
    load = meter.load([2 * S, S], 1.0)
    assert load.fractions == (1.0, 1.0)
    assert load.busy_s == pytest.approx((2.0, 1.0))
