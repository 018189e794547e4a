"""Holds what ranks tell of their steps against each other: turns it into signals of stragglers, sick training and bad replicas.

Called by `runtime.intake` for every beat of an agent, and for votes that are not unanimous. The judgements are pure and stand in `diagnose`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from rerail.decide.setbacks import KINDS
from rerail.diagnose.classify import BACK
from rerail.diagnose.health import HealthWatch
from rerail.diagnose.straggler import Phases, Straggler, StragglerWatch
from rerail.diagnose.vote import Ballot, Votes, compare, count
from rerail.runtime.clock import METRICS, Metric, Took
from rerail.runtime.orders import Beat
from rerail.runtime.wire import Unsound, Voted
from rerail.wording import ranks

Payload = dict[str, str | int | float | bool]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something about the training of one rank (or, with -1, of all) that begins or ends."""

    source: str
    rank: int
    step: int
    state: str
    """Which of the things that this source tells."""
    text: str
    over: bool = False
    back: int = -1
    """The newest version that all ranks can be sent back to; -1: it is only told."""

    @property
    def payload(self) -> Payload:
        told: Payload = {"state": self.state, "message": self.text, "subject": f"rank {self.rank}", "over": self.over}
        return told if self.back < 0 else {**told, ACT: self.back}


class TrainingWatch:
    """All that is compared, over all ranks of the job."""

    def __init__(self, roll_back: Sequence[str] = ()) -> None:
        self._back = {KINDS[name].removeprefix("training.") for name in roll_back}
        """Kinds of sickness that all go back for."""
        self._stragglers = StragglerWatch()
        self._health = HealthWatch()
        self._disputes: dict[tuple[int, ...], tuple[int, int, Votes]] = {}
        """By the ranks that differed: the version, where they went back to, and their votes."""
        self._pids: dict[int, int] = {}
        self._seen = -1
        """The newest step whose health was looked at: steps that are repeated count once."""
        self._unsound: dict[tuple[int, str], int] = {}
        self._told: dict[tuple[int, str], int] = {}

    def take(self, beat: Beat) -> list[Finding]:
        """What this beat shows."""
        found: list[Finding] = []
        for rank, pid in beat.pids.items():
            if self._pids.setdefault(rank, pid) != pid:
                self._pids[rank] = pid
                found += [_slow(one) for one in self._stragglers.forget(rank)]
        for rank, steps in beat.took.items():
            for took in steps:
                phases = Phases(took.data, took.compute, took.communication, took.checkpoint)
                found += [_slow(one) for one in self._stragglers.take(rank, took.version, phases)]
        return found + self._sickness(beat)

    def voted(self, vote: Voted) -> list[Finding]:
        """Replicas differ, or have computed again what they differed in."""
        ballot = count(vote.version, vote.sums)
        version, back, first = self._disputes.get(ballot.voters, (-1, -1, {}))
        if vote.back >= 0:
            self._disputes[ballot.voters] = vote.version, vote.back, vote.sums
            return _differing(ballot, vote.sums, vote.back)
        if version == vote.version:
            del self._disputes[ballot.voters]
            return _replayed(ballot, back, first, vote)
        return _differing(ballot, vote.sums)

    def unsound(self, rank: int, word: Unsound) -> Finding:
        """A rank says itself that its training has gone wrong, and waits; its beats need not tell it again."""
        for name in METRICS:
            self._told[rank, name] = max(word.version + 1, self._told.get((rank, name), 0))
        state = {"batch": "bad_batch", "healing": "unhealed", "source": "refused"}.get(word.what, "nan")
        return Finding(source=HEALTH, rank=rank, step=word.version, state=state, text=word.text, back=word.trusted)

    def went_back(self, version: int) -> None:
        """All go on from here: what was seen since never was."""
        self._seen = min(self._seen, version)
        self._health.went_back(version)
        self._unsound.clear()

    def _sickness(self, beat: Beat) -> list[Finding]:
        found = []
        told = [(m.unsound, rank, name, m) for rank, metrics in beat.metrics.items() for name, m in metrics.items()]
        for _, rank, name, metric in sorted(told, key=lambda one: one[:3]):  # whoever had it first comes first
            found += self._soundness(rank, name, metric)
        first = min(beat.took, default=-1)
        if first < 0 or first != min(self._pids, default=-1):
            return found  # one rank speaks for all
        for took in beat.took[first]:
            if took.version > self._seen:
                self._seen = took.version
                newest = took is beat.took[first][-1]  # the metrics are of that one, or near it
                found += self._step(took, beat.metrics.get(first, {}) if newest else {})
        return found

    def _soundness(self, rank: int, name: str, metric: Metric) -> list[Finding]:
        told = self._unsound.get((rank, name))
        if metric.unsound > self._told.get((rank, name), 0) and told is None:
            self._told[rank, name] = metric.unsound
            self._unsound[rank, name] = metric.unsound
            text = f"{name} at step {metric.unsound} on rank {rank}"
            return [Finding(source=HEALTH, rank=rank, step=metric.unsound, state="nan", text=text)]
        if told is not None and math.isfinite(metric.value) and metric.version - metric.unsound >= SOUND_STEPS:
            del self._unsound[rank, name]
            text = f"{name} is finite again since step {metric.unsound + 1}"
            return [Finding(source=HEALTH, rank=rank, step=metric.version, state="nan", text=text, over=True)]
        return []

    def _step(self, took: Took, metrics: dict[str, Metric]) -> list[Finding]:
        newest = {name: metric.value for name, metric in metrics.items() if math.isfinite(metric.value)}
        seconds = took.data + took.compute + took.communication + took.checkpoint
        loss, norm = newest.get("loss"), newest.get("grad_norm")
        return [
            Finding(
                source=HEALTH,
                rank=-1,
                step=one.step,
                state=one.kind,
                text=f"{one.value:.4g} at step {one.step}, expected {one.expected:.4g}",
                over=not one.begins,
                back=max(0, one.since - 1) if one.begins and one.kind in self._back else -1,
            )
            for one in self._health.take(took.version, loss, norm, step_s=seconds)
            if one.kind != "nan"
        ]


SOUND_STEPS = 10
"""Steps in a row that must be finite before it counts as over."""
HEALTH, STRAGGLER, VOTE = "training.health", "training.straggler", "training.vote"
ACT = BACK
"""In the payload of a signal that asks for a repair; others only tell."""


def _slow(one: Straggler) -> Finding:
    text = f"{one.ratio:.2f} times as long as its peers, since step {one.since}"
    return Finding(source=STRAGGLER, rank=one.rank, step=one.step, state=one.phase, text=text, over=one.over)


def _differing(vote: Ballot, sums: Votes, back: int = -1) -> list[Finding]:
    """Nothing where all agree."""
    parts = f"in {len(vote.groups)} of {len(next(iter(sums.values())))} parts of the state"
    then = f"; all go back to step {back} and compute it again" if back >= 0 else ""
    if vote.tie:
        text = f"{ranks(vote.suspects)} at step {vote.version}, {parts}{then}"
        return [Finding(source=VOTE, rank=-1, step=vote.version, state="tie", text=text, back=back)]
    agree = len(vote.voters) - len(vote.suspects)
    text = f"at step {vote.version}, {parts}; {agree} of {len(vote.voters)} agree{then}"
    return [
        Finding(source=VOTE, rank=rank, step=vote.version, state="differs", text=text, back=back)
        for rank in vote.suspects
    ]


def _replayed(vote: Ballot, back: int, first: Votes, second: Voted) -> list[Finding]:
    """Who was wrong, now that the same steps were computed twice."""
    result, step = compare(first, second.sums, second.far), vote.version
    if result.again:
        text = f"{ranks(vote.voters)} at step {step}, also when computed again from step {back}"
        return [Finding(source=VOTE, rank=-1, step=step, state="again", text=text)]
    if not result.suspects:
        text = f"{ranks(vote.voters)} at step {step}, computed again from step {back}"
        return [Finding(source=VOTE, rank=-1, step=step, state="unnamed", text=text)]
    others = tuple(rank for rank in vote.voters if rank not in result.suspects)
    text = (
        f"at step {step}; computed again from step {back} by all, it is what {ranks(others)} had, or far nearer to it"
    )
    return [Finding(source=VOTE, rank=rank, step=step, state="replayed", text=text) for rank in result.suspects]
