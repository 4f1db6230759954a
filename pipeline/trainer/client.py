"""The trainer's client: pull, commit, abandon and replay complete groups.

Used in the trainer process, by adapters and the command line. Transactions are short.
Every wait has a timeout, and its error gives the reason. Must not: need the broker.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator

from sqlalchemy import Engine

from pipeline.contract.errors import InputError, ServiceUnavailable
from pipeline.contract.names import check_name
from pipeline.contract.rollout import RunState
from pipeline.contract.train_batch import (
    BatchSpec,
    NotReady,
    PipelineStats,
    ResumeInfo,
    TrainBatch,
)
from pipeline.embedded import EmbeddedServices
from pipeline.queue.payloads import PayloadStore, open_payloads
from pipeline.settings import Settings, load_settings
from pipeline.store.engine import READY_CHANNEL, Listener, open_engine, transact
from pipeline.store.runs import Run, get_run
from pipeline.store.schema import require_current
from pipeline.store.status import run_stats
from pipeline.store.train_batches import (
    abandon_batch,
    commit_batches,
    forget_lost_batches,
    list_steps,
)
from pipeline.trainer.batches import ConsumerBatches

#: Longer than most trainer steps. An expired lease ends only if another consumer needs the groups.
LEASE_S = 3600.0
_POLL_S = 2.0


class TrainerClient:
    """Leases complete groups of one run to one consumer.

    Args:
        engine: The trajectory store.
        run: The run's whole slug.
        consumer: Name of the trainer; two consumers of one run share its groups.
        payloads: The payload store, needed if trajectories are stored there.
        lease_s: Seconds after which another consumer may take over what was not committed.

    Raises:
        InputError: The consumer's name is too long.
        NotFound: There is no such run.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        run: str,
        consumer: str = "trainer",
        payloads: PayloadStore | None = None,
        lease_s: float = LEASE_S,
    ) -> None:
        try:
            check_name(consumer, "consumer")
        except ValueError as error:
            raise InputError(str(error)) from error
        self._engine = engine
        self._consumer = consumer
        self._run: Run = transact(engine, lambda connection: get_run(connection, run))
        self._batches = ConsumerBatches(
            engine, self._run, consumer=consumer, payloads=payloads, lease_s=lease_s
        )
        # Connects at the first wait and stays connected: connecting costs more than a pull.
        self._listener = Listener(engine, READY_CHANNEL)
        weakref.finalize(self, self._listener.close)

    @classmethod
    def connect(
        cls, run: str, *, consumer: str = "trainer", settings: Settings | None = None
    ) -> TrainerClient:
        """Return a client for the store that the settings name, or the private one of this folder.

        This starts no private server; a running one stays until `rollout down`.

        Raises:
            ServiceUnavailable: The settings name no database, and no private one runs.
            SchemaOutdated: It is not migrated.
        """
        settings = settings or load_settings()
        engine = open_engine(
            _database_url(settings),
            connect_timeout_s=settings.database.connect_timeout_s,
            network_timeout_s=settings.database.network_timeout_s,
        )
        require_current(engine)
        return cls(engine, run=run, consumer=consumer, payloads=open_payloads(settings))

    def pull(
        self,
        step: int,
        spec: BatchSpec | None = None,
        *,
        policy_version: int | None = None,
        timeout_s: float | None = None,
    ) -> TrainBatch:
        """Return the batch of this step: leased now, or the same one as before.

        Args:
            step: The trainer's step; pulled again it gives the same groups in the same order.
            spec: What to lease; a replay keeps what was leased.
            policy_version: Weights being trained, for the record.
            timeout_s: Longest wait for enough groups; None does not wait.

        Raises:
            NotReady: Too few groups are ready; `error.stats` says why, `error.drained` whether
                waiting longer is of no use.
            NotAllowed: Another consumer took over this step's groups.
            UnreadableBody: The step was pulled before, and a trajectory of it is gone or damaged.
                In a step that is pulled for the first time, other groups take the place of such a
                group, which is dropped.
            ServiceUnavailable: The payload store does not answer; nothing is dropped.
        """
        spec = spec or BatchSpec()
        deadline = time.monotonic() + (timeout_s or 0.0)
        while True:
            pulled = self._batches.take(step, spec, policy_version=policy_version)
            if isinstance(pulled, TrainBatch):
                return pulled
            left = deadline - time.monotonic()
            # The figures are costly in a large run, so they are not read at each wake-up.
            if left <= 0 or pulled in (RunState.FINISHED, RunState.CANCELLED):
                stats = self.stats()
                if left <= 0 or stats.drained:
                    raise NotReady(stats, wanted=spec.groups)
            self._listener.wait(min(left, _POLL_S))

    def commit(self, upto_step: int, *, checkpoint_uri: str | None = None) -> int:
        """Consume all batches up to this step; call it when the step's checkpoint is durable.

        Committing again changes nothing. Returns the number of groups that became consumed.

        Raises:
            NotAllowed: One of the steps was taken over by another consumer.
        """
        return transact(
            self._engine,
            lambda connection: commit_batches(
                connection,
                self._run,
                consumer=self._consumer,
                upto_step=upto_step,
                checkpoint_uri=checkpoint_uri,
            ),
        )

    def abandon(self, step: int, *, reason: str) -> int:
        """Give back the groups of a step, so that they can be pulled again; return how many."""
        return transact(
            self._engine,
            lambda connection: abandon_batch(
                connection, self._run, consumer=self._consumer, step=step, reason=reason
            ),
        )

    def resume(self, *, committed_step: int | None) -> ResumeInfo:
        """Return the next step after a restart from the checkpoint of `committed_step`.

        Steps up to it are committed if they are not yet. Later leased steps can be replayed, except
        those that another consumer took over: they lease other groups when they are pulled. None
        means that there is no checkpoint.

        Raises:
            NotAllowed: One of the committed steps was taken over by another consumer.
        """
        after = -1 if committed_step is None else committed_step
        if committed_step is not None:
            self.commit(committed_step)
        transact(
            self._engine,
            lambda connection: forget_lost_batches(
                connection, self._run, consumer=self._consumer, after=after
            ),
        )
        steps = self._steps()
        replay = tuple(
            step for step, state in steps if step > after and state in ("leased", "committed")
        )
        return ResumeInfo(committed_step, next_step=after + 1, replay=replay)

    def stats(self) -> PipelineStats:
        """Return the figures of the run and the reasons why it is not finished."""
        return transact(
            self._engine,
            lambda connection: run_stats(connection, self._run, consumer=self._consumer),
        )

    def stream(
        self,
        spec: BatchSpec | None = None,
        *,
        start_step: int | None = None,
        timeout_s: float = 600.0,
    ) -> Iterator[TrainBatch]:
        """Yield batch after batch until the run has no more; the caller commits.

        Args:
            spec: The size of each batch.
            start_step: The first step; None: the one after the last that was committed.
            timeout_s: Longest wait for a batch.

        Raises:
            NotReady: Nothing became ready for `timeout_s`.
        """
        if start_step is None:
            committed = [step for step, state in self._steps() if state == "committed"]
            start_step = max(committed, default=-1) + 1
        step = start_step
        while True:
            try:
                batch = self.pull(step, spec, timeout_s=timeout_s)
            except NotReady as error:
                if error.drained:
                    return
                raise
            yield batch
            step += 1

    def close(self) -> None:
        """Close the connections to the store."""
        self._listener.close()
        self._engine.dispose()

    def _steps(self) -> list[tuple[int, str]]:
        return transact(
            self._engine,
            lambda connection: list_steps(connection, self._run, consumer=self._consumer),
        )


def _database_url(settings: Settings) -> str:
    if settings.database.url is not None:
        return settings.database.url.get_secret_value()
    url = EmbeddedServices(settings.data_dir).find_postgres()
    if url is None:
        raise ServiceUnavailable(
            f"No trajectory store is named, and no private one runs in {settings.data_dir}.",
            remedy="Start it in this folder: `rollout up`. Or set ROLLOUT_DATABASE__URL.",
            code="E212",
        )
    return url
