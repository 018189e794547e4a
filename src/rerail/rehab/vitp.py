"""The variable-interval temporal predictor: a small net that learns, on the job's own kept versions, how tensors move next.

    kept versions -> denoised (FDD) -> how far each element moved in each interval, and how long each was -> net -> how far it moves next

One net for all elements of all tensors, each scaled by how far its tensor usually moves: what it has learnt on one shard holds for another
one. It is trained on samples, tensor by tensor, so that what is held beside the shard stays below `LARGEST` bytes; bit by bit, so that
it can be done in moments in which there is nothing else to do (`session.coordinator`). What it is trained towards is a choice:

    "next"    how far the element moved in the next interval. Least squares then says "hardly": what an element does from one
              checkpoint to the next is mostly noise.
    "drift"   the same, but the whole is scaled until it supplies the slow drift that intervals further apart have in common
              (`rehab.drift`); never further than going straight on would.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Sequence

import torch
from torch import nn

from rerail.errors import StateError
from rerail.rehab.denoise import bands
from rerail.rehab.drift import AHEAD, shared_drift
from rerail.rehab.predictors import Times, Window, rates

LOOK_BACK = 4
"""Intervals that the net sees."""
WIDTH = 64
SAMPLES = 1 << 17
"""Elements that it is trained on."""
LARGEST = 200 << 20
"""Bytes that the net, its optimizer and its samples take at most."""
STEPS, BATCH = 300, 8192
GREATEST_GAIN = 8.0
_TINY = 1e-30


class _Net(nn.Module):
    """Movement and length of the last intervals, and the length of the one to come -> movement in it, per unit of time."""

    def __init__(self, chance: torch.Generator) -> None:
        super().__init__()
        embedded = 4 * LOOK_BACK
        self.layers = nn.Sequential(
            _layer(2 * LOOK_BACK + embedded, WIDTH, chance),
            nn.GELU(),
            _layer(WIDTH, WIDTH, chance),
            nn.GELU(),
            _layer(WIDTH, 1, chance),
        )
        self.through = nn.Parameter(torch.zeros(LOOK_BACK))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        straight: torch.Tensor = inputs[:, :LOOK_BACK] @ self.through
        bent: torch.Tensor = self.layers(inputs)[:, 0]
        return straight + bent


def _layer(inputs: int, outputs: int, chance: torch.Generator) -> nn.Linear:
    """As torch makes them, but not by torch's own chance: the training that goes on meanwhile draws from that."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs)  # type: ignore[no-untyped-call]
    bound = inputs**-0.5
    with torch.no_grad():
        for one in (layer.weight, layer.bias):
            one.copy_((2 * torch.rand(one.shape, generator=chance) - 1) * bound)
    return layer


class Vitp:
    """Trained by `train`; guesses nothing but the newest version before that."""

    def __init__(self, *, target: str = "next", denoised: bool = True, seed: int = 0) -> None:
        if target not in ("next", "drift"):
            raise StateError(f'a predictor is trained towards "next" or "drift", not {target!r}')
        self.name = f"vitp{'' if target == 'next' else ', drift'}{'' if denoised else ', not denoised'}"
        self.needs = 3
        self.loss = math.nan
        """Of the newest training, relative to guessing that nothing moves: 1 is no better than that."""
        self.losses: list[float] = []
        """One for each training: what `rehab.fitter` fits tau to."""
        self._target, self._denoised = target, denoised
        self._random = torch.Generator().manual_seed(seed)
        self._net = _Net(self._random)
        self._gain = 1.0
        self._trained = False

    # --- training ---

    def train(self, windows: Iterable[Window], *, steps: int = STEPS) -> None:
        """On all intervals behind the first, of elements chosen by chance: of large tensors more."""
        for _ in self.learning(windows, steps=steps):
            pass

    def learning(self, windows: Iterable[Window], *, steps: int = STEPS, part: int = BATCH) -> Iterator[None]:
        """The same, bit by bit: whoever trains it may do something else between any two. `part`: elements in one bit."""
        inputs, wanted = yield from self._samples(list(windows))
        self._net.to(inputs.device).train()
        optimizer = torch.optim.AdamW(self._net.parameters(), lr=3e-3, weight_decay=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        held_out = inputs.shape[0] // 8
        for _ in range(steps):
            chosen = torch.randint(held_out, inputs.shape[0], (BATCH,), generator=self._random).to(inputs.device)
            for some in _parts(chosen, part):
                with torch.enable_grad():
                    loss = nn.functional.mse_loss(self._net(inputs[some]), wanted[some]) * (len(some) / BATCH)
                    loss.backward()  # type: ignore[no-untyped-call]
                yield
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        seen = wanted.new_zeros(())
        for some in _parts(torch.arange(held_out, device=inputs.device), part):
            with torch.no_grad():
                seen += (self._net(inputs[some]) - wanted[some]).square().sum()
            yield
        self.loss = float(seen / wanted[:held_out].square().sum().clamp_min(_TINY))
        self.losses.append(self.loss)
        self._net.eval()
        self._trained = True

    def tune(self, windows: Sequence[Window]) -> None:
        """With the target "drift": by how much to scale what the net says, from the intervals that are known."""
        for _ in self.tuning(windows):
            pass

    def tuning(self, windows: Sequence[Window]) -> Iterator[None]:
        """The same, bit by bit."""
        if self._target != "drift":
            return
        self._gain, supplied, shared = 1.0, 0.0, 0.0
        for rows, times in windows:
            known = rows.shape[0] - AHEAD
            drift = shared_drift(rows, times)
            if drift is None or known < 2:
                continue
            before = times.first(known)
            guess = self._moved(rows[:known], before) / before.spans[-1]
            supplied += float(guess.double() @ drift.direction.double())
            shared += drift.squared
            yield
        if supplied > 0 and shared > 0:
            self._gain = min(max(shared / supplied, 1.0), GREATEST_GAIN)

    def _samples(self, windows: Sequence[Window]) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor]]:
        total = sum(rows.shape[1] * (rows.shape[0] - 2) for rows, _ in windows if rows.shape[0] >= self.needs)
        if not total:
            raise StateError(f"{self.name} needs {self.needs} kept versions of a shard to learn from")
        inputs: list[torch.Tensor] = []
        wanted: list[torch.Tensor] = []
        for rows, times in windows:
            for known in range(2, rows.shape[0]):
                size = rows.shape[1]
                count = min(size, max(1, round(SAMPLES * size / total)))
                chosen = torch.randint(size, (count,), generator=self._random).to(rows.device)
                past, then = rows[:known, chosen], times.first(known)
                features, scale = self._features(past, then)
                moved = (rows[known, chosen] - rows[known - 1, chosen]) / max(then.spans[-1], _TINY)
                inputs.append(features)
                wanted.append(moved / scale)
                yield
        mixed = torch.randperm(sum(len(one) for one in wanted), generator=self._random).to(wanted[0].device)
        return torch.cat(inputs)[mixed], torch.cat(wanted)[mixed]

    # --- what it has learnt ---

    @property
    def trained(self) -> bool:
        return self._trained

    @torch.no_grad()
    def vector(self) -> torch.Tensor:
        """All its numbers in a row."""
        return torch.cat([one.detach().reshape(-1).cpu() for one in self._net.parameters()])

    @torch.no_grad()
    def adopt(self, vector: torch.Tensor, gain: float | None = None) -> None:
        """What `vector` gave somewhere else."""
        parts = list(self._net.parameters())
        if vector.numel() != sum(one.numel() for one in parts) or not bool(torch.isfinite(vector).all()):
            raise StateError(f"{vector.numel()} numbers are not what a {self.name} has learnt")
        at = 0
        for one in parts:
            one.copy_(vector[at : at + one.numel()].view(one.shape))
            at += one.numel()
        self._gain = self._gain if gain is None else gain
        self._trained = True

    @property
    def gain(self) -> float:
        return self._gain

    def towards(self, target: str) -> Vitp:
        """The same net, with another target; what it learns, both learn."""
        other = Vitp(target=target, denoised=self._denoised)
        other._net, other._random, other._trained, other.loss = self._net, self._random, self._trained, self.loss
        return other

    # --- guessing ---

    def predict(self, window: torch.Tensor, times: Times) -> torch.Tensor:
        if not self._trained or window.shape[0] < 2:
            return window[-1].clone()
        return window[-1] + self._moved(window, times)

    def _moved(self, window: torch.Tensor, times: Times) -> torch.Tensor:
        """By how much, until the wanted moment. In parts: an activation of the net is far larger than what goes in."""
        found = torch.empty_like(window[-1])
        part = max(1, LARGEST // 4 // (4 * (6 * LOOK_BACK + 3 * WIDTH)))
        scale = self._scale(window, times)
        with torch.no_grad():
            for at in range(0, window.shape[1], part):
                features, _ = self._features(window[:, at : at + part], times, scale)
                found[at : at + part] = self._net(features) * (scale * times.spans[-1] * self._gain)
        if self._target == "drift":
            straight = (window[-1] - window[-2]) * (times.spans[-1] / max(times.spans[-2], _TINY))
            longest = float(straight.norm()) / max(float(found.norm()), _TINY)
            found *= min(1.0, longest)
        return found

    def _scale(self, window: torch.Tensor, times: Times) -> torch.Tensor:
        return rates(window, times).square().mean().sqrt().clamp_min(_TINY)

    def _features(
        self, window: torch.Tensor, times: Times, scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One row for each element: how it moved, as kept and without its noise, and how long that and the next take."""
        scale = self._scale(window, times) if scale is None else scale
        moved = rates(window, times)[-LOOK_BACK:] / scale
        clean = moved
        if self._denoised and window.shape[0] > 2:
            even = Times(tuple(torch.linspace(times.kept[0], times.kept[-1], len(times.kept)).tolist()), times.wanted)
            clean = rates(bands(window, times).clean, even)[-LOOK_BACK:] / scale
        spans = torch.tensor(times.spans[-1 - LOOK_BACK :], dtype=torch.float64)
        ratio = torch.log((spans[:-1] / spans[-1].clamp_min(_TINY)).clamp(1e-6, 1e6))
        embedded = torch.cat([torch.sin(ratio), torch.cos(ratio), torch.sin(ratio / 4), torch.cos(ratio / 4)])
        missing = LOOK_BACK - moved.shape[0]
        rows = [nn.functional.pad(part, (0, 0, missing, 0)) for part in (moved, clean)]
        pads = nn.functional.pad(embedded.reshape(4, -1), (missing, 0)).reshape(-1).to(window)
        wide = pads[:, None].expand(-1, window.shape[1])
        return torch.cat([*rows, wide]).T.contiguous(), scale


def _parts(whole: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    return (whole[at : at + size] for at in range(0, len(whole), size))
