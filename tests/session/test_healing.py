"""The guard behind a repair that is not exact: when it waits, when it is content, when it has all go back."""

from __future__ import annotations

import pytest

from rerail.runtime.plans import Healing
from rerail.session.healing import Healer

HEALING = Healing(judge=1, loss=2.0, spread=0.1, target=20, since=33, until=46)


def judged(losses: dict[int, float], healing: Healing = HEALING, rank: int = 1) -> tuple[bool, str, int] | None:
    healer = Healer()
    healer.begin(healing)
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
    healed, text, target = found
    assert not healed and target == 20
    assert text.startswith(f"loss {loss:.4g} at step 35, worse than the 2.")


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
