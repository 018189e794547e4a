"""What the runs of `bench/rehab_train.py` learn, and the models that learn it: Python source by a GPT, made-up images by a VGG16."""

from __future__ import annotations

import contextlib
import math
import sysconfig
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional as f

VOCABULARY = 256
HELD_OUT = 1 << 19
"""Bytes at the end of the data that are never trained on."""
CLASSES, PIXELS = 10, 32


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
    images: bool = False
    warm_up: int = 100
    lean: bool = False
    """So large that hardly more than one state of it fits: made on the device, judged by fewer rows, little of it kept."""

    def rate_at(self, step: int) -> float:
        """Warm-up, then a cosine down to a tenth."""
        if step < self.warm_up:
            return self.rate * (step + 1) / self.warm_up
        done = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * min(done, 1.0))))


class Task(Protocol):
    """Makes models, and batches that they turn into a loss."""

    def model(self) -> nn.Module: ...

    def batch(self, chance: torch.Generator) -> torch.Tensor: ...

    @property
    def fixed(self) -> torch.Tensor:
        """What is never trained on."""


def task_of(shape: Shape, device: torch.device) -> Task:
    return Images(shape, device) if shape.images else Text(shape, device)


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


class Text:
    """The next byte of Python source."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        data = python_source(1 << (21 if shape.width < 256 else 27)).to(device)
        self._data, held_out = data[:-HELD_OUT], data[-HELD_OUT:]
        rows = 64 if device.type == "cuda" and not shape.lean else 16
        self.fixed = self._cut(held_out, torch.arange(rows) * (HELD_OUT // rows - shape.context - 1))

    def model(self) -> nn.Module:
        with self._device if self._shape.lean else contextlib.nullcontext():
            return Gpt(self._shape).to(self._device)

    def batch(self, chance: torch.Generator) -> torch.Tensor:
        starts = torch.randint(len(self._data) - self._shape.context - 1, (self._shape.batch,), generator=chance)
        return self._cut(self._data, starts)

    def _cut(self, data: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        places = torch.arange(self._shape.context + 1, device=self._device)
        return data[starts.to(self._device)[:, None] + places].long()


class Layer(nn.Module):
    """One of the sixteen: a convolution, with pooling behind the last of a group, or a linear layer."""

    def __init__(self, inputs: int, outputs: int, *, pool: bool = False, flat: bool = False) -> None:
        super().__init__()
        self.pool, self.flat = pool, flat
        self.weigh = nn.Linear(inputs, outputs) if flat else nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.LayerNorm(outputs) if flat else nn.GroupNorm(max(1, outputs // 8), outputs)
        nn.init.kaiming_normal_(self.weigh.weight, nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = f.relu(self.norm(self.weigh(x.flatten(1) if self.flat else x)))
        return f.max_pool2d(x, 2) if self.pool else x


class Vgg(nn.Module):
    """VGG16; `width` is that of its first convolutions (64 in the original)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        widths = [shape.width * times for times in (1, 1, 2, 2, 4, 4, 4, 8, 8, 8, 8, 8, 8)]
        pooled = {1, 3, 6, 9, 12}
        layers = [
            Layer(before, after, pool=at in pooled)
            for at, (before, after) in enumerate(zip([3, *widths], widths, strict=False))
        ]
        layers += [Layer(widths[-1], widths[-1], flat=True), Layer(widths[-1], widths[-1], flat=True)]
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The first pixel of each image says what it is, and is not shown."""
        kinds, x = x[:, 0, 0, 0].long(), x.clone()
        x[:, 0, 0, 0] = 0
        for block in self.blocks:
            x = block(x)
        return f.cross_entropy(self.head(x).float(), kinds)


class Images:
    """Which of ten gratings lies under the noise, faint or clear: each has a direction and a distance of its own, and a place by chance."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self.fixed = self._made(512, torch.Generator().manual_seed(-1 & 0xFFFF))

    def model(self) -> nn.Module:
        return Vgg(self._shape).to(self._device)

    def batch(self, chance: torch.Generator) -> torch.Tensor:
        return self._made(self._shape.batch, chance)

    def _made(self, count: int, chance: torch.Generator) -> torch.Tensor:
        kinds = torch.randint(CLASSES, (count,), generator=chance)
        turn, place = torch.pi * kinds / CLASSES, 2 * torch.pi * torch.rand(count, generator=chance)
        side = torch.arange(PIXELS, dtype=torch.float32)
        along = turn.cos()[:, None, None] * side[:, None] + turn.sin()[:, None, None] * side
        waves = (along * (0.5 + 0.05 * kinds)[:, None, None] + place[:, None, None]).sin()
        noise = torch.randn(count, 3, PIXELS, PIXELS, generator=chance)
        clear = 0.2 + 1.2 * torch.rand(count, 1, 1, 1, generator=chance)
        images = clear * waves[:, None] + 0.8 * noise
        images[:, 0, 0, 0] = kinds.float()
        return images.to(self._device)
