"""The limits that a process knows to be in force: those of its model, and of its whole endpoint.

Owned by a `Limiter`, which takes them from the ledger's answers. Must not: decide who may call.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.limits.ledger import Answer, Ledger
from pipeline.limits.settings import LimitSettings, Pace


@dataclass(slots=True)
class LimitsInForce:
    """Both limits, with the versions that the ledger gave them; 0: none were ever set."""

    version: int = 0
    settings: LimitSettings | None = None
    wide_version: int = 0
    wide_settings: LimitSettings | None = None
    pace: Pace = field(default_factory=Pace)

    @property
    def is_unlimited(self) -> bool:
        """Whether no call has to wait."""
        both = (self.settings, self.wide_settings)
        return all(settings is None or settings.is_unlimited for settings in both)

    def are_lost(self, answer: Answer) -> bool:
        """Say whether the ledger lost its memory: it knows nothing of limits that were set."""
        return answer.version == 0 < self.version or answer.wide_version == 0 < self.wide_version

    def adopt(self, answer: Answer) -> bool:
        """Take over what the ledger says is in force; say whether that is something else."""
        if (answer.version, answer.wide_version) == (self.version, self.wide_version):
            return False
        if answer.version != self.version:
            self.version, self.settings = answer.version, answer.settings
        if answer.wide_version != self.wide_version:
            self.wide_version, self.wide_settings = answer.wide_version, answer.wide_settings
        self.pace = self.settings.pace() if self.settings else Pace()
        if self.wide_settings:
            self.pace = self.pace.merged(self.wide_settings.pace())
        return True

    async def restore(self, ledger: Ledger) -> None:
        """Tell a ledger that lost its memory what is in force."""
        if self.settings is not None:
            await ledger.restore(self.settings)
        if self.wide_settings is not None:
            await ledger.restore_wide(self.wide_settings)
