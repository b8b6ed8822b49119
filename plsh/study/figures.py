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


def _sizes(axis: Any, values: Sequence[int], name: str) -> None:
    """Make the axis of x logarithmic, with the sizes that were measured as its ticks."""
    axis.set_xscale("log")
    axis.set_xticks(values, [str(v) for v in values], fontsize=8)
    axis.minorticks_off()
    axis.set_xlabel(name)


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
            axis.set_yscale("log")
            _sizes(axis, x, "masks s")
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
    axes[0, 0].set_ylabel("longest block / sigma")
    _sizes(axes[0, 0], samples[middle], "masks s")
    axes[0, 0].set_title(f"sigma = {sigma}, n = {middle}", fontsize=10)
    _sizes(axes[0, 1], lengths, "length n")
    axes[0, 1].set_title(f"sigma = {sigma}, s = {some}", fontsize=10)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
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
    ticks = (0, 0.05, 0.2, 0.5, 1)
    axes[0, 1].set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes[0, 1].minorticks_off()
    axes[0, 1].axvline(0, color="black", linewidth=0.8)
    for axis in axes.flat:
        axis.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    save(figure, path)


def _training_curves(document: Mapping[str, Any], path: Path) -> None:
    """Draw the loss of each arm, averaged over seeds."""
    figure, axes = _panels(1, 1, 3.6)
    steps = document["settings"]["steps"]
    for arm, runs in _arms(document).items():
        curve = np.mean([r["curve"] for r in runs.values()], axis=0)
        at = (np.arange(len(curve)) + 0.5) * steps / len(curve)
        axes[0, 0].plot(at, curve, label=arm, linewidth=1)
    axes[0, 0].set(xlabel="step", ylabel="bits per byte, training")
    axes[0, 0].legend(fontsize=8, ncols=2)
    save(figure, path)


def _training_swapped(document: Mapping[str, Any], path: Path) -> None:
    """Draw the model trained under exact, used under other attention."""
    runs = [r["swapped"] for r in document["runs"] if "swapped" in r]
    figure, axes = _panels(1, 1, 3.6)
    axis = axes[0, 0]
    names = list(runs[0]) if runs else []
    all_samples: set[int] = set()
    for start, label in (("lsh s=", "lsh, pooled"), ("mean of outputs s=", "mean of outputs")):
        own = [name for name in names if name.startswith(start)]
        samples = [int(name.removeprefix(start)) for name in own]
        all_samples.update(samples)
        _band(axis, samples, [[r[n]["bits_per_byte"] for r in runs] for n in own], label=label)
    for name, line in (("exact", "-"), ("window 4 sigma", "--"), ("fixed blocks", ":")):
        if runs:
            bits = np.mean([r[name]["bits_per_byte"] for r in runs])
            axis.axhline(bits, color="black", linestyle=line, linewidth=1, label=name)
    axis.set_ylabel("bits per byte, trained under exact")
    if runs:
        _sizes(axis, sorted(all_samples), "masks s")
    figure.legend(loc="outside lower center", ncols=5, fontsize=8)
    save(figure, path)


# --- reduction ------------------------------------------------------------------------------------

_METHODS = {
    "lsh iid": ("tab:blue", "-"),
    "lsh stratified": ("tab:orange", "-"),
    "window at the pairs": ("tab:red", "--"),
    "window at the bandwidth": ("tab:purple", "--"),
}
_LEAST = 1e-9
"""Errors are drawn from here on."""


def reduction(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw errors of outputs beside windows and bounds, their rows, and time."""
    paths = [folder / f"reduction-{name}.png" for name in ("errors", "bounds", "rows", "time")]
    _reduction_errors(document, paths[0])
    _reduction_bounds(document, paths[1])
    _reduction_rows(document, paths[2])
    _reduction_time(document, paths[3])
    return paths


def _over_heads(
    cells: Sequence[Mapping[str, Any]], metric: str
) -> tuple[list[int], list[list[float]]]:
    """Return samples, and for each the repetitions of a metric averaged over the heads."""
    samples = sorted({c["samples"] for c in cells})
    means = [
        np.mean([c["metrics"][metric] for c in cells if c["samples"] == s], axis=0).tolist()
        for s in samples
    ]
    return samples, means


def _reduction_errors(document: Mapping[str, Any], path: Path) -> None:
    """Draw relative errors against the samples, lsh and windows at its cost, for each input."""
    cells = document["cells"]
    names = list(dict.fromkeys(c["inputs"] for c in cells))
    columns = 3
    figure, axes = _panels(-(-len(names) // columns), columns, 3.0 * -(-len(names) // columns))
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    for name, axis in zip(names, axes.flat, strict=False):
        for method, (colour, line) in _METHODS.items():
            own = [c for c in cells if (c["inputs"], c["method"]) == (name, method)]
            samples, errors = _over_heads(own, "relative")
            drawn = [[max(e, _LEAST) for e in row] for row in errors]
            _band(axis, samples, drawn, color=colour, linestyle=line, label=method)
        axis.set_yscale("log")
        _sizes(axis, samples, "masks s")
        axis.set_title(name, fontsize=9)
    for row in axes:
        row[0].set_ylabel("relative error of the output")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    save(figure, path)


def _reduction_bounds(document: Mapping[str, Any], path: Path) -> None:
    """Draw the largest error over heads beside the bound, for each input."""
    figure, axes = _panels(1, 1, 4.6)
    cells = [c for c in document["cells"] if c["method"] == "lsh iid"]
    for name in dict.fromkeys(c["inputs"] for c in cells):
        own = [c for c in cells if c["inputs"] == name]
        samples, errors = _over_heads(own, "absolute")
        _, bounds = _over_heads(own, "bound")
        (line,) = axes[0, 0].plot(samples, np.mean(errors, axis=1), marker=".", label=name)
        axes[0, 0].plot(samples, np.mean(bounds, axis=1), ":", color=line.get_color())
    axes[0, 0].set_yscale("log")
    _sizes(axes[0, 0], samples, "masks s")
    axes[0, 0].set_ylabel("rms error of rows / largest |v|; dotted: bound")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    save(figure, path)


def _reduction_rows(document: Mapping[str, Any], path: Path) -> None:
    """Draw quantiles over rows, and the error of numerators beside that of outputs."""
    cells = [c for c in document["cells"] if c["method"] == "lsh iid"]
    names = list(dict.fromkeys(c["inputs"] for c in cells))
    figure, axes = _panels(1, 3, 3.4)
    for name in names:
        own = [c for c in cells if c["inputs"] == name]
        for axis, metric in zip(axes[0], ("row median", "row 99 %", "unnormalised"), strict=True):
            samples, errors = _over_heads(own, metric)
            axis.plot(samples, np.mean(errors, axis=1), marker=".", label=name)
            axis.set_yscale("log")
            _sizes(axis, samples, "masks s")
            axis.set_title(f"relative error, {metric}", fontsize=9)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    save(figure, path)


def _reduction_time(document: Mapping[str, Any], path: Path) -> None:
    """Draw the time of a call against the length."""
    figure, axes = _panels(1, 1, 3.4)
    for name, fit in document["exponents"].items():
        own = [r for r in document["times"] if r["method"] == name]
        label = f"{name}, exponent {fit['mean']:.2f}"
        _band(axes[0, 0], [r["n"] for r in own], [r["seconds"] for r in own], label=label)
    axes[0, 0].set(yscale="log", ylabel="seconds of a call")
    _sizes(axes[0, 0], document["settings"]["time_lengths"], "length n")
    axes[0, 0].legend(fontsize=8)
    save(figure, path)
