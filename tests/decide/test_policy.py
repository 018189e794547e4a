"""Policy: which rule answers which question, and what is wrong with rules."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rerail.config import Settings, load_settings
from rerail.decide.policy import About, Policy, Verdict
from rerail.errors import ConfigError
from rerail.faults.catalog import Catalog, shipped
from rerail.flow import Handling, Rung, Severity
from rerail.runtime.handling import check, policy_of, problems_with, shipped_levels

FAULTS = shipped()
CATALOG = Catalog(FAULTS)


def settings(text: str = "", **more: Any) -> Settings:
    return msgspec.convert({**tomllib.loads(text), **more}, Settings)


def verdict(policy: Policy, code: str, **where: str) -> Verdict:
    fault = CATALOG.get(code)
    assert fault is not None
    return policy.verdict(About.of(fault, **where))


def axes(found: Verdict) -> tuple[str, str, str]:
    return found.axes.admission, found.axes.running, found.axes.repair


def test_without_rules_the_shipped_mapping_answers_and_says_so() -> None:
    found = verdict(policy_of(settings()), "gpu.xid.79")
    assert axes(found) == ("no", "now", "reboot") and found.rule == "mapping"
    assert "shipped mapping of drain_node, critical, scope device" in found.why
    assert set(found.rungs) == set(Rung)


def test_the_first_rule_that_answers_wins_on_each_axis_alone() -> None:
    policy = policy_of(
        settings("""
        [[policy]]
        code = "gpu.xid.79"
        repair = "replace"
        [[policy]]
        id = "all-xids"
        code = "gpu.xid.*"
        admission = "not_now"
        repair = "retry"
        """)
    )
    found = verdict(policy, "gpu.xid.79")
    assert axes(found) == ("not_now", "now", "replace") and found.rule == "policy 1, all-xids"
    assert "repair by rule policy 1; admission by rule all-xids; running by the shipped mapping" in found.why
    assert verdict(policy, "gpu.xid.48").axes.repair == "retry"
    assert verdict(policy, "process.killed").rule == "mapping"


@pytest.mark.parametrize(
    ("matcher", "fits"),
    [
        ('class = "pcie"', True),
        ('class = "nic"', False),
        ('scope = ["device", "link"]', True),
        ('scope = "node"', False),
        ('job = "big-*"', True),
        ('job = "small"', False),
        ('node = ["n1", "n2"]', True),
        ('node = "n3"', False),
        ('code = ["nic.*", "gpu.xid.7?"]\nclass = "pcie"\nnode = "n*"', True),
    ],
)
def test_all_matchers_of_a_rule_have_to_fit(matcher: str, fits: bool) -> None:
    policy = policy_of(settings(f"[[policy]]\n{matcher}\nmute_s = 5"))
    assert (verdict(policy, "gpu.xid.79", job="big-1", node="n2").mute_s == 5.0) is fits


def test_a_level_stands_for_all_axes_that_the_rule_leaves_open() -> None:
    text = '[[policy]]\ncode = "gpu.xid.79"\nlevel = ["PreSeparateNPU", "nvidia.RESET_GPU"]\nrepair = "reboot"'
    assert axes(verdict(policy_of(settings(text)), "gpu.xid.79")) == ("no", "now", "reboot")


def test_a_ladder_and_the_setting_rungs_both_limit_what_may_be_done() -> None:
    text = 'rungs = "stop, replace_rank, restart_all"\n[[policy]]\ncode = "gpu.*"\nladder = ["restart_all", "stop"]'
    policy = policy_of(settings(text))
    assert verdict(policy, "gpu.xid.79").rungs == (Rung.RESTART_ALL, Rung.STOP)
    assert verdict(policy, "process.killed").rungs == (Rung.REPLACE_RANK, Rung.RESTART_ALL, Rung.STOP)


def test_rungs_that_do_not_repair_a_fault_are_named() -> None:
    policy = policy_of(settings())
    assert set(verdict(policy, "gpu.xid.79").unfit) >= {Rung.RETRY_STEP, Rung.REPLACE_RANK}
    assert Rung.REPLACE_RANK not in verdict(policy, "process.killed").unfit
    assert Rung.RESTART_ALL in verdict(policy, "gpu.xid.79").unfit


def test_graceful_puts_a_reset_before_a_move_and_rescheduling_behind_it() -> None:
    ladder = [str(rung) for rung in Rung]
    for handling in ("rescheduling", "graceful"):
        order = [str(rung) for rung in policy_of(settings(handling=handling)).ordered()]
        assert sorted(order) == sorted(ladder)
        resets = [order.index(one) for one in ladder if one.startswith("reset")]
        moves = [order.index(one) for one in ladder if one.startswith("swap")]
        if resets and moves:
            assert (max(resets) < min(moves)) is (handling == "graceful")


@pytest.mark.parametrize(
    ("severity", "scope", "expected"),
    [
        (Severity.INFO, "device", ("yes", "no", "nothing")),
        (Severity.DEGRADED, "device", ("not_now", "no", "nothing")),
        (Severity.ERROR, "process", ("yes", "now", "restart_process")),
        (Severity.CRITICAL, "device", ("no", "now", "replace")),
    ],
)
def test_unknown_codes_are_judged_by_their_severity(severity: Severity, scope: str, expected: tuple[str, ...]) -> None:
    assert axes(policy_of(settings()).verdict(About(code="x.y", severity=severity, scope=scope))) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[policy]]\ncod = "gpu.*"\nmute_s = 1', "here.toml, policy 1: there is no key 'cod'; did you mean code"),
        (
            '[[policy]]\nmute_s = 1\n[[policy]]\nadmission = "nope"',
            "policy 2: admission 'nope' is not one of yes not_now no",
        ),
        ('[[policy]]\nrepair = "reset_devise"', "did you mean reset_device"),
        (
            '[[policy]]\nladder = ["retry_stp", "stop"]',
            "policy 1: ladder 'retry_stp' is not one of .*did you mean retry_step",
        ),
        ("[[policy]]\nladder = []", "ladder is empty"),
        ('[[policy]]\ncode = []\nladder = ["stop"]', "code is empty, which would mean any"),
        ('[[policy]]\nlevel = "RestartNPUs"', "policy 1: there is no level 'RestartNPUs'; did you mean RestartNPU"),
        ('[[policy]]\ncode = "gpu.*"', "it says nothing"),
        ("[[policy]]\nmute_s = -1", "mute_s is -1"),
        ('[[policy]]\nmute_s = "long"', "policy 1: mute_s: a number"),
        ('[[policy]]\ncode = "gpu.xidd.*"\nmute_s = 1', "code 'gpu.xidd.\\*' fits no fault that is known"),
        ('[[policy]]\ncode = "gpu.xid.791"\nmute_s = 1', "did you mean gpu.xid"),
        ('[[policy]]\nclass = "gpuu"\nmute_s = 1', "class 'gpuu' is not one of .*did you mean gpu"),
        ('[[policy]]\nscope = "devise"\nmute_s = 1', "scope 'devise' is not one of .*did you mean device"),
        ('[[policy]]\ncode = "gpu.*"\nclass = "nic"\nmute_s = 1', "no fault has such a code, class and scope together"),
        (
            '[[policy]]\ncode = "gpu.xid.79"\nrepair = "reboot"\n[[policy]]\ncode = "gpu.xid.79"\nrepair = "replace"',
            "policy 1 and 2 are about the same and contradict one another: repair reboot or replace",
        ),
        (
            '[[policy]]\ncode = "gpu.*"\nrepair = "reboot"\n[[policy]]\ncode = "gpu.xid.79"\nnode = "n1"\nrepair = "replace"',
            "policy 2 never has a say: policy 1 before it answers all it does",
        ),
        ('[[policy]]\nid = "a"\nmute_s = 1\n[[policy]]\nid = "a"\nrepair = "retry"', "another rule is called 'a'"),
        (
            'rungs = "retry_step"',
            "setting rungs: with retry_step alone, process.killed .* would have no rung left; add",
        ),
        ('rungs = "retry_stp"', "there is no rung 'retry_stp'; did you mean retry_step"),
        (
            '[[policy]]\ncode = "gpu.xid.79"\nladder = ["retry_step"]',
            "gpu.xid.79 would have no rung left when that fails",
        ),
        ('rungs = "stop"\n[[policy]]\nladder = ["restart_all"]', "which the setting rungs .* does not allow"),
        ('[[escalation]]\ncode = "gpu.*"\ntimes = 2', "escalation 1: nothing follows when it has come 2 times"),
        ('[[escalation]]\ncode = "zzz.*"\ntimes = 2\nquarantine = true', "escalation 1: code 'zzz.\\*' fits no fault"),
        ("[[escalation]]\ntims = 2", "there is no key 'tims'; did you mean times"),
        ("[[escalation]]\ntimes = 101\nquarantine = true", "times is 101, but 0 to 100"),
        ("[[escalation]]\nquarantine = true", "needs times"),
        (
            '[[escalation]]\ncode = "gpu.*"\ntimes = 2\nquarantine = true\n[[escalation]]\ncode = "gpu.xid.79"\ntimes = 1\nquarantine = true',
            "escalation 2 never has a say: escalation 1 before it covers it",
        ),
    ],
)
def test_what_is_wrong_with_a_policy_is_said_with_file_rule_and_suggestion(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(settings(text), FAULTS, "here.toml")


def test_rules_that_differ_by_place_or_by_what_they_answer_do_not_contradict() -> None:
    text = """
    [[policy]]
    code = "gpu.xid.79"
    node = "n1"
    repair = "reboot"
    [[policy]]
    code = "gpu.xid.79"
    repair = "replace"
    [[policy]]
    code = "gpu.xid.79"
    admission = "no"
    """
    assert problems_with(settings(text), FAULTS) == []


def test_tables_are_read_from_the_file_and_refused_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "rerail.toml"
    file.write_text('standbys = 2\n[[policy]]\ncode = "gpu.*"\nmute_s = 3\n')
    assert load_settings(file, env={}).policy == ({"code": "gpu.*", "mute_s": 3},)
    file.write_text('[policy]\ncode = "gpu.*"\n')
    with pytest.raises(ConfigError, match=r"policy is no list of tables; write each as \[\[policy\]\]"):
        load_settings(file, env={})
    with pytest.raises(ConfigError, match="RERAIL_POLICY"):
        load_settings(None, env={"RERAIL_POLICY": "x"})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"handling": "gracefull"}, "did you mean graceful"),
        ({"restart_limits": "ranks=5"}, "did you mean rank"),
        ({"restart_limits": "rank=many"}, "write rank=5"),
    ],
)
def test_settings_of_handling_are_checked(given: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_settings(None, env={}, **given)


def test_settings_with_tables_go_through_the_environment_of_the_processes() -> None:
    given = settings('[[policy]]\ncode = "gpu.*"\nladder = ["stop"]\nmute_s = 1.5')
    assert msgspec.json.decode(msgspec.json.encode(given), type=Settings) == given


DOCUMENT = (Path(__file__).parents[2] / "docs" / "policy.md").read_text()


def test_the_examples_in_the_documents_are_sound() -> None:
    examples = re.findall(r"```toml\n(.*?)```", DOCUMENT, re.DOTALL)
    assert len(examples) >= 2
    for text in examples:
        assert problems_with(settings(text), FAULTS) == []


def test_the_documents_show_the_mapping_as_it_is() -> None:
    levels = shipped_levels()
    shown = re.findall(
        r"^\| `(\w+)` \| (\w+, \w+, \w+) \| (\w+, \w+, \w+) \| (\w+, \w+, \w+) \|$", DOCUMENT, re.MULTILINE
    )
    assert [row[0] for row in shown] == [str(action) for action in Handling]
    for action, *cells in shown:
        for severities, cell in zip((("info", "warning"), ("degraded",), ("error", "critical")), cells, strict=True):
            for severity in severities:
                found = levels.of_handling(Handling(action), Severity(severity), "device")
                assert f"{found.admission}, {found.running}, {found.repair}" == cell, (action, severity)
    assert [name for name in levels.names() if name.partition(".")[2] not in DOCUMENT] == []
