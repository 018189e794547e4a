"""Compares what ranks' flight recorders hold: turns records of collectives into the sentence who has not come. Pure.

torch's recorder keeps the newest collectives of a process, numbered per group, as JSON (its version 2.x). A rank that waits
in number 57 of a group, while another member has come to 56 only, waits for that one. Called by `runtime.flight`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

LINES = 2
"""At most so many sentences: the first says most."""
DEFAULT = "0"
"""torch's name for the default group."""


class Entry(msgspec.Struct, frozen=True):
    """One collective as torch writes it; what is not used here is left out."""

    process_group: tuple[str, str]
    """Name and description."""
    collective_seq_id: int
    profiling_name: str
    """`gloo:all_reduce`, `nccl:broadcast`."""
    state: str
    """`scheduled`, `started` or `completed`; gloo's stay `scheduled` and are `retired` when they are over."""
    retired: bool
    time_created_ns: int
    is_p2p: bool = False
    input_sizes: list[list[int]] = []

    @property
    def over(self) -> bool:
        return self.retired or self.state == "completed"

    @property
    def operation(self) -> str:
        return self.profiling_name.rpartition(":")[2]


class Trace(msgspec.Struct, frozen=True):
    """What one recorder gave. Without entries where nothing was recorded."""

    entries: list[Entry] = []


class Record(msgspec.Struct, frozen=True):
    """The answer of one rank."""

    traces: dict[str, Trace]
    """By recorder: `gloo` and `nccl` have one each, and a rank may have given only one."""
    groups: dict[str, list[int]] = {}
    """Members of its process groups, by name."""
    formed_ns: int = 0
    """When its generation was formed (wall clock). Older entries are of wires that are gone, and numbered anew since."""


_record = msgspec.json.Decoder(Record)


def read(data: bytes) -> Record | None:
    """One rank's answer; None if it is none, or only half of one."""
    try:
        return _record.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        return None


class _Group:
    """One group over one backend: what each rank has begun, and what of it is not over."""

    def __init__(self, recorder: str, name: str) -> None:
        self.recorder, self.name = recorder, name
        self.begun: dict[int, dict[int, Entry]] = {}
        """By rank and number."""

    def add(self, rank: int, entry: Entry) -> None:
        self.begun.setdefault(rank, {})[entry.collective_seq_id] = entry

    def waiting(self) -> dict[int, int]:
        """Number of the oldest collective that each rank waits in; who waits in none is left out."""
        open_ = {rank: [n for n, entry in mine.items() if not entry.over] for rank, mine in sorted(self.begun.items())}
        return {rank: min(numbers) for rank, numbers in open_.items() if numbers}

    def newest(self, rank: int) -> int:
        return max(self.begun.get(rank, {}), default=0)

    def told(self, rank: int, number: int) -> str:
        """What `rank` calls this collective, with everything that helps to find it in the script."""
        entry = self.begun[rank][number]
        sizes = ["x".join(map(str, size)) or "scalar" for size in entry.input_sizes[:1]]
        sizes += [f"and {len(entry.input_sizes) - 1} more"] * (len(entry.input_sizes) > 1)
        group = "default" if self.name == DEFAULT else self.name
        return f"{entry.operation} #{number} of group {group}" + (f" ({' '.join(sizes)})" if sizes else "")


def tell(records: Mapping[int, Record], silent: Collection[int] = ()) -> list[str]:
    """Who waits in which collective for whom, as far as these ranks know; `silent` ones were asked and gave nothing."""
    groups = _groups(records)
    stuck = {rank for group in groups for rank in group.waiting()}
    judged = [_judge(group, records, silent, stuck) for group in groups]
    found = sorted((one for one in judged if one is not None), key=lambda one: one[0])
    return [f"flight recorder: {text}" for _, text in found[:LINES]]


def _groups(records: Mapping[int, Record]) -> list[_Group]:
    groups: dict[tuple[str, str], _Group] = {}
    for rank, record in records.items():
        for recorder, entry in _current(record):
            key = (recorder, entry.process_group[0])
            groups.setdefault(key, _Group(*key)).add(rank, entry)
    return list(groups.values())


def _current(record: Record) -> Iterator[tuple[str, Entry]]:
    for recorder, trace in record.traces.items():
        for entry in trace.entries:
            if entry.time_created_ns >= record.formed_ns and not entry.is_p2p:
                yield recorder, entry


def _judge(
    group: _Group, records: Mapping[int, Record], silent: Collection[int], stuck: set[int]
) -> tuple[int, str] | None:
    """A sentence about this group, and how much it says: the least number says most."""
    waiting = group.waiting()
    if not waiting:
        return None
    number = min(waiting.values())
    there = [rank for rank in waiting if waiting[rank] == number]
    operation = group.begun[there[0]][number].operation
    what = group.told(there[0], number)
    members = next((record.groups[group.name] for record in records.values() if group.name in record.groups), [])
    heard = [rank for rank in members if rank in records and group.recorder in records[rank].traces]
    late = [rank for rank in heard if group.newest(rank) < number]
    mute = [rank for rank in members if rank in silent]
    if late:
        # one that waits in another group is late for a reason of its own, which another sentence tells
        rating = 1 if stuck.issuperset(late) else 0
        # a broadcast, say, lets some pass that the late one has not come to yet
        ahead = [f"{_ranks([rank])} in #{waiting[rank]}" for rank in waiting if rank not in there]
        text = f"{_ranks(late)} {_verb(late, 'has', 'have')} not begun {what}, which {_wait(there)}"
        return rating, ", ".join([text + " in", *ahead])
    others = [rank for rank in there if group.begun[rank][number].operation != operation]
    if others:
        same = [rank for rank in there if rank not in others]
        return 0, f"{_wait(same)} in {what}, but {_ranks(others)} in {group.told(others[0], number)}"
    if mute:
        return 2, f"{_wait(there)} in {what}; {_ranks(mute)} {_verb(mute, 'gives', 'give')} no record"
    return 3, f"{_wait(there)} in {what}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"{_verb(ranks, 'rank', 'ranks')} {', '.join(map(str, ranks))}"


def _wait(ranks: Sequence[int]) -> str:
    return f"{_ranks(ranks)} {_verb(ranks, 'waits', 'wait')}"


def _verb(ranks: Sequence[int], one: str, several: str) -> str:
    return one if len(ranks) == 1 else several
