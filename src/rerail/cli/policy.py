"""`rerail policy check|explain|replay`: is the policy sound, what does it say about a fault, what would it have done.

Called by `cli.main`. `replay` is in `cli.policy_replay`.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from rerail.cli.policy_replay import replay
from rerail.config import Settings, read_settings, settings_file
from rerail.decide.axes import Admission, Repair
from rerail.decide.choose import choose
from rerail.decide.escalation import Escalation, Seen
from rerail.decide.policy import About, Policy, Verdict
from rerail.decide.setbacks import FAULTS, rolls_back
from rerail.decide.situation import Situation
from rerail.detect.levels import Levels
from rerail.errors import UsageError
from rerail.faults.catalog import Catalog, Fault, load_catalog
from rerail.flow import Cost, Decision, Diagnosis, Place, Rung
from rerail.runtime.handling import missing_here, policy_of, problems_with, shipped_book
from rerail.texts import listed
from rerail.wording import counted

EXIT_WRONG = 1
RANKS = 4
"""Of the example that a fault is explained by."""
OF_THE_RANK = {"script", "exit"}
"""Where a fault shows that no monitor tells of."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", required=True, metavar="check|explain|replay")
    checking = what.add_parser("check", help="is the policy in rerail.toml sound?")
    checking.add_argument("policy", nargs="?", default="", metavar="FILE", help="another file of settings")
    explaining = what.add_parser("explain", help="what is done about a fault, by which rule, and what it would cost")
    explaining.add_argument("code", help="its code, or its id in another catalogue (GPU-XID-79)")
    explaining.add_argument("--job", default="", help="as in the job of this name")
    explaining.add_argument("--node", default="", help="as on the node of this name")
    replaying = what.add_parser("replay", help="what this policy would have done in a job that has run")
    replaying.add_argument(
        "run",
        nargs="?",
        default="",
        metavar="RUN",
        help="a job, a run directory or a journal; the newest job when not given",
    )
    for one in (explaining, replaying):
        one.add_argument("--policy", default="", metavar="FILE", help="settings to use instead of rerail.toml here")
        one.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    """One of the three."""
    path = Path(args.policy) if args.policy else settings_file()
    if path is not None and not path.is_file():
        raise UsageError(f"{path}: no such file")
    settings, wrong = read_settings(path)
    origin = str(path or "default policy")
    catalog = load_catalog(Levels.of(settings).files)
    found = [*(_placed(text, path) for text in wrong), *problems_with(settings, catalog.faults, origin)]
    if args.what == "check":
        return _check(settings, origin, [*found, *missing_here(settings, origin)])
    if found:
        raise UsageError(found[0], hint="rerail policy check says all that is wrong")
    if args.what == "replay":
        return replay(args.run, settings, origin, as_json=args.json)
    return _explain(args, settings, catalog)


def _placed(text: str, path: Path | None) -> str:
    """With the file, where a problem does not name its origin."""
    return f"{path}, {text}" if path is not None and text.startswith("setting ") else text


def _check(settings: Settings, origin: str, found: list[str]) -> int:
    if found:
        print("\n".join(found))
        print(f"{origin}: {counted(len(found), 'problem')}", file=sys.stderr)
        return EXIT_WRONG
    rules = f"{counted(len(settings.policy), 'policy rule')}, {counted(len(settings.escalation), 'escalation rule')}"
    rungs = " ".join(policy_of(settings).ordered())
    print(f"{origin}: sound: {rules}, handling {settings.handling}, rungs {rungs}")
    return 0


def _explain(args: argparse.Namespace, settings: Settings, catalog: Catalog) -> int:
    fault = _find(args.code, catalog)
    policy = policy_of(settings)
    about = About.of(fault, job=args.job, node=args.node)
    verdict = policy.verdict(about)
    escalations = _escalations(settings, policy, about, verdict)
    acts = verdict.axes.running != "no" or fault.code in rolls_back(listed(settings.roll_back))
    decision, spared = (
        choose(example(fault), _situation(fault, verdict, spare=spare), at=0.0) if acts else None
        for spare in (False, True)
    )
    if args.json:
        shown: dict[str, Any] = {
            "code": fault.code,
            "verdict": msgspec.to_builtins(verdict),
            "escalation": [msgspec.to_builtins(rule) for rule in escalations],
            "decision": msgspec.to_builtins(decision),
            "with_spare": msgspec.to_builtins(spared),
        }
        print(json.dumps(shown))
    else:
        print("\n".join(_described(fault, verdict, escalations, (decision, spared))))
    return 0


def _find(word: str, catalog: Catalog) -> Fault:
    if (fault := catalog.find(word)) is not None:
        return fault
    close = difflib.get_close_matches(word, [fault.code for fault in catalog.faults], n=3)
    hint = f"did you mean: {', '.join(close)}" if close else "rerail faults list WORD searches"
    raise UsageError(f"there is no fault {word!r}", hint=hint)


def _escalations(settings: Settings, policy: Policy, about: About, verdict: Verdict) -> list[Escalation]:
    seen = Seen(
        code=about.code,
        subject="node:any",
        kind=about.kind,
        scope=about.scope,
        severity=about.severity,
        hardware=about.hardware,
        axes=verdict.axes,
        again=policy.again(about),
    )
    return shipped_book(settings).rules_for(seen)


def example(fault: Fault) -> Diagnosis:
    """This fault as it would be found on one rank of four; it takes the process along unless only the work has to be done again."""
    lost = () if fault.action in ("retry_in_place", "ignore") or fault.code in FAULTS else (1,)
    return Diagnosis(
        id="", job="", at=0.0, code=fault.code, root="", node="n1", ranks=(1,), lost=lost, step=100,
        hardware=fault.hardware, rule="earliest-root", summary=fault.title, trusted=99 if fault.code in FAULTS else -1,
    )  # fmt: skip


def _situation(fault: Fault, verdict: Verdict, *, spare: bool) -> Situation:
    """Four ranks in training, three of them well; rungs that the policy does not allow are out.

    Where a monitor tells of such faults it has done so, and the place is out of use where the policy wants that: always where no new
    work may land there, and where it may not for now as long as there is another place.
    """
    barred = {rung: "the policy does not allow it" for rung in Rung if rung not in verdict.rungs}
    barred.pop(Rung.STOP, None)
    by_node = fault.scope == "node"
    places = {rank: Place(f"n{rank}", 0) if by_node else Place("n1", rank) for rank in range(RANKS)}
    wanted = (Admission.NO, Admission.NOT_NOW) if spare else (Admission.NO,)
    told = fault.scope in ("device", "node") and not fault.sources and set(fault.seen) - OF_THE_RANK
    out = bool(told) and verdict.axes.admission in wanted
    sick = f"{'node' if by_node else 'device'}:{places[1].node if by_node else places[1]}"
    gone = {1: f"node {places[1].node} of rank 1 is not connected"} if "agent.lost" in fault.sources else {}
    return Situation(
        aware=True,
        in_training=True,
        settled=True,
        survivors=RANKS - 1,
        places=places,
        barred={1: f"{sick} is out of use: {fault.code}"} if out else gone,
        free=(Place("n9", 0) if by_node else Place("n1", RANKS),) if spare else (),
        homeless=f"1 of {RANKS} ranks have no healthy place left" if out and not spare else "",
        tried=barred,
        rungs=verdict.rungs,
        unfit=verdict.unfit if fault.hardware and fault.scope == "device" else {},
        wants_reset=verdict.axes.repair is Repair.RESET_DEVICE,
    )


def _described(
    fault: Fault, verdict: Verdict, escalations: list[Escalation], decisions: tuple[Decision | None, Decision | None]
) -> list[str]:
    """`decisions`: without a spare place, and with one."""
    lines = [
        f"{fault.code}: {fault.title}",
        f"admission   {verdict.axes.admission}",
        f"running     {verdict.axes.running}",
        f"repair      {verdict.axes.repair}",
        f"rule        {verdict.rule}: {verdict.why}",
    ]
    if verdict.mute_s:
        lines.append(f"mute        counts only if it still stands after {verdict.mute_s:g} s")
    if verdict.axes.running != "no" and verdict.axes.admission == "yes" and fault.hardware:
        lines.append("told        by a monitor alone, nothing is done: only when a rank breaks of it")
    lines += [f"escalation  {_words(rule)}" for rule in escalations] or ["escalation  none"]
    decision, spared = decisions
    if decision is None or spared is None:
        return [*lines, "would do    nothing to the running job"]
    lines.append(f"would do    {decision.rung} (rule {decision.rule}): {decision.why}")
    for one in decision.candidates:
        text = _price(one.expected) if one.feasible else f"out: {one.why}"
        lines.append(
            f"  {one.rung:<13} {text}"
            + (f"; {verdict.unfit[one.rung]}" if one.rung in verdict.unfit and one.feasible else "")
        )
    if spared.rung is not decision.rung:
        where = "node" if fault.scope == "node" else "device of its node"
        lines.append(f"with a spare {where}: {spared.rung} (rule {spared.rule}): {spared.why}")
    return [
        *lines,
        "for one rank of four in training, without a spare place; costs are expectations until the job has measured its own",
    ]


def _words(rule: Escalation) -> str:
    lasting = f"must last {rule.lasts_s:g} s, over after {rule.gone_s:g} s; " if rule.lasts_s else ""
    release = (
        f", probation after {rule.release_s / 3600:g} h without a fault" if rule.release_s else ", released by hand"
    )
    then = [f"admission {rule.admission}"] if rule.admission else []
    then += [f"quarantine{release}"] if rule.quarantine else []
    then += ["what the catalogue asks for when it comes again"] if rule.then else []
    often = f"{rule.times} in {rule.within_s / 3600:g} h" + (" of any such fault" if rule.together else "")
    return f"{rule.id}: {lasting}{often if rule.times else 'not counted'}: {'; '.join(then)}"


def _price(cost: Cost) -> str:
    if not cost.total:
        return "the job ends"
    return f"T0 {cost.t0:.2f} s, T1 {cost.t1:.2f} s, T2 {cost.t2:.2f} s, T3 {cost.t3:.2f} s, T4 {cost.t4:.2f} s: {cost.total:.2f} s"
