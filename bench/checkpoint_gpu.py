"""A GPT of 3 billion parameters on one GPU, fp32 with Adam (36 GB): what snapshots, a save, a load and a restart cost.

    python bench/checkpoint_gpu.py [--layers 36 --width 2560 --batch 12] [--folder DIR]

Prints one JSON line per phase. Snapshots: blocks of 20 steps with one every 10 steps take turns with blocks without. The
same for `dcp.async_save` in its best modes, with a writer that writes nothing. Then one save until durable, and a fresh process that loads it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import StorageWriter

BLOCK, EVERY = 20, 10
SEQUENCE, VOCABULARY = 1024, 32_000


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 128
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, 128).transpose(1, 2)
            for part in self.attend(self.first(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(SEQUENCE, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


class Training:
    """The model, its optimizer, and one step."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(1)
        torch.backends.cuda.matmul.allow_tf32 = True
        with torch.device("cuda"):
            self.model = GPT(args.layers, args.width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(0, VOCABULARY, (args.batch, SEQUENCE), device="cuda")

    def step(self) -> None:
        self.step_until_update()
        self.update()

    def step_until_update(self) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.model(self.tokens)
        loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_bytes(self) -> int:
        moments = (t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
        return sum(t.numel() * t.element_size() for t in (*self.model.parameters(), *moments))


def blocks(step: object, switch: object, pairs: int) -> tuple[list[float], list[float]]:
    """Seconds of every block of steps with and without snapshots, taking turns."""
    with_, without = [], []
    for pair in range(2 * pairs):
        on = pair % 2 == 0
        switch(on)  # type: ignore[operator]
        torch.cuda.synchronize()
        began = time.monotonic()
        for index in range(BLOCK):
            step(index)  # type: ignore[operator]
        torch.cuda.synchronize()
        (with_ if on else without).append(time.monotonic() - began)
    return with_, without


def slowdown(name: str, found: tuple[list[float], list[float]], **more: object) -> None:
    with_, without = found
    pairs = [100 * (a / b - 1) for a, b in zip(with_, without, strict=True)]
    step_s = statistics.median(without) / BLOCK
    say(phase=name, slowdown_percent=statistics.median(pairs), pairs=pairs, step_s=step_s, every=EVERY, **more)


def snapshot(args: argparse.Namespace) -> None:
    """rerail's snapshots into pinned shared memory, beside forward and backward."""
    from rerail.checkpoint.arena import Arena
    from rerail.checkpoint.layout import Piece
    from rerail.checkpoint.staging import Stager

    training = Training(args)
    for _ in range(3):
        training.step()
    named = dict(training.model.named_parameters())
    tensors = {**named, **{
        f"{name}.{key}": value for name, p in named.items() for key, value in training.optimizer.state[p].items()
    }}  # fmt: skip
    pieces = [Piece(name, t.detach(), tuple(t.shape), (0,) * t.dim(), True) for name, t in tensors.items()]
    stager, version = Stager(Arena(os.memfd_create("bench"))), 0
    first = time.monotonic()
    while not stager.stage(0, pieces, b""):
        stager.settle()
    stager.settle()
    first_s, again = time.monotonic() - first, time.monotonic()
    stager.stage(1, pieces, b"")
    stager.settle()
    copy_s = time.monotonic() - again
    training.optimizer.register_step_pre_hook(lambda *_: stager.before_update())
    active = [False]

    def step(index: int) -> None:
        nonlocal version
        if active[0] and index % EVERY == 0:
            version += 1
            stager.stage(version + 1, pieces, b"")
        training.step()
        device = stager._device
        if os.environ.get("RERAIL_BENCH_VERBOSE") and active[0] and index % EVERY == 0 and device is not None:
            torch.cuda.synchronize()
            stager.settle()
            held = device._buffer.numel() if device._buffer is not None else 0
            say(
                rate=device._rate / 1e9,
                window_s=device._window_s,
                cloned_gb=held / 1e9,
                free_gb=torch.cuda.mem_get_info()[0] / 1e9,
            )

    found = blocks(step, lambda on: active.__setitem__(0, on), args.pairs)
    gb = training.state_bytes() / 1e9
    slowdown("rerail snapshot", found, state_gb=gb, first_s=first_s, copy_s=copy_s)


class Nowhere(StorageWriter):
    """Writes nothing: what is measured is what saving costs the training, not the disk."""

    def reset(self, checkpoint_id: object = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None: ...

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans

    def write_data(self, plan: Any, planner: Any) -> torch.futures.Future[list[Any]]:
        done: torch.futures.Future[list[Any]] = torch.futures.Future()
        done.set_result([])
        return done

    def finish(self, metadata: Any, results: Any) -> None: ...

    def storage_meta(self) -> None:
        return None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True


def dcp_process(args: argparse.Namespace) -> None:
    """torch's own, in its best mode: pinned shared memory, asynchronous staging, a process that writes."""
    dcp(args, "process")


def dcp_thread(args: argparse.Namespace) -> None:
    """The same with a thread that writes."""
    dcp(args, "thread")


def dcp(args: argparse.Namespace, kind: str) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577")
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    training = Training(args)
    for _ in range(3):
        training.step()

    stager = DefaultStager(StagingOptions(True, kind == "process", True, True))
    # torch 2.11 closes this after every save, and the next one fails for want of it; its pinned memory, too, is then gone
    stager.close = stager._state_dict_stager.close = lambda: None  # type: ignore[method-assign]
    pending: list[Any] = []
    active = [False]

    def step(index: int) -> None:
        if active[0] and index % EVERY == 0:
            for response in pending:
                response.upload_completion.result()
            pending.clear()
            named = {name: p.detach() for name, p in training.model.named_parameters()}
            moments = {
                f"{name}.{key}": value.detach()
                for name, p in training.model.named_parameters()
                for key, value in training.optimizer.state[p].items()
            }
            pending.append(
                checkpoint.async_save(
                    {"model": named, "optimizer": moments},
                    storage_writer=Nowhere(),
                    async_stager=stager,
                    async_checkpointer_type=getattr(AsyncCheckpointerType, kind.upper()),
                )
            )
        training.step_until_update()
        for response in pending:  # the update changes what is being copied
            response.staging_completion.result()
        training.update()

    active[0], first = True, time.monotonic()
    step(0)  # the first one makes its memory and its process
    first_s = time.monotonic() - first
    found = blocks(step, lambda on: active.__setitem__(0, on), args.pairs)
    slowdown(f"dcp.async_save, {kind}", found, first_s=first_s)
    os._exit(0)


def save(args: argparse.Namespace) -> None:
    """A whole job alone: two steps, one save, and how long it took."""
    train(args, until=2)


def load(args: argparse.Namespace) -> None:
    """A fresh process that goes on from it."""
    train(args, until=3)


def train(args: argparse.Namespace, until: int) -> None:
    import rerail

    began = args.began or time.time()
    job = rerail.join(backend="gloo")
    training = Training(args)
    built = time.time()
    job.track(model=training.model, optimizer=training.optimizer)
    job.checkpoints(Path(args.folder) / "rerail", when=1000)
    before = time.monotonic()
    restored = 0.0
    for version in job.steps(until=until):
        if version != 0 and not restored:
            restored = time.monotonic() - before
        with job.step():
            training.step()
        torch.cuda.synchronize()
        say(phase="step", version=job.version, since_start_s=time.time() - began)
    say(phase="train", build_s=built - began, restored_s=restored, total_s=time.time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--phase", choices=("snapshot", "dcp_process", "dcp_thread", "save", "load"))
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--width", type=int, default=2560)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--folder", default="/tmp/rerail-bench-gpu")
    parser.add_argument("--began", type=float, default=0.0)
    args = parser.parse_args()
    if args.phase:
        globals()[args.phase](args)
        return
    Path(args.folder).mkdir(parents=True, exist_ok=True)
    for phase in ("snapshot", "dcp_process", "dcp_thread", "save", "load"):
        command = [sys.executable, __file__, *sys.argv[1:], "--phase", phase, "--began", str(time.time())]
        with contextlib.suppress(subprocess.CalledProcessError):
            subprocess.run(command, check=True)
        if phase == "load":
            shutil.rmtree(Path(args.folder) / "rerail", ignore_errors=True)


if __name__ == "__main__":
    main()
