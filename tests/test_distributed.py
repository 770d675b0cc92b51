"""Several ranks and processes: DDP, FSDP, one choice for all ranks, DataLoader workers, threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import fresh
import pytest
import torch
import torch.distributed as dist
from _parity import OTHER, assert_same, bound, favouring
from torch import nn

import convselect
from convselect.base.problem import conv_problem
from convselect.eager import resolve
from convselect.model import loaded

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
GEMM = "im2col_gemm"
HERE = Path(__file__).parent
# Common to all ranks' programs. One thread each: two processes on a busy machine must not wait for each other's teams.
PREAMBLE = """
import os, sys, warnings
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
torch.set_num_threads(1)
import convselect
from convselect.model import loaded
from convselect.eager import resolve
from _parity import favouring
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=timedelta(seconds=120))

def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1, bias=False), nn.ReLU(),
                         nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(8 * 8 * 8, 4))

def inputs(i):
    return torch.randn(2, 3, 10, 10, generator=torch.Generator().manual_seed(10 * i + rank))
"""

# The ranks are forks of a process that has imported torch and nothing else.
TOGETHER = """
import json, os, runpy, sys, traceback
children = []
for rank, own in enumerate(json.loads(sys.argv[2])):
    children.append(os.fork())
    if children[-1] == 0:
        os.environ.update(own)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{rank}.{name}", os.O_WRONLY | os.O_CREAT), number)
        status = 1
        try:
            runpy.run_path(sys.argv[1], run_name="__main__")
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))
"""


def ranks(code: str, tmp_path: Path, world: int = 2, **environment: str) -> list[str]:
    """Run a program on `world` ranks; returns what each of them printed."""
    program = tmp_path / "rank.py"
    program.write_text(PREAMBLE + textwrap.dedent(code) + "\ndist.barrier()\ndist.destroy_process_group()\n")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    each = []
    for rank in range(world):
        own = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        # The store of this process is the rendezvous: no port is guessed, and no rank has to be the first.
        own |= {"TORCHELASTIC_USE_AGENT_STORE": "True", **environment}
        if rank == 0 and "RANK_0_ARTIFACT" in own:
            own["CONVSELECT_ARTIFACT"] = own.pop("RANK_0_ARTIFACT")
        each.append(own)
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    together = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = fresh.run(["-c", TOGETHER, str(program), json.dumps(each)], cwd=tmp_path, env=together, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0] * world, [
        (tmp_path / f"{rank}.err").read_text()[-3000:] for rank in range(world)
    ]
    return [(tmp_path / f"{rank}.out").read_text() for rank in range(world)]


# ---- training on two ranks --------------------------------------------------------------------------------------


def test_distributed_data_parallel(tmp_path):
    """As the stock model: gradients, their strides, and not one warning more (bucket views want aten's strides)."""
    out = ranks(
        """
        from torch.nn.parallel import DistributedDataParallel

        def train(how, channels_last):
            model = network()
            if channels_last:
                model = model.to(memory_format=torch.channels_last)
            if how == "converted":
                assert len(convselect.summary(convselect.convert(model)).converted) == 3
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for i in range(3):
                    x = inputs(i).contiguous(memory_format=torch.channels_last) if channels_last else inputs(i)
                    optimizer.zero_grad(set_to_none=False)
                    if how == "enabled":
                        with convselect.enabled():
                            loss = model(x).square().mean()
                    else:
                        loss = model(x).square().mean()
                    loss.backward()
                    optimizer.step()
            results = [t.detach().clone() for p in model.parameters() for t in (p, p.grad)]
            return results, [str(w.message) for w in caught]

        for channels_last in (False, True):
            want, stock = train("stock", channels_last)
            for how in ("converted", "enabled"):
                with favouring("im2col_gemm"):
                    got, own = train(how, channels_last)
                    assert any(e.found.algorithm == "im2col_gemm" for e in resolve.choices.entries.values())
                for w, g in zip(want, got, strict=True):
                    assert g.stride() == w.stride()
                    torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)
                assert len(own) <= len(stock), own
                everyone = [None, None]
                dist.all_gather_object(everyone, got)
                assert all(torch.equal(a, b) for a, b in zip(*everyone, strict=True))
        print("done")
        """,
        tmp_path,
    )
    assert [text.split() for text in out] == [["done"], ["done"]]


def test_fully_sharded(tmp_path):
    """FSDP2 (a DTensor per parameter) and FSDP1 (views into one flat parameter, at any offset) train as the stock
    model."""
    out = ranks(
        """
        def gathered(model, grads=True):
            full = lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t
            return {name: full(p.grad if grads else p).detach().clone() for name, p in model.named_parameters()}

        def train(shard, selected, steps=3):
            model = network()
            if selected:
                convselect.convert(model)
            model = shard(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            losses = []
            for i in range(steps):
                optimizer.zero_grad()
                loss = model(inputs(i)).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            return losses

        def fsdp2(model):
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard
            mesh = init_device_mesh("cpu", (2,))
            for layer in list(model):
                if isinstance(layer, nn.Conv2d):
                    fully_shard(layer, mesh=mesh)
            return fully_shard(model, mesh=mesh)

        def fsdp1(model):
            from torch.distributed.fsdp import FullyShardedDataParallel
            return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))

        for name, shard in (("fsdp2", fsdp2), ("fsdp1", fsdp1)):
            try:
                want = train(shard, False)
            except Exception as error:
                print(name, "stock fails:", type(error).__name__, str(error)[:80].replace(chr(10), " "))
                dist.barrier()
                continue
            with favouring("im2col_gemm"):
                got = train(shard, True)
                assert any(e.found.algorithm == "im2col_gemm" for e in resolve.choices.entries.values())
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
            assert want[0] != want[2]
            print(name, "done")
        """,
        tmp_path,
    )
    assert out[0] == out[1]
    lines = out[0].splitlines()
    if "fsdp2 done" not in lines or "fsdp1 done" not in lines:
        pytest.skip(f"not here without convselect either: {lines}")


# ---- one choice for all ranks -----------------------------------------------------------------------------------

CHOICES = """
def chosen():
    from convselect.base.problem import Direction, conv_problem
    problems = [conv_problem(n, c, h, h, c, k, k, padding=k // 2, direction=d)
                for n in (1, 8) for c in (8, 64, 256) for h in (14, 56) for k in (1, 3, 5) for d in Direction]
    return [resolve.choice_for(p, convselect.base.settings.current()).algorithm for p in problems]

def everyone(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
"""


def test_all_ranks_choose_as_rank_0_does(tmp_path):
    """Two ranks with different models and defaults: different choices; after `same_choices` rank 0's on both, also
    after the model was unloaded; after `own_choices` each its own again."""
    artifacts = sorted((Path(convselect.__file__).parent / "model" / "artifacts").glob("cpu-x86-avx*.npz"))
    assert len(artifacts) >= 2
    ranks(
        CHOICES
        + """
try:
    convselect.distributed.same_choices(dist.GroupMember.NON_GROUP_MEMBER)
    raise AssertionError
except (ValueError, RuntimeError):
    pass
if rank == 1:
    convselect.set_defaults(precision="exact")
before = everyone(chosen())
assert before[0] != before[1] and len(set(before[0])) > 2
convselect.distributed.same_choices()
after = everyone(chosen())
assert after[0] == after[1] == before[0]
assert convselect.base.settings.current().precision == "native"
convselect.unload()
convselect.clear()
if rank == 1:  # nobody has to take part: nothing is communicated any more
    assert chosen() == before[0]
convselect.distributed.own_choices()
convselect.set_defaults(precision="exact" if rank == 1 else "native")
assert everyone(chosen()) == before
group = dist.new_group([1, 0])
convselect.distributed.same_choices(group)
assert everyone(chosen())[0] == everyone(chosen())[1]
""",
        tmp_path,
        RANK_0_ARTIFACT=str(artifacts[0]),
        CONVSELECT_ARTIFACT=str(artifacts[-1]),
    )


def test_rank_0_without_a_model_makes_all_native(tmp_path):
    artifact = next((Path(convselect.__file__).parent / "model" / "artifacts").glob("cpu-x86-avx*.npz"))
    ranks(
        CHOICES
        + """
warnings.simplefilter("ignore")
assert (set(chosen()) == {"native"}) == (rank == 0)
convselect.distributed.same_choices()
assert set(chosen()) == {"native"}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    torch.set_num_threads(1 + rank)
    convselect.distributed.same_choices()
assert ["number of threads" in str(w.message) for w in caught] == [True]
""",
        tmp_path,
        RANK_0_ARTIFACT=str(tmp_path / "none.npz"),
        CONVSELECT_ARTIFACT=str(artifact),
    )


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        convselect.distributed.same_choices()


def test_a_given_model_is_kept_until_taken_back():
    from fake_model import FakePredictor

    problem = conv_problem(1, 8, 8, 8, 8, 3, 3)
    try:
        loaded.override(FakePredictor(GEMM))
        for _ in range(2):
            assert loaded.get().predict(problem).ranked[0] == GEMM
            convselect.unload()
        loaded.override(None)
        assert loaded.get() is None
    finally:
        convselect.distributed.own_choices()
    assert loaded._override is None
    assert not resolve.choices.entries


# ---- worker processes and threads -------------------------------------------------------------------------------


class Images(torch.utils.data.Dataset):
    """A data set that runs a converted layer on each image, as augmentation and feature extraction do."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layer = nn.Conv2d(3, 4, 3, padding=1).requires_grad_(False)
        convselect.convert(self.layer, policy=GEMM)
        self.images = torch.randn(6, 3, 12, 12)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i):
        assert torch.utils.data.get_worker_info() is not None
        return self.layer(self.images[i])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers(method, tmp_path):
    """In a fresh process: one that has run OpenMP threads cannot fork, with or without us."""
    program = tmp_path / "load.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import sys
            import torch
            torch.set_num_threads(1)
            import convselect
            from test_distributed import Images

            if __name__ == "__main__":
                images = Images()
                want = torch.stack([images.layer(image) for image in images.images])
                loader = torch.utils.data.DataLoader(images, 2, num_workers=2, multiprocessing_context={method!r})
                for _ in range({1 + (method == "fork")}):  # spawned ones start anew each time
                    torch.testing.assert_close(torch.cat(list(loader)), want)
                print("done")
            """
        )
    )
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        [sys.executable, str(program)], env={**os.environ, "PYTHONPATH": path}, timeout=240,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip() == "done"


@pytest.mark.parametrize("favourite", [OTHER, GEMM])
def test_threads_share_one_layer(favourite):
    """Training and inference at once, in both layouts, through one layer and one set of plans."""
    layer = nn.Conv2d(3, 5, 3, padding=1)
    inputs = [torch.randn(2, 3, 9, 9 + i % 2) for i in range(4)]
    inputs = [x.contiguous(memory_format=torch.channels_last) if i > 1 else x for i, x in enumerate(inputs)]
    want = [torch.autograd.grad(layer(x).square().sum(), layer.weight)[0] for x in inputs]
    convselect.convert(layer)
    limit = 4 * bound(torch.float32, GEMM)
    errors = []

    def work(i):
        try:
            for _ in range(25):
                if i % 3:
                    (got,) = torch.autograd.grad(layer(inputs[i % 4]).square().sum(), layer.weight)
                    assert_same(got, want[i % 4], limit, f"thread {i}")
                else:
                    with torch.inference_mode():
                        layer(inputs[i % 4])
        except BaseException as error:
            errors.append(error)

    with favouring(favourite):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors[0]
