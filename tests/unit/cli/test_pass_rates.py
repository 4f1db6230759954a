"""pass@k without bias."""

from __future__ import annotations

from itertools import combinations

import pytest

from rollout.demo.summary import mean_pass_at_k, pass_at_k


@pytest.mark.parametrize("correct", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_it_is_the_share_of_draws_that_hold_a_correct_try(correct, k):
    tries = [True] * correct + [False] * (5 - correct)
    draws = list(combinations(tries, k))
    assert pass_at_k(5, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_groups_with_too_few_tries_are_left_out():
    assert mean_pass_at_k([(4, 4), (4, 0), (2, 2)], 4) == 0.5
    assert mean_pass_at_k([(2, 2)], 4) is None


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_impossible_figures_are_refused(n, correct, k):
    with pytest.raises(ValueError, match="no pass@"):
        pass_at_k(n, correct, k)
