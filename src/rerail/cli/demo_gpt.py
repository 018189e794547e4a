"""Turns the Python standard library's sources into batches of bytes, and bytes into a loss: a small GPT in plain PyTorch.

Used by `rerail demo`, the examples and the benchmark. Knows nothing of rerail: this is the part a user already has.
"""

from __future__ import annotations

import ctypes
import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256
"""Bytes: no tokenizer needed."""


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(batch, length, width)))
        deeper: Tensor = self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))
        return x + deeper


class GPT(nn.Module):
    """Predicts the next token. `forward` returns the loss, so that wrappers such as DDP see all of the work."""

    def __init__(
        self,
        *,
        layers: int = 8,
        width: int = 256,
        heads: int = 4,
        length: int = 64,
        vocabulary: int = VOCABULARY,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Sources:
    """The standard library's top-level *.py files as one long row of bytes; the same on every rank."""

    def __init__(self, length: int = 64, batch: int = 2, limit: int = 4 << 20) -> None:
        self.length, self.batch_size = length, batch
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)[:limit]
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def batch(self, index: int, rank: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Batch `index` of `rank`: which bytes it holds depends on nothing else."""
        generator = torch.Generator().manual_seed((index << 20) + rank)
        starts = torch.randint(len(self.bytes) - self.length - 1, (self.batch_size, 1), generator=generator)
        rows = self.bytes[starts + torch.arange(self.length + 1)].long().to(device)
        return rows[:, :-1], rows[:, 1:]


def fingerprint(module: nn.Module) -> str:
    """sha256 over every parameter and buffer, by name. Sharded parameters are gathered, so all ranks must call it."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        digest.update(name.removeprefix("module.").encode())
        plain = whole.detach().cpu().contiguous()
        digest.update(ctypes.string_at(plain.data_ptr(), plain.nbytes))  # as numpy would, but without needing it
    return digest.hexdigest()
