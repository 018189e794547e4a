"""Whole runs: they add up, repeat, agree with what can be computed, and policies differ where they should."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rerail.checkpoint.schedule import EverySteps
from rerail.flow import Cost, Rung
from rerail.planner.model import Hazard, Problem, Tier, waste
from rerail.sim.faults import Fault, generate
from rerail.sim.job import Job
from rerail.sim.policies import POLICIES, Rates, plan_of, policy
from rerail.sim.run import Measured, Result, compare, predict, run
from rerail.sim.scenario import Scenario, preset, scenario

MID = scenario({**preset("mid-1024").values, "days": 6, "faults": 3.0})
RERAIL, HOURLY = policy("rerail"), policy("hourly")


def adds_up(result: Result) -> None:
    lost = sum(result.by_stage.values())
    assert result.productive_s + lost == pytest.approx(result.wall_s, rel=1e-9)
    assert sum(result.by_cause.values()) == pytest.approx(lost, rel=1e-9, abs=1e-9)
    assert min([*result.by_stage.values(), *result.by_cause.values(), 0.0]) >= 0
    assert 0 <= result.goodput <= 1


def one(at: float, code: str, scope: str, seen: str, needs: str, **more: object) -> Fault:
    values = {"number": 0, "kind": "gpu", "repair_s": 600.0, **more}
    return Fault(at=at, code=code, scope=scope, seen=seen, needs=needs, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("plan", POLICIES, ids=lambda plan: plan.name)
def test_runs_add_up_and_repeat(plan) -> None:
    faults = generate(MID, 5)
    first = run(MID, plan, faults, 5)
    adds_up(first)
    assert first.interruptions > 10
    assert run(MID, plan, faults, 5) == first


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([8, 16, 64]),
    st.integers(0, 3),
    st.floats(0, 4000),
    st.floats(0, 40),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.integers(0, 6),
    st.integers(0, 1000),
)
def test_anything_adds_up(
    gpus: int, spares: int, faults: float, software: float, elastic: bool, replicas: int, which: int, seed: int
) -> None:
    made = Scenario(
        gpus=gpus, spare_nodes=spares, days=1.0, step_s=3.0, faults=faults, software_per_day=software,
        planned_per_day=2.0, elastic=elastic, replicas=replicas, batch_least=1, batch_most=3, silent_root=0.3,
        attempt_fails=0.2, replace_s=7200.0,
    )  # fmt: skip
    adds_up(run(made, POLICIES[which], generate(made, seed), seed))


def test_without_faults_nothing_but_saving_is_lost() -> None:
    calm = msgspec.structs.replace(MID, faults=0.0, software_per_day=0.0, start_faults=0.0)
    for result in compare(calm, POLICIES, [0]):
        adds_up(result)
        assert set(result.by_stage) <= {"saving"}
        assert result.interruptions == 0


def test_every_policy_gets_the_same_faults() -> None:
    results = compare(MID, POLICIES, [1])
    hardware = [{k: n for k, n in r.struck.items() if k not in ("software", "dependency")} for r in results]
    assert all(one == hardware[0] for one in hardware)


@pytest.mark.parametrize("name", ["hourly", "gemini", "replica", "rerail"])
def test_more_faults_never_help(name: str) -> None:
    def mean(faults: float) -> float:
        made = msgspec.structs.replace(MID, faults=faults, software_per_day=0.0, start_faults=0.0)
        return sum(run(made, policy(name), generate(made, seed), seed).goodput for seed in range(3)) / 3

    found = [mean(faults) for faults in (0.5, 2.0, 8.0)]
    assert found[0] + 0.001 > found[1] and found[1] + 0.001 > found[2]
    assert found[0] > found[2]


def test_the_comparison_comes_out_in_the_order_that_theory_says() -> None:
    goodput = {result.policy: result.goodput for result in compare(MID, POLICIES, [2])}
    assert goodput["hourly"] < goodput["gemini"] < goodput["rerail"]
    assert goodput["hourly"] < goodput["replica"]


@pytest.mark.parametrize("interval", [60, 300, 1500])
def test_one_tier_and_one_kind_agree_with_the_exact_formula(interval: int) -> None:
    """Young's case: exponential faults, one store, a restart each time; the planner's formula is exact for it."""
    tier = Tier(name="store", stall_s=4.0, save_s=0.0, restore_s=20.0, survives="job")
    plan = msgspec.structs.replace(
        HOURLY,
        tiers=lambda _: (tier,),
        when={"store": EverySteps(interval)},
        times=lambda *_: Cost(t1=10.0),
        detects=lambda *_: 0.0,
    )
    rate, wall = 1 / 1500, 1.2e6
    made = Scenario(gpus=1024, days=wall / 86_400, step_s=1.0, start_faults=0.0, software_per_day=0.0)
    stream, at, faults = random.Random(7), 0.0, []
    while (at := at + stream.expovariate(rate)) < wall:
        node = stream.randrange(128)  # the same rank three times in a row would stop the job
        faults.append(one(at, "process.crashed", "device", "exit", "process", node=node))
    result = run(made, plan, faults)
    seen = result.interruptions / (wall - result.by_stage["reschedule (T1)"] - result.by_stage["load (T3)"])
    hazard = Hazard(name="crash", rate=seen, scope="process", down_s=10.0)
    expected = waste(Problem(tiers=(tier,), hazards=(hazard,)), {"store": float(interval)}).total
    assert 1 - result.goodput == pytest.approx(expected, rel=0.06)


# --- what policies do ---


def test_a_crash_is_a_restart_for_one_and_a_replacement_for_the_other() -> None:
    faults = [one(50_000.0, "process.crashed", "device", "exit", "process", node=3, device=1)]
    quiet = msgspec.structs.replace(MID, start_faults=0.0, attempt_fails=0.0)
    hourly, rerail = run(quiet, HOURLY, faults), run(quiet, RERAIL, faults)
    assert hourly.rungs == {"restart_all": 1} and rerail.rungs == {"replace_rank": 1}
    assert hourly.by_stage["lost work (T0)"] > 60
    assert rerail.by_stage["lost work (T0)"] <= quiet.step_s, "a replica has all but the step that was under way"
    times = RERAIL.times(quiet, Rung.REPLACE_RANK)
    assert rerail.mttr_s == pytest.approx(times.total + quiet.transfer_s + 0.1)


def test_an_exception_is_a_step_done_again() -> None:
    faults = [one(50_000.0, "script.raised", "job", "raised", "passes", node=3, device=1)]
    assert run(MID, RERAIL, faults).rungs == {"retry_step": 1}


def test_a_lost_device_moves_to_a_spare_node_and_a_lost_node_as_a_whole() -> None:
    quiet = msgspec.structs.replace(MID, attempt_fails=0.0)
    device = [one(1000.0, "gpu.xid.79", "device", "explicit", "replace", node=3, device=1)]
    node = [one(1000.0, "node.lost", "node", "exit", "replace", node=3)]
    for faults, moved in ((device, 1), (node, 8)):
        job = Job(quiet, RERAIL, faults)
        job.run()
        assert job.rungs == {Rung.SWAP_NODE: 1}
        assert (
            sum(place.node.startswith("n12") and int(place.node[1:]) >= 128 for place in job.cluster.places.values())
            == moved
        )


def test_without_a_spare_all_wait_until_the_node_is_back() -> None:
    alone = msgspec.structs.replace(MID, spare_nodes=0, attempt_fails=0.0)
    faults = [one(1000.0, "node.lost", "node", "exit", "reboot", node=3, repair_s=5000.0)]
    result = run(alone, RERAIL, faults)
    assert result.rungs == {"restart_all": 1}
    assert 4500 < result.by_stage["waiting for nodes"] <= 5000
    elastic = run(msgspec.structs.replace(alone, elastic=True), RERAIL, faults)
    assert elastic.rungs == {"shrink": 1, "grow": 1}
    assert elastic.by_stage["fewer ranks"] == pytest.approx(5000 * 8 / 1024, rel=0.1)
    assert elastic.goodput > result.goodput


def test_empty_seats_are_not_filled_again_and_again_where_nothing_is_repaired() -> None:
    alone = msgspec.structs.replace(MID, spare_nodes=0, attempt_fails=0.0, elastic=True)
    silent = {"node": 3, "device": 1, "silent_root": True, "repair_s": 200_000.0}
    faults = [
        one(1000.0, "gpu.xid.79", "device", "explicit", "replace", **silent),
        one(5000.0, "node.lost", "node", "exit", "reboot", node=9, repair_s=900.0, number=1),
    ]
    result = run(alone, RERAIL, faults)
    assert sum(result.rungs.values()) < 10
    assert result.goodput > 0.98


def test_a_broken_device_that_says_nothing_is_left_in_the_end() -> None:
    faults = [
        one(1000.0, "gpu.xid.79", "device", "explicit", "replace", node=3, device=1, silent_root=True, repair_s=1e9)
    ]
    job = Job(MID, RERAIL, faults)
    job.run()
    assert job.cluster.places[25].node != "n3"
    assert job.training.losses.by(0)["detect"] > 100, "only the others complain, after a while"


def test_wrong_results_cost_what_came_since_replicas_last_agreed() -> None:
    faults = [one(50_000.0, "training.replica_differs", "device", "silent", "passes", node=3, luck=0.5)]
    result = run(MID, RERAIL, faults)
    steps = result.by_stage["lost work (T0)"] / MID.step_s
    assert 50 <= steps <= 251
    assert run(MID, HOURLY, faults).by_stage["lost work (T0)"] >= MID.silent_s


def test_a_warning_makes_ranks_leave_in_good_time() -> None:
    faults = [one(1000.0, "node.lemon", "node", "explicit", "passes", node=3)]
    result = run(MID, RERAIL, faults)
    assert result.rungs == {"hot_switch": 1}
    assert "lost work (T0)" not in result.by_stage


def test_planned_restarts_lose_no_work() -> None:
    faults = [Fault(number=0, at=50_000.0, kind="planned", code="", scope="job", seen="planned", needs="process")]
    result = run(MID, HOURLY, faults)
    assert set(result.by_stage) == {"planned restarts", "saving"}
    assert result.by_stage["planned restarts"] == pytest.approx(MID.job_restart_s + MID.load_s)


def test_a_second_fault_during_a_repair_belongs_to_it() -> None:
    quiet = msgspec.structs.replace(MID, attempt_fails=0.0)
    first = one(1000.0, "process.crashed", "device", "exit", "process", node=3, device=1)
    again = one(1005.0, "process.crashed", "device", "exit", "process", node=5, device=1, number=1)
    alone, both = run(quiet, RERAIL, [first]), run(quiet, RERAIL, [first, again])
    assert both.interruptions == 1
    assert alone.mttr_s < both.mttr_s < 2 * alone.mttr_s


def test_what_comes_back_from_repair_interrupts_nobody() -> None:
    quiet = msgspec.structs.replace(MID, attempt_fails=0.0)
    first = one(1000.0, "process.crashed", "device", "exit", "process", node=3, device=1)
    idle = one(500.0, "node.lost", "node", "exit", "reboot", node=130, repair_s=505.0)
    assert run(quiet, RERAIL, [first, idle]).mttr_s == run(quiet, RERAIL, [first]).mttr_s


def test_more_echoes_change_nothing() -> None:
    few, many = (msgspec.structs.replace(MID, days=2.0, echoes=echoes) for echoes in (16, 400))
    faults = generate(few, 3)
    assert run(few, RERAIL, faults) == run(many, RERAIL, faults)


def test_the_shadow_saves_work_where_there_is_no_replica() -> None:
    single = msgspec.structs.replace(MID, replicas=1, storage_gb_s=1.0, attempt_fails=0.0)
    faults = [one(50_000.0, "node.lost", "node", "exit", "reboot", node=3)]
    exact, fast = run(single, RERAIL, faults), run(single, policy("rerail-fast"), faults)
    assert fast.by_stage["lost work (T0)"] < 0.5 * exact.by_stage["lost work (T0)"]


def test_more_faults_make_saves_come_more_often() -> None:
    single = msgspec.structs.replace(MID, replicas=1, storage_gb_s=1e6)
    seldom = plan_of(RERAIL, single, Rates(process=1e-6, node=1e-6, job=1e-6))
    often = plan_of(RERAIL, single, Rates(process=1e-3, node=1e-3, job=1e-3))
    assert often["store"] < seldom["store"]
    assert plan_of(HOURLY, single, Rates(process=1, node=1))["store"] == 450


def test_predictions_use_the_figures_of_the_job() -> None:
    tier = Tier(name="memory", stall_s=0.01, save_s=0.0, restore_s=0.1, survives="process")
    measured = Measured(
        wall_s=1000.0,
        step_s=0.1,
        gpus=4,
        per_node=4,
        tiers=(tier,),
        every={"memory": 10},
        costs={Rung.REPLACE_RANK: Cost(t0=99.0, t1=0.3, t2=0.1, t3=0.2, t4=0.1), Rung.RETRY_STEP: Cost(t1=0.05)},
        detect_s={"exit": 0.05},
        faults=tuple((100.0 * n, 0, n % 4, "process.killed") for n in range(1, 10)),
    )
    result = predict(measured, RERAIL)
    adds_up(result)
    assert result.rungs == {"replace_rank": 9}
    assert result.by_stage["reschedule (T1)"] == pytest.approx(9 * 0.3)
    assert result.by_stage["detect"] == pytest.approx(9 * 0.05)
    assert result.by_stage["load (T3)"] == pytest.approx(9 * (0.2 + tier.restore_s))
    assert 9 * 0.05 < result.by_stage["lost work (T0)"] < 9 * 1.2
    assert result.by_stage["saving"] == pytest.approx(0.01 * 1000, rel=0.05)
