"""`rerail.join()`: finds out how this process was started and gives a Job that fits.

Under `rerail run` the rank gets its place from the agent and replaceable process groups. Under torchrun, or alone,
the same script runs with torch's own groups and without repairs. Called by the user's script, once.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from rerail.config import settings_of_rank
from rerail.errors import JobStopped
from rerail.runtime import stacks
from rerail.runtime.wire import Assign, CommFailed, Interrupt, Joined, Parked, Warm
from rerail.session import flight, groups, waiting
from rerail.session.c10d import HashStore
from rerail.session.fabric import fabric, hearing
from rerail.session.foresight import foresight
from rerail.session.job import Job, Place
from rerail.session.link import AgentLink, connect

STUCK_S = 10.0
"""Seconds after an interrupt at which a rank that has not parked writes its stacks to its log."""
LEAVE_S = 2.0
"""Seconds that gloo's threads may take to come to rest at the end of a script."""
_job: Job | None = None


def join(*, backend: str | None = None, timeout: timedelta | None = None) -> Job:
    """Take part in the job this process was started for. Call it before process groups are made, once.

    `backend` as in torch: `gloo`, `nccl` or `cpu:gloo,cuda:nccl`; by default what the devices call for.
    """
    global _job
    if _job is None:
        link = connect()
        if link is not None:
            _job = _join_agent(link, backend, timeout)
        else:
            _job = _join_plain(backend, timeout)
    return _job


def _join_agent(link: AgentLink, backend: str | None, timeout: timedelta | None) -> Job:
    assignment = link.assignment
    if assignment is None:
        link.send(Warm(at_join=True))
        assignment = link.wait_for_assignment()
        os.environ.update(assignment.env)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = _device(local_rank)
    place = Place(assignment.rank, assignment.world_size, local_rank, device)
    replaceable = not dist.is_initialized()
    link.send(Joined(rank=assignment.rank, generation=assignment.generation, replaceable=replaceable))
    link.start_beating(settings_of_rank().beat_s)
    stacks.answer(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if not replaceable:
        if assignment.rank == 0:
            print(
                "rerail: the script made its process group before rerail.join(), so a lost rank restarts all. "
                "Remove init_process_group(): join() makes the group",
                file=sys.stderr,
            )
        return Job(None, place)
    _wire_up(link, assignment)
    fabric.address = assignment.address
    fabric.inner_backend = _with_cpu_side(backend or _default_backend(device))
    if "nccl" in fabric.inner_backend:
        _leave_nccl_errors_to_us()
    groups.register()
    if assignment.newcomer:
        if link.clock is not None:
            hearing.play_back(link.clock)
    else:
        _form_first(link, assignment)
        if link.clock is not None:
            hearing.record(link.clock)
    dist.init_process_group(
        groups.BACKEND, store=fabric.store, rank=assignment.rank, world_size=assignment.world_size, timeout=timeout
    )
    return Job(link, place)


def _leave_nccl_errors_to_us() -> None:
    """torch's own watchdog ends the process when a peer is lost; here the process is what we want to keep."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    # Its record of past collectives is written before an abort goes through, which would otherwise take a minute.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1")


def _wire_up(link: AgentLink, assignment: Assign) -> None:
    def on_interrupt(interrupt: Interrupt) -> None:
        if not fabric.rehearsing:
            # If this rank does not leave its step, its log tells where it is: written without Python's help.
            faulthandler.dump_traceback_later(STUCK_S)
        fabric.interrupt(interrupt.generation)

    def on_failure(text: str) -> None:
        version = link.clock.read().step if link.clock is not None else -1
        link.send(CommFailed(rank=assignment.rank, generation=fabric.generation, version=version, text=text[:2000]))

    link.on_interrupt = on_interrupt
    link.collectives = lambda: (fabric.pending_since(), fabric.collectives, fabric.newest_name)
    fabric.on_failure = on_failure
    link.at_beat = flight.answer(os.environ.get("TORCHELASTIC_ERROR_FILE", "")) or link.at_beat


def _form_first(link: AgentLink, assignment: Assign) -> None:
    """All ranks of a new start meet here, before any of them builds anything."""
    port, served = 0, None
    if assignment.store_rank == assignment.rank:
        served, port = fabric.serve()
    link.send(
        Parked(
            rank=assignment.rank,
            generation=assignment.generation,
            version=0,
            intact=False,
            in_training=False,
            store_port=port,
        )
    )
    plan = link.wait_for_plan(assignment.generation)
    fabric.nodes = plan.nodes
    foresight.take(plan.outlook, plan.version)
    try:
        fabric.form(plan.generation, lambda: served or fabric.dial(plan.store_host, plan.store_port))
    except RuntimeError:
        if fabric.wanted > plan.generation:
            raise JobStopped(f"generation {fabric.wanted} replaces {plan.generation} while it was formed") from None
        raise
    link.formed(assignment.rank, plan.generation)


def _join_plain(backend: str | None, timeout: timedelta | None) -> Job:
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = _device(local_rank)
    if not dist.is_initialized():
        chosen = backend or _default_backend(device)
        if "MASTER_ADDR" in os.environ:
            dist.init_process_group(chosen, timeout=timeout)
        else:
            dist.init_process_group(chosen, store=HashStore(), rank=0, world_size=1, timeout=timeout)
            rank, world_size = 0, 1
        if chosen == "gloo":
            # a thread of gloo's that still lets go of Python objects when the interpreter is gone aborts the process
            atexit.register(waiting.until_asleep, LEAVE_S)
    return Job(None, Place(rank, world_size, local_rank, device))


def _device(local_rank: int) -> torch.device:
    """This rank's accelerator, or the CPU. Ranks beyond the number of devices share them."""
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def _with_cpu_side(backend: str) -> str:
    """rerail moves small things by CPU tensors, so NCCL alone is not enough."""
    return "cpu:gloo,cuda:nccl" if backend in ("nccl", "cuda:nccl") else backend


def _default_backend(device: torch.device) -> str:
    if device.type != "cuda":
        return "gloo"
    shared = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count()
    return "gloo" if shared else "cpu:gloo,cuda:nccl"
