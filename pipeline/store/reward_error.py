"""The standard error of a run's mean reward, clustered by prompt.

Used by `status.py`. The rewards of one prompt's rollouts are correlated, so each of them says less
about the mean than a reward of another prompt. With N rewards of the mean m, in G prompts of which
prompt g has n rewards with the sum s, the variance of the mean is

    G / (G - 1) * sum over g of (s - m * n)^2 / N^2

(the cluster-robust variance of a mean: E. Miller, "Adding Error Bars to Evals", arXiv:2411.00640,
section 2.2; the factor G / (G - 1) for few clusters is that of Cameron and Miller, 2015). With one
rollout a prompt it is the ordinary standard error. A prompt is a dataset row: a row that was
enqueued again in another epoch is the same prompt. Must not: change anything.
"""

from __future__ import annotations

from sqlalchemy import Connection, text

from pipeline.store.runs import Run

_REPEATS = text("SELECT EXISTS (SELECT FROM prompts WHERE run_id = :run_id AND epoch > 0)")

#: The sums over groups, from a run counter. In a run of one epoch each group is another prompt.
GROUP_SUMS = """
SELECT sum(n_groups) AS prompts, sum(sum_squares) AS ss, sum(sum_products) AS sn,
    sum(count_squares) AS nn
FROM reward_tallies WHERE run_id = :run_id
"""

# Reads a row for each rollout of the run.
_PROMPT_SUMS = """
SELECT count(*) AS prompts, sum(s * s) AS ss, sum(s * n) AS sn, sum(n * n) AS nn
FROM (SELECT count(reward) AS n, sum(reward::numeric) AS s
      FROM rollouts r JOIN groups g USING (group_id) JOIN prompts p USING (prompt_id)
      WHERE r.run_id = :run_id AND reward IS NOT NULL
      GROUP BY p.dataset, p.split, p.row_no) AS by_prompt
"""

#: The standard error from these sums and N = `reward_n`, N * m = `reward_sum`: the square of each
#: residual sum is s * s - 2 * m * s * n + m * m * n * n. Numeric sums are exact, so equal rewards
#: give 0.
STDERR = """
    CASE WHEN prompts > 1 THEN sqrt(prompts / (prompts - 1.0) * (
        reward_n * reward_n * ss - 2 * reward_n * reward_sum * sn + reward_sum * reward_sum * nn
    )) / (reward_n * reward_n) END
"""


def prompt_sums(connection: Connection, run: Run) -> str:
    """Return the query of the sums over a run's prompts; it takes the parameter `run_id`."""
    repeats = connection.execute(_REPEATS, {"run_id": run.run_id}).scalar_one()
    return _PROMPT_SUMS if repeats else GROUP_SUMS
