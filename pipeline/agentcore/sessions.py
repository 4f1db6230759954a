"""The service that stops remote sessions whose outcome is known, and so frees their places.

A session's row is removed when the session does not exist any more. Stops count towards the
same rate as invocations. Must not: decide outcomes.
"""

from __future__ import annotations

import asyncio
import logging
import time

from sqlalchemy import Connection, Engine

from pipeline.agentcore.call_pace import CallPace, require_shared_pace
from pipeline.agentcore.data_plane import DataPlane, SessionMissing
from pipeline.contract.agentcore import session_id_of
from pipeline.contract.errors import ContractError, ModelRateLimit, RolloutError
from pipeline.contract.messages import AttemptKey
from pipeline.limits.pool import LimiterPool
from pipeline.service import process_id
from pipeline.settings import Settings
from pipeline.store.engine import WORK_CHANNEL, notify, transact
from pipeline.store.remote_sessions import StoppableSession, close_sessions, take_stoppable

log = logging.getLogger(__name__)

_IDLE_S = 0.5
#: Sessions that are stopped in one step: as many as the pace allows in a few seconds.
_AT_ONCE = 50
#: A worker whose attempt was cancelled may be just about to invoke its session.
_LATE_S = 30.0


class SessionStopper:
    """Stops sessions."""

    name = "sessions"

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._runner = asyncio.Runner()
        self._plane = DataPlane()
        self._pool: LimiterPool | None = None
        self._pace: CallPace | None = None

    def step(self) -> None:
        """Stop sessions whose outcome is known; wait where there are none."""
        runs = self._settings.dispatch.runs
        sessions = transact(self._engine, take_stoppable, runs=runs, most=_AT_ONCE, late_s=_LATE_S)
        if not sessions:
            time.sleep(_IDLE_S)
            return
        ended = [s for s in sessions if not s.target.is_arn]
        if len(ended) < len(sessions):
            ended = self._runner.run(self._stop_all(sessions))
        if ended:
            keys: list[AttemptKey] = [(s.rollout_id, s.attempt_no) for s in ended]

            def close(connection: Connection) -> None:
                close_sessions(connection, keys)
                # The dispatcher may have waited for a free place.
                notify(connection, WORK_CHANNEL)

            transact(self._engine, close)

    def close(self) -> None:
        """Close the connections."""
        self._runner.run(self._plane.close())
        if self._pool is not None:
            self._runner.run(self._pool.close())
        self._runner.close()

    async def _stop_all(self, sessions: list[StoppableSession]) -> list[StoppableSession]:
        pace = self._open_pace()
        for target in {session.target for session in sessions}:
            await self._plane.prepare(target)
        done = await asyncio.gather(*(self._stop(session, pace) for session in sessions))
        return [session for session, is_over in zip(sessions, done, strict=True) if is_over]

    async def _stop(self, session: StoppableSession, pace: CallPace) -> bool:
        """Stop a session; return whether it is over."""
        if not session.target.is_arn:
            return True
        session_id = session_id_of(session.label, session.rollout_id)
        await pace.wait(session.target, run=session.run)
        try:
            await self._plane.stop(session.target, session_id)
        except SessionMissing:
            return not session.may_start_late
        except ModelRateLimit:
            await pace.note_throttled(session.target)
            return False
        except ContractError as error:
            # The same call would be refused again; its idle timeout ends the session.
            log.error("The session of %s cannot be stopped: %s", session.label, error)
            return True
        except RolloutError as error:
            log.warning("The session of %s is stopped later: %s", session.label, error)
            return False
        return True

    def _open_pace(self) -> CallPace:
        if self._pace is None:
            url = require_shared_pace(self._settings)
            self._pool = LimiterPool(
                url, prefix=self._settings.limits_prefix, process=process_id(self.name)
            )
            self._pace = CallPace(self._pool, self._settings.agentcore.requests_per_second)
        return self._pace
