"""A trainer as a process: pulls, trains, checkpoints, commits, and dies at a given place.

Tests and the campaign start it. Its checkpoint defines the trained groups: it has the steps of the
lineage with their groups. Must not: commit a step before its checkpoint is durable.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from benchmarks.faults.histories import History
from pipeline.contract.train_batch import BatchSpec, NotReady
from pipeline.trainer.client import TrainerClient

ACTOR = "trainer"

#: The places where it may die, in the order of a step.
PULLED, TRAINED, CHECKPOINTED, COMMITTED = PLACES = (
    "pulled",
    "trained",
    "checkpointed",
    "committed",
)
#: `PLACE:STEP`: die at this place of this step.
DIE_VARIABLE = "FAULTS_TRAINER_DIES_AT"

#: Exit code when no more groups become ready.
STARVED = 5

_WAIT_S = 60.0

Lineage = dict[int, list[str]]


def arguments_of(run: str, consumer: str, checkpoint: Path, *, groups: int) -> list[str]:
    """Return the arguments of a trainer."""
    flags = ["--run", run, "--consumer", consumer]
    return [*flags, "--checkpoint", str(checkpoint), "--groups", str(groups)]


def read_checkpoint(path: Path) -> Lineage:
    """Return the steps of a checkpoint with the groups that each was trained on."""
    if not path.exists():
        return {}
    return {int(step): groups for step, groups in json.loads(path.read_text()).items()}


def train(client: TrainerClient, checkpoint: Path, *, groups: int, history: History) -> None:
    """Train until the run has no more groups.

    Raises:
        NotReady: No groups became ready for a minute.
    """
    lineage = read_checkpoint(checkpoint)
    resumed = client.resume(committed_step=max(lineage, default=None))
    step = resumed.next_step
    while True:
        try:
            batch = client.pull(step, BatchSpec(groups=groups), timeout_s=_WAIT_S)
        except NotReady as error:
            if error.drained:
                return
            raise
        names = [str(group.group_id) for group in batch.groups]
        history.note(
            "pull", consumer=batch.consumer, step=step, groups=names, replayed=batch.replayed
        )
        _die_if_due(PULLED, step)
        lineage[step] = names
        _die_if_due(TRAINED, step)
        _write(checkpoint, lineage)
        _die_if_due(CHECKPOINTED, step)
        client.commit(step, checkpoint_uri=str(checkpoint))
        _die_if_due(COMMITTED, step)
        step += 1


def _write(path: Path, lineage: Lineage) -> None:
    part = path.with_suffix(".part")
    with part.open("w") as file:
        json.dump(lineage, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _die_if_due(place: str, step: int) -> None:
    if os.environ.get(DIE_VARIABLE) == f"{place}:{step}":
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(prog="trainer")
    parser.add_argument("--run", required=True)
    parser.add_argument("--consumer", required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--groups", type=int, default=4)
    options = parser.parse_args()
    client = TrainerClient.connect(options.run, consumer=options.consumer)
    try:
        train(
            client,
            options.checkpoint,
            groups=options.groups,
            history=History.of_environment(ACTOR),
        )
    except NotReady as error:
        print(error, file=sys.stderr)
        sys.exit(STARVED)
    finally:
        client.close()


if __name__ == "__main__":
    main()
