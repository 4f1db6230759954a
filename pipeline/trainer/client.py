"""The trainer's client: pull, commit, abandon and replay complete groups.

Used in the trainer process, by adapters and the command line. Operations on the run itself are in
`run_control.py`. Transactions are short. Every wait has a timeout, and its error gives the reason.
Must not: need the broker.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import get_args

from sqlalchemy import Engine

from pipeline.contract.errors import InputError
from pipeline.contract.rollout import RunState
from pipeline.contract.train_batch import (
    BatchSpec,
    Later,
    NotReady,
    ResumeInfo,
    VersionOfStep,
    no_version,
)
from pipeline.embedded import EmbeddedServices
from pipeline.queue.payloads import PayloadStore, open_payloads
from pipeline.settings import Settings, load_settings
from pipeline.store.batch_leases import renew_leases
from pipeline.store.engine import READY_CHANNEL, Listener, open_engine, transact
from pipeline.store.rewind import resume_consumer
from pipeline.store.schema import require_current
from pipeline.store.train_batches import (
    abandon_batch,
    commit_batches,
    list_steps,
    reset_expired_steps,
)
from pipeline.trainer.batches import ConsumerBatches
from pipeline.trainer.run_control import RunControl
from pipeline.trainer.train_batch import TrainBatch

#: Longer than most trainer steps. An expired lease ends only if another consumer pulls the groups.
LEASE_S = 3600.0
_POLL_S = 2.0


class TrainerClient(RunControl):
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
        super().__init__(engine, run=run, consumer=consumer)
        self.lease_s = lease_s
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

        No private server is started, and a running one stays until `rollout down`.

        Raises:
            ServiceUnavailable: The settings name no database, and no private one runs.
            SchemaOutdated: The database is not migrated.
        """
        settings = settings or load_settings()
        url = settings.database.url
        engine = open_engine(
            url.get_secret_value()
            if url is not None
            else EmbeddedServices(settings.data_dir).require_postgres(),
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
            spec: The batch to lease; a replay returns the groups that were leased.
            policy_version: Version of the weights being trained; groups that are more than
                `spec.max_staleness` versions behind it are dropped. None: none is too old.
            timeout_s: Longest wait for enough groups; None does not wait.

        Raises:
            NotReady: Too few groups are ready; `error.stats` says why, `error.drained` whether
                waiting longer is of no use.
            NotAllowed: Another consumer took over this step's groups.
            UnreadableBody: The step was pulled before, and a trajectory of it is gone or damaged.
                In a step that is pulled for the first time, such a group is dropped, and another
                one replaces it.
            ServiceUnavailable: The payload store does not answer; nothing is dropped.
        """
        deadline = time.monotonic() + (timeout_s or 0.0)
        while True:
            left_s = deadline - time.monotonic()
            batch = self.try_pull(
                step, spec, policy_version=policy_version, is_last_try=left_s <= 0
            )
            if batch is not None:
                return batch
            self.wait_for_groups(min(left_s, _POLL_S))

    def try_pull(
        self,
        step: int,
        spec: BatchSpec | None = None,
        *,
        policy_version: int | None = None,
        is_last_try: bool = True,
    ) -> TrainBatch | None:
        """Return the batch of this step as `pull` does, without waiting.

        Returns:
            None if too few groups are ready, and it is neither the last try nor is waiting of no
            use.

        Raises:
            NotReady: Too few groups are ready.
        """
        spec, version = spec or BatchSpec(), policy_version
        if isinstance(pulled := self._batches.take(step, spec, policy_version=version), TrainBatch):
            return pulled
        # The figures are costly in a large run, so they are not read at each wake-up.
        if is_last_try or pulled in (RunState.FINISHED, RunState.CANCELLED):
            stats = self.stats(spec)
            if is_last_try or stats.drained:
                # Another process of this consumer may have leased the step before the figures.
                again = self._batches.take(step, spec, policy_version=version)
                if isinstance(again, TrainBatch):
                    return again
                raise NotReady(stats, spec)
        return None

    def wait_for_groups(self, timeout_s: float) -> None:
        """Wait until groups became ready or were dropped, or until the time is over."""
        self._listener.wait(timeout_s)

    def commit(self, upto_step: int, *, checkpoint_uri: str | None = None) -> int:
        """Consume all batches up to this step; call it when the step's checkpoint is durable.

        Committing again changes nothing. Returns the number of groups that became consumed.

        Raises:
            NotAllowed: One of the steps was taken over by another consumer.
        """
        return transact(
            self._engine,
            commit_batches,
            self._run,
            consumer=self._consumer,
            upto_step=upto_step,
            checkpoint_uri=checkpoint_uri,
        )

    def abandon(self, step: int, *, reason: str) -> int:
        """Give back the groups of a step, so that they can be pulled again; return how many."""
        return transact(
            self._engine,
            abandon_batch,
            self._run,
            consumer=self._consumer,
            step=step,
            reason=reason,
        )

    def resume(self, *, committed_step: int | None, later: Later = "replay") -> ResumeInfo:
        """Return the next step after a restart from the checkpoint of `committed_step`.

        Steps up to it are committed if they are not yet. The checkpoint may be of any age: later
        steps may be committed already. Steps that another consumer took over lease other groups
        when they are pulled.

        Args:
            committed_step: The step of the checkpoint; None: there is no checkpoint.
            later: The treatment of this consumer's later steps. `replay`: pulled again, they give
                the same batches. `ready`: their groups are ready for the next pull. `afresh`: their
                groups are dropped as `rewound`, and their prompts enqueued again.

        Raises:
            NotAllowed: One of the committed steps was taken over by another consumer.
            InputError: There is no such choice for `later`.
        """
        if later not in get_args(Later):
            raise InputError(
                f"later={later!r} is not known.", remedy="Use replay, ready or afresh."
            )
        after = -1 if committed_step is None else committed_step
        if committed_step is not None:
            self.commit(committed_step)
        transact(self._engine, reset_expired_steps, self._run, consumer=self._consumer, after=after)
        return transact(
            self._engine,
            resume_consumer,
            self._run,
            consumer=self._consumer,
            committed_step=committed_step,
            later=later,
        )

    def renew(self) -> int:
        """Renew the leases of all steps that this consumer holds; return how many.

        `pull` renews them too. Call it within a trainer step that takes longer than the lease.
        """
        return transact(
            self._engine, renew_leases, self._run, consumer=self._consumer, lease_s=self.lease_s
        )

    def stream(
        self,
        spec: BatchSpec | None = None,
        *,
        start_step: int | None = None,
        policy_version: VersionOfStep = no_version,
        timeout_s: float = 600.0,
    ) -> Iterator[TrainBatch]:
        """Yield batch after batch until the run has no more; the caller commits.

        Args:
            spec: The size of each batch.
            start_step: The first step; None: the one after the last that was committed.
            policy_version: Given a step, the version of the weights that it trains, as in `pull`.
            timeout_s: Longest wait for a batch.

        Raises:
            NotReady: Nothing became ready for `timeout_s`.
        """
        step = self.next_step() if start_step is None else start_step
        while True:
            try:
                batch = self.pull(
                    step, spec, policy_version=policy_version(step), timeout_s=timeout_s
                )
            except NotReady as error:
                if error.drained:
                    return
                raise
            yield batch
            step += 1

    def next_step(self) -> int:
        """Return the step after the last that was committed."""
        committed = [step for step, state in self._steps() if state == "committed"]
        return max(committed, default=-1) + 1

    def close(self) -> None:
        """Close the connections to the store."""
        self._listener.close()
        self._engine.dispose()

    def _steps(self) -> list[tuple[int, str]]:
        return transact(self._engine, list_steps, self._run, consumer=self._consumer)
