"""What breaks, where and when."""

import math
from collections import Counter

import pytest

from rerail.sim.faults import danger, generate, lemons
from rerail.sim.kinds import NEEDS, SCOPES, SEEN, classifier, kinds, shape_of
from rerail.sim.scenario import preset, scenario

LLAMA = scenario(preset("llama3-405b").values)


def test_kinds_are_llamas_counts_and_codes_are_in_the_catalogue() -> None:
    assert sum(kind.count for kind in kinds()) == 419
    for kind in kinds():
        assert kind.scope in SCOPES and kind.seen in SEEN
        assert math.isclose(sum(share for _, share, _ in kind.codes), 1.0, abs_tol=1e-6)
        for code, _, needs in kind.codes:
            assert classifier().catalog.get(code) is not None, code
            assert needs in NEEDS


def test_the_same_seed_gives_the_same_faults_and_another_others() -> None:
    assert generate(LLAMA, 3) == generate(LLAMA, 3)
    assert generate(LLAMA, 3) != generate(LLAMA, 4)


def test_rates_are_the_published_ones() -> None:
    found: Counter[str] = Counter()
    seeds = 30
    for seed in range(seeds):
        found.update(fault.kind for fault in generate(LLAMA, seed) if not fault.hurry)
    with_spares = 1 + LLAMA.spare_nodes / LLAMA.nodes
    assert found["gpu"] / seeds == pytest.approx(148 * with_spares, rel=0.06)
    assert found["hbm"] / seeds == pytest.approx(72 * with_spares, rel=0.09)
    assert found["planned"] / seeds == pytest.approx(47, rel=0.1)


def test_lemons_break_more_often_by_their_factor() -> None:
    sick, mine, others = set(lemons(LLAMA, 1)), 0, 0
    assert len(sick) in (25, 26)
    for seed in range(40):
        sick = set(lemons(LLAMA, seed))
        for fault in generate(LLAMA, seed):
            if fault.scope != "job":
                mine, others = mine + (fault.node in sick), others + (fault.node not in sick)
    nodes = LLAMA.nodes + LLAMA.spare_nodes
    ratio = (mine / len(sick)) / (others / (nodes - len(sick)))
    assert ratio == pytest.approx(LLAMA.lemon_factor, rel=0.15)


def test_batches_take_several_nodes_and_the_rest_one() -> None:
    many = [fault for seed in range(5) for fault in generate(LLAMA, seed)]
    assert {fault.nodes for fault in many if fault.scope != "batch"} == {1}
    sizes = [fault.nodes for fault in many if fault.scope == "batch"]
    assert min(sizes) >= 8 and max(sizes) <= 64 and len(set(sizes)) > 20


def test_software_is_most_dangerous_right_after_a_start() -> None:
    assert danger(LLAMA, 0) > danger(LLAMA, 300) > danger(LLAMA, 3000)
    assert danger(LLAMA, 1e9) == pytest.approx(LLAMA.software_per_day / 86_400)
    early = sum(danger(LLAMA, second) - danger(LLAMA, 1e9) for second in range(10_000))
    assert early == pytest.approx(LLAMA.start_faults, rel=0.01)


def test_more_spares_change_no_software_and_no_plans() -> None:
    fewer = scenario({**preset("llama3-405b").values, "spare_nodes": 10})

    def of_job(faults: list) -> list:
        return [(f.at, f.kind, f.code) for f in faults if f.scope == "job"]

    assert of_job(generate(LLAMA, 1)) == of_job(generate(fewer, 1))


def test_codes_of_traces_show_as_the_catalogue_says() -> None:
    assert shape_of("gpu.xid.79").needs == "replace"
    assert shape_of("node.lost").scope == "node"
    assert shape_of("process.hung").seen == "hang"
    assert shape_of("cuda.oom" if classifier().catalog.get("cuda.oom") else "process.killed").seen == "exit"
