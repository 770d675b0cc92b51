"""A converted model through torch.export and AOTInductor: compiled once, loaded and run by another process.

    python examples/export_aoti.py            # a minute or two, most of it compiling
    python examples/export_aoti.py --quick    # a tiny network

Sizes are fixed here, so that what is chosen is part of the graph; with dynamic ones the choice is made when it runs.
A process that loads the package has to `import convselect`, which registers the operators that it may hold.
"""

import argparse
import multiprocessing
import os
import shutil
import tempfile
from pathlib import Path

import torch
from torch import nn

import convselect
from convselect.base.timing import interleaved, ratio


def build(width, classes=10):
    layers = [nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    layers += [nn.Conv2d(width, width, 31, padding=15, groups=width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)).eval()


def compile_to(path, model, x):
    """Export, compile and save; how many of the graph's convolutions are convselect's."""
    program = torch.export.export(model, (x,))
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return sum("convselect" in str(node.target) for node in program.graph.nodes)


def load_and_run(paths, x, rounds, threads):
    """In a process of its own: every package's result and its times."""
    torch.set_num_threads(threads)
    packages = {name: torch._inductor.aoti_load_package(str(path)) for name, path in paths.items()}
    with torch.inference_mode():
        results = {name: package(x) for name, package in packages.items()}
        calls = {name: lambda package=package: package(x) for name, package in packages.items()}
        return results, interleaved(calls, rounds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny network, and no stock one to compare with")
    args = parser.parse_args()
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        print("AOTInductor needs a C++ compiler, and there is none here.")
        return
    width, size, rounds = (16, 32, 3) if args.quick else (64, 64, 20)

    torch.manual_seed(0)
    model = build(width)
    x = torch.randn(2, 3, size, size)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        want = model(x)
        paths = {name: Path(folder) / f"{name}.pt2" for name in ("converted", "stock")[: 1 if args.quick else 2]}
        if "stock" in paths:
            compile_to(paths["stock"], model, x)
        ours = compile_to(paths["converted"], convselect.convert(model), x)
        print(f"{ours} of 6 convolutions are convselect's in the exported graph; Inductor compiles the others")

        # "spawn": a fresh interpreter, as a server would be. It imports this file, and convselect with it.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            results, timings = pool.apply(load_and_run, (paths, x, rounds, torch.get_num_threads()))

    for name, got in results.items():
        error = float((got - want).norm() / want.norm())
        print(f"{name}: {error:.0e} from eager PyTorch, {timings[name].median_us / 1e3:.2f} ms")
        assert error < 1e-4
    if "stock" in timings:
        whole = ratio(timings["stock"], timings["converted"])
        print(f"converted: {whole.median:.2f} times faster than stock (p20 {whole.p20:.2f}, p80 {whole.p80:.2f})")


if __name__ == "__main__":
    main()
