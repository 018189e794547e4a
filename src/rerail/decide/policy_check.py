"""What is wrong with a policy as a whole: turns it and the catalogue into sentences. Pure.

Single rules are checked when they are read (`decide.policy`); here it is how they go together: rules that contradict one
another, that never have a say, that mean faults nobody knows, and faults that would be left without a rung.
Called by `runtime.handling` before a job starts, and by `cli.policy`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from rerail.decide.axes import Admission, Repair
from rerail.decide.policy import About, Policy, Rule
from rerail.faults.catalog import CLASSES, Fault
from rerail.flow import Rung
from rerail.wording import guess

LAST = (Rung.RESTART_ALL, Rung.STOP)
"""A job that has none of these, nor what comes between them on the ladder, may end up with nothing that it may do."""


def problems(policy: Policy, faults: Sequence[Fault], origin: str = "rerail.toml") -> list[str]:
    """Everything that is wrong, one sentence each; none when the policy can be used."""
    found = _unknown_words(policy, faults, origin)
    if found:
        return found  # what rules mean is not known
    matched = [_matched(rule, faults) for rule in policy.rules]
    return [
        *_empty(policy, matched, origin),
        *_shadowed(policy, matched, origin),
        *_without_rung(policy, faults, origin),
        *_without_reset(policy, origin),
        *_too_wide(policy, matched, faults, origin),
    ]


def unmatched(globs: Sequence[str], codes: Sequence[str]) -> list[str]:
    """Sentences about wildcards that fit no code."""
    return [
        f"code {glob!r} fits no fault that is known{guess(glob, _like(glob, codes)) or ' (rerail faults list)'}"
        for glob in globs
        if not fnmatch.filter(codes, glob)
    ]


def _like(glob: str, codes: Sequence[str]) -> Sequence[str]:
    """What may have been meant: a family of codes (`gpu.xid.*`) by one that ends in a wildcard, else a code."""
    if not glob.endswith(".*"):
        return codes
    parts = [code.split(".") for code in codes]
    return sorted({".".join([*one[:length], "*"]) for one in parts for length in range(1, len(one))})


def _unknown_words(policy: Policy, faults: Sequence[Fault], origin: str) -> list[str]:
    codes = [fault.code for fault in faults]
    found = []
    for number, rule in enumerate(policy.rules, 1):
        where = f"{origin}, policy {number}"
        found += [f"{where}: {text}" for text in unmatched(rule.code, codes)]
        found += [
            f"{where}: class {word!r} is not one of {' '.join(CLASSES)}{guess(word, CLASSES)}"
            for word in rule.kind
            if not fnmatch.filter(CLASSES, word)
        ]
    return found


def _matched(rule: Rule, faults: Sequence[Fault]) -> frozenset[str]:
    """Codes of the faults it is about, wherever they are."""
    anywhere = Rule(code=rule.code, kind=rule.kind, scope=rule.scope)
    return frozenset(fault.code for fault in faults if anywhere.fits(About.of(fault)))


def _empty(policy: Policy, matched: Sequence[frozenset[str]], origin: str) -> list[str]:
    return [
        f"{origin}, policy {number}: no fault has such a code, class and scope together (rerail faults show CODE says what one has)"
        for number, (_, codes) in enumerate(zip(policy.rules, matched, strict=True), 1)
        if not codes
    ]


def _shadowed(policy: Policy, matched: Sequence[frozenset[str]], origin: str) -> list[str]:
    """Rules of which nothing is left, or that say the contrary of an earlier one about the same."""
    found = []
    for number, rule in enumerate(policy.rules):
        if not matched[number]:
            continue
        earlier = [other for other in range(number) if _everywhere(policy.rules[other], rule)]
        for other in earlier:
            text = _contrary(policy.rules[other], rule) if _same(policy, matched, other, number) else ""
            if text:
                found.append(
                    f"{origin}, policy {other + 1} and {number + 1} are about the same and contradict one another: {text}"
                )
                break
        else:
            covering = [_covering(policy, matched, earlier, number, name) for name in rule.answers()]
            if all(covering):
                names = ", ".join(f"policy {one + 1}" for one in sorted(set().union(*covering)))
                found.append(
                    f"{origin}, policy {number + 1} never has a say: {names} before it answer{'s' if ',' not in names else ''} all it does; remove it, or put it first"
                )
    return found


def _same(policy: Policy, matched: Sequence[frozenset[str]], one: int, other: int) -> bool:
    first, second = policy.rules[one], policy.rules[other]
    places = (set(first.job), set(first.node)) == (set(second.job), set(second.node))
    return places and matched[one] == matched[other]


def _contrary(one: Rule, other: Rule) -> str:
    first, second = one.answers(), other.answers()
    return "; ".join(
        f"{name} {_shown(first[name])} or {_shown(second[name])}"
        for name in first
        if name in second and first[name] != second[name]
    )


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _everywhere(earlier: Rule, later: Rule) -> bool:
    """Whether the earlier rule holds in every job and on every node in which the later one does."""
    return all(
        not wide or bool(narrow and all(any(_within(one, glob) for glob in wide) for one in narrow))
        for wide, narrow in ((earlier.job, later.job), (earlier.node, later.node))
    )


def _within(narrow: str, wide: str) -> bool:
    """Whether all that fits the one fits the other; of two with wildcards it is known only where they are the same."""
    return narrow == wide or wide == "*" or (not set("*?[") & set(narrow) and fnmatch.fnmatchcase(narrow, wide))


def _covering(
    policy: Policy, matched: Sequence[frozenset[str]], earlier: Sequence[int], number: int, name: str
) -> frozenset[int]:
    """The earlier rules that together answer this question wherever this one would; none if they do not."""
    having = [one for one in earlier if name in policy.rules[one].answers() and matched[one] & matched[number]]
    together = frozenset().union(*(matched[one] for one in having)) if having else frozenset()
    return frozenset(having) if matched[number] <= together else frozenset()


def _without_rung(policy: Policy, faults: Sequence[Fault], origin: str) -> list[str]:
    """Faults for which nothing may be left to do."""
    ladder = list(Rung)
    last = set(ladder[ladder.index(LAST[0]) :])
    advice = f"add {' or '.join(LAST)}"
    if not last & set(policy.rungs):
        example = "process.killed (a process is gone)"
        given = " ".join(policy.rungs)
        return [f"{origin}, setting rungs: with {given} alone, {example} would have no rung left; {advice}"]
    if not policy.restarts and Rung.STOP not in policy.rungs:
        given = " ".join(policy.rungs)
        return [
            f"{origin}, setting rungs: max_restarts is 0, so of {given} restart_all can never be taken, and nothing would be left when the "
            "others fail; add stop, or allow restarts"
        ]
    found = []
    for number, rule in enumerate(policy.rules, 1):
        if rule.ladder is None:
            continue
        where = f"{origin}, policy {number}"
        allowed = [rung for rung in rule.ladder if rung in policy.rungs]
        if len(allowed) < len(rule.ladder):
            out = ", ".join(rung for rung in rule.ladder if rung not in policy.rungs)
            found.append(
                f"{where}: the ladder has {out}, which the setting rungs ({' '.join(policy.rungs)}) does not allow"
            )
        elif not last & set(allowed):
            code = min((fault.code for fault in faults if rule.fits(About.of(fault, job="", node=""))), default="")
            whose = code or min(_matched(rule, faults), default="a fault")
            found.append(
                f"{where}: with {' '.join(allowed)} alone, {whose} would have no rung left when that fails; {advice}"
            )
    return found


def _without_reset(policy: Policy, origin: str) -> list[str]:
    """Rules that ask for a reset which may never be done."""
    found = []
    for number, rule in enumerate(policy.rules, 1):
        where, wants = f"{origin}, policy {number}", rule.repair is Repair.RESET_DEVICE and not rule.level
        if wants and rule.ladder is not None and Rung.RESET_DEVICE not in rule.ladder:
            given = " ".join(rule.ladder)
            found.append(
                f"{where}: repair is reset_device, but its ladder ({given}) has no such rung; add reset_device, or leave repair out"
            )
        elif wants and (Rung.RESET_DEVICE not in policy.rungs or not policy.resets):
            found.append(
                f"{where}: repair is reset_device, but no device may be reset (settings rungs, reset_limit); allow it, or leave repair out"
            )
    return found


def _too_wide(policy: Policy, matched: Sequence[frozenset[str]], faults: Sequence[Fault], origin: str) -> list[str]:
    """Rules by which any fault at all takes its place out of use."""
    every = frozenset(fault.code for fault in faults)
    return [
        f"{origin}, policy {number}: it is about every fault everywhere, so with admission no any of them, however small, would put its "
        "place out of use; name a code, class, scope, job or node"
        for number, (rule, codes) in enumerate(zip(policy.rules, matched, strict=True), 1)
        if rule.admission is Admission.NO and codes == every and not (rule.job or rule.node)
    ]
