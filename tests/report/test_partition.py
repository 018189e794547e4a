"""Every second has one cause: the pieces follow each other without gap or overlap, and add up to the wall time."""

from __future__ import annotations

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from rerail.report.partition import PHASES, Cause, Piece, Run, Stop, Window, partition

EPOCH = 1.8e9
seconds = st.floats(0, 500)
shares = st.floats(-0.1, 1.2)


@st.composite
def runs(draw: st.DrawFn) -> list[Run]:
    found, now = [], EPOCH
    for _ in range(draw(st.integers(1, 3))):
        begin = now + draw(st.floats(-5, 100))
        end = begin + draw(st.floats(0, 2000))
        trained = draw(st.none() | st.floats(begin - 5, end + 5))
        progress = draw(st.none() | st.floats(begin - 5, end + 5))
        flags = {"silent": draw(st.booleans()), "closed": draw(st.booleans())}
        found.append(Run(begin, end, trained, progress, **flags, lost=draw(st.just(0.0) | seconds)))
        now = end
    return found


@st.composite
def stops(draw: st.DrawFn) -> list[Stop]:
    found = []
    for number in range(1, draw(st.integers(0, 12)) + 1):
        signal = EPOCH + draw(st.floats(-50, 3000))
        marks = [signal + draw(st.floats(0, 60)) for _ in range(3)]
        parked, formed, end = marks if draw(st.booleans()) else sorted(marks)
        begin = signal - draw(st.floats(0, 40))
        found.append(Stop(number, begin, signal, parked, formed, max(end, signal), *[draw(seconds) for _ in range(4)]))
    return found


windows = st.lists(
    st.tuples(st.floats(-10, 3000), st.floats(-1, 200), shares, shares).map(
        lambda one: Window(EPOCH + one[0], EPOCH + one[0] + one[1], one[2], one[3])
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=200)
@given(runs(), stops(), windows)
def test_the_pieces_add_up_to_the_wall_time_whatever_the_journal_holds(
    lives: list[Run], held: list[Stop], trained: list[Window]
) -> None:
    pieces = partition(lives, held, trained)
    begin = min(run.begin for run in lives)
    end = max(begin, *(run.end for run in lives))
    assert all(piece.seconds > 0 for piece in pieces)
    assert all(first.end == second.begin for first, second in itertools.pairwise(pieces)), "a gap, or an overlap"
    total = math.fsum(piece.seconds for piece in pieces)
    assert abs(total - (end - begin)) <= 0.005 * (end - begin) + 1e-5
    assert all(piece.cause in PHASES for piece in pieces if piece.incident)
    assert all(piece.incident or piece.cause is Cause.LOST for piece in pieces if piece.cause in PHASES)
    for stop in held:
        lost = math.fsum(one.seconds for one in pieces if one.incident == stop.incident and one.cause is Cause.LOST)
        assert lost <= stop.lost + 1e-4, "no more is computed again than was lost"


def spent(pieces: list[Piece]) -> dict[Cause, float]:
    found: dict[Cause, float] = {}
    for piece in pieces:
        found[piece.cause] = round(found.get(piece.cause, 0.0) + piece.seconds, 6)
    return found


JOB = Run(0.0, 1000.0, trained=100.0, progress=990.0)
STOP = Stop(1, begin=298.0, signal=300.0, parked=310.0, formed=314.0, end=317.0, communication=1.0, load=3.0, compile=1.0, lost=5.0)  # fmt: skip


def test_an_undisturbed_job() -> None:
    found = spent(partition([JOB], [], [Window(100.0, 990.0, data=0.1, checkpoint=0.2)]))
    assert found == {Cause.STARTUP: 100, Cause.TRAINING: 623, Cause.DATA: 89, Cause.CHECKPOINT: 178, Cause.SHUTDOWN: 10}


def test_an_incident_has_its_phases_and_its_lost_work_goes_on_beyond_its_end() -> None:
    pieces = partition([JOB], [STOP], [])
    assert [(one.begin, one.end, one.cause) for one in pieces[2:-2]] == [
        (298, 300, Cause.DETECT),
        (300, 310, Cause.RESCHEDULE),
        (310, 311, Cause.COMMUNICATION),
        (311, 314, Cause.LOAD),
        (314, 315, Cause.COMPILE),
        (315, 320, Cause.LOST),
    ]


def test_lost_work_that_the_next_fault_interrupts_is_computed_after_it() -> None:
    second = Stop(2, begin=318.0, signal=318.0, parked=320.0, formed=320.0, end=320.0)
    found = [(one.begin, one.end, one.cause, one.incident) for one in partition([JOB], [second, STOP], [])]
    assert found[7:11] == [
        (315, 318, Cause.LOST, 1),
        (318, 320, Cause.RESCHEDULE, 2),
        (320, 322, Cause.LOST, 1),
        (322, 990, Cause.TRAINING, 0),
    ]


def test_a_run_that_begins_with_an_older_version_computes_again_what_an_earlier_one_had() -> None:
    again = Run(1010.0, 1100.0, trained=1020.0, progress=1100.0, repeated=6, lost=30.0)
    found = [(one.begin, one.end, one.cause) for one in partition([JOB, again], [], [])]
    assert found[-3:] == [(1010, 1020, Cause.STARTUP), (1020, 1050, Cause.LOST), (1050, 1100, Cause.TRAINING)]


def test_recoveries_that_overlap_are_counted_once() -> None:
    within = Stop(2, begin=304.0, signal=305.0, parked=312.0, formed=316.0, end=325.0)
    found = spent(partition([JOB], [STOP, within], []))
    assert sum(found.values()) == 1000
    assert found[Cause.DETECT] == 2 and found[Cause.RESCHEDULE] == 10 and found[Cause.COMPILE] == 1 + 8


def test_a_first_step_longer_than_all_that_was_lost_was_warming_up() -> None:
    stop = Stop(1, 300.0, 300.0, 301.0, 302.0, 310.0, compile=1.0, lost=3.0)
    found = spent(partition([JOB], [stop], []))
    assert (found[Cause.COMPILE], found[Cause.LOST]) == (5, 3)


def test_what_nobody_told_is_said_to_be_so() -> None:
    silent = Run(0.0, 50.0, silent=True)
    killed = Run(60.0, 100.0, trained=70.0, progress=90.0, closed=False)
    died = Run(110.0, 120.0, silent=False)
    found = partition([killed, silent, died], [], [])
    assert [(one.begin, one.end, one.cause) for one in found] == [
        (0, 50, Cause.UNKNOWN),
        (50, 60, Cause.OFF),
        (60, 70, Cause.STARTUP),
        (70, 90, Cause.TRAINING),
        (90, 100, Cause.UNKNOWN),
        (100, 110, Cause.OFF),
        (110, 120, Cause.STARTUP),
    ]


def test_the_time_between_the_last_step_and_a_fault_is_a_step_that_was_under_way() -> None:
    run = Run(0.0, 400.0, trained=100.0, progress=280.0)
    assert spent(partition([run], [STOP], []))[Cause.SHUTDOWN] == 83, "and not from step to fault"
