"""Data of the documentation's tables and figures: summaries of the committed results, and Markdown tables.

Nothing is measured here. `benchmarks.figures` draws and prints.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._data_set import contents, contents_table
from benchmarks._markdown import geometric_mean, table
from benchmarks._timm_tables import TIMM, clients_table, converted_table, record_table, timm_table
from convselect.measure.rows import NATIVE, Row, kernel_class, read_rows

RESULTS = Path(__file__).parent / "results"
TIMES = RESULTS / "times-cpu-x86-avx512-c.csv.gz"
TIMES_OF = {
    "AVX-512": TIMES,
    "AVX2": RESULTS / "times-cpu-x86-avx2-c.csv.gz",
    "AVX2, later": RESULTS / "later-cpu-x86-avx2-c.csv.gz",
    "volumes, AVX-512": RESULTS / "times-volumes-cpu-x86-avx512-c.csv.gz",
    "volumes, AVX2": RESULTS / "times-volumes-cpu-x86-avx2-c.csv.gz",
}
KERNELS = RESULTS / "kernels-avx512-1-thread.json"
NETWORKS = RESULTS / "networks-avx512-1-thread.json"
DIRECTIONS = {"forward": "forward", "backward_data": "grad-input", "backward_weight": "grad-weight"}
GROUPS = {
    "native": "native",
    "native_channels_last": "native, other layout",
    "native_contiguous": "native, other layout",
    "upcast": "upcast",
    "im2col_gemm": "im2col_gemm",
    "fft": "FFT",
    "fft_tiled": "FFT",
    "depthwise": "depthwise",
    "grouped": "grouped",
    "direct": "direct",
    "patches": "patches, thin",
    "thin": "patches, thin",
}
CLASSES = {
    "1x1": "1x1",
    "3x3": "3x3, stride 1",
    "strided": "strided",
    "depthwise": "depthwise, up to 5x5",
    "grouped": "grouped",
    "large": "7x7 and larger",
    "other": "everything else",
}
"""`kernel_class` -> title, in the order of the page."""


class Winner(NamedTuple):
    """Results of an algorithm over the measured problems.

    Attributes:
        measured: number of problems with a correct result and complete timing.
        fastest: number of problems on which no other was faster.
        gain: geometric mean of native's time over the algorithm's, over problems on which it was the fastest.
    """

    measured: int
    fastest: int
    gain: float


# ---- from the results -----------------------------------------------------------------------------------------------


def best_times(rows: Iterable[Row]) -> dict[Any, dict[str, float]]:
    """Problem -> algorithm -> median in us, of first measurements with correct results."""
    found: dict[Any, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row.status == "ok" and row.repeat == 0:
            found[row.problem][row.algorithm] = row.median_us
    return {problem: times for problem, times in found.items() if NATIVE in times}


def winners(times: Mapping[Any, Mapping[str, float]]) -> dict[str, Winner]:
    """Algorithm -> its results; those that are most often the fastest come first."""
    measured: Counter[str] = Counter()
    gains: dict[str, list[float]] = defaultdict(list)
    for of_problem in times.values():
        measured.update(of_problem.keys())  # not the values: those are times
        best = min(of_problem, key=lambda name: of_problem[name])
        gains[best].append(of_problem[NATIVE] / of_problem[best])
    found = {name: Winner(measured[name], len(gains[name]), geometric_mean(gains[name])) for name in measured}
    return dict(sorted(found.items(), key=lambda item: -item[1].fastest))


def group(algorithm: str) -> str:
    """The group under which an algorithm is drawn: Winograd's tile sizes, the two transforms and the two layouts are
    one group each."""
    return "Winograd" if algorithm.startswith("winograd") else GROUPS[algorithm]


def shares(times: Mapping[Any, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """kernel class -> group of algorithms -> share of the class's problems in which one of them is the fastest."""
    won: dict[str, Counter[str]] = {name: Counter() for name in CLASSES}
    for problem, of_problem in times.items():
        won[kernel_class(problem)][group(min(of_problem, key=lambda name: of_problem[name]))] += 1
    return {name: {which: n / sum(of.values()) for which, n in of.items()} for name, of in won.items() if of}


# ---- tables ---------------------------------------------------------------------------------------------------------


def winners_table(found: Mapping[str, Winner], problems: int) -> str:
    return table(
        ("algorithm", "timed to the end on", "the fastest of all", "there, times native"),
        [
            (f"`{name}`", f"{w.measured:,}", f"{w.fastest:,} ({w.fastest / problems:.1%})", f"{w.gain:.2f}")
            for name, w in found.items()
            if w.fastest
        ],
    )


def shares_table(found: Mapping[str, Mapping[str, float]]) -> str:
    names = list(dict.fromkeys([*GROUPS.values(), "Winograd"]))
    return table(
        ("fastest in", *names),
        [(CLASSES[of], *(f"{share:.1%}" if (share := found[of].get(name)) else "" for name in names)) for of in found],
    )


def classes_table(kernels: Mapping[str, Any]) -> str:
    """`kernels` as `python -m benchmarks.run` writes it."""
    return table(
        ("kind of convolution", "direction", "the choice, times native: mean (p10)", "the best: mean", "the best ones"),
        [
            (
                row["class"],
                DIRECTIONS[row["direction"]],
                f"{at['chosen']:.2f} ({at['chosen_p10']:.2f})",
                f"{at['best']:.2f}",
                ", ".join(f"`{name}` {count}" for name, count in list(at["names"].items())[:3]),
            )
            for row in kernels["rows"]
            for at in [row["layouts"]["contiguous"]]
        ],
    )


TITLES = {
    "resnet18": "ResNet-18",
    "vgg16": "VGG-16",
    "unet": "U-Net",
    "resnet50": "ResNet-50",
    "mobilenet_v2": "MobileNetV2",
    "convnext_tiny": "ConvNeXt-T",
    "replknet_small": "RepLKNet-like, 31x31 depthwise",
}
SELECTORS = {
    "reformer": "Reformer",
    "lambdarank": "trees that rank (lambdarank)",
    "gbdt": "gradient-boosted trees",
    "neighbour": "nearest neighbours",
    "mlp": "runtime regression per algorithm",
}

FIRST_CALLS = ("first 100: all", "first 100: median", "first 100: p95")


def demo_table(demos: Mapping[tuple[int, str], Mapping[str, Any]]) -> str:
    """`demos`: (threads, instruction set) -> what `convselect demo --json` wrote."""
    threads = sorted({count for count, _ in demos})

    def ratios(count: int, isa: str, name: str) -> str:
        (found,) = [model for model in demos[count, isa]["models"] if model["name"] == name]
        ratio = [speed["ratio"]["median"] for speed in found["speeds"]]
        return " / ".join(f"{r:.2f}" if r < 4 else f"{r:.1f}" for r in ratio)

    return table(
        ("network", "threads", "AVX-512: inference / training step", "AVX2: inference / training step"),
        [
            (TITLES[model["name"]], str(n), *(ratios(n, isa, model["name"]) for isa in ("avx512", "avx2")))
            for n in threads
            for model in demos[n, "avx512"]["models"]
        ],
    )


def networks_table(networks: Mapping[str, Any]) -> str:
    rivals = ("eager channels_last", "torch.compile", "onnxruntime", "openvino")
    rows = []
    for network in networks["networks"]:
        gain = network["gain"]
        frozen = max(gain["frozen"], gain["frozen channels_last"])
        values = (*(gain[name] for name in rivals), gain["converted"], frozen, frozen / max(gain[r] for r in rivals))
        rows.append((TITLES[network["network"]], *(f"{value:.2f}" for value in values)))
    header = (
        "channels_last",
        "torch.compile, freezing",
        "ONNX Runtime",
        "OpenVINO",
        "converted",
        "frozen, better layout",
    )
    return table(("network", *header, "frozen / best rival"), rows)


def layers_table(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """`measured`: instruction set -> what `python -m benchmarks.single_layers` wrote."""
    kinds = next(iter(measured.values()))["kinds"]
    sides = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "alone": "the better's convolution alone"}
    return table(
        ("frozen over", *(f"{isa}: {' / '.join(sides.values())}" for isa in measured)),
        [
            (kind, *(" / ".join(f"{run['kinds'][kind][side]:.2f}" for side in sides) for run in measured.values()))
            for kind in kinds
        ],
    )


def policies_table(policies: Mapping[str, Any]) -> str:
    found = {(r["network"], *r["mode"].split()): r for r in policies["results"]}
    return table(
        ("network", "mode", "times stock after the trials, batch 1 / 8", "first calls' time over stock's, batch 1 / 8"),
        [
            (
                TITLES[network],
                mode,
                f"{one['verify'][0]:.2f} / {found[network, mode, 'N=8']['verify'][0]:.2f}",
                f"{one['first']:.2f} / {found[network, mode, 'N=8']['first']:.2f}",
            )
            for (network, mode, batch), one in found.items()
            if batch == "N=1"
        ],
    )


def compile_table(compiled: Mapping[str, Any]) -> str:
    found = {(r["network"], r["mode"]): f"{r['over_compiled'][0]:.2f}" for r in compiled["results"]}
    return table(
        ("network", "inference, batch 1", "training step, batch 8"),
        [(TITLES[n], found[n, "inference N=1"], found[n, "training N=8"]) for n, mode in found if "inference" in mode],
    )


def selectors_table(evaluated: Mapping[str, Any]) -> str:
    rows = []
    for name, title in SELECTORS.items():
        one = evaluated["judged"][name]
        fractions = [one[part]["fraction_of_oracle_mean"] for part in ("without_margin", "overall")]
        slower = f"{one['overall']['slower_than_native_share']:.1%}"
        rows.append((title, *(f"{fraction:.3f}" for fraction in fractions), slower, f"{one['choice_us']:,.0f}"))
    header = ("fraction of oracle without a margin", "with its margin", "then slower than native", "one choice, us")
    return table(("selector", *header), rows)


def trials_table(verified: Mapping[str, Mapping[str, Any]]) -> str:
    """`verified`: instruction set -> what `python -m benchmarks.verification` wrote."""
    sides = {
        "model alone": "model alone",
        "with trials": "verify, noise 3%",
        "trials of a model that always lies": "verify, lying model, noise 3%",
    }
    rows = []
    for isa, result in verified.items():
        for title, name in sides.items():
            of = result["figures"][name]
            harm = (
                f"{of['slower > 2 %']:.1%} ({of['worst']:.{0 if of['worst'] > 10 else 1 if of['worst'] > 2 else 2}f}x)"
            )
            first = " / ".join(f"{of[key]:.2f}" for key in FIRST_CALLS if key in of)
            alone = title == "model alone"
            rows.append(
                (
                    f"{isa}, {title}" if alone else title,
                    f"{result['problems']:,}" if alone else "",
                    f"{of['of oracle']:.3f} / {of['p10']:.2f}",
                    harm,
                    first,
                )
            )
    header = ("problems", "fraction of oracle: mean / p10", "slower than native by more than 2 % (worst)")
    return table(("", *header, "first 100 calls over native's: all together / median / p95"), rows)


def tables() -> dict[str, str]:
    """All of them, by name, as the pages have them."""

    def read(name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((RESULTS / name).read_text())
        return found

    measured = {title: read_rows(path) for title, path in TIMES_OF.items()}
    times = best_times(measured["AVX-512"])
    demos = {
        (threads, isa): read(f"demo-{isa}-{threads}-thread{'s' if threads > 1 else ''}.json")
        for threads in (1, 2)
        for isa in ("avx512", "avx2")
    }
    verified = {
        title: read(f"verification-cpu-x86-{title.lower().replace('-', '')}-c.json") for title in ("AVX-512", "AVX2")
    }
    return {
        "data set": contents_table({title: contents(rows) for title, rows in measured.items()}),
        "winners": winners_table(winners(times), len(times)),
        "shares": shares_table(shares(times)),
        "classes": classes_table(read(KERNELS.name)),
        "demo": demo_table(demos),
        "networks": networks_table(read(NETWORKS.name)),
        "timm": timm_table({title: read(name) for title, name in TIMM.items()}),
        "converted": converted_table(read(TIMM["AVX-512"])),
        "record": record_table(read(TIMM["AVX-512"])),
        "clients": clients_table(read("clients-avx512-1-thread.json")),
        "layers": layers_table({"AVX-512": read("layers-avx512-1-thread.json")}),
        "policies": policies_table(read("policies-avx512-1-thread.json")),
        "trials": trials_table(verified),
        "compile": compile_table(read("compile-avx512-1-thread.json")),
        "selectors": selectors_table(read("evaluate-cpu-x86-avx512-c.json")),
    }
