"""The guard behind a repair that is not exact: when it waits, when it is content, when it has all go back."""

from __future__ import annotations

import pytest

from rerail.runtime.plans import Healing
from rerail.session.healing import Healer, Verdict

HEALING = Healing(judge=1, loss=2.0, spread=0.1, target=20, since=33, until=46)


def judged(losses: dict[int, float], healing: Healing = HEALING, rank: int = 1) -> Verdict | None:
    healer = Healer()
    healer.begin(healing, sorted(losses.items()))
    return healer.judged(rank, max(losses), sorted(losses.items()))


def course(after: list[float]) -> dict[int, float]:
    """Falling from 3 to 2 over 33 steps, a little uneven; then what came after the repair."""
    before = {at: 3.0 - at / 33 + 0.05 * (-1) ** at for at in range(33)}
    return before | {33 + n: loss for n, loss in enumerate(after)}


def test_a_small_step_back_is_given_its_time() -> None:
    assert judged(course([2.3, 2.3, 2.25, 2.2])) is None


@pytest.mark.parametrize("loss", [4.0, 50.0])
def test_a_leap_beyond_where_all_would_go_back_to_ends_it_at_once(loss: float) -> None:
    assert judged(course([loss, loss])) is None, "two losses may be chance"
    found = judged(course([loss, loss * 1.1, loss]))
    assert found is not None
    assert not found.healed and found.target == 20
    assert found.text.startswith(f"loss {loss:.4g} at step 35, worse than the 2.")


def test_one_bad_batch_is_no_leap() -> None:
    assert judged(course([2.2, 9.0, 2.2])) is None


def test_without_losses_of_that_time_it_waits_until_the_end() -> None:
    late = {at: loss for at, loss in course([9.0] * 5).items() if at > 30}
    assert judged(late) is None
    found = judged(late | dict.fromkeys(range(33, 47), 9.0))
    assert found is not None and not found[0]


def test_at_the_end_it_has_healed_or_not() -> None:
    found = judged(course([2.4, 2.3, 2.2, *[2.05] * 11]))
    assert found is not None and found[0]
    found = judged(course([2.4] * 14))
    assert found is not None and not found[0]


def test_it_is_the_judges_affair_alone() -> None:
    assert judged(course([50.0] * 14), rank=0) is None


def test_a_guard_of_an_older_version_waits_until_the_end() -> None:
    old = Healing(judge=1, loss=2.0, spread=0.1, target=20, until=46)
    assert judged(course([50.0] * 5), old) is None


def test_what_it_has_cost_is_told_in_steps() -> None:
    """The loss falls by a hundredth in a step, and is set back by five of them."""
    before = {at: 5.0 * 0.99**at for at in range(60)}
    healing = Healing(judge=1, loss=5.0 * 0.99**56, spread=0.1, target=40, since=60, until=80, expected=4.0)
    found = judged(before | {at: 5.0 * 0.99 ** (at - 5) for at in range(60, 81)}, healing)
    assert found is not None and found.healed
    assert found.figures["lag"] == pytest.approx(5.0, abs=0.01) and found.figures["lag_error"] < 0.5
    assert (found.figures["behind"], found.figures["expected"]) == (20.0, 4.0)
    assert "5 ± 0 steps behind where it was heading, 4 were expected, going back would have cost 20" in found.text


def test_where_the_loss_does_not_fall_for_sure_nobody_says_what_it_has_cost() -> None:
    flat = {at: 2.0 + 0.1 * (-1) ** at for at in range(81)}
    found = judged(flat, Healing(judge=1, loss=2.0, spread=0.2, target=40, since=60, until=80))
    assert found is not None and found.healed and "lag" not in found.figures


# --- before anything is changed ---

TRIED = Healing(judge=1, loss=2.0, spread=0.1, target=20, since=33, until=46, tellers=(1,))


def looked(losses: dict[int, float], healing: Healing = TRIED) -> str:
    healer = Healer()
    healer.begin(healing, [])
    found = healer.first_look(healing.since)
    assert found is healing and healer.first_look(healing.since) is None, "once"
    return healer.no_good(healing, sorted(losses.items()))


def test_a_single_loss_that_no_chance_explains_is_refused() -> None:
    assert looked(course([2.3])) == ""
    assert looked(course([2.9])) == "", "it is where all would go back to, within its scatter"
    assert looked(course([4.0])).startswith("loss 4 in step 34, 2.")
    assert looked(course([float("inf")])).startswith("loss inf in step 34")


def test_where_no_loss_is_told_before_the_update_nobody_knows() -> None:
    assert looked(course([])) == ""
    assert looked({at: loss for at, loss in course([50.0]).items() if at > 30}) == "", "nor where too few are known"


def test_only_the_first_update_behind_the_repair_is_looked_at() -> None:
    healer = Healer()
    healer.begin(TRIED, [])
    assert healer.on_trial(33) and not healer.on_trial(34)
    assert healer.first_look(34) is None, "the step behind it"
    healer.begin(None, [])
    assert not healer.on_trial(33) and healer.first_look(33) is None


def test_where_the_loss_was_at_a_checkpoint_long_ago_is_known_by_a_mark() -> None:
    """From 9 down to 2 over 1000 steps; only the newest 64 losses are kept."""
    healer, every = Healer(), {at: 9.0 - 7.0 * at / 1000 + 0.05 * (-1) ** at for at in range(1001)}
    for at in range(1001):
        healer.told(at, [(one, every[one]) for one in range(max(0, at - 63), at + 1)])
    saved = Healing(judge=1, loss=2.0, spread=0.1, target=500, saved=True, since=1000, until=1500, tellers=(1,))
    healer.begin(saved, [])
    recent = [(one, every[one]) for one in range(937, 1000)]
    assert healer.no_good(saved, [*recent, (1000, 5.0)]) == "", "no worse than it was at step 500"
    assert healer.no_good(saved, [*recent, (1000, 7.0)]) != ""
    assert healer.judged(1, 1002, [*recent, *((1000 + n, 7.0) for n in range(3))]) is not None


def test_marks_of_a_past_that_never_was_are_dropped() -> None:
    healer = Healer()
    for at in range(200):
        healer.told(at, [(one, 2.0) for one in range(max(0, at - 10), at + 1)])
    newest = healer._marks[-1][0]
    healer.told(50, [(one, 2.0) for one in range(40, 51)])
    assert healer._marks[-1][0] <= 50 < newest
