"""`python -m benchmarks.faults`: the campaign from the command line.

Also the subcommand `faults` of `python -m benchmarks`. Exit code 1 where a promise was broken.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.faults.campaign import run_campaign
from benchmarks.faults.report import campaign_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--broker", choices=("redis", "rabbitmq"), default="redis")
    parser.add_argument("--rollouts", type=int, default=5000, help="in the longest phase")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all figures to this file")


def run(options: argparse.Namespace) -> None:
    campaign = run_campaign(broker=options.broker, rollouts=options.rollouts, seed=options.seed)
    print(campaign_table(campaign))
    if options.json is not None:
        options.json.write_text(json.dumps(campaign.to_json(), indent=2) + "\n")
    if campaign.violations:
        sys.exit(1)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults")
    add_arguments(parser)
    run(parser.parse_args(argv))


if __name__ == "__main__":
    main()
