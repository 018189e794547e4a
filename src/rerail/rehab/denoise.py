"""FFT-based denoising of what was kept of a tensor: separates it, along time, into base line, stable pattern and noise. Pure.

The founding system's FDD. Versions are kept at uneven times, so each row is first put on an even grid of as many points; the straight line
from the first to the last point is taken off before the transform, since a transform takes everything for periodic, and goes
to the base line afterwards. Used by `rehab.vitp`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rerail.rehab.predictors import Times

LOW, MIDDLE = 0.25, 0.6
"""Shares of the frequencies that make up the base line, and the pattern above it; the rest is noise."""


class Bands(NamedTuple):
    """Three parts of a window, on an even grid. Together they are the window."""

    base: torch.Tensor
    pattern: torch.Tensor
    noise: torch.Tensor

    @property
    def clean(self) -> torch.Tensor:
        return self.base + self.pattern


def bands(window: torch.Tensor, times: Times) -> Bands:
    """Along the first dimension."""
    even = on_even_grid(window, times.kept)
    count = even.shape[0]
    ramp = torch.linspace(0.0, 1.0, count, dtype=even.dtype, device=even.device)[:, None]
    line = even[0] + ramp * (even[-1] - even[0])
    spectrum = torch.fft.rfft(even - line, dim=0)
    places = torch.arange(spectrum.shape[0], device=even.device) / max(spectrum.shape[0] - 1, 1)
    low, middle = places <= LOW, (places > LOW) & (places <= MIDDLE)

    def part(which: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.fft.irfft(spectrum * which[:, None], n=count, dim=0)
        return found

    base, pattern = part(low), part(middle)
    return Bands(line + base, pattern, even - line - base - pattern)


def on_even_grid(window: torch.Tensor, kept: tuple[float, ...]) -> torch.Tensor:
    """As many rows, evenly far apart; between two rows on the line from one to the other."""
    at = torch.tensor(kept, dtype=torch.float64)
    grid = torch.linspace(float(at[0]), float(at[-1]), len(kept), dtype=torch.float64)
    after = torch.searchsorted(at, grid).clamp(1, len(kept) - 1)
    span = (at[after] - at[after - 1]).clamp_min(1e-300)
    share = ((grid - at[after - 1]) / span).to(window)[:, None]
    return torch.lerp(window[(after - 1).to(window.device)], window[after.to(window.device)], share)
