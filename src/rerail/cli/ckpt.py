"""`rerail ckpt ls|show|verify|diff|copy|export|import|prune`: looks at checkpoints, checks them, and moves them in and out.

Called by `cli.main`. ls, verify and prune do without torch, so that they answer at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec

from rerail.checkpoint import catalog, names
from rerail.checkpoint.catalog import Found
from rerail.checkpoint.copying import copy_step
from rerail.checkpoint.manifest import RankManifest
from rerail.checkpoint.names import StepId
from rerail.checkpoint.reading import mark, verify
from rerail.checkpoint.retention import Keep, prune
from rerail.checkpoint.saving import newest_epoch
from rerail.checkpoint.tiers import Tier, tier_at
from rerail.cli.ckpt_roots import (
    Row,
    clean,
    find,
    look,
    opened,
    place_at,
    place_at_step,
    progress,
    root_at,
    size_text,
    table,
)
from rerail.errors import CheckpointError, RerailError, UsageError

GOOD, BAD = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    root = "a directory or URL that checkpoints are saved to"
    one = f"{root}; ROOT@STEP names a step, otherwise the newest is meant"

    def add(name: str, what: str, to_json: str = "the same as JSON") -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument("--json", action="store_true", help=to_json)
        return command

    ls = add("ls", "the steps that are there, newest first, and why some do not count")
    ls.add_argument("root", nargs="+", help=root)

    show = add("show", "what is in a step: tensors, small state, versions")
    show.add_argument("root", help=one)
    show.add_argument("--step", help="the step; the newest when not given")
    show.add_argument("--rank", type=_count, default=0, help="whose small state is shown (default 0)")

    check = add("verify", "read and check every byte; exit code 1 if anything is wrong")
    check.add_argument("root", help=one)
    which = check.add_mutually_exclusive_group()
    which.add_argument("--step", help="the step; the newest when not given")
    which.add_argument("--all", action="store_true", help="all committed steps")

    diff = add("diff", "compare the tensors of two steps; exit code 1 if they differ")
    diff.add_argument("a", help=one)
    diff.add_argument("b", help="the other one")
    diff.add_argument("--what", default="", help="only what is tracked under this name, such as model")

    _add_movers(add, one, root)

    thin = add("prune", "remove steps that no rule keeps; the newest whole step always stays")
    thin.add_argument("root", help=root)
    thin.add_argument("--keep-last", type=_count, default=0, metavar="N", help="keep the newest N")
    thin.add_argument("--keep-every", type=_count, default=0, metavar="M", help="keep steps that are a multiple of M")
    thin.add_argument("--keep-best", type=_count, default=0, metavar="N", help="keep the best N by --metric")
    thin.add_argument("--metric", default="", help="as given to job.metric(); -loss means that less is better")
    thin.add_argument("--dry-run", action="store_true", help="say what would go, and remove nothing")


def _add_movers(add: Callable[[str, str], argparse.ArgumentParser], one: str, root: str) -> None:
    export = add("export", "write a step as files that others read")
    export.add_argument("root", help=one)
    export.add_argument("--to", required=True, metavar="PATH", help="a directory, or with --as safetensors a file; new")
    export.add_argument("--as", required=True, dest="form", choices=("hf", "safetensors", "dcp"), help="what to write")
    named = export.add_mutually_exclusive_group()
    named.add_argument("--what", default="model", help="what was tracked under this name, without it (default: model)")
    named.add_argument("--all", action="store_true", help="every tensor, under its full name")
    export.add_argument("--shard-gb", type=float, default=5.0, help="largest file of --as hf in GB (default 5)")

    copy = add("copy", "copy a step to another place, as it is")
    copy.add_argument("root", help=one)
    copy.add_argument("--to", required=True, metavar="ROOT", help=root)

    bring = add("import", "make a step of safetensors, a torch.save file or a DCP directory")
    bring.add_argument("source", help="a file, or a directory of DCP or safetensors files")
    bring.add_argument("--to", required=True, metavar="ROOT", help=root)
    bring.add_argument("--part", default="", help="only what lies under this name in the source, without it")
    named = bring.add_mutually_exclusive_group()
    named.add_argument("--what", default="model", help="the name that the job tracks it under (default: model)")
    named.add_argument("--all", action="store_true", help="the names in the source are full names already")
    bring.add_argument("--step", type=_count, default=0, help="the step that a job goes on from (default 0)")
    bring.add_argument("--add", action="store_true", help="into a root that has steps; this one becomes the newest")
    bring.add_argument("--trust-pickle", action="store_true", help="read DCP's description, which can run code")
    bring.add_argument("--scratch", default="", metavar="DIR", help="put it together in a file there, not in memory")


def parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """`--metric -loss` would be two flags for argparse; here it is a flag and its value."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] == "--metric":
            joined[-1] = f"--metric={argument}"
        else:
            joined.append(argument)
    return parser.parse_args(joined)


def run(args: argparse.Namespace) -> int:
    """Run one of the commands; what the disk or the network says against it is told in one line."""
    try:
        return _COMMANDS[args.command](args)
    except (RerailError, BrokenPipeError):
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise CheckpointError(f"{where}{error.strerror or error}") from error


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return int(text)


# --- ls ---


def _ls(args: argparse.Namespace) -> int:
    tiers = [root_at(text) for text in dict.fromkeys(args.root)]
    rows = [look(tier, found.id) for tier in tiers for found in catalog.folders(tier)]
    rows.sort(key=lambda row: row.id, reverse=True)
    if args.json:
        print(msgspec.json.encode(rows).decode())
        return GOOD
    if not rows:
        print(f"no checkpoints in {', '.join(tier.url for tier in tiers)}")
        return GOOD
    print(table(rows))
    good = [row for row in rows if row.whole]
    print(f"{len(good)} of {len(rows)} whole, {size_text(sum(row.size for row in rows))} in all")
    print("more: rerail ckpt show ROOT@STEP · rerail ckpt verify ROOT@STEP")
    return GOOD


# --- verify ---


class Verdict(msgspec.Struct, kw_only=True):
    """What reading a whole step came to."""

    root: str
    folder: str
    step: int
    ok: bool
    size: int = 0
    why: str = ""


def _verify(args: argparse.Namespace) -> int:
    place = place_at(args.root, args.step)
    chosen = [find(place)]
    if args.all:
        if place.step:
            raise UsageError(f"{args.root} names one step, --all means every one")
        chosen = [found for found in reversed(catalog.folders(place.tier)) if found.committed]
    verdicts = []
    for found in chosen:
        verdict = _verdict(found)
        verdicts.append(verdict)
        if not args.json:
            print(_said(verdict), file=sys.stdout if verdict.ok else sys.stderr, flush=True)
    if args.json:
        print(msgspec.json.encode(verdicts).decode())
    return GOOD if all(verdict.ok for verdict in verdicts) else BAD


def _said(verdict: Verdict) -> str:
    if verdict.ok:
        return f"step {verdict.step}: {size_text(verdict.size)} read, every byte is right"
    return f"step {verdict.step}: damaged: {clean(verdict.why)}\n  {verdict.root}/{verdict.folder}"


def _verdict(found: Found) -> Verdict:
    said = Verdict(root=found.tier.url, folder=found.id.folder, step=found.id.step, ok=False)
    try:
        step = catalog.open_step(found.tier, found.id)
    except (OSError, CheckpointError) as error:
        said.why = str(error)
        return said
    problems = []
    with progress(f"step {step.id.step}", step.size) as advance:
        for manifest in step.manifests.values():
            try:
                said.size += verify(step.tier, step.id.folder, manifest, advance)
                _mark(step.tier, step.id, manifest, "")
            except (OSError, CheckpointError) as error:
                problems.append(str(error))
                _mark(step.tier, step.id, manifest, str(error))
    said.ok, said.why = not problems, "; ".join(problems)
    return said


def _mark(tier: Tier, step: StepId, manifest: RankManifest, problem: str) -> None:
    """Leave what was found, where that is news: a shard that was never marked and is wrong says so by itself."""
    name = names.verified_name(manifest.rank)
    path = f"{step.folder}/{name}"
    try:
        marked = name in tier.names(step.folder)
        if marked if problem else (not marked or tier.size(path)):
            mark(tier, step.folder, manifest.rank, problem)
    except OSError as error:
        print(f"rerail ckpt: {tier.url}/{path} could not be written: {error.strerror}", file=sys.stderr)


# --- copy ---


def _copy(args: argparse.Namespace) -> int:
    if place_at_step(args.to):
        raise UsageError(
            f"--to {args.to}: a step cannot be copied under another number", hint="give the place without @STEP"
        )
    step, target = opened(place_at(args.root)), tier_at(args.to)
    if target.url == step.tier.url:
        raise UsageError(f"{target.url} is where the step comes from", hint="give another place with --to")
    if Path(target.url).is_file():
        raise UsageError(f"{target.url} is a file", hint="a place for checkpoints is a directory or a URL")
    newest = newest_epoch(target)
    if 0 < newest < step.id.epoch:
        raise UsageError(
            f"{target.url} belongs to jobs up to epoch {newest}, and this step is of epoch {step.id.epoch}",
            hint="copied there it would stop a job that still writes to it; choose a new place",
        )
    with progress(f"step {step.id.step}", step.size) as advance:
        new = copy_step(step, target, progress=advance)
    told = {"step": step.id.step, "to": target.url, "size": step.size, "copied": new}
    if args.json:
        print(msgspec.json.encode(told).decode())
    elif new:
        print(f"step {step.id.step}: {size_text(step.size)} copied to {target.url}, and read back")
    else:
        print(f"{target.url} has step {step.id.step} already")
    return GOOD


# --- prune ---


class _Spared:
    """A tier on which nothing is removed: what would go is decided by the very code that removes."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def remove(self, folder: str) -> None:
        return None


def _prune(args: argparse.Namespace) -> int:
    keep = Keep(last=args.keep_last, every=args.keep_every, best=args.keep_best, metric=args.metric)
    if keep.everything:
        raise UsageError("nothing is said about what to keep", hint="--keep-last N, --keep-every M, --keep-best N")
    if bool(keep.best) != bool(keep.metric):
        raise UsageError("--keep-best and --metric go together", hint="for example: --keep-best 3 --metric -loss")
    tier = root_at(args.root)
    rows = {row.id: row for found in catalog.folders(tier) if (row := look(tier, found.id))}
    whole = [row for row in rows.values() if row.whole]
    if not whole:
        raise UsageError(f"no step in {tier.url} is whole, so none is removed", hint=f"rerail ckpt ls {tier.url}")
    name = keep.metric.removeprefix("-")
    if keep.best and not any(name in row.metrics for row in whole):
        known = ", ".join(sorted({clean(one) for row in whole for one in row.metrics})) or "none"
        raise UsageError(f"no step has the metric {name!r}", hint=f"there are: {known}")
    # A job that still runs may be writing: what the newest one left unfinished is not for us to judge.
    latest = max(step.epoch for step in rows)
    busy = {row.id for row in rows.values() if not row.committed and row.epoch == latest}
    gone = prune(cast(Tier, _Spared(tier)) if args.dry_run else tier, keep, whole[-1].id, busy)
    _say_pruned([rows[step] for step in reversed(gone) if step in rows], len(rows) - len(gone), args)
    return GOOD


def _say_pruned(gone: list[Row], left: int, args: argparse.Namespace) -> None:
    if args.json:
        print(msgspec.json.encode({"removed": gone, "left": left, "dry_run": args.dry_run}).decode())
        return
    verb = "would be removed" if args.dry_run else "removed"
    for row in gone:
        print(f"step {row.step} {verb}: {row.folder}, {size_text(row.size)}{'' if row.committed else ', unfinished'}")
    print(
        f"{len(gone)} {verb} ({size_text(sum(row.size for row in gone))}), {left} {'would stay' if args.dry_run else 'left'}"
    )


# --- what needs torch ---


def _show(args: argparse.Namespace) -> int:
    from rerail.cli.ckpt_show import show

    return show(args)


def _diff(args: argparse.Namespace) -> int:
    from rerail.cli.ckpt_diff import diff

    return diff(args)


def _export(args: argparse.Namespace) -> int:
    from rerail.cli.ckpt_move import export

    return export(args)


def _import(args: argparse.Namespace) -> int:
    from rerail.cli.ckpt_move import bring

    return bring(args)


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "ls": _ls,
    "show": _show,
    "verify": _verify,
    "diff": _diff,
    "copy": _copy,
    "export": _export,
    "import": _import,
    "prune": _prune,
}
