"""One run of `bench/rehab.py`: trained undisturbed, then put back to a fault, mended in one of many ways and priced.

`Reference` is the undisturbed run and what was kept of it, `METHODS` are the ways of putting a lost shard back, `recovery` trains on
behind one of them and says what it cost, in steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from rehab_train import Span, State, Trainer, part
from rerail.rehab.choosing import Choice, choose
from rerail.rehab.predictors import LeastSquares, Linear, Predictor, Stale, Times, Window
from rerail.rehab.vitp import Vitp

KEPT = 6
"""Checkpoints of a shard that predictors may look at."""
MIRROR = 4
"""Steps between two mirrors of the shadow; the fault comes as late behind one as it can."""
LOOK = 3
"""Steps between two validations."""
SMOOTH = 30
"""Steps at the end of a horizon over which the gap is averaged, at most."""
AROUND = 60
"""Steps to both sides by which a slope is taken, at most."""
THIN = 16
"""Of a lean shape, every so many elements are learnt from and back-tested on."""
PARAMETERS, FIRST, SECOND = range(3)
"""Kinds of tensors."""


class Learnt(NamedTuple):
    """A net, and what it took to train."""

    net: Vitp
    seconds: float


class Reference:
    """The undisturbed run: its losses, and what is needed to go back into it. Only the lost parts are kept of checkpoints."""

    def __init__(self, trainer: Trainer, every: int, faults: Sequence[int], lost: Sequence[Span]) -> None:
        self.trainer, self.every, self.faults, self.lost = trainer, every, list(faults), list(lost)
        self.hit: Callable[[int], object] | None = None
        """Called at each fault: the run is disturbed, after all."""
        self.valid: dict[int, float] = {}
        self.trained: list[float] = []
        self.rates = [0.0]
        self.states: dict[int, State] = {}
        self.checkpoints: dict[int, list[list[torch.Tensor]]] = {}
        """By step and kind, one for each lost part."""
        self.mirrors: dict[int, list[torch.Tensor]] = {}
        self.learnt: dict[tuple[int, str, int], Learnt] = {}
        """Predictors that were trained for a fault: by its step, their name and what they guess."""
        self.seconds = 0.0
        self.kept_on = torch.device("cpu") if trainer.shape.lean else trainer.device

    def run(self) -> None:
        trainer, shape = self.trainer, self.trainer.shape
        whole = {*self.faults, *(self.checkpoint(fault) for fault in self.faults)}
        mirrored = {fault - back for fault in self.faults for back in (MIRROR - 1, 2 * MIRROR - 1)}
        trained: list[torch.Tensor] = []
        valid: dict[int, torch.Tensor] = {}
        began, aside = time.monotonic(), 0.0
        for step in range(shape.steps + 1):
            paused = time.monotonic()
            if step in self.faults and self.hit is None:
                self.states[step] = trainer.take()
            if step % self.every == 0:
                self._keep(step)
            if step in mirrored:
                self.mirrors[step] = [
                    part(trainer.tensors()[0], span).bfloat16().to(self.kept_on) for span in self.lost
                ]
            aside += time.monotonic() - paused
            if step % LOOK == 0 or step == shape.steps or step in whole:
                valid[step] = trainer.validate()
            if self.hit is not None and step in self.faults:
                self.hit(step)
            if step < shape.steps:
                trained.append(trainer.train())
                self.rates.append(self.rates[-1] + shape.rate_at(step))
        self.valid = {step: float(loss) for step, loss in valid.items()}
        self.seconds = (time.monotonic() - began - aside) / shape.steps
        self.trained = [float(loss) for loss in trained]

    def _keep(self, step: int) -> None:
        """Of a lean shape no more than is asked for: checkpoints before the fault, moments of the newest of them."""
        kinds = 3
        if self.trainer.shape.lean:
            if step > max(self.faults):
                return
            kinds = 3 if step in {self.checkpoint(fault) for fault in self.faults} else 1
        self.checkpoints[step] = [
            [part(kind, span).to(self.kept_on, copy=True) for span in self.lost]
            for kind in self.trainer.tensors()[:kinds]
        ]

    def checkpoint(self, fault: int) -> int:
        """The newest one before it; never at the very step."""
        return (fault - 1) // self.every * self.every

    def slope(self, step: int) -> float:
        """By how much the validation loss falls in a step, around this one."""
        around = min(AROUND, 2 * self.every)
        near = [(s, loss) for s, loss in self.valid.items() if abs(s - step) <= around]
        return -statistics.linear_regression(*zip(*near, strict=True)).slope

    def window(self, fault: int, at: int, *, kind: int = PARAMETERS, by_rates: bool = True, thin: int = 1) -> Window:
        """What was kept of one lost part before a fault, on the device."""
        newest = self.checkpoint(fault)
        steps = [step for step in sorted(self.checkpoints) if step <= newest][-KEPT:]
        clock: Sequence[float] = self.rates if by_rates else range(len(self.rates))
        times = Times(tuple(float(clock[step]) for step in steps), float(clock[fault]))
        rows = [self.checkpoints[step][kind][at][::thin].to(self.trainer.device) for step in steps]
        return Window(torch.stack(rows), times)

    def windows(self, fault: int, kind: int = PARAMETERS) -> list[Window]:
        """What predictors learn from."""
        thin = THIN if self.trainer.shape.lean else 1
        return [self.window(fault, at, kind=kind, thin=thin) for at in range(len(self.lost))]


Method = Callable[[Reference, int], dict[str, object]]
"""Puts the lost part back, at the step of the fault; says what there is to say about it."""


def put_back(run: Reference, fault: int, guesses: Sequence[Callable[[int], torch.Tensor]]) -> None:
    """`guesses[kind](i)` is the i-th lost part; kinds that are not guessed are those of the checkpoint."""
    old, now = run.checkpoints[run.checkpoint(fault)], run.trainer.tensors()
    for at, span in enumerate(run.lost):
        for kind in range(3):
            part(now[kind], span).copy_(guesses[kind](at) if kind < len(guesses) else old[kind][at])


def wait(run: Reference) -> None:
    if run.trainer.device.type == "cuda":
        torch.cuda.synchronize()


def learn(run: Reference, fault: int, fresh: Vitp, kind: int = PARAMETERS) -> Learnt:
    """Once for each fault."""
    key = (fault, fresh.name, kind)
    if key not in run.learnt:
        wait(run)
        began, windows = time.monotonic(), run.windows(fault, kind)
        fresh.train(windows)
        fresh.tune(windows)
        wait(run)
        run.learnt[key] = Learnt(fresh, time.monotonic() - began)
    return run.learnt[key]


def predicted(
    made: Callable[[], Predictor], run: Reference, fault: int, *, by_rates: bool = True, moments: bool = False
) -> dict[str, object]:
    """By a predictor; with `moments`, those too, each kind by a net of its own where it is a net."""
    predictors, train_s, told = list[Predictor](), 0.0, dict[str, object]()
    for kind in range(3 if moments else 1):
        one = made()
        if isinstance(one, Vitp):
            one, seconds = learn(run, fault, one, kind)
            train_s += seconds
            told.setdefault("predictor_loss", one.loss)
        predictors.append(one)
    wait(run)
    began = time.monotonic()

    def guess(kind: int, at: int) -> torch.Tensor:
        found = predictors[kind].predict(*run.window(fault, at, kind=kind, by_rates=by_rates))
        return found.clamp_min(0.0) if kind == SECOND else found

    put_back(run, fault, [partial(guess, kind) for kind in range(len(predictors))])
    wait(run)
    return told | {"train_s": train_s, "apply_s": time.monotonic() - began}


def choice(run: Reference, fault: int) -> Choice:
    """Which of the predictors rerail would take, by what was known at the checkpoint."""
    nets = [learn(run, fault, Vitp(target=target)).net for target in ("next", "drift")]
    return choose(run.windows(fault), [Linear(), Linear("linear over 2", 2), LeastSquares(), *nets])


def chosen(run: Reference, fault: int) -> dict[str, object]:
    began = time.monotonic()
    found = choice(run, fault)
    wait(run)
    told = {"chose": found.predictor.name, "expected": found.costs, "choose_s": time.monotonic() - began}
    return predicted(lambda: found.predictor, run, fault) | told


def shadow(on: bool, run: Reference, fault: int) -> dict[str, object]:
    """Parameters of some steps before, in half precision; the steps since on a straight line, or not at all."""
    sooner, later = (run.mirrors[fault - back] for back in (2 * MIRROR - 1, MIRROR - 1))
    times = Times((run.rates[fault - 2 * MIRROR + 1], run.rates[fault - MIRROR + 1]), run.rates[fault])
    way = Linear() if on else Stale()

    def guess(at: int) -> torch.Tensor:
        rows = [mirror[at].to(run.trainer.device).float() for mirror in (sooner, later)]
        return way.predict(torch.stack(rows), times)

    put_back(run, fault, [guess])
    return {}


def untouched(run: Reference, fault: int) -> dict[str, object]:
    return {}


METHODS: dict[str, Method] = {
    "replica": untouched,
    "stale": partial(predicted, Stale),
    "linear": partial(predicted, Linear),
    "linear, by steps": partial(predicted, Linear, by_rates=False),
    "linear over 2": partial(predicted, partial(Linear, "linear over 2", 2)),
    "least squares": partial(predicted, LeastSquares),
    "vitp": partial(predicted, Vitp),
    "vitp, drift": partial(predicted, partial(Vitp, target="drift")),
    "linear, moments too": partial(predicted, Linear, moments=True),
    "vitp, moments too": partial(predicted, Vitp, moments=True),
    "shadow": partial(shadow, False),
    "shadow, on": partial(shadow, True),
    "chosen": chosen,
}
FEW = ("replica", "stale", "linear", "shadow", "shadow, on", "chosen")
"""Where each takes long: those that a job may use."""


def recovery(run: Reference, fault: int, name: str, until: int) -> dict[str, object]:
    """Train on behind a fault, and price it."""
    trainer = run.trainer
    trainer.put(run.states[fault])
    told = METHODS[name](run, fault)
    first = trainer.validate()
    trained: list[torch.Tensor] = []
    looks: dict[int, torch.Tensor] = {}
    while trainer.step < until:
        if trainer.step % LOOK == 0:
            looks[trainer.step] = trainer.validate()
        trained.append(trainer.train())
    looks[trainer.step] = trainer.validate()
    valid = {step: float(loss) for step, loss in looks.items()}
    early = min(until, fault + horizon(run))
    result = {
        "method": name,
        "fault": fault,
        "at": fault / trainer.shape.steps,
        "behind": fault - run.checkpoint(fault),
        "jump": float(first) - run.valid[fault],
        "fell": run.valid[run.checkpoint(fault)] - run.valid[fault],
        "lag": lag(run, valid, early),
        "regain": regained(run.trained[:fault], [float(loss) for loss in trained]),
        **told,
    }
    if until == trainer.shape.steps:
        result["valid"] = {str(step): round(loss, 5) for step, loss in valid.items()}
        result["end"] = lag(run, valid, until)
    return result


def horizon(run: Reference) -> int:
    return 2 * run.every


def lag(run: Reference, valid: dict[int, float], until: int) -> float:
    """How many steps behind the undisturbed run, over the last of these steps."""
    smooth = min(SMOOTH, run.every)
    steps = [step for step in valid if until - smooth <= step <= until and step in run.valid]
    gap = statistics.fmean(valid[step] - run.valid[step] for step in steps)
    return gap / run.slope(until - smooth // 2)


def regained(before: Sequence[float], after: Sequence[float], window: int = 10) -> int:
    """Steps until the mean of ten losses is no more than that of the ten before the fault; one more than were seen: never."""
    level = statistics.fmean(before[-window:])
    for at in range(window, len(after) + 1):
        if statistics.fmean(after[at - window : at]) <= level:
            return at - window
    return len(after) + 1


def repeated(run: Reference, name: str, count: int) -> dict[str, object]:
    """The same run from its start, hit several times; each time with what was kept in this very run."""
    shape = run.trainer.shape
    faults = [shape.steps * (at + 1) // (count + 1) // run.every * run.every + run.every - 5 for at in range(count)]
    run.trainer.begin()
    hit = Reference(run.trainer, run.every, faults, run.lost)
    told: list[dict[str, object]] = []
    hit.hit = lambda fault: told.append(METHODS[name](hit, fault))
    hit.run()
    result = {
        "method": name,
        "faults": count,
        "behind": sum(fault - hit.checkpoint(fault) for fault in faults),
        "end": lag(run, hit.valid, shape.steps),
        "end_loss": hit.valid[shape.steps],
    }
    chose = [one["chose"] for one in told if "chose" in one]
    return result | ({"chose": chose} if chose else {})
