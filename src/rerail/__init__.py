"""rerail: vendor-neutral resumable training for PyTorch.

    import rerail
    job = rerail.join()

`import rerail` is light; torch is imported by the first use of `join` or `Job`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rerail.errors import JobStopped, RerailError, StateError, StepInterrupted

if TYPE_CHECKING:
    from rerail.session.dealing import Dealer as Dealer
    from rerail.session.job import Job as Job
    from rerail.session.join import join as join

__version__ = "0.1.0"
__all__ = ["Dealer", "Job", "JobStopped", "RerailError", "StateError", "StepInterrupted", "join"]


def __getattr__(name: str) -> Any:
    if name == "join":
        from rerail.session.join import join

        return join
    if name == "Job":
        from rerail.session.job import Job

        return Job
    if name == "Dealer":
        from rerail.session.dealing import Dealer

        return Dealer
    raise AttributeError(f"module 'rerail' has no attribute {name!r}")
