"""torch's stores and gloo options under names a type checker can see. Called by the rest of `session`."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _distributed_c10d as _c10d

Store = _c10d.Store
TCPStore = _c10d.TCPStore
HashStore = _c10d.HashStore
PrefixStore = _c10d.PrefixStore


def gloo_options() -> Any:
    """Options of a gloo backend; torch has them under a private name only."""
    return getattr(_c10d.ProcessGroupGloo, "_Options")()  # noqa: B009 - the stub file does not know it


def finished_work(outputs: list[torch.Tensor]) -> Any:
    """A Work that is done, with a result: DDP's reducer insists on one."""
    devices: list[int | str | torch.device] = list({tensor.device for tensor in outputs if tensor.device.type != "cpu"})
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices or None)
    future.set_result(outputs)
    return getattr(_c10d, "_create_work_from_future")(future)  # noqa: B009 - the stub file does not know it


def cuda_in_use() -> bool:
    """Whether this process has touched CUDA; asking does not touch it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
