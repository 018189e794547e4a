"""The tests of the deep check: turns an `Order` into notes of what was measured and what was wrong. Imports torch where it needs it.

Started by `detect.deep` as `python -m rerail.detect.deep_tests ORDER`, one process for each test and device. Sums are of
small whole numbers, so that the right result is known to the last bit whatever the order and precision of the adding.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import msgspec

from rerail.detect.checkup import Figure, Note, Phase, Unseen, broken, report
from rerail.detect.deep import DEVICES, Order, wrong

MIB = 1 << 20
Tell = Callable[[Note], None]
_libc = ctypes.CDLL(None)
for _function in (_libc.memcmp, _libc.memcpy):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


# --- memory and disk ---


def on_every_core(work: Callable[[int], None]) -> int:
    """Run `work(core)` on all cores we may use, at the same time; how many they are."""
    cores = sorted(os.sched_getaffinity(0))
    failed: list[Exception] = []

    def pinned(core: int) -> None:
        try:
            os.sched_setaffinity(0, {core})  # of this thread only
            work(core)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=pinned, args=(core,)) for core in cores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return len(cores)


class Region:
    """Memory of our own, by address."""

    def __init__(self, size: int) -> None:
        self.size = max(MIB, size // MIB * MIB)
        self._pages = mmap.mmap(-1, self.size)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))

    def fill(self, pattern: bytes) -> None:
        """Write a pattern of one MiB everywhere, each time with its number in front: no two pieces are the same."""
        for number in range(self.size // MIB):
            _libc.memcpy(self.start + number * MIB, number.to_bytes(8, "little") + pattern[8:], MIB)

    def difference(self, pattern: bytes) -> str:
        """Where and how the memory differs from what `fill` has written, or nothing."""
        for number in range(self.size // MIB):
            piece = number.to_bytes(8, "little") + pattern[8:]
            if _libc.memcmp(self.start + number * MIB, piece, MIB):
                got = ctypes.string_at(self.start + number * MIB, MIB)
                place = first_difference(piece, got)
                return f"byte {number * MIB + place} is {got[place]:#04x}, {piece[place]:#04x} was written"
        return ""


def first_difference(want: bytes, got: bytes) -> int:
    """Where two pieces of the same length begin to differ; at their end if they do not."""
    return next((place for place, pair in enumerate(zip(want, got, strict=True)) if pair[0] != pair[1]), len(want))


def memory_speed(order: Order, tell: Tell) -> None:
    """Every core copies memory of its own; then copy and source are compared."""
    share = order.effort.copy_mib * MIB // (2 * len(os.sched_getaffinity(0)))
    pattern, rates, starting = os.urandom(MIB), [], threading.Barrier(len(os.sched_getaffinity(0)))

    def work(core: int) -> None:
        source, copy = Region(share), Region(share)
        source.fill(pattern)
        copy.fill(bytes(MIB))
        starting.wait()
        began, times = time.perf_counter(), 0
        while time.perf_counter() - began < order.effort.seconds:
            _libc.memcpy(copy.start, source.start, source.size)
            times += 1
        rates.append(times * source.size / (time.perf_counter() - began))
        if found := copy.difference(pattern):
            tell(wrong("memory-speed", f"core {core}", found))

    cores = on_every_core(work)
    tell(Figure(area="memory-speed", name="copied at", value=sum(rates) / 1e9, unit="GB/s"))
    tell(Figure(area="memory-speed", name="cores", value=cores))


def memory_pattern(order: Order, tell: Tell) -> None:
    """Write patterns to a part of memory, larger than any cache, and see whether they are still there."""
    cores = len(os.sched_getaffinity(0))
    share = order.effort.pattern_mib * MIB // cores
    noise = os.urandom(MIB)
    patterns = (bytes(MIB), b"\xff" * MIB, b"\x55" * MIB, b"\xaa" * MIB, noise, bytes(255 - byte for byte in noise))

    def work(core: int) -> None:
        region = Region(share)
        for pattern in patterns:
            region.fill(pattern)
            if found := region.difference(pattern):
                tell(wrong("memory-pattern", "memory", f"{found} (by core {core})"))
                return

    on_every_core(work)
    tell(Figure(area="memory-pattern", name="tested", value=max(1, share // MIB) * cores, unit="MiB"))


def disk(order: Order, tell: Tell) -> None:
    """Write, make durable, read back from the disk rather than from memory, compare."""
    room = os.statvfs(order.directory)
    size = min(order.effort.disk_mib, room.f_bavail * room.f_frsize // 2 // MIB)
    if size < 1:
        tell(Unseen(area="disk", what=order.directory, why="less than 2 MiB are free there"))
        return
    noise = os.urandom(MIB)
    with tempfile.TemporaryFile(dir=order.directory) as file:
        began = time.perf_counter()
        for number in range(size):
            file.write(number.to_bytes(8, "little") + noise[8:])
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        reading = 0.0
        for number in range(size):
            before = time.perf_counter()
            got = file.read(MIB)
            reading += time.perf_counter() - before
            want = number.to_bytes(8, "little") + noise[8:]
            if got != want:
                place = first_difference(want[: len(got)], got)
                tell(wrong("disk", order.directory, f"byte {number * MIB + place} of {size} MiB was read back wrong"))
                return
    tell(Figure(area="disk", name="written at", value=size * MIB / (written - began) / 1e9, unit="GB/s"))
    tell(Figure(area="disk", name="read at", value=size * MIB / reading / 1e9, unit="GB/s"))


# --- arithmetic ---


class Product:
    """Two matrices and what their product must be, for one type of numbers."""

    def __init__(self, torch: Any, kind: Any, size: int, *, whole: bool, shortened: float) -> None:
        self.whole = whole
        noise = torch.Generator().manual_seed(size)
        shape = (2, size, size)
        if whole:  # mostly zeros, so that all sums stay below 256 and even bfloat16 holds them exactly
            signs = torch.randint(0, 2, shape, generator=noise) * 2 - 1
            values = signs * (torch.randint(0, 4, shape, generator=noise) == 0)
        else:
            values = torch.randn(shape, generator=noise, dtype=torch.float64)
        self.left, self.right = values.to(kind)
        self._rows = slice(0, None, max(1, size // 256))  # some of every tile that a kernel works on
        left, right = self.left[self._rows].double(), self.right.double()
        self._want = left @ right
        # rounding of single precision while adding, of the result, and of inputs where hardware shortens them
        rounding = 4 * size * torch.finfo(torch.float32).eps + 2 * torch.finfo(kind).eps + shortened
        self._allowed = 0.0 if whole else left.abs() @ right.abs() * rounding

    def fault(self, got: Any) -> str:
        """How a product differs from what it must be, or nothing. Not a number is a difference, too."""
        off = (got[self._rows].cpu().double() - self._want).abs()
        bad = ~(off <= self._allowed)
        if not bool(bad.any()):
            return ""
        worst = float(off[bad].max())
        exactly = "exactly" if self.whole else "within rounding"
        return f"{int(bad.sum())} of {bad.numel()} {got.dtype} sums are not {exactly} right, the worst off by {worst:g}"


def products(torch: Any, device: str, size: int) -> Iterator[Product]:
    """One after the other, all that are tried on a device."""
    kinds = (torch.float32, torch.bfloat16, torch.float16) if device else (torch.float32, torch.float64)
    for kind in kinds:
        for whole in (True, False):
            yield Product(torch, kind, size, whole=whole, shortened=2**-9 if device else 0.0)  # TF32, HF32


def cpu_math(order: Order, tell: Tell) -> None:
    """Every core multiplies the same matrices again and again: always right, and always the same bits."""
    import torch

    tries = list(products(torch, "", order.effort.matrix))
    rates: list[float] = []

    def work(core: int) -> None:
        began, times = time.perf_counter(), 0
        first = [one.left @ one.right for one in tries]
        while times == 0 or time.perf_counter() - began < order.effort.seconds:
            times += 1
            for one, before in zip(tries, first, strict=True):
                again = one.left @ one.right
                text = one.fault(again) if times == 1 else ""
                if text or not torch.equal(again, before):
                    tell(wrong("cpu-math", f"core {core}", text or f"{again.dtype} product {times} has other bits"))
                    return
        rates.append((times + 1) * len(tries) * 2 * order.effort.matrix**3 / (time.perf_counter() - began))

    cores = on_every_core(work)
    tell(Figure(area="cpu-math", name="computed at", value=sum(rates) / 1e9, unit="GFLOP/s"))
    tell(Figure(area="cpu-math", name="cores", value=cores))


# --- devices ---


def devices(order: Order, tell: Tell) -> None:
    """Which accelerators torch sees."""
    import torch

    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if kind is not None else 0
    for index in range(count):
        name = torch.get_device_module(kind).get_device_name(index)
        tell(Figure(area=DEVICES, name=name, value=1, subject=f"{kind}:{index}"))
    if not count:
        tell(Unseen(area=DEVICES, what="accelerators", why=f"torch {torch.__version__} sees none: none was tested"))


def device(order: Order, tell: Tell) -> None:
    """Arithmetic, memory and link of one device."""
    import torch

    torch.accelerator.set_device_index(int(order.device.rpartition(":")[2]))
    for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
        setattr(torch.backends.cuda.matmul, name, False)
    tests = {"device-math": _device_math, "device-memory": _device_memory, "device-link": _device_link}
    for area in order.areas:
        tell(Phase(area=area))
        tests[area](torch, order, tell)


def timed(torch: Any, work: Callable[[], object], seconds: float) -> float:
    """Seconds that one call takes, from as many as fit."""
    work()
    torch.accelerator.synchronize()
    began, times = time.perf_counter(), 0
    while times == 0 or time.perf_counter() - began < seconds:
        for _ in range(4):
            work()
        torch.accelerator.synchronize()
        times += 4
    return (time.perf_counter() - began) / times


def _device_math(torch: Any, order: Order, tell: Tell) -> None:
    size = order.effort.device_matrix
    for one in products(torch, order.device, size):
        left, right = one.left.to(order.device), one.right.to(order.device)
        first = left @ right
        differing = torch.zeros((), dtype=torch.int64, device=order.device)

        def again(left: Any = left, right: Any = right, first: Any = first, differing: Any = differing) -> None:
            differing.add_((left @ right != first).sum())

        seconds = timed(torch, again, order.effort.seconds / 6)
        text = one.fault(first) or one.fault(left @ right)
        if not text and int(differing):
            text = f"{int(differing)} {first.dtype} sums had other bits when computed again"
        if text:
            tell(wrong("device-math", order.device, text))
        name = f"{first.dtype} at".removeprefix("torch.")
        if not one.whole:
            rate = 2 * size**3 / seconds / 1e12
            tell(Figure(area="device-math", name=name, value=rate, unit="TFLOP/s", subject=order.device))


def _device_memory(torch: Any, order: Order, tell: Tell) -> None:
    count = order.effort.device_mib * MIB // 8
    source = words(torch, count, order.device)
    copy = torch.empty_like(source)
    seconds = timed(torch, lambda: copy.copy_(source), order.effort.seconds)
    want = words(torch, count, "cpu")
    if not torch.equal(copy.cpu(), want):
        tell(wrong("device-memory", order.device, f"{int((copy.cpu() != want).sum())} of {count} words were not kept"))
    rate = 2 * count * 8 / seconds / 1e9
    tell(Figure(area="device-memory", name="read and written at", value=rate, unit="GB/s", subject=order.device))


def words(torch: Any, count: int, place: str) -> Any:
    """Many different bits, the same wherever they are made."""
    numbers = torch.arange(count, dtype=torch.int64, device=place) * 2654435761
    return numbers ^ (numbers << 31)


def _device_link(torch: Any, order: Order, tell: Tell) -> None:
    count = order.effort.device_mib * MIB // 8
    try:
        there, back = (torch.empty(count, dtype=torch.int64, pin_memory=True) for _ in range(2))
    except RuntimeError:  # no pinned memory for this device, or none left
        there, back = (torch.empty(count, dtype=torch.int64) for _ in range(2))
    there.random_(generator=torch.Generator().manual_seed(count))
    on_device = torch.empty(count, dtype=torch.int64, device=order.device)
    for name, work in (
        ("to device", lambda: on_device.copy_(there, non_blocking=True)),
        ("from device", lambda: back.copy_(on_device, non_blocking=True)),
    ):
        rate = count * 8 / timed(torch, work, order.effort.seconds / 2) / 1e9
        tell(Figure(area="device-link", name=name, value=rate, unit="GB/s", subject=order.device))
    if not torch.equal(there, back):
        bad = int((there != back).sum())
        tell(wrong("device-link", order.device, f"{bad} of {count} words came back changed"))


def collective(order: Order, tell: Tell) -> None:
    """One of the ranks that add up numbers whose sum is known."""
    import torch
    import torch.distributed as dist

    place = order.device or "cpu"
    if order.device:
        torch.accelerator.set_device_index(order.rank)
    backend = "gloo" if not order.device else dist.get_default_backend_for_device(order.device)
    timeout = timedelta(seconds=order.timeout_s)
    dist.init_process_group(
        backend, init_method=f"file://{order.store}", rank=order.rank, world_size=order.world, timeout=timeout
    )
    base = torch.arange(order.effort.collective_mib * MIB // 4, device=place) % 1000
    want = base * (order.world * (order.world + 1) // 2)
    fastest = float("inf")
    for _ in range(5):
        mine = (base * (order.rank + 1)).float()
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(mine)
        if order.device:
            torch.accelerator.synchronize()
        fastest = min(fastest, time.perf_counter() - began)
        if not torch.equal(mine.long(), want):
            tell(wrong(order.test, order.device or f"rank {order.rank}", f"{int((mine != want).sum())} sums are wrong"))
            break
    if order.rank == 0:
        rate = 2 * (order.world - 1) / order.world * base.numel() * 4 / fastest / 1e9
        tell(Figure(area=order.test, name="ranks", value=order.world))
        if order.world > 1:
            tell(Figure(area=order.test, name="bus", value=rate, unit="GB/s"))
    dist.destroy_process_group()


TESTS: dict[str, Callable[[Order, Tell], None]] = {
    "memory-speed": memory_speed,
    "memory-pattern": memory_pattern,
    "disk": disk,
    "cpu-math": cpu_math,
    DEVICES: devices,
    "device": device,
    "gloo": collective,
    "device-collective": collective,
}


def main(text: str) -> None:
    """Do the test; what keeps it from being done is told as such, what fails in it as a problem."""
    order = msgspec.json.decode(text, type=Order)
    area = order.areas[0] if order.areas else order.test
    subject = order.directory if order.test == "disk" else order.device
    with report() as out:

        def tell(note: Note) -> None:
            nonlocal area
            area = note.area if isinstance(note, Phase) else area
            out(note)

        try:
            TESTS[order.test](order, tell)
        except (ImportError, RuntimeError) as error:
            out(Unseen(area=area, what=subject or area, why=f"cannot be tested here: {error}"))
        except Exception as error:
            if "out of memory" in str(error).lower():
                out(Unseen(area=area, what=subject or area, why="there is not enough free memory for the test"))
            else:
                reason = (str(error).strip() or "no message").splitlines()[0]
                out(broken(area, "check.error", "a test has failed", subject, f"{type(error).__name__}: {reason}"))


if __name__ == "__main__":
    main(sys.argv[1])
