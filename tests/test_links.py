"""The links `kernels` and `model` at the top of the repository are for readers, and get in no other package's way.

`kernels` is also an optional package of Hugging Face's, which transformers, diffusers and peft look for. From the
repository's root the link would answer in its place, if it were a package: it has no `__init__.py`, so that a package
of that name anywhere on the path wins, and without one those libraries see that it is not installed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
from pathlib import Path

import fresh
import pytest
from places import ROOT

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="an installed package has no repository"),
]

# Each runs a tiny network with convolutions and prints the shape of its result.
NETWORKS = {
    "transformers": """
from transformers import ResNetConfig, ResNetForImageClassification
config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)
result = ResNetForImageClassification(config).eval()(torch.randn(1, 3, 32, 32)).logits
""",
    "diffusers": """
from diffusers import UNet2DModel
down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
unet = UNet2DModel(16, layers_per_block=1, block_out_channels=(8, 16), down_block_types=down, up_block_types=up,
                   norm_num_groups=4)
result = unet(torch.randn(1, 3, 16, 16), 3).sample
""",
    "peft": """
from peft import LoraConfig, get_peft_model
net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 5, 3))
result = get_peft_model(net, LoraConfig(target_modules=["0", "2"], r=2))(torch.randn(1, 3, 12, 12))
""",
}
SHAPES = {"transformers": [1, 3], "diffusers": [1, 3, 16, 16], "peft": [1, 5, 8, 8]}
# One process runs them all: starting one costs more than the networks do.
PROGRAM = f"""
import importlib.util, json, sys, traceback
assert sys.path[0] == ""
import torch
said = {{}}
for name, code in {NETWORKS!r}.items():
    if importlib.util.find_spec(name):
        try:
            exec(code)
            said[name] = list(result.shape)
        except Exception:
            said[name] = traceback.format_exc()
if "transformers" in said:
    from transformers.utils import is_kernels_available
    said["taken"] = is_kernels_available()
import kernels
said["file"], said["version"] = kernels.__file__, getattr(kernels, "__version__", None)
print(json.dumps(said))
"""
# Has every name that somebody imports from it; each is a decorator that changes nothing.
STAND_IN = """
__version__ = {version!r}


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *arguments, **keywords: lambda decorated: decorated
"""
# None: what is installed here, as a rule none. transformers 5 takes versions from 0.18.2 on, diffusers any.
VERSIONS = [None, "0.17.2", "0.18.2"]


def installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def run_from_root(code: str, *path: Path) -> str:
    """What a program prints that is run by `python -c` in the repository's root, with folders put on its path."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}
    done = fresh.run(["-c", code], cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    @functools.cache
    def by(version: str | None):
        if version is None:
            return json.loads(run_from_root(PROGRAM).splitlines()[-1])
        folder = tmp_path_factory.mktemp("site")
        (folder / "kernels").mkdir()
        (folder / "kernels" / "__init__.py").write_text(STAND_IN.format(version=version))
        metadata = folder / f"kernels-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
        found = json.loads(run_from_root(PROGRAM, folder).splitlines()[-1])
        assert found["file"] == str(folder / "kernels" / "__init__.py")
        return found

    return by


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("library", NETWORKS)
def test_libraries_run_from_the_root(library, version, said):
    if importlib.util.find_spec(library) is None:  # importing them here would take seconds
        pytest.skip(f"{library} is not installed")
    assert said(version)[library] == SHAPES[library], said(version)[library]


@pytest.mark.parametrize("version", VERSIONS)
def test_another_package_of_the_name_wins(version, said):
    if version is not None:
        assert said(version)["version"] == version
    elif not installed("kernels"):
        assert said(None)["file"] is None
        assert not said(None).get("taken", False)


@pytest.mark.parametrize("name", ["kernels", "model"])
def test_a_link_opens_on_its_room_and_has_no_code_of_its_own(name):
    link = ROOT / name
    assert link.is_symlink()
    assert os.readlink(link) == f"convselect/{name}"
    assert link.resolve() == ROOT / "convselect" / name
    assert not (link / "__init__.py").exists()
    if not installed(name):
        code = f"import {name}; print({name}.__file__, [n for n in vars({name}) if not n.startswith('__')])"
        assert run_from_root(code).strip() == "None []"
