"""A result of text_classification.py as Markdown tables and as a figure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.case_studies._classifiers import KINDS, LABELS

NAMES = {
    "rotten-tomatoes": "Rotten Tomatoes",
    "bbc": "BBC news",
    "r52": "Reuters R52",
    "synthetic-pairs": "generated pairs",
}


def markdown(result: Mapping[str, Any]) -> str:
    """Accuracy, then times, then ratios, then operations, as the page in docs/ has them."""
    lines = [
        "| corpus | model | parameters, of them the block's | test accuracy, % | over seeds | test set's interval | "
        "s per epoch (p20..p80) | us per text, batch 1 | us per text, batch 32 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, case in result["corpora"].items():
        for kind in KINDS:
            model = case["models"][kind]
            test, epoch = model["test"], model["epoch_s"]
            inference = []
            for batch, found in case["inference"].items():
                side = found["transformer"] if kind == "transformer" else kind
                inference.append(f"{found['call_us'][side]['median'] / int(batch):,.0f}")
            low, high = test["over_test_set"]
            seeds = "-" if test["over_seeds"] is None else f"± {test['over_seeds']:.2f}"
            lines.append(
                f"| {NAMES.get(name, name)} | {LABELS[kind]} | {model['parameters']['model']:,}, "
                f"{model['parameters']['block']:,} | {test['mean']:.2f} | {seeds} | {low:.1f}..{high:.1f} | "
                f"{epoch['median']:.2f} ({epoch['p20']:.2f}..{epoch['p80']:.2f}) | {' | '.join(inference)} |"
            )
    lines += [
        "",
        "| corpus | Γ less transformer, points | Γ less bag, points | training epoch | step at the corpus's length | "
        "step at 200 | the same, stock layer | inference, batch 1 | batch 32 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, case in result["corpora"].items():
        points = [case["accuracy_differences"][f"gamma over {other}"] for other in ("transformer", "bag")]
        ratios = case["transformer_over_gamma"]
        lengths = [case["steps"][str(length)]["over_gamma"] for length in (case["corpus"]["length"], 200)]
        cells = [
            *(f"{p['points']:+.2f} ± {p['half_interval']:.2f}" for p in points),
            _times(ratios["epoch"]),
            *(_times(over["transformer"]) for over in lengths),
            _times(lengths[1]["transformer, attention dropout"]),
            *(_times(ratios[f"inference at batch {batch}"]) for batch in (1, 32)),
        ]
        lines.append(f"| {NAMES.get(name, name)} | {' | '.join(cells)} |")
    lines += [
        "",
        "| corpus | block | matrix products | projections counted one by one | less the feed-forward part | "
        "element-wise | forward and backward |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, kinds in result["operations"].items():
        for kind, found in kinds.items():
            both = found["forward_and_backward"]
            lines.append(
                f"| {NAMES.get(name, name)} | {LABELS[kind]} | {found['products']} | {found['unstacked_products']} | "
                f"{found['without_feed_forward']} | {found['element_wise']} | {both['products']}, "
                f"{both['element_wise']} |"
            )
    return "\n".join(lines)


def _times(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['p20']:.2f}..{ratio['p80']:.2f})"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Accuracy with the test set's interval, and how many times quicker the Γ-block is, into a PNG file.

    Raises:
        ModuleNotFoundError: without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(result["corpora"])
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for i, kind in enumerate(KINDS):
        tests = [result["corpora"][name]["models"][kind]["test"] for name in names]
        means = [test["mean"] for test in tests]
        errors = [
            [m - t["over_test_set"][0] for m, t in zip(means, tests, strict=True)],
            [t["over_test_set"][1] - m for m, t in zip(means, tests, strict=True)],
        ]
        places = [n + 0.26 * (i - 1) for n in range(len(names))]
        left.errorbar(places, means, yerr=errors, fmt="o", capsize=4, label=LABELS[kind])
        for place, test in zip(places, tests, strict=True):
            left.plot([place] * len(test["each"]), test["each"], "_", color="0.3")
    left.set_xticks(range(len(names)), [NAMES.get(name, name) for name in names])
    left.set_ylabel("test accuracy, %")
    left.set_title("Accuracy: mean, seeds (dashes), test set's 95 % interval", fontsize=10)
    left.legend(fontsize=8)
    sides = ("epoch", "inference at batch 1", "inference at batch 32")
    for i, side in enumerate(sides):
        found = [result["corpora"][name]["transformer_over_gamma"][side] for name in names]
        medians = [f["median"] for f in found]
        errors = [
            [f["median"] - f["p20"] for f in found],
            [f["p80"] - f["median"] for f in found],
        ]
        right.bar(
            [n + 0.26 * (i - 1) for n in range(len(names))], medians, 0.24, yerr=errors, capsize=3,
            label="training epoch" if side == "epoch" else side,
        )  # fmt: skip
    for target, text in ((2.5, "training, to reach"), (1.27, "inference, to reach")):
        right.axhline(target, color="0.4", linestyle=":", linewidth=1)
        right.text(len(names) - 0.5, target, text, fontsize=7, ha="right", va="bottom")
    right.set_xticks(range(len(names)), [NAMES.get(name, name) for name in names])
    right.set_ylabel("transformer's time / Γ-block's")
    right.set_title("How many times quicker the Γ-block is, p20..p80", fontsize=10)
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
