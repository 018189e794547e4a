"""`rerail ckpt export` and `rerail ckpt import`: carries a step out to files of other kinds, and such files in.

Called by `cli.ckpt`.
"""

from __future__ import annotations

import argparse
import math
import platform
import random
import sys
from pathlib import Path

import msgspec
import torch

from rerail import __version__
from rerail.checkpoint import catalog, importing
from rerail.checkpoint import export as exporting
from rerail.checkpoint.importing import Wish
from rerail.checkpoint.tiers import tier_at
from rerail.cli.ckpt_roots import clean, opened, place_at, progress, size_text
from rerail.errors import UsageError
from rerail.session import plain, rng
from rerail.session.cursor import Position
from rerail.session.small import Small, encode
from rerail.session.snapshotting import UNTIL_AGREED


def export(args: argparse.Namespace) -> int:
    """Write a step as files that others read."""
    if "://" in args.to:
        raise UsageError(f"--to {args.to}: exports go to a local path", hint="copy the files from there")
    if not args.shard_gb > 0 or math.isinf(args.shard_gb):
        raise UsageError(f"--shard-gb {args.shard_gb}: more than 0 is needed")
    step = opened(place_at(args.root))
    chosen = exporting.plan(step, "" if args.all else args.what)
    target = Path(args.to).absolute()
    with progress(f"step {step.id.step}", chosen.size) as advance:
        files = exporting.write(chosen, target, args.form, advance, int(args.shard_gb * 1e9))
    told = {"step": step.id.step, "to": str(target), "tensors": len(chosen.names), "size": chosen.size, "files": files}
    if args.json:
        print(msgspec.json.encode(told).decode())
        return 0
    print(f"step {step.id.step}: {len(chosen.names)} tensors, {size_text(chosen.size)}, to {target}")
    if chosen.from_ranks:
        print(f"  {chosen.from_ranks} of them are each rank's own; they come from the lowest rank that has them")
    for name in files[:8] if target.is_dir() else ():
        print(f"  {name}")
    if len(files) > 8:
        print(f"  and {len(files) - 8} more")
    return 0


def bring(args: argparse.Namespace) -> int:
    """Make a committed step of files of another kind."""
    source_path = Path(args.source).absolute()
    if args.scratch and not Path(args.scratch).is_dir():
        raise UsageError(f"--scratch {args.scratch} is not a directory")
    tier = tier_at(args.to)
    if Path(tier.url).is_file():
        raise UsageError(f"{tier.url} is a file", hint="a checkpoint root is a directory, new or empty")
    if catalog.folders(tier) and not args.add:
        raise UsageError(
            f"{tier.url} has steps already",
            hint="choose a new root, or --add: the import becomes the newest step, and a job that writes there is stopped "
            "from doing so",
        )
    source = importing.open_source(source_path, trust_pickle=args.trust_pickle)
    chosen = importing.choose(source, args.part, "" if args.all else args.what)
    wish = Wish(args.step, _fresh(args.step), f"import of {source_path.name}", _versions(), args.scratch)
    outcome = importing.bring_in(source, chosen, tier, wish)
    told = {
        "step": args.step,
        "root": tier.url,
        "kind": source.kind,
        "tensors": sorted(chosen.values()),
        "size": outcome.size,
        "left_out": [*source.left_out, *(name for name in source.tensors if name not in chosen)],
    }
    if args.json:
        print(msgspec.json.encode(told).decode())
        return 0
    print(f"step {args.step}: {len(chosen)} tensors from {source.kind}, {size_text(outcome.size)}, in {tier.url}")
    left = [clean(name) for name in told["left_out"]]
    if left:
        more = f" and {len(left) - 6} more" if len(left) > 6 else ""
        print(f"  left out: {', '.join(left[:6])}{more}")
    for note in outcome.notes:
        print(f"rerail ckpt: {clean(note)}", file=sys.stderr)
    print(f"more: rerail ckpt show {tier.url} · job.checkpoints({tier.url!r}) starts from it")
    return 0


def _fresh(step: int) -> bytes:
    """The small state of a job that begins with these weights: start of the data, random generators of seed 0."""
    random.seed(0)
    torch.manual_seed(0)
    return encode(Small(step, rng.capture(), Position(), plain.encode({}, "an import"), {}, UNTIL_AGREED))


def _versions() -> dict[str, str]:
    return {"rerail": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
