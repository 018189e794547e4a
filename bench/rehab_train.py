"""What `bench/rehab.py` trains: a model whose state can be taken, put back and cut into shards."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from rehab_models import Shape, task_of

SHAPES = {
    "tiny": Shape(layers=8, width=64, heads=4, context=64, batch=8, steps=240, rate=2e-3),
    "tiny-lean": Shape(layers=4, width=64, heads=4, context=64, batch=8, steps=160, rate=2e-3, warm_up=20, lean=True),
    "mini": Shape(layers=12, width=256, heads=8, context=256, batch=32, steps=800, rate=1e-3),
    "small": Shape(layers=12, width=512, heads=8, context=512, batch=32, steps=1600, rate=1e-3),
    "gpt350": Shape(layers=24, width=1024, heads=16, context=512, batch=32, steps=1000, rate=3e-4),
    "gpt3b": Shape(layers=16, width=4096, heads=32, context=512, batch=8, steps=160, rate=2e-4, warm_up=20, lean=True),
    "vgg16": Shape(layers=15, width=64, heads=1, context=0, batch=128, steps=1000, rate=5e-4, images=True),
    "vgg16-thin": Shape(layers=15, width=8, heads=1, context=0, batch=32, steps=600, rate=1e-3, images=True),
}


class Span(NamedTuple):
    """Part of one tensor, of its flat elements."""

    tensor: int
    start: int
    end: int


class State(NamedTuple):
    """Everything at a step: parameters and both moments."""

    step: int
    tensors: list[list[torch.Tensor]]


class Recorded:
    """A function of one tensor whose kernels are recorded once and then started together: small models wait for launches alone."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], given: torch.Tensor) -> None:
        self._given = given.clone()
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                function(self._given)
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._found = function(self._given)

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        self._given.copy_(given)
        self._graph.replay()
        return self._found.clone()


class Trainer:
    """One run. Every step's data follow from its number and the seed, whatever happened before."""

    def __init__(self, shape: Shape, seed: int, device: torch.device, *, recorded: bool = True) -> None:
        torch.manual_seed(seed)
        self.shape, self.device, self._seed = shape, device, seed
        recorded = recorded and device.type == "cuda" and not shape.lean
        self._task = task_of(shape, device)
        self.model = self._task.model()
        self.parameters = list(self.model.parameters())
        self._optimizer = torch.optim.AdamW(
            self.parameters,
            lr=torch.tensor(shape.rate, device=device) if recorded else shape.rate,
            betas=(0.9, shape.beta2),
            weight_decay=0.1,
            fused=device.type == "cuda",
            capturable=recorded,
        )
        self._update: Callable[[torch.Tensor], torch.Tensor] = self._one_update
        self._look: Callable[[torch.Tensor], torch.Tensor] = self._one_look
        self.step = 0
        self.train()  # the first one makes the moments
        if recorded:
            self._record()
        self.begin()

    def _record(self) -> None:
        """Where that fails, all goes on as before, only slower."""
        batch = self._task.batch(torch.Generator().manual_seed(0))
        try:
            update, look = Recorded(self._one_update, batch), Recorded(self._one_look, self._task.fixed)
        except RuntimeError as error:
            print(f"steps are not recorded: {error}", file=sys.stderr)
            torch.cuda.synchronize()
            self._optimizer.zero_grad()
            return
        self._update, self._look = update, look

    @torch.no_grad()
    def begin(self) -> None:
        """From the start, as if nothing had been."""
        self.step = 0
        torch.manual_seed(self._seed)
        fresh = self._task.model()
        for mine, theirs in zip(self.parameters, fresh.parameters(), strict=True):
            mine.copy_(theirs)
        for kind in self.tensors()[1:]:
            torch._foreach_zero_(kind)
        for state in self._optimizer.state.values():
            state["step"].zero_()

    def tensors(self) -> list[list[torch.Tensor]]:
        """Parameters, first moments, second moments; in the order of the parameters."""
        states = [self._optimizer.state[one] for one in self.parameters]
        return [
            [one.data for one in self.parameters],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
        ]

    def train(self) -> torch.Tensor:
        """One step; its loss, not waited for."""
        chance = torch.Generator().manual_seed(self._seed * 1_000_003 + self.step)
        rate = self.shape.rate_at(self.step)
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self.step += 1
        return self._update(self._task.batch(chance))

    def _one_update(self, batch: torch.Tensor) -> torch.Tensor:
        with self._half():
            loss: torch.Tensor = self.model(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def validate(self) -> torch.Tensor:
        """The loss on what is never trained on, the same every time."""
        return self._look(self._task.fixed)

    @torch.no_grad()
    def _one_look(self, batch: torch.Tensor) -> torch.Tensor:
        with self._half():
            loss: torch.Tensor = self.model(batch)
        return loss

    def take(self) -> State:
        return State(self.step, [[one.clone() for one in kind] for kind in self.tensors()])

    def put(self, state: State) -> None:
        self.step = state.step
        for mine, theirs in zip(self.tensors(), state.tensors, strict=True):
            torch._foreach_copy_(mine, theirs)
        for one in self._optimizer.state.values():
            one["step"].fill_(state.step)

    def stage(self, number: int, of: int) -> list[Span]:
        """A contiguous part of the layers; the first one has the embeddings too, the last one the head."""
        first, last = number * self.shape.layers // of, (number + 1) * self.shape.layers // of - 1
        found: list[Span] = []
        for at, (name, parameter) in enumerate(self.model.named_parameters()):
            parts = name.split(".")
            inside = parts[0] == "blocks" and first <= int(parts[1]) <= last
            ends = (number == 0 and parts[0] in ("tokens", "places")) or (
                number == of - 1 and parts[0] in ("last", "head")
            )
            if inside or ends:
                found.append(Span(at, 0, parameter.numel()))
        return found

    def slices(self, number: int, of: int) -> list[Span]:
        """One of several equal parts of every tensor, as FSDP cuts them."""
        sizes = ((at, one.numel()) for at, one in enumerate(self.parameters))
        return [Span(at, size * number // of, size * (number + 1) // of) for at, size in sizes]

    @contextlib.contextmanager
    def _half(self) -> Iterator[None]:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            yield


def part(tensors: Sequence[torch.Tensor], span: Span) -> torch.Tensor:
    return tensors[span.tensor].view(-1)[span.start : span.end]
