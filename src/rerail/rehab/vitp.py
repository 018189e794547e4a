"""The variable-interval temporal predictor: a small net that learns, on the job's own kept versions, how tensors move next.

    kept versions -> denoised (FDD) -> how far each element moved in each interval, and how long each was -> net -> how far it moves next

One net for all elements of all tensors, each scaled by how far its tensor usually moves. It is trained on samples, tensor by tensor,
so that what is held beside the shard stays below `LARGEST` bytes. What it is trained towards is a choice:

    "next"    how far the element moved in the next interval. Least squares then says "hardly": what an element does from one
              checkpoint to the next is mostly noise.
    "drift"   the same, but the whole is scaled until it supplies the slow drift that intervals further apart have in common
              (`rehab.drift`); never further than going straight on would.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

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

    def __init__(self) -> None:
        super().__init__()
        embedded = 4 * LOOK_BACK
        self.layers = nn.Sequential(
            nn.Linear(2 * LOOK_BACK + embedded, WIDTH),
            nn.GELU(),
            nn.Linear(WIDTH, WIDTH),
            nn.GELU(),
            nn.Linear(WIDTH, 1),
        )
        self.through = nn.Parameter(torch.zeros(LOOK_BACK))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        straight: torch.Tensor = inputs[:, :LOOK_BACK] @ self.through
        bent: torch.Tensor = self.layers(inputs)[:, 0]
        return straight + bent


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
        self._net = _Net()
        self._gain = 1.0
        self._random = torch.Generator().manual_seed(seed)
        self._trained = False

    # --- training ---

    def train(self, windows: Iterable[Window], *, steps: int = STEPS) -> None:
        """On all intervals behind the first, of elements chosen by chance: of large tensors more."""
        inputs, wanted, device = self._samples(list(windows))
        self._net.to(device).train()
        optimizer = torch.optim.AdamW(self._net.parameters(), lr=3e-3, weight_decay=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        held_out = inputs.shape[0] // 8
        with torch.enable_grad():
            for _ in range(steps):
                chosen = torch.randint(held_out, inputs.shape[0], (BATCH,), generator=self._random).to(device)
                loss = nn.functional.mse_loss(self._net(inputs[chosen]), wanted[chosen])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
        with torch.no_grad():
            seen = nn.functional.mse_loss(self._net(inputs[:held_out]), wanted[:held_out])
            self.loss = float(seen / wanted[:held_out].square().mean().clamp_min(_TINY))
        self.losses.append(self.loss)
        self._net.requires_grad_(False).eval()
        self._trained = True

    def tune(self, windows: Sequence[Window]) -> None:
        """With the target "drift": by how much to scale what the net says, from the intervals that are known."""
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
        if supplied > 0 and shared > 0:
            self._gain = min(max(shared / supplied, 1.0), GREATEST_GAIN)

    def _samples(self, windows: Sequence[Window]) -> tuple[torch.Tensor, torch.Tensor, torch.device]:
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
        mixed = torch.randperm(sum(len(one) for one in wanted), generator=self._random).to(wanted[0].device)
        return torch.cat(inputs)[mixed], torch.cat(wanted)[mixed], wanted[0].device

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
