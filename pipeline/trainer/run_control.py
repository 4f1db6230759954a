"""A trainer's operations on its run: publish weights, enqueue prompts, cancel groups, read figures.

`TrainerClient` inherits these methods and adds the batches. Must not: choose prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Engine

from pipeline.contract.errors import InputError
from pipeline.contract.names import check_name
from pipeline.contract.policy import PolicyMode, check_publication
from pipeline.contract.rollout import group_id_of, prompt_id_of
from pipeline.contract.train_batch import BatchSpec, PipelineStats
from pipeline.store.capacity import run_capacity
from pipeline.store.engine import transact
from pipeline.store.operations import cancel_all
from pipeline.store.policies import groups_begun_before, publish_policy
from pipeline.store.prompts import PromptSource, add_prompts, seal_run
from pipeline.store.runs import get_run
from pipeline.store.status import run_stats

#: The split of prompts from a trainer; the idempotency key takes the place of the dataset.
_SPLIT = "trainer"


class RunControl:
    """One run, as its trainer controls it.

    Args:
        engine: The trajectory store.
        run: The run's whole slug.
        consumer: Name of the trainer.

    Raises:
        InputError: The consumer's name is too long.
        NotFound: There is no such run.
    """

    def __init__(self, engine: Engine, *, run: str, consumer: str) -> None:
        try:
            self._consumer = check_name(consumer, "consumer")
        except ValueError as error:
            raise InputError(str(error)) from error
        self._engine = engine
        self._run = transact(engine, get_run, run)

    def publish_policy(
        self,
        version: int,
        *,
        endpoints: str | Sequence[str] | None = None,
        uri: str | None = None,
        mode: PolicyMode = "keep",
    ) -> bool:
        """Make this version of the weights the current one; return whether anything changed.

        Requests carry it from now on, and running workers learn of it within seconds (on SQS with
        their next request). Calls whose server reports no version are stamped with it. Publish the
        version that the servers begin with before prompts are enqueued.

        Args:
            version: Ascending. The current one may be published again with another mode.
            endpoints: Base URLs that serve it; None: those of the version before.
            uri: The location of the weights, stored with the version.
            mode: The treatment of model calls. `keep`: those under way finish on the old weights;
                `abort`: they are repeated on the new ones; `pause`: new calls wait for the next
                publication, for at most `worker.policy_pause_wait_s`.

        Raises:
            NotAllowed: A later version was published before, or the run is cancelled.
            InputError: The version, the mode or an endpoint is not valid.
        """
        given = endpoints if endpoints is None or isinstance(endpoints, str) else tuple(endpoints)
        urls = check_publication(version, given, mode)
        return transact(
            self._engine, publish_policy, self._run, version, endpoints=urls, uri=uri, mode=mode
        )

    def enqueue(
        self, prompts: Iterable[str | Mapping[str, Any]], *, idempotency_key: str
    ) -> list[UUID]:
        """Enqueue prompts in this run, all or none; return the ids of their groups, in order.

        The same key with the same prompts adds nothing, also after a crash in between. Each group
        gets the run's number of rollouts.

        Args:
            prompts: Texts, or payloads with `content` or `messages`, and any other columns.
            idempotency_key: Names these prompts within the run, such as `step-7`.

        Raises:
            InputError: The key is empty or too long, or a payload has no prompt.
            NotAllowed: The run is cancelled, or the key came with other prompts before.
        """
        if not idempotency_key:
            raise InputError(
                "The idempotency_key is empty.", remedy="Name the prompts by their step."
            )
        try:
            source = PromptSource(check_name(idempotency_key, "idempotency_key"), _SPLIT)
        except ValueError as error:
            raise InputError(str(error)) from error
        rows = [(row_no, _payload(prompt, row_no)) for row_no, prompt in enumerate(prompts)]

        def add(connection: Connection) -> None:
            add_prompts(connection, self._run, source, rows)
            seal_run(connection, self._run)

        transact(self._engine, add)
        return [
            group_id_of(prompt_id_of(self._run.run_id, idempotency_key, _SPLIT, 0, row_no))
            for row_no, _ in rows
        ]

    def cancel(
        self, group_ids: Iterable[UUID] | None = None, *, older_than_version: int | None = None
    ) -> int:
        """Cancel the rollouts of open groups that are not done; return how many.

        A group with enough usable rollouts becomes ready, another one is dropped as `cancelled`.
        Workers stop within seconds. Groups that are ready, leased or consumed stay.

        Args:
            group_ids: Groups of this run; None: all.
            older_than_version: Only groups with a rollout that was dispatched before this version
                was published.

        Raises:
            NotFound: This version was never published.
        """
        groups = None if group_ids is None else list(group_ids)
        if older_than_version is not None:
            begun = transact(self._engine, groups_begun_before, self._run, older_than_version)
            groups = begun if groups is None else [each for each in groups if each in set(begun)]
        return cancel_all(self._engine, self._run, groups=groups)

    def capacity(self) -> int:
        """Return how many groups may be begun now so that none is too old when it is trained.

        `(max_staleness + 1) * groups_per_step - (ready + leased + running)`, counted now, by the
        run's fields. Without them `max_staleness` is 4, and `groups_per_step` the size of the last
        pull. Leased steps that are trained already do not count.
        """
        return transact(self._engine, lambda c: run_capacity(c, self._run).free)

    def stats(self, spec: BatchSpec | None = None) -> PipelineStats:
        """Return the figures of the run and the reasons why it is not finished.

        Args:
            spec: The batch that the trainer waits for; None: the groups of one step of the run.
        """
        return transact(self._engine, run_stats, self._run, consumer=self._consumer, spec=spec)


def _payload(prompt: str | Mapping[str, Any], row_no: int) -> dict[str, Any]:
    payload = {"content": prompt} if isinstance(prompt, str) else dict(prompt)
    if not (payload.get("content") or payload.get("messages")):
        raise InputError(
            f"Prompt {row_no} has no text.",
            why="The payload has neither `content` nor `messages`.",
            remedy="Give a text, or a payload with one of them.",
        )
    return payload
