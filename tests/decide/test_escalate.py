"""The ledger: counting, hysteresis, storms, quarantine, budgets; and that it forgets and invents nothing."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rerail.config import Settings
from rerail.decide.axes import Admission, Axes, Repair, Running
from rerail.decide.escalate import Change, Ledger, What
from rerail.decide.escalation import Book, Escalation, Seen
from rerail.decide.quarantine import Entry
from rerail.decide.subjects import node_of, of_sighting, subject_of
from rerail.errors import UsageError
from rerail.runtime.handling import shipped_book, shipped_text

HOUR, DAY = 3600.0, 86_400.0
D0, D1, D2 = "device:n1/0", "device:n1/1", "device:n2/0"
MEMBERS = frozenset({"node:n1", "node:n2", D0, D1, D2})
RESET = Axes(admission=Admission.NOT_NOW, running=Running.NOW, repair=Repair.RESET_DEVICE)
SHIPPED = shipped_book(Settings())
STORM = SHIPPED.storm_s


def seen(subject: str = D0, code: str = "gpu.xid.48", **more: Any) -> Seen:
    facts: dict[str, Any] = {"axes": RESET, "once": True, "evidence": f"{code} on {subject}", **more}
    return Seen(code=code, subject=subject, kind="gpu", scope="device", **facts)


def run(
    sightings: Iterable[tuple[float, Seen]],
    book: Book = SHIPPED,
    until: float = 0.0,
    ledger: Ledger | None = None,
    members: frozenset[str] = MEMBERS,
) -> tuple[Ledger, list[Change]]:
    """All of them in order, with every deadline in between, and on to `until`."""
    ledger, changes = ledger or Ledger(), list[Change]()

    def ticks(limit: float) -> None:
        nonlocal ledger
        assert ledger is not None
        for _ in range(10_000):
            due = ledger.next_deadline()
            if due is None or due > limit:
                return
            ledger, new = ledger.tick(due, book, members)
            changes.extend(new)
        raise AssertionError("deadlines without end")

    last = 0.0
    for at, one in sightings:
        ticks(at)
        ledger, new = ledger.note(one, at, book, members)
        changes.extend(new)
        last = at
    ticks(max(until, last + STORM))
    return ledger, changes


def kinds(changes: Iterable[Change]) -> list[str]:
    return [change.what for change in changes]


# --- frequency ---


def test_a_device_that_needs_a_second_reset_within_a_day_is_quarantined_with_reason_and_evidence() -> None:
    ledger, changes = run([(0.0, seen()), (5 * HOUR, seen())])
    entry = ledger.quarantine[D0]
    assert entry.rule == "needs-resets" and entry.code == "gpu.xid.48" and entry.since == 5 * HOUR
    assert entry.reason == "gpu.xid.48 2 times within 24 h" and entry.evidence == (f"gpu.xid.48 on {D0}",)
    assert kinds(changes) == [What.QUARANTINED] and "until it is released" in changes[0].text
    assert ledger.quarantined(D0) is entry and ledger.quarantined(D1) is None


def test_two_in_more_than_a_day_are_not_enough() -> None:
    assert run([(0.0, seen()), (DAY + 1, seen())])[0].quarantine == {}


def test_the_same_line_again_and_again_is_one_occurrence_until_it_has_been_gone() -> None:
    ledger, _ = run([(float(second), seen()) for second in range(0, 300, 20)])
    assert ledger.quarantine == {} and [len(times) for times in ledger.counts.values()] == [1, 1]


def test_the_hbm_parity_error_may_come_twice_and_not_three_times() -> None:
    parity = seen(code="npu.80e18005")
    three = [(HOUR, parity), (2 * HOUR, parity), (3 * HOUR, parity)]
    assert run(three[:2])[0].quarantine == {}
    assert run(three)[0].quarantine[D0].rule == "hbm-parity"


def test_three_different_faults_a_day_are_one_too_many() -> None:
    ledger, _ = run([(HOUR * n, seen(code=f"gpu.xid.{n}")) for n in (1, 2, 3)])
    assert ledger.quarantine[D0].rule == "anything-often" and ledger.quarantine[D0].release_s == 2 * DAY


def test_what_the_catalogue_asks_for_the_second_time_is_told() -> None:
    again = Axes(admission=Admission.NO, running=Running.NOW, repair=Repair.REPLACE)
    weak = seen(axes=Axes(admission=Admission.NOT_NOW), severity="degraded", again=again)
    _, changes = run([(0.0, weak), (HOUR, weak)])
    assert [(one.what, one.axes.repair) for one in changes] == [(What.STRONGER, Repair.REPLACE)]


def test_software_is_not_counted() -> None:
    ledger, changes = run([(HOUR * n, seen(hardware=False)) for n in range(9)])
    assert ledger.quarantine == {} and ledger.counts == {} and changes == []


# --- duration ---

LINK = "link:n1/eth0"


def link(**more: Any) -> Seen:
    axes = Axes(admission=Admission.NOT_NOW, repair=Repair.REPLACE)
    return seen(LINK, "nic.link_down", **{"axes": axes, "once": False, **more})


def test_a_link_that_is_back_in_time_does_not_count() -> None:
    ledger, changes = run([(0.0, link()), (19.0, link(over=True))], until=HOUR)
    assert changes == [] and ledger == Ledger()


def test_a_link_that_stays_down_counts_after_its_time_and_is_over_after_another() -> None:
    ledger, changes = run([(0.0, link()), (100.0, link(over=True))], until=HOUR)
    assert [(one.what, one.at) for one in changes] == [(What.STRONGER, 20.0), (What.OVER, 160.0)]
    assert changes[0].axes.admission is Admission.NO and changes[0].rule == "link-down"
    assert ledger.counts == {f"link-down|nic.link_down|{LINK}": (20.0,)} and not ledger.standing


def test_flapping_is_one_fault_until_the_link_has_been_up_for_long_enough() -> None:
    flaps = [(10.0 * n, link(over=bool(n % 2))) for n in range(40)]
    assert len(run(flaps, until=HOUR)[0].counts[f"link-down|nic.link_down|{LINK}"]) == 1


def test_five_long_outages_a_day_quarantine_the_link_and_two_quiet_days_bring_probation() -> None:
    outages = [(HOUR * n + (50.0 if over else 0.0), link(over=over)) for n in range(1, 6) for over in (False, True)]
    ledger, changes = run(outages, until=6 * HOUR)
    assert kinds(changes)[-1] == What.OVER and What.QUARANTINED in kinds(changes)
    assert ledger.quarantine[LINK].last_fault == 5 * HOUR + 50, "free of faults since it has been up"
    entry = ledger.quarantine[LINK]
    assert entry.ends == entry.last_fault + 2 * DAY
    early, _ = run([], until=entry.ends - 1, ledger=ledger)
    assert not early.quarantine[LINK].probation
    late, changes = run([], until=entry.ends, ledger=ledger)
    assert late.quarantine[LINK].probation and kinds(changes) == [What.PROBATION] and "check --deep" in changes[0].text
    assert late.quarantined(LINK) is not None, "probation is not release"
    back, changes = run([(entry.ends + 5, link())], ledger=late, until=entry.ends + 6)
    assert not back.quarantine[LINK].probation and What.BACK in kinds(changes)


def test_a_fault_that_still_stands_keeps_its_device_from_probation() -> None:
    book = Book(rules=(Escalation(id="r", times=1, quarantine=True, release_s=HOUR),))
    ledger, _ = run([(0.0, seen(once=False))], book, until=DAY)
    assert not ledger.quarantine[D0].probation
    ledger, _ = run([(DAY, seen(once=False, over=True))], book, until=DAY + 2 * HOUR, ledger=ledger)
    assert ledger.quarantine[D0].probation


def test_a_muted_fault_counts_only_if_it_still_stands_after_that_time() -> None:
    muted = {"mute_s": 60.0, "once": False}
    short = [
        (0.0, seen(**muted)),
        (30.0, seen(**muted, over=True)),
        (HOUR, seen(**muted)),
        (HOUR + 59, seen(**muted, over=True)),
    ]
    assert run(short, until=2 * HOUR)[0].counts == {}
    long = [(0.0, seen(**muted)), (61.0, seen(**muted, over=True))]
    assert run(long, until=HOUR)[0].counts != {}


# --- storms ---


def test_the_same_code_on_two_devices_within_half_a_minute_is_software_and_not_counted() -> None:
    both = [
        (at + apart, seen(device)) for at in (0.0, HOUR, 2 * HOUR) for device, apart in ((D0, 0.0), (D1, STORM - 1))
    ]
    ledger, changes = run(both)
    assert ledger.quarantine == {} and ledger.counts == {}
    assert set(kinds(changes)) == {What.STORM} and len(changes) == 6 and "so it is software" in changes[0].text


def test_further_apart_or_of_another_code_they_are_no_storm() -> None:
    apart = [(at + late, seen(device)) for at in (0.0, HOUR) for device, late in ((D0, 0.0), (D1, STORM + 1))]
    assert set(run(apart)[0].quarantine) == {D0, D1}
    codes = [(at, seen(device, code)) for at in (0.0, HOUR) for device, code in ((D0, "gpu.a"), (D1, "gpu.b"))]
    assert set(run(codes)[0].quarantine) == {D0, D1}


# --- the last one ---


def test_the_last_device_is_spared_and_that_is_said() -> None:
    two = frozenset({"node:n1", D0, D1})
    ledger, _ = run([(0.0, seen()), (HOUR, seen())], members=two)
    assert set(ledger.quarantine) == {D0}
    ledger, changes = run([(2 * HOUR, seen(D1)), (3 * HOUR, seen(D1))], members=two, ledger=ledger)
    assert set(ledger.quarantine) == {D0} and kinds(changes) == [What.SPARED] and "stays in use" in changes[0].text
    ledger, changes = ledger.isolate(seen(D1), 4 * HOUR, SHIPPED, two)
    assert kinds(changes) == [What.SPARED]


def test_by_hand_the_last_one_is_refused_unless_forced() -> None:
    alone = frozenset({"node:n1", D0, D1})
    entry = Entry(subject="node:n1", reason="smoke", since=1.0, by="me")
    with pytest.raises(UsageError, match=r"node:n1 is the last node .* nothing could train"):
        Ledger().add(entry, alone)
    ledger = Ledger().add(entry, alone, force=True)
    assert ledger.quarantined(D1) == entry, "a device goes with its node"
    assert Ledger().add(entry, MEMBERS).quarantined(D2) is None


def test_release_of_something_unknown_says_what_there_is() -> None:
    with pytest.raises(UsageError, match="nothing is"):
        Ledger().release("node:n1")
    ledger = Ledger().add(Entry(subject="node:n11", reason="r", since=1.0))
    with pytest.raises(UsageError, match=r"did you mean node:n11.*\n.*in quarantine: node:n11"):
        ledger.release("node:n1")
    with pytest.raises(UsageError, match="release node:n11"):
        ledger.release("device:n11/3")


def test_after_a_release_the_counts_begin_anew() -> None:
    ledger, _ = run([(0.0, seen()), (HOUR, seen())])
    ledger = ledger.release(D0)
    assert run([(2 * HOUR, seen())], ledger=ledger)[0].quarantine == {}


# --- budgets ---


def test_a_device_is_reset_three_times_in_six_hours_and_then_again_when_the_first_is_old() -> None:
    ledger = Ledger()
    for at in (0.0, HOUR, 2 * HOUR):
        assert ledger.may_reset(D0, at, SHIPPED) == ""
        ledger = ledger.reset_done(D0, at, SHIPPED)
    assert ledger.may_reset(D0, 3 * HOUR, SHIPPED) == f"reset budget of {D0} is used up (3 in 6 h)"
    assert ledger.may_reset(D1, 3 * HOUR, SHIPPED) == "" and ledger.may_reset(D0, 6 * HOUR, SHIPPED) == ""
    assert "switched off" in ledger.may_reset(D0, 9 * HOUR, shipped_book(Settings(reset_limit=0)))


def test_restarts_are_limited_per_rank_node_and_job_within_a_window() -> None:
    ledger, whose = Ledger(), ["rank:3", "node:n1", "job"]
    for at in range(20):
        assert ledger.may_restart(whose, float(at), SHIPPED) == ""
        ledger = ledger.restarted(whose, float(at), SHIPPED)
    assert "rank 3 was started anew 20 times within 3600 s" in ledger.may_restart(whose, 29.0, SHIPPED)
    assert ledger.may_restart(["rank:4", "node:n1", "job"], 29.0, SHIPPED) == ""
    assert ledger.may_restart(whose, HOUR + 29, SHIPPED) == ""
    assert ledger.may_restart(whose, 29.0, shipped_book(Settings(restart_limits="job=60"))) == ""


# --- subjects ---


@pytest.mark.parametrize(
    ("text", "subject"),
    [
        ("n1", "node:n1"),
        ("node:n1.rack-2", "node:n1.rack-2"),
        ("n1/3", "device:n1/3"),
        ("n1/gpu03", "device:n1/3"),
        ("device:n1/npu3", "device:n1/3"),
        ("n1/eth0", "link:n1/eth0"),
        ("link:n1/mlx5_0", "link:n1/mlx5_0"),
        ("n1/0000:3b:00", "device:n1/0000:3b:00"),
    ],
)
def test_people_may_name_things_in_short(text: str, subject: str) -> None:
    assert subject_of(text) == subject and subject_of(subject) == subject
    assert node_of(subject).startswith("node:n1")


@pytest.mark.parametrize("text", ["", "node:", "device:n1", "link:n1/a/b", "rack:7", "node:n1/3", "n1/../x", "n" * 200])
def test_what_is_no_subject_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="names nothing that can be in quarantine\n  use node:NODE"):
        subject_of(text)


@pytest.mark.parametrize(
    ("words", "subject"),
    [
        (("n1", "gpu3/link1", "link"), "device:n1/3"),
        (("n1", "npu0", "device"), "device:n1/0"),
        (("n1", "eth0", "link"), "link:n1/eth0"),
        (("n1", "0000:3B:00", "device"), "device:n1/0000:3b:00"),
        (("n1", "gpu3", "node"), "node:n1"),
        (("n1", "", "device"), "node:n1"),
        (("n1", "/data", "node"), "node:n1"),
    ],
)
def test_words_of_monitors_become_subjects(words: tuple[str, str, str], subject: str) -> None:
    assert of_sighting(*words) == subject


# --- properties ---

TIMES = st.integers(0, 400).map(lambda n: n * 500.0)
SIGHTINGS = st.lists(
    st.tuples(
        TIMES,
        st.builds(
            seen,
            st.sampled_from((D0, D1, D2, LINK, "node:n1")),
            st.sampled_from(("gpu.xid.48", "gpu.xid.79", "nic.link_down", "npu.80e18005")),
            once=st.booleans(),
            over=st.booleans(),
        ),
    ),
    max_size=30,
).map(lambda found: sorted(found, key=lambda item: item[0]))


@given(SIGHTINGS)
def test_nothing_leaves_quarantine_by_itself_and_probation_never_comes_before_its_time(
    found: list[tuple[float, Seen]],
) -> None:
    ledger, last = Ledger(), {}
    for at, one in [*found, (10 * DAY, None)]:
        while True:
            due = ledger.next_deadline()
            new = ledger if due is None or due > at else ledger.tick(due, SHIPPED, MEMBERS)[0]
            assert new.quarantine.keys() >= ledger.quarantine.keys()
            for subject, entry in new.quarantine.items():
                if entry.probation and not ledger.quarantine[subject].probation:
                    assert due is not None and entry.release_s and due >= last[subject] + entry.release_s
            if due is None or due > at:
                break
            assert new != ledger, "a deadline that nothing comes of"
            ledger = new
        if one is not None:
            new = ledger.note(one, at, SHIPPED, MEMBERS)[0]
            assert new.quarantine.keys() >= ledger.quarantine.keys()
            ledger = new
            if not one.over:
                last[one.subject] = last[node_of(one.subject)] = at


@given(SIGHTINGS)
def test_the_ledger_comes_back_from_the_journal_as_it_was(found: list[tuple[float, Seen]]) -> None:
    middle = len(found) // 2
    ledger, _ = run(found[:middle])
    kept = msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(ledger)))
    again = msgspec.convert(kept, Ledger)
    assert again == ledger
    assert run(found[middle:], ledger=again) == run(found[middle:], ledger=ledger)


@given(SIGHTINGS, st.randoms())
def test_the_order_of_what_happens_at_the_same_time_does_not_matter(
    found: list[tuple[float, Seen]], random: Any
) -> None:
    mixed = []
    for _, group in itertools.groupby(found, key=lambda item: item[0]):
        together = list(group)
        random.shuffle(together)
        mixed += together
    assert run(mixed)[0] == run(found)[0]


@given(SIGHTINGS, st.floats(1.0, DAY))
def test_late_ticks_count_the_same_as_early_ones(found: list[tuple[float, Seen]], late: float) -> None:
    early, _ = run(found, until=11 * DAY)
    ledger = Ledger()
    for at, one in found:
        ledger, _ = ledger.tick(at, SHIPPED, MEMBERS)
        ledger, _ = ledger.note(one, at, SHIPPED, MEMBERS)
    end = max([at for at, _ in found], default=0.0) + STORM
    ledger, _ = ledger.tick(end, SHIPPED, MEMBERS)
    assert set(ledger.quarantine) == set(early.quarantine)


def test_the_shipped_rules_say_what_they_are_for_and_have_names() -> None:
    rows = tomllib.loads(shipped_text("escalation.toml"))["escalation"]
    assert all(row["note"] and row["id"] for row in rows)
