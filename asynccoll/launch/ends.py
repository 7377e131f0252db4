"""How ranks and jobs end, in words and as exit codes. Knows no processes, descriptors or clocks."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TypeAlias

from asynccoll.errors import name_ranks

__all__ = ["TIMED_OUT", "Cause", "Exit", "Overdue", "exit_code"]

TIMED_OUT = 124
"""Exit code of a job that ran over its limit, as timeout(1) has it."""


@dataclass(frozen=True)
class Exit:
    """How one rank's process ended."""

    rank: int
    pid: int
    returncode: int
    """Exit code, or minus the signal's number, as `subprocess` has it."""
    elapsed: float
    """Seconds from the start of the job."""

    @property
    def code(self) -> int:
        """As a shell reports it: the exit code, or 128 plus the signal's number."""
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    @property
    def reason(self) -> str:
        """``"exited with code 3"`` or ``"was killed by SIGKILL"`` (``"signal 40"``: no name)."""
        if self.returncode >= 0:
            return f"exited with code {self.returncode}"
        number = -self.returncode
        known = {entry.value: entry.name for entry in signal.Signals}
        return f"was killed by {known.get(number, f'signal {number}')}"

    def __str__(self) -> str:
        return f"rank {self.rank} {self.reason} (pid {self.pid}) after {self.elapsed:.1f} s"


@dataclass(frozen=True)
class Overdue:
    """The job ran over its limit."""

    limit: float
    """Seconds."""
    ranks: tuple[int, ...]
    """Those that were still running, in ascending order."""

    def __str__(self) -> str:
        return f"{name_ranks(self.ranks)} still running after the limit of {self.limit:g} s"


Cause: TypeAlias = Exit | Overdue | signal.Signals
"""Why a job was stopped: a rank's failure, its limit, or a signal to the launcher."""


def exit_code(cause: Cause | None) -> int:
    """Exit code of a job: 0 without a cause, a rank's own, 124 for the limit, 128 + number for a signal."""
    if cause is None:
        return 0
    if isinstance(cause, Exit):
        return cause.code
    return TIMED_OUT if isinstance(cause, Overdue) else 128 + cause
