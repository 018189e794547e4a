"""Holds what ranks tell of their steps against each other: turns beats into signals of stragglers, sick training and bad replicas.

Called by `runtime.intake` for every beat of an agent. The judgements are pure and stand in `diagnose`.
"""

from __future__ import annotations

import math

import msgspec

from rerail.diagnose.health import HealthWatch
from rerail.diagnose.straggler import Phases, Straggler, StragglerWatch
from rerail.diagnose.vote import Ballot, VoteBox
from rerail.runtime.clock import GROUPS, Metric, Took
from rerail.runtime.wire import Beat

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

    @property
    def payload(self) -> Payload:
        return {"state": self.state, "message": self.text, "subject": f"rank {self.rank}", "over": self.over}


class TrainingWatch:
    """All that is compared, over all ranks of the job."""

    def __init__(self) -> None:
        self._stragglers = StragglerWatch()
        self._health = HealthWatch()
        self._votes = VoteBox()
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
                found += [one for vote in self._votes.forget(rank) for one in _differing(vote)]
        for rank, steps in beat.took.items():
            for took in steps:
                phases = Phases(took.data, took.compute, took.communication, took.checkpoint)
                found += [_slow(one) for one in self._stragglers.take(rank, took.version, phases)]
        found += self._sickness(beat)
        for rank, ballot in beat.ballots.items():
            result = self._votes.take(rank, ballot.version, ballot.sums, ballot.replicas)
            if result is not None:
                found += _differing(result)
        return found

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
            )
            for one in self._health.take(took.version, loss, norm, step_s=seconds)
            if one.kind != "nan"
        ]


SOUND_STEPS = 10
"""Steps in a row that must be finite before it counts as over."""
HEALTH, STRAGGLER, VOTE = "training.health", "training.straggler", "training.vote"


def _slow(one: Straggler) -> Finding:
    text = f"{one.ratio:.2f} times as long as its peers, since step {one.since}"
    return Finding(source=STRAGGLER, rank=one.rank, step=one.step, state=one.phase, text=text, over=one.over)


def _differing(vote: Ballot) -> list[Finding]:
    """Nothing where all agree."""
    parts = f"parts {', '.join(map(str, vote.groups))} of {GROUPS}"
    if vote.tie:
        text = f"ranks {', '.join(map(str, vote.suspects))} at step {vote.version} ({parts})"
        return [Finding(source=VOTE, rank=-1, step=vote.version, state="tie", text=text)]
    text = f"at step {vote.version}, against {len(vote.voters) - len(vote.suspects)} ({parts})"
    return [Finding(source=VOTE, rank=rank, step=vote.version, state="differs", text=text) for rank in vote.suspects]
