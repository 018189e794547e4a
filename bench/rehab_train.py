"""What `bench/rehab.py` trains: a GPT on Python source, byte by byte, whose state can be taken, put back and cut into shards."""

from __future__ import annotations

import contextlib
import math
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as f

VOCABULARY = 256
HELD_OUT = 1 << 19
"""Bytes at the end of the data that are never trained on."""
WARM_UP = 100


class Shape(NamedTuple):
    """A model, and how it is trained."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    rate: float
    beta2: float = 0.95

    def rate_at(self, step: int) -> float:
        """Warm-up, then a cosine down to a tenth."""
        if step < WARM_UP:
            return self.rate * (step + 1) / WARM_UP
        done = (step - WARM_UP) / max(1, self.steps - WARM_UP)
        return self.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * min(done, 1.0))))


SHAPES = {
    "tiny": Shape(layers=8, width=64, heads=4, context=64, batch=8, steps=240, rate=2e-3),
    "mini": Shape(layers=12, width=256, heads=8, context=256, batch=32, steps=800, rate=1e-3),
    "small": Shape(layers=12, width=512, heads=8, context=512, batch=32, steps=1600, rate=1e-3),
    "gpt350": Shape(layers=24, width=1024, heads=16, context=512, batch=32, steps=1000, rate=3e-4),
    "gpt3b": Shape(layers=32, width=2944, heads=23, context=512, batch=32, steps=300, rate=2e-4),
}


def python_source(most: int) -> torch.Tensor:
    """All the Python there is beside this interpreter, in an order that is no order."""
    folders = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    files = sorted({path for folder in folders for path in folder.rglob("*.py")})
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    found, size = list[bytes](), 0
    for at in order:
        with contextlib.suppress(OSError):
            found.append(files[at].read_bytes())
            size += len(found[-1])
        if size >= most:
            break
    return torch.frombuffer(bytearray(b"\n".join(found)[:most]), dtype=torch.uint8)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.before, self.between = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.look = nn.Linear(shape.width, 3 * shape.width)
        self.gather = nn.Linear(shape.width, shape.width)
        self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.look(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.gather(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(f.gelu(self.up(self.between(x))))


class Gpt(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.last = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("gather.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * shape.layers) if deep else 1.0))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.tokens(text[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return f.cross_entropy(self.head(self.last(x)).flatten(0, 1).float(), text[:, 1:].flatten())


class Span(NamedTuple):
    """Part of one tensor, of its flat elements."""

    tensor: int
    start: int
    end: int


class State(NamedTuple):
    """Everything at a step: parameters and both moments."""

    step: int
    tensors: list[list[torch.Tensor]]


class Trainer:
    """One run. Every step's data follow from its number and the seed, whatever happened before."""

    def __init__(self, shape: Shape, seed: int, device: torch.device) -> None:
        torch.manual_seed(seed)
        self.shape, self.device, self._seed = shape, device, seed
        self.model = Gpt(shape).to(device)
        self.parameters = list(self.model.parameters())
        fused = device.type == "cuda"
        self._optimizer = torch.optim.AdamW(
            self.parameters, lr=shape.rate, betas=(0.9, shape.beta2), weight_decay=0.1, fused=fused
        )
        data = python_source(1 << (21 if shape.width < 256 else 27)).to(device)
        self._data, held_out = data[:-HELD_OUT], data[-HELD_OUT:]
        rows = 64 if fused else 16
        self._fixed = self._text(held_out, torch.arange(rows) * (HELD_OUT // rows - shape.context - 1))
        self._places = torch.arange(shape.context + 1, device=device)
        self.step = 0
        self.train()  # the first one makes the moments
        self.step = 0
        with torch.no_grad():
            torch.manual_seed(seed)
            fresh = Gpt(shape).to(device)
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
        starts = torch.randint(len(self._data) - self.shape.context - 1, (self.shape.batch,), generator=chance)
        for group in self._optimizer.param_groups:
            group["lr"] = self.shape.rate_at(self.step)
        with self._half():
            loss: torch.Tensor = self.model(self._text(self._data, starts))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        return loss.detach()

    @torch.no_grad()
    def validate(self) -> torch.Tensor:
        """The loss on text that is never trained on, the same every time."""
        with self._half():
            loss: torch.Tensor = self.model(self._fixed)
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
        blocks = self.shape.layers // of
        first, last = number * blocks, (number + 1) * blocks - 1
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

    def _text(self, data: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        places = torch.arange(self.shape.context + 1, device=self.device)
        return data[starts.to(self.device)[:, None] + places].long()

    @contextlib.contextmanager
    def _half(self) -> Iterator[None]:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            yield


def part(tensors: Sequence[torch.Tensor], span: Span) -> torch.Tensor:
    return tensors[span.tensor].view(-1)[span.start : span.end]
