"""The exceptions a user or an operator can meet, each deriving from what they would already catch.

    RerailError (Exception)
    +-- UsageError (ValueError)            a flag, file or argument is wrong; shown without a traceback
    +-- ConfigError (ValueError)           a setting in rerail.toml or the environment is wrong
    +-- WireError (ConnectionError)        a message from another process is malformed or out of turn
    +-- FencedError (ConnectionError)      this process belongs to an old generation and must not join
    +-- JournalError (OSError)             the journal cannot be opened, read or written
    +-- StateError (RuntimeError)          tracked state cannot be saved, moved or restored exactly
    +-- CheckpointError (RuntimeError)     a checkpoint is damaged, incomplete or cannot be written
    +-- NotReplaceable (RuntimeError)      the script's process groups cannot be rebuilt under living ranks
    +-- StepInterrupted (RuntimeError)     raised inside `job.step()` when a fault elsewhere ends this attempt
    +-- JobStopped (RuntimeError)          the controller has ended the job

Raised everywhere; imports nothing of rerail.
"""


class RerailError(Exception):
    """Base of everything rerail raises on purpose."""


class UsageError(RerailError, ValueError):
    """A flag, file or argument is wrong. The text says what, where and what to do."""

    def __init__(self, what: str, *, hint: str = "") -> None:
        super().__init__(what if not hint else f"{what}\n  {hint}")


class ConfigError(RerailError, ValueError):
    """A setting is wrong; the text names its origin."""


class WireError(RerailError, ConnectionError):
    """A message from another process is malformed, too large or out of turn."""


class FencedError(RerailError, ConnectionError):
    """This process belongs to an old generation; its slot has been given to another."""


class JournalError(RerailError, OSError):
    """The journal cannot be opened, read or written."""


class StateError(RerailError, RuntimeError):
    """Tracked state cannot be saved, moved or restored exactly."""


class CheckpointError(RerailError, RuntimeError):
    """A checkpoint is damaged, incomplete or cannot be written. The text says which file and what is wrong with it."""


class NotReplaceable(RerailError, RuntimeError):
    """The script's process groups cannot be rebuilt under living ranks."""


class StepInterrupted(RerailError, RuntimeError):
    """A fault elsewhere ends this attempt of the step.

    `job.step()` catches it; the same batch is handed out again once the job is whole. Code between
    `optimizer.step()` and this class must not swallow it: `except Exception` around a step hides the fault.
    """


class JobStopped(RerailError, RuntimeError):
    """The controller has ended the job; the text says why."""
