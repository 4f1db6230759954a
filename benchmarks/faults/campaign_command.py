"""The campaign from the command line: `python -m benchmarks faults`, `rollout bench faults`.

Exit code 1 where a promise was broken.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.faults.campaign import run_campaign
from benchmarks.faults.report import campaign_table
from benchmarks.faults.servers import BrokerMissing
from benchmarks.report import machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the campaign's options."""
    parser.add_argument("--broker", choices=("redis", "rabbitmq"), default="redis")
    parser.add_argument("--rollouts", type=int, default=5000, help="in the longest phase")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all figures to this file")


def run(options: argparse.Namespace) -> None:
    """Run the campaign and print its table."""
    try:
        campaign = run_campaign(broker=options.broker, rollouts=options.rollouts, seed=options.seed)
    except BrokerMissing as error:
        sys.exit(str(error))
    print(campaign_table(campaign))
    if options.json is not None:
        document = campaign.to_json() | {"machine": machine()}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    if campaign.violations:
        sys.exit(1)
