"""Train a language model under each arm and seed, so that a run that was killed goes on.

A run is a function of its settings: the data of a step are drawn by (seed, step), blocks by
(seed, layer, step), and nothing else is random. So a run resumed from its checkpoint ends with
the bits of one that was never interrupted (with the same number of threads).
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..cli.common import CliError
from .arms import SWAPPED, Arm
from .corpus import Corpus
from .evaluation import all_lengths, evaluate
from .language_model import LanguageModel, Shape, optimizer
from .output import write_whole


@dataclass(frozen=True, slots=True)
class Settings:
    """What a table of runs has in common.

    Parameters
    ----------
    shape : Shape
    length : int
        Of training, in bytes; at least 8 times the largest sigma.
    batch, steps : int
    rate : float
        Highest learning rate: reached linearly in the first twentieth of the steps, then a cosine
        down to a tenth.
    scored : int
        Held-out bytes to evaluate on.
    """

    shape: Shape = field(default_factory=Shape)
    length: int = 256
    batch: int = 8
    steps: int = 1000
    rate: float = 3e-3
    scored: int = 16384

    def __post_init__(self) -> None:
        sigma = 1 / min(self.shape.slopes)
        if self.length < 8 * sigma:
            raise CliError(
                f"the length must be at least 8 sigma of every head, {math.ceil(8 * sigma)}, "
                f"got {self.length}"
            )

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step."""
        warm = max(1, self.steps // 20)
        if step < warm:
            return self.rate * (step + 1) / warm
        done = (step - warm) / max(1, self.steps - warm)
        return self.rate * (0.55 + 0.45 * math.cos(math.pi * done))

    @property
    def least_bytes(self) -> int:
        """Bytes that either part of the text must have: the longest window, and one to score."""
        return 5 * self.length + 2


CHECKPOINT_STEPS = 100
"""At most so many steps are lost when a run is killed."""
_CURVE_STEPS = 20
"""Steps that a point of the loss curve averages."""


def batch_at(corpus: Corpus, settings: Settings, seed: int, step: int) -> torch.Tensor:
    """Return the text of a step, ``(batch, length + 1)`` int64."""
    draw = np.random.Generator(np.random.Philox(key=np.array([seed, step], dtype=np.uint64)))
    first = draw.integers(0, corpus.train.size - settings.length, settings.batch)
    return torch.from_numpy(
        corpus.train[first[:, None] + np.arange(settings.length + 1)].astype(np.int64)
    )


class Run:
    """One model in training.

    Parameters
    ----------
    settings : Settings
    arm : Arm
    seed : int
        Of weights, data and blocks.
    corpus : Corpus
    folder : Path
        Where checkpoint, weights and result go; what is there is taken up.
    """

    def __init__(
        self, settings: Settings, arm: Arm, seed: int, corpus: Corpus, folder: Path
    ) -> None:
        self.settings, self.arm, self.seed, self.corpus = settings, arm, seed, corpus
        name = f"{arm.name.replace(' ', '-').replace('=', '')}-seed{seed}"
        self.result_path = folder / f"{name}.json"
        self.checkpoint_path = folder / f"{name}.checkpoint.pt"
        self.weights_path = folder / f"{name}.weights.pt"
        self.model = LanguageModel(settings.shape, seed)
        self.optimizer = optimizer(self.model, settings.rate)
        self.step, self.seconds = 0, 0.0
        self.losses: list[float] = []

    @property
    def identity(self) -> dict[str, Any]:
        """What must be equal for a checkpoint or a result to be taken up."""
        return {
            "settings": asdict(self.settings),
            "arm": asdict(self.arm),
            "seed": self.seed,
            "text": [self.corpus.source, self.corpus.train.size, self.corpus.held_out.size],
        }

    def result(self) -> dict[str, Any] | None:
        """Return what an earlier call left, or None."""
        if not self.result_path.exists():
            return None
        found: dict[str, Any] = json.loads(self.result_path.read_text(encoding="utf-8"))
        self._check(found["identity"], self.result_path)
        return found

    def resume(self) -> None:
        """Go back to the checkpoint, if there is one."""
        if not self.checkpoint_path.exists():
            return
        state = torch.load(self.checkpoint_path, weights_only=True)
        self._check(json.loads(state["identity"]), self.checkpoint_path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.losses = state["step"], state["seconds"], state["losses"]

    def _check(self, identity: dict[str, Any], path: Path) -> None:
        if identity != json.loads(json.dumps(self.identity)):
            raise CliError(
                f"{path} is of other settings or another text; give another --output, or those"
            )

    def checkpoint(self) -> None:
        """Write all that the next step depends on."""
        state = {
            "identity": json.dumps(self.identity),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "losses": self.losses,
        }
        write_whole(self.checkpoint_path, lambda path: torch.save(state, path))

    def train(self, after: Callable[["Run"], None] = lambda run: None) -> None:
        """Take the steps that are left, with a checkpoint now and then."""
        while self.step < self.settings.steps:
            begin = time.perf_counter()
            self._take_step()
            self.seconds += time.perf_counter() - begin
            if self.step % CHECKPOINT_STEPS == 0 or self.step == self.settings.steps:
                self.checkpoint()
            after(self)

    def _take_step(self) -> None:
        text = batch_at(self.corpus, self.settings, self.seed, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.rate_at(self.step)
        logits = self.model(text[:, :-1], self.arm, self.seed, self.step)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(float(loss.detach()) / math.log(2))
        self.step += 1

    def finish(self) -> dict[str, Any]:
        """Evaluate, write weights and result, drop the checkpoint, and return the result."""
        self.model.eval()
        result: dict[str, Any] = {
            "identity": self.identity,
            "arm": self.arm.name,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "curve": [
                round(float(np.mean(self.losses[i : i + _CURVE_STEPS])), 4)
                for i in range(0, len(self.losses), _CURVE_STEPS)
            ],
            "own": self._evaluate(self.arm),
            "under exact": self._evaluate(Arm("exact")),
        }
        if self.arm == Arm("exact"):
            s = self.settings
            given = self.corpus.held_out, s.length, 1, s.scored, self.seed
            result["swapped"] = {
                arm.name: evaluate(self.model, arm, *given)._asdict() for arm in SWAPPED
            }
        write_whole(self.weights_path, lambda path: torch.save(self.model.state_dict(), path))
        text = json.dumps(result, indent=1)
        write_whole(self.result_path, lambda path: path.write_text(text, encoding="utf-8"))
        self.checkpoint_path.unlink(missing_ok=True)
        return result

    def _evaluate(self, arm: Arm) -> dict[str, Any]:
        s = self.settings
        return all_lengths(self.model, arm, self.corpus.held_out, s.length, s.scored, self.seed)


def table(
    settings: Settings,
    arms: Sequence[Arm],
    seeds: int,
    corpus: Corpus,
    folder: Path,
    after: Callable[[Run], None] = lambda run: None,
) -> list[dict[str, Any]]:
    """Train every arm under every seed, seeds outermost, and return the results.

    Parameters
    ----------
    settings : Settings
    arms : sequence of Arm
    seeds : int
        How many; they are 0, 1, …
    corpus : Corpus
    folder : Path
        Of checkpoints and results: what is complete is read, what was begun goes on.
    after : callable, optional
        Called with the run after each step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = []
    for seed in range(seeds):
        for arm in arms:
            run = Run(settings, arm, seed, corpus, folder)
            result = run.result()
            if result is None:
                run.resume()
                run.train(after)
                result = run.finish()
            results.append(result)
    return results
