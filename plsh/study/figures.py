"""The figures, drawn from what the studies write as JSON, by matplotlib without a display."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_COLOURS = {"iid": "tab:blue", "stratified": "tab:orange", "cuts": "tab:green"}
_WIDTH = 9.0


def pyplot() -> Any:
    """Return matplotlib's pyplot, which draws into files."""
    importlib.import_module("matplotlib").use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def save(figure: Any, path: Path) -> None:
    """Write a small PNG and close the figure."""
    figure.savefig(path, dpi=90, format="png")
    pyplot().close(figure)


def _panels(rows: int, columns: int, height: float) -> tuple[Any, Any]:
    figure, axes = pyplot().subplots(
        rows, columns, squeeze=False, figsize=(_WIDTH, height), layout="constrained"
    )
    for axis in axes.flat:
        axis.grid(visible=True, which="major", alpha=0.3)
    return figure, axes


def _band(axis: Any, x: Sequence[float], repeats: Sequence[Sequence[float]], **style: Any) -> None:
    """Draw the mean of repetitions, and from the least to the largest of them as a band."""
    means = [float(np.mean(r)) for r in repeats]
    (line,) = axis.plot(x, means, marker=".", **style)
    low, high = [min(r) for r in repeats], [max(r) for r in repeats]
    axis.fill_between(x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)


# --- structure ------------------------------------------------------------------------------------


def structure(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw the errors of the masks and their longest blocks."""
    paths = [folder / "structure-errors.png", folder / "structure-blocks.png"]
    _structure_errors(document, paths[0])
    _structure_blocks(document, paths[1])
    return paths


def _structure_errors(document: Mapping[str, Any], path: Path) -> None:
    cells = document["errors"]
    sigmas = sorted({c["sigma"] for c in cells})
    n = max(c["n"] for c in cells)
    figure, axes = _panels(2, len(sigmas), 6.2)
    for column, sigma in enumerate(sigmas):
        rows = (("relative spectral", axes[0, column]), ("max", axes[1, column]))
        for metric, axis in rows:
            for sampler, colour in _COLOURS.items():
                for causal, line in ((False, "-"), (True, ":")):
                    own = [
                        c
                        for c in cells
                        if (c["sigma"], c["n"], c["sampler"], c["causal"])
                        == (sigma, n, sampler, causal)
                    ]
                    label = sampler + (", causal" if causal else "")
                    _band(
                        axis,
                        [c["samples"] for c in own],
                        [c["errors"][metric] for c in own],
                        color=colour,
                        linestyle=line,
                        label=label,
                    )
            bounded = [
                c
                for c in cells
                if (c["sigma"], c["n"], c["sampler"], c["causal"]) == (sigma, n, "iid", False)
            ]
            x = [c["samples"] for c in bounded]
            if metric == "max":
                axis.plot(x, [c["max_bound"] for c in bounded], "k--", label="bound, odds 0.01")
            else:
                norm = [
                    np.mean(c["errors"]["spectral"]) / np.mean(c["errors"]["relative spectral"])
                    for c in bounded
                ]
                for key, style, label in (
                    ("bound", "k--", "bound on the mean"),
                    ("tail_bound", "k:", "bound, odds 0.01"),
                ):
                    y = [c[key] / s for c, s in zip(bounded, norm, strict=True)]
                    axis.plot(x, y, style, label=label)
            axis.set(xscale="log", yscale="log", xlabel="masks s")
        axes[0, column].set_title(f"sigma = {sigma}, n = {n}", fontsize=10)
    axes[0, 0].set_ylabel("relative spectral error")
    axes[1, 0].set_ylabel("largest entry of the error")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    save(figure, path)


def _structure_blocks(document: Mapping[str, Any], path: Path) -> None:
    rows = document["blocks"]
    sigma = document["settings"]["block_sigma"]
    lengths = sorted({r["n"] for r in rows})
    samples = {n: sorted({r["samples"] for r in rows if r["n"] == n}) for n in lengths}
    middle = max(lengths, key=lambda n: len(samples[n]))
    some = next(iter(samples[lengths[0]]))
    figure, axes = _panels(1, 2, 3.4)
    for sampler, colour in _COLOURS.items():
        own = [r for r in rows if r["sampler"] == sampler]
        at = sorted((r for r in own if r["n"] == middle), key=lambda r: r["samples"])
        scaled = [[x / sigma for x in r["longest"]] for r in at]
        _band(axes[0, 0], [r["samples"] for r in at], scaled, color=colour, label=sampler)
        if sampler == "iid":
            bound = [r["bound"] / sigma for r in at]
            axes[0, 0].plot([r["samples"] for r in at], bound, "k:", label="bound, odds 0.01")
        at = sorted((r for r in own if r["samples"] == some), key=lambda r: r["n"])
        scaled = [[x / sigma for x in r["longest"]] for r in at]
        _band(axes[0, 1], [r["n"] for r in at], scaled, color=colour, label=sampler)
    axes[0, 0].set(xscale="log", xlabel="masks s", ylabel="longest block / sigma")
    axes[0, 0].set_title(f"sigma = {sigma}, n = {middle}", fontsize=10)
    axes[0, 1].set(xscale="log", xlabel="length n")
    axes[0, 1].set_title(f"sigma = {sigma}, s = {some}", fontsize=10)
    axes[0, 0].legend(fontsize=8)
    save(figure, path)


# --- training -------------------------------------------------------------------------------------


def training(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw how well the arms predict, how they learn, and what swapping at use costs."""
    paths = [folder / f"training-{name}.png" for name in ("bits", "curves", "swapped")]
    _training_bits(document, paths[0])
    _training_curves(document, paths[1])
    _training_swapped(document, paths[2])
    return paths


def _arms(document: Mapping[str, Any]) -> dict[str, dict[int, Mapping[str, Any]]]:
    """Return the runs by arm and seed."""
    arms: dict[str, dict[int, Mapping[str, Any]]] = {}
    for run in document["runs"]:
        arms.setdefault(run["arm"], {})[run["seed"]] = run
    return arms


def _training_bits(document: Mapping[str, Any], path: Path) -> None:
    """Draw bits per byte of each arm, and apart the differences to exact, seed by seed."""
    arms = _arms(document)
    multiples = list(document["runs"][0]["own"])
    figure, axes = _panels(1, 2, 3.8)
    for place, (arm, runs) in enumerate(arms.items()):
        for shift, (multiple, colour) in enumerate(
            zip(multiples, ("tab:blue", "tab:orange", "tab:green"), strict=True)
        ):
            bits = {seed: r["own"][multiple]["bits_per_byte"] for seed, r in runs.items()}
            y = [place + 0.2 * (shift - 1)] * len(bits)
            label = f"{multiple} x training length" if place == 0 else None
            axes[0, 0].plot(list(bits.values()), y, ".", color=colour, label=label)
            exact = {
                seed: r["own"][multiple]["bits_per_byte"]
                for seed, r in arms.get("exact", {}).items()
            }
            gaps = [b - exact[seed] for seed, b in bits.items() if seed in exact]
            if arm != "exact":
                axes[0, 1].plot(gaps, y[: len(gaps)], ".", color=colour)
    axes[0, 0].set(xlabel="bits per byte", yticks=range(len(arms)), yticklabels=list(arms))
    axes[0, 1].set(xlabel="bits per byte less those of exact", yticks=range(len(arms)))
    axes[0, 1].set_yticklabels([])
    axes[0, 1].set_xscale("symlog", linthresh=0.05)
    axes[0, 1].axvline(0, color="black", linewidth=0.8)
    for axis in axes.flat:
        axis.invert_yaxis()
    axes[0, 0].legend(fontsize=8)
    save(figure, path)


def _training_curves(document: Mapping[str, Any], path: Path) -> None:
    """Draw the loss of each arm, averaged over seeds."""
    figure, axes = _panels(1, 1, 3.6)
    steps = document["settings"]["steps"]
    for arm, runs in _arms(document).items():
        curve = np.mean([r["curve"] for r in runs.values()], axis=0)
        at = (np.arange(len(curve)) + 0.5) * steps / len(curve)
        axes[0, 0].plot(at, curve, label=arm, linewidth=1)
    axes[0, 0].set(xlabel="step", ylabel="bits per byte, training", yscale="log")
    axes[0, 0].legend(fontsize=8, ncols=2)
    save(figure, path)


def _training_swapped(document: Mapping[str, Any], path: Path) -> None:
    """Draw the model trained under exact, used under other attention."""
    runs = [r["swapped"] for r in document["runs"] if "swapped" in r]
    figure, axes = _panels(1, 1, 3.6)
    axis = axes[0, 0]
    names = list(runs[0]) if runs else []
    for start, label in (("lsh s=", "lsh, pooled"), ("mean of outputs s=", "mean of outputs")):
        own = [name for name in names if name.startswith(start)]
        samples = [int(name.removeprefix(start)) for name in own]
        _band(axis, samples, [[r[n]["bits_per_byte"] for r in runs] for n in own], label=label)
    for name, line in (("exact", "-"), ("window 4 sigma", "--"), ("fixed blocks", ":")):
        if runs:
            bits = np.mean([r[name]["bits_per_byte"] for r in runs])
            axis.axhline(bits, color="black", linestyle=line, linewidth=1, label=name)
    axis.set(xscale="log", xlabel="masks s", ylabel="bits per byte of the model trained exactly")
    axis.legend(fontsize=8)
    save(figure, path)
