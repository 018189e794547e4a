"""What is to be done about faults in one job: holds the policy and the ledger, and turns events into changes of it.

Called by `runtime.controller`; `cli.run` and `cli.policy` let it check settings before anything is started. The thinking is in
`decide.policy` and `decide.escalate`, which are pure; here are the shipped tables, and what the journal keeps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import resources
from typing import Any

import msgspec

from rerail.config import Settings
from rerail.decide.axes import Levels, parse_levels
from rerail.decide.escalate import Change, Ledger
from rerail.decide.escalation import AT_ONCE, Book, Escalation, Seen, book_of, escalation_problems
from rerail.decide.policy import GRACEFUL, About, Policy, Verdict
from rerail.decide.policy_check import problems, unmatched
from rerail.decide.quarantine import Entry
from rerail.decide.subjects import KINDS, of_sighting
from rerail.errors import ConfigError
from rerail.faults.catalog import Catalog, Fault
from rerail.flow import Event, Rung, Severity
from rerail.runtime.chores import lacks, problem_with
from rerail.runtime.journal import Journal
from rerail.runtime.processes import say
from rerail.wording import counted

KEY = "handling"
"""Of the ledger in the journal's state."""


def shipped_text(name: str) -> str:
    """One of the tables that come with rerail."""
    return resources.files("rerail.decide").joinpath(name).read_text(encoding="utf-8")


@functools.cache
def shipped_levels() -> Levels:
    """The shipped mapping."""
    return parse_levels(shipped_text("levels.toml"))


def policy_of(settings: Settings, origin: str = "rerail.toml") -> Policy:
    """The policy as set."""
    return Policy.of(settings, shipped_levels(), origin)


def shipped_book(settings: Settings, origin: str = "rerail.toml") -> Book:
    """The rules of escalation as set."""
    return book_of(settings, shipped_text("escalation.toml"), origin)


def problems_with(settings: Settings, faults: Sequence[Fault], origin: str = "rerail.toml") -> list[str]:
    """Everything that is wrong with the policy and the rules of escalation, one sentence each."""
    found: list[str] = []
    if why := problem_with(settings.reset_command):
        found.append(f"{origin}: reset_command is {settings.reset_command!r}, but {why}")
    for read in (policy_of, shipped_book):
        try:
            read(settings, origin)
        except ConfigError as error:
            found += str(error).splitlines()
    if found:
        return found
    policy, book = policy_of(settings, origin), shipped_book(settings, origin)
    if settings.handling == GRACEFUL and (Rung.RESET_DEVICE not in policy.rungs or not settings.reset_limit):
        found.append(f"{origin}: handling is {GRACEFUL}, but no device may be reset (settings rungs, reset_limit)")
    codes = [fault.code for fault in faults]
    own = len(settings.escalation)
    unknown = [
        f"{origin}, escalation {number}: {text}"
        for number, rule in enumerate(book.rules[:own], 1)
        for text in unmatched(rule.code, codes)
    ]
    return [*found, *problems(policy, faults, origin), *escalation_problems(book, codes, unknown, own, origin)]


def missing_here(settings: Settings, origin: str = "rerail.toml") -> list[str]:
    """What a job on this machine would lack, one sentence each; elsewhere it may be there."""
    if problem_with(settings.reset_command) or not (program := lacks(settings.reset_command)):
        return []
    text = f"reset_command is {settings.reset_command!r}, but there is no program {program} here (PATH)"
    return [f"{origin}: {text}; install it, or correct the setting"]


def check(settings: Settings, faults: Sequence[Fault], origin: str = "rerail.toml") -> None:
    """Refuse settings under which a job could not be handled."""
    found = [*problems_with(settings, faults, origin), *missing_here(settings, origin)]
    if found:
        more = f"\n  ({counted(len(found) - 1, 'more problem')}: rerail policy check)" if len(found) > 1 else ""
        raise ConfigError(f"{found[0]}{more}")


class Handling:
    """Policy and ledger of one job."""

    def __init__(self, settings: Settings, catalog: Catalog, job: str, tell: Callable[[str], None] = say) -> None:
        self.policy, self.book, self.ledger = policy_of(settings), shipped_book(settings), Ledger()
        self.members: frozenset[str] = frozenset()
        """Nodes and devices of the job, as in `decide.subjects`; whoever places ranks keeps it up to date."""
        self.same: dict[str, str] = {}
        """Other names of members: `device:n1/0000:3b:00` is `device:n1/3`."""
        self._catalog, self._job, self._tell = catalog, job, tell
        self._written: tuple[Ledger, dict[str, Any]] | None = None

    @classmethod
    def of(cls, settings: Settings, catalog: Catalog, job: str, journal: Journal) -> Handling:
        """With what an earlier controller, or an earlier run in the same run directory, has left in the journal."""
        handling = cls(settings, catalog, job)
        handling.restore(journal.state())
        return handling

    # --- what to do ---------------------------------------------------------------------------------------------

    def verdict(self, code: str, *, node: str = "", severity: Severity = Severity.ERROR) -> Verdict:
        """What the policy says about a fault; `severity` counts where the catalogue does not know it."""
        return self.policy.verdict(self._about(code, node, severity))

    def heard(self, event: Event, subject: str = "", *, over: bool = False, once: bool = True) -> list[Change]:
        """An event of a machine or rank; `subject` as its monitor names it, or as in `decide.subjects`."""
        return self.note(self.seen(event, subject, over=over, once=once), event.at)

    def note(self, seen: Seen, at: float) -> list[Change]:
        """One sighting, for the ledger."""
        known = self.ledger.quarantined(seen.subject) is not None and seen.hardware
        if not (known or seen.mute_s or self.book.rules_for(seen)):
            return []
        return self._changed(self.ledger.note(seen, at, self.book, self.members))

    def seen(self, event: Event, subject: str = "", *, over: bool = False, once: bool = True) -> Seen:
        """The event as the ledger wants it."""
        about = self._about(event.code, event.node, event.severity)
        verdict = self.policy.verdict(about)
        whole = subject.partition(":")[0] in KINDS and ":" in subject
        named = subject if whole else of_sighting(event.node, subject, about.scope)
        return Seen(
            code=event.code,
            subject=self.same.get(named, named),
            kind=about.kind,
            scope=about.scope,
            severity=event.severity,
            hardware=about.hardware,
            axes=verdict.axes,
            again=self.policy.again(about),
            mute_s=verdict.mute_s,
            over=over,
            once=once,
            evidence=(event.evidence or event.message)[:300],
        )

    def tick(self, at: float) -> list[Change]:
        """What has become true by now (wall clock)."""
        return self._changed(self.ledger.tick(at, self.book, self.members))

    def next_deadline(self) -> float | None:
        """When to tick next, by the wall clock."""
        return self.ledger.next_deadline()

    # --- quarantine, restarts, resets ---------------------------------------------------------------------------

    def usable(self, subject: str) -> bool:
        """Whether ranks may be placed there."""
        return self.ledger.quarantined(subject) is None

    def isolate(self, seen: Seen, at: float, rule: Escalation = AT_ONCE) -> list[Change]:
        """Put it into quarantine at once, because of what the fault is; never the last one."""
        return self._changed(self.ledger.isolate(seen, at, self.book, self.members, rule))

    def add(self, entry: Entry, members: Collection[str], *, force: bool = False) -> None:
        """By hand."""
        self.ledger = self.ledger.add(entry, members, force=force)

    def release(self, subject: str) -> None:
        """By hand, or after a check that has passed."""
        self.ledger = self.ledger.release(subject)

    def may_restart(self, ranks: Mapping[int, str], at: float) -> str:
        """Why these ranks (with their nodes) must not be started anew now, or nothing."""
        return self.ledger.may_restart(_whose(ranks), at, self.book)

    def restarted(self, ranks: Mapping[int, str], at: float) -> None:
        """Count it."""
        self.ledger = self.ledger.restarted(_whose(ranks), at, self.book)

    def may_reset(self, device: str, at: float) -> str:
        """Why this device cannot be reset now, or nothing."""
        return self.ledger.may_reset(device, at, self.book)

    def last_reset(self, device: str) -> float | None:
        """When this device was reset last, or was to be; None: not of late."""
        return max(self.ledger.resets.get(device, ()), default=None)

    def reset_done(self, device: str, at: float) -> None:
        """Count it, also if it has failed."""
        self.ledger = self.ledger.reset_done(device, at, self.book)

    # --- memory -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """For the journal; made anew only where something has changed."""
        if self._written is None or self._written[0] is not self.ledger:
            self._written = self.ledger, msgspec.to_builtins(self.ledger)
        return {KEY: self._written[1]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """What the journal holds; a ledger that cannot be read is begun anew, and that is said."""
        try:
            self.ledger = msgspec.convert(state.get(KEY, {}), Ledger)
        except msgspec.ValidationError as error:
            self._tell(
                f"the counts of faults and the quarantine in the journal cannot be read ({error}) and begin anew"
            )

    def _about(self, code: str, node: str, severity: Severity) -> About:
        fault = self._catalog.get(code)
        if fault is None:
            return About(code=code, severity=severity, job=self._job, node=node)
        return About.of(fault, job=self._job, node=node)

    def _changed(self, result: tuple[Ledger, list[Change]]) -> list[Change]:
        self.ledger, changes = result
        return changes


def _whose(ranks: Mapping[int, str]) -> list[str]:
    nodes = sorted({node for node in ranks.values() if node})
    return [*(f"rank:{rank}" for rank in sorted(ranks)), *(f"node:{node}" for node in nodes), "job"]
