"""What a choice may use: workspace, disabled algorithms, precision, determinism; and what happens if it fails."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import types
import warnings

import fresh
import pytest
import torch
from fake_model import FakePredictor, use_fake
from problems import PROBLEMS, operands_of, random_operands, relative_error
from torch import nn

import convselect
from convselect.base import lru, settings
from convselect.base import warnings as _warnings
from convselect.base.problem import ConvProblem, Direction, conv_problem
from convselect.base.settings import use
from convselect.choice.budgets import Shortage, check_disabled, is_disabled, refusal
from convselect.choice.choose import Choice, choose
from convselect.eager import execute
from convselect.explain import explain_problem
from convselect.kernels.pool import ALL, BY_NAME
from convselect.machine import memory as machine_memory

CONV3 = conv_problem(2, 8, 12, 12, 8, 3, 3, padding=1)
LARGE = conv_problem(8, 64, 112, 112, 64, 3, 3, padding=1)
MIB = 2**20


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(_warnings, "_given", set())
    check_disabled.cache_clear()
    execute.failures.clear()
    lru.clear()
    yield
    execute.failures.clear()
    lru.clear()


# ---- workspace ------------------------------------------------------------------------------------------------------


@pytest.fixture
def memory(monkeypatch):
    """Free and total memory that a test sets, and how often it was asked."""
    there = types.SimpleNamespace(free=1000 * MIB, total=4000 * MIB, asked=0)

    def free_bytes(device):
        there.asked += 1
        return there.free

    monkeypatch.setattr(machine_memory, "free_bytes", free_bytes)
    monkeypatch.setattr(machine_memory, "total_bytes", lambda device: there.total)
    return there


def needing(monkeypatch, **bytes_of: int) -> None:
    for name, size in bytes_of.items():
        monkeypatch.setattr(BY_NAME[name], "workspace_bytes", lambda problem, size=size: size)


def test_both_bounds_hold(memory, monkeypatch):
    needing(monkeypatch, winograd4=100 * MIB)
    for size, share, allowed in (
        (200 * MIB, 1.0, True),
        (99 * MIB, 1.0, False),
        (200 * MIB, 0.11, True),
        (200 * MIB, 0.09, False),
        (2**62, 0.09, False),
        (99 * MIB, 0.5, False),
        (100 * MIB, 0.1, True),
    ):
        with use(workspace_bytes=size, workspace_share=share) as used:
            reason = refusal(BY_NAME["winograd4"], LARGE, used)
        assert (reason is None) == allowed, (size, share, reason)
        # Only what more free memory would mend may pass.
        assert reason is None or isinstance(reason, Shortage) == (size >= 100 * MIB)
    memory.free = 50 * MIB
    assert refusal(BY_NAME["winograd4"], LARGE, settings.Settings()) == (
        "winograd4 needs 100 MiB of workspace; 100% of the 50 MiB that are free are allowed."
    )
    memory.free = None  # not known
    assert refusal(BY_NAME["winograd4"], LARGE, settings.Settings()) is None


def test_small_workspaces_do_not_ask(memory, monkeypatch):
    needing(monkeypatch, winograd4=16 * MIB)
    with use(workspace_share=0.0001) as used:
        assert refusal(BY_NAME["winograd4"], LARGE, used) is None
        assert memory.asked == 0
        needing(monkeypatch, winograd4=16 * MIB + 1)
        assert isinstance(refusal(BY_NAME["winograd4"], LARGE, used), Shortage)
    assert memory.asked == 1


def test_native_is_never_short(memory):
    memory.free = 0
    assert refusal(BY_NAME["native"], LARGE, settings.Settings()) is None


def test_a_choice_made_for_want_of_memory_says_so(memory, monkeypatch):
    needing(monkeypatch, winograd4=300 * MIB, winograd2=1)
    predictor = FakePredictor("winograd4", "winograd2")
    auto = settings.Settings()
    assert not choose(LARGE, BY_NAME, auto, predictor=predictor).memory_limited
    memory.free = 299 * MIB
    second = choose(LARGE, BY_NAME, auto, predictor=predictor)
    assert (second.algorithm, second.memory_limited) == ("winograd2", True)
    only = choose(LARGE, BY_NAME, auto, predictor=FakePredictor("winograd4"))
    assert (only.algorithm, only.memory_limited) == ("native", True)
    # Ranked lower than what was taken: no matter.
    assert not choose(LARGE, BY_NAME, auto, predictor=FakePredictor("winograd2", "winograd4")).memory_limited
    # Left out for another reason: it stays so.
    with use(workspace_bytes=200 * MIB) as little:
        assert not choose(LARGE, BY_NAME, little, predictor=predictor).memory_limited
    # A stored choice that does not fit just now.
    stored = Choice("winograd4", "store")
    assert choose(LARGE, BY_NAME, auto, store=lambda p: stored).memory_limited
    memory.free = 301 * MIB
    assert choose(LARGE, BY_NAME, auto, store=lambda p: stored) is stored


def test_batch_invariant_choices_do_not_depend_on_what_is_free(memory, monkeypatch):
    needing(monkeypatch, winograd4=100 * MIB)
    memory.free = 1
    with use(batch_invariant=True, workspace_share=0.1) as used:
        assert refusal(BY_NAME["winograd4"], LARGE, used) is None
        memory.total = 999 * MIB
        reason = refusal(BY_NAME["winograd4"], LARGE, used)
    assert reason == "winograd4 needs 100 MiB of workspace; 10% of all 999 MiB are allowed."
    assert not isinstance(reason, Shortage)
    assert memory.asked == 0


def test_free_memory_of_this_machine():
    free, total = machine_memory.free_bytes("cpu"), machine_memory.total_bytes("cpu")
    assert 0 < free <= total


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/jobs/a\n", {"jobs/a": ("1000", "700", "inactive_file 100\n")}, [(1000, 600)]),
        ("0::/jobs/a\n", {"jobs/a": ("max", "700", "inactive_file 0\n")}, []),
        (
            "0::/jobs/a\n",
            {"jobs/a": ("max", "7", "inactive_file 0\n"), "jobs": ("500", "400", "inactive_file 900\n")},
            [(500, 0)],
        ),
        ("0::/\n", {"": ("800", "300", "anon 7\n")}, [(800, 300)]),
        ("4:memory:/x\n1:cpu:/x\n", {"memory/x": ("600", "100", "total_inactive_file 50\n")}, [(600, 50)]),
        ("0::/gone\n", {}, []),
        (None, {}, []),
    ],
)
def test_control_groups(tmp_path, monkeypatch, own, files, expected):
    for folder, (limit, used, stat) in files.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if "memory" in folder else ("memory.max",)
        names = (*names, "memory.current")[:2]
        for name, text in zip((*names, "memory.stat"), (limit, used, stat), strict=True):
            (tmp_path / folder / name).write_text(text)
    if own is not None:
        (tmp_path / "own").write_text(own)
    monkeypatch.setattr(machine_memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine_memory, "_OWN_CGROUP", tmp_path / "own")
    assert machine_memory._cgroup_limits() == expected
    free = machine_memory.free_bytes("cpu")
    assert free == min([limit - used for limit, used in expected]) if expected else free > 2000


def test_a_gpu_counts_what_the_caching_allocator_holds_free(monkeypatch):
    if not torch.cuda.is_available():
        assert machine_memory.free_bytes("cuda") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 20)
    assert machine_memory.free_bytes("cuda") == 150
    assert machine_memory.total_bytes("cuda") == 1000

    def no_driver(*_):
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "mem_get_info", no_driver)
    assert machine_memory.free_bytes("cuda") is None


# ---- the kill-switch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("disabled", "off"),
    [
        ("winograd", {a.name for a in ALL if a.name.startswith("winograd")}),
        ("winograd4", {"winograd4"}),
        ("fft", {"fft", "fft_tiled"}),
        ("fft_tiled", {"fft_tiled"}),
        ("winograd2,fft_tiled", {"winograd2", "fft_tiled"}),
        ("native", {"native_channels_last", "native_contiguous", "native_depthwise"}),
        ("wino", set()),
        ("", set()),
    ],
)
def test_names_and_beginnings(disabled, off):
    with use(disable=disabled) as used:
        assert {name for name in BY_NAME if is_disabled(name, used.disabled)} == off


def test_what_is_no_algorithm_is_pointed_out_once():
    with pytest.warns(convselect.ConvselectWarning) as caught:
        for _ in range(3):
            for predictor in (None, FakePredictor("winograd4")):
                with use(disable="winogrd,winograd44,native,fft,xyzzy") as used:
                    choose(CONV3, BY_NAME, used, predictor=predictor)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "native cannot be disabled" in text
    assert "'winogrd' (did you mean winograd" in text
    assert "'winograd44' (did you mean winograd4" in text
    assert text.endswith("there is no algorithm 'xyzzy'.")
    assert "'fft'" not in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with use(disable="winograd,fft,depthwise") as used:
            choose(CONV3, BY_NAME, used)


def ran(monkeypatch) -> list[str]:
    """Names of what runs from here on."""
    seen: list[str] = []
    for algorithm in ALL:
        run = algorithm.run_checked

        def note(*arguments, run=run, name=algorithm.name, **keywords):
            seen.append(name)
            return run(*arguments, **keywords)

        monkeypatch.setattr(algorithm, "run_checked", note)
    return seen


def test_a_disabled_algorithm_is_refused_with_a_sentence_and_runs_when_forced(monkeypatch):
    use_fake(monkeypatch, "winograd4", "im2col_gemm")
    with use(disable="winograd"):
        (row,) = explain_problem(CONV3)
        assert row.algorithm == "im2col_gemm"
        assert row.why_not["winograd4"] == "winograd4 is disabled (CONVSELECT_DISABLE or use(disable=...))."
        assert "winograd4 is disabled" in explain_problem(CONV3).details()
        with use("winograd4") as named:  # an explicit policy wins
            assert choose(CONV3, BY_NAME, named) == Choice("winograd4", "forced")
        with use(disable="native,im2col_gemm,winograd") as all_of_it, pytest.warns(convselect.ConvselectWarning):
            assert choose(CONV3, BY_NAME, all_of_it, predictor=FakePredictor("winograd4")).algorithm == "native"


@pytest.mark.compile
def test_it_holds_for_calls_that_chose_before(monkeypatch):
    use_fake(monkeypatch, "winograd4")
    seen = ran(monkeypatch)
    layer, x = convselect.SelectedConv2d(8, 8, 3, padding=1), torch.randn(2, 8, 12, 12)
    plain = nn.Conv2d(8, 8, 3, padding=1)

    def step(call):
        seen.clear()
        call(x.clone().requires_grad_()).sum().backward()
        return {name for name in seen if name != "native"}

    assert step(layer) == {"winograd4"}
    with use(disable="winograd"):
        assert step(layer) == set()
        with convselect.enabled():
            assert step(plain) == set()
    assert step(layer) == {"winograd4"}
    with convselect.enabled():
        assert step(plain) == {"winograd4"}
    with convselect.enabled(disable="winograd4"):
        assert step(plain) == set()
    before = settings.defaults()
    try:
        settings.set_defaults(disable="winograd")
        assert step(layer) == set()
        torch._dynamo.reset()
        assert step(torch.compile(layer, backend="aot_eager", fullgraph=True)) == set()
    finally:
        settings.set_default_settings(before)
    torch._dynamo.reset()
    assert step(torch.compile(layer, backend="aot_eager", fullgraph=True)) == {"winograd4"}
    torch._dynamo.reset()


def test_it_holds_for_choices_that_are_stored():
    known = {"store": lambda problem: Choice("winograd4", "store")}
    with use(disable=()) as free, use(disable="winograd") as used:
        assert choose(CONV3, BY_NAME, free, **known).algorithm == "winograd4"
        assert choose(CONV3, BY_NAME, used, **known).algorithm == "native"


def test_frozen_models_leave_it_out():
    model = nn.Sequential(
        nn.Conv2d(16, 64, 1), nn.ReLU6(), nn.Conv2d(64, 64, 3, padding=1, groups=64), nn.ReLU6(), nn.Conv2d(64, 16, 1),
        nn.Conv2d(16, 16, 3, padding=1),
    ).eval()  # fmt: skip
    x = torch.randn(1, 16, 20, 20).contiguous(memory_format=torch.channels_last)
    from convselect.freeze import conv

    considered: list[str] = []
    candidates = conv.FrozenConv.candidates

    def note(self, *arguments):
        found = candidates(self, *arguments)
        considered.extend(candidate.name for candidate in found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv.FrozenConv, "candidates", note)
        convselect.freeze(model, x)
        everything = set(considered)
        considered.clear()
        with use(disable="direct,depthwise,winograd,im2col_gemm,grouped"):
            report = convselect.summary(convselect.freeze(model, x))
    assert {"direct", "depthwise", "gemm"} <= everything or BY_NAME["direct"].why_not(CONV3) is not None
    assert set(considered) <= {"native", "onednn_packed"}
    assert {name for row in report.inputs for name in row.chosen.values()} <= {"native", "onednn_packed"}


def test_the_environment_variable():
    code = (
        "import torch, convselect; from convselect.explain import explain_problem; "
        "from convselect.base.problem import conv_problem; "
        "(row,) = explain_problem(conv_problem(2, 8, 12, 12, 8, 3, 3, padding=1)); "
        "print(sorted(n for n, why in row.why_not.items() if ' is disabled (' in why))"
    )
    env = {**os.environ, "CONVSELECT_DISABLE": "fft, winograd4,grouped"}
    out = fresh.run(["-c", code], env=env, check=True)
    # `grouped` does not apply here, and that is said first.
    assert out.stdout.strip() == "['fft', 'fft_tiled', 'winograd4']"


# ---- precision ------------------------------------------------------------------------------------------------------

# What `use` promises in float32: relative L2 error, and a multiple of native's, or 1e-6 if that is more.
PROMISED = {"exact": (2.5e-6, 8), "native": (3e-6, 20), "fast": (2e-5, 100)}
REAL = (
    conv_problem(1, 64, 28, 28, 64, 3, 3, padding=1), conv_problem(2, 128, 14, 14, 128, 3, 3, padding=1),
    conv_problem(1, 256, 14, 14, 256, 3, 3, padding=1), conv_problem(1, 512, 7, 7, 512, 3, 3, padding=1),
    conv_problem(1, 64, 28, 28, 128, 1, 1), conv_problem(1, 48, 27, 27, 64, 5, 5, padding=2),
    conv_problem(1, 32, 30, 30, 32, 7, 7, padding=3), conv_problem(1, 64, 35, 35, 48, 1, 7, padding=(0, 3)),
    conv_problem(1, 64, 35, 35, 48, 3, 1, padding=(1, 0)), conv_problem(4, 32, 32, 32, 32, 3, 3, padding=1),
    conv_problem(1, 96, 28, 28, 96, 7, 7, padding=3, groups=96), conv_problem(1, 16, 40, 40, 16, 13, 13, padding=6),
    conv_problem(1, 64, 28, 28, 64, 3, 3, padding=1, groups=8),
    conv_problem(2, 3, 64, 64, 32, 7, 7, stride=2, padding=3),
)  # fmt: skip
VARIED = (*PROBLEMS.values(), *REAL)


@functools.cache
def error_of(name: str, problem: ConvProblem) -> float:
    """The same under every precision, which only says what may run."""
    a, b = operands_of(problem, *random_operands(problem))
    return relative_error(BY_NAME[name].run(a, b, problem), exact(problem))


@functools.lru_cache(maxsize=1)
def exact(problem: ConvProblem) -> torch.Tensor:
    a, b = operands_of(problem, *random_operands(problem))
    return BY_NAME["reference"].run(a.double(), b.double(), problem._replace(dtype="float64"))


@pytest.mark.slow
@pytest.mark.parametrize("precision", PROMISED)
@pytest.mark.parametrize("direction", list(Direction))
def test_results_keep_to_what_the_precision_promises(precision, direction):
    bound, multiple = PROMISED[precision]
    if direction == Direction.BACKWARD_WEIGHT:
        bound *= 2  # a sum over the batch and all pixels
    assert len(VARIED) >= 60
    judged: set[str] = set()
    with use(precision=precision, workspace_bytes=2**40) as used:
        for forward in VARIED:
            problem = forward.with_direction(direction)
            native = error_of("native", problem)
            for algorithm in ALL:
                if algorithm.name != "native" and refusal(algorithm, problem, used) is None:
                    error = error_of(algorithm.name, problem)
                    assert error <= min(bound, max(multiple * native, 1e-6)), (algorithm.name, problem, error, native)
                    judged.add(algorithm.name)
    assert "im2col_gemm" in judged
    assert judged.isdisjoint({"winograd2", "winograd4"}) == (precision == "exact")


def test_16_bit_results_are_rounded_once_under_every_precision():
    with use(precision="exact", workspace_bytes=2**40) as used:
        for forward in VARIED[::3]:
            problem = forward._replace(dtype="bfloat16")
            a, b = operands_of(problem, *random_operands(problem))
            exact = BY_NAME["reference"].run(a.double(), b.double(), problem._replace(dtype="float64"))
            for algorithm in ALL:
                if not algorithm.name.startswith("native") and refusal(algorithm, problem, used) is None:
                    assert relative_error(algorithm.run(a, b, problem), exact) <= 2.0**-8.5, (algorithm.name, problem)


def test_precision_is_applied_after_ranking_and_explained(monkeypatch):
    use_fake(monkeypatch, "winograd4", "im2col_gemm")
    for precision, taken in (("exact", "im2col_gemm"), ("native", "winograd4"), ("fast", "winograd4")):
        with use(precision=precision):
            (row,) = explain_problem(CONV3)
        assert row.algorithm == taken
        if precision == "exact":
            assert row.why_not["winograd4"].startswith("winograd4 is a transform")


# ---- determinism ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def busy():
    """Another thread that competes for cores and caches, and for PyTorch's thread pool."""
    stop = threading.Event()

    def work():
        a = torch.randn(96, 96)
        while not stop.is_set():
            a = (a @ a).clamp(-1, 1)

    competitor = threading.Thread(target=work)
    competitor.start()
    try:
        yield
    finally:
        stop.set()
        competitor.join()


DETERMINISM = (
    *(PROBLEMS[name] for name in ("3x3", "1x1", "stride 2", "groups 2", "depthwise 5x5 stride 2", "whole image")),
    *(PROBLEMS[name] for name in ("5x5", "1xN", "groups, few channels", "31x31")),
    conv_problem(2, 64, 28, 28, 48, 3, 3, padding=1), conv_problem(2, 48, 30, 30, 48, 7, 7, padding=3, groups=48),
    conv_problem(2, 64, 20, 20, 64, 3, 3, padding=1, groups=16), conv_problem(2, 128, 20, 20, 96, 1, 1),
    conv_problem(1, 24, 24, 24, 24, 7, 7, padding=3),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("algorithm", [a for a in ALL if "cpu" in a.devices and a.automatic], ids=lambda a: a.name)
def test_what_counts_as_deterministic_gives_the_same_bits_again(algorithm, threads):
    torch.set_num_threads(threads)
    tried = 0
    with busy():
        for forward in DETERMINISM:
            for direction in Direction:
                for dtype in ("float32", "bfloat16") if forward.H < 20 else ("float32",):
                    problem = forward._replace(direction=direction, threads=threads, dtype=dtype)
                    if algorithm.why_not(problem) is not None or not algorithm.deterministic(problem):
                        continue
                    a, b = operands_of(problem, *random_operands(problem))
                    first = algorithm.run(a, b, problem)
                    for _ in range(4):
                        assert torch.equal(algorithm.run(a.clone(), b.clone(), problem), first), problem
                    tried += 1
    assert tried or all(algorithm.why_not(p) is not None for p in DETERMINISM)


def test_what_is_not_deterministic_is_refused_where_that_is_asked_for(monkeypatch):
    use_fake(monkeypatch, "winograd4", "im2col_gemm")
    seen = ran(monkeypatch)
    monkeypatch.setattr(BY_NAME["winograd4"], "deterministic", lambda problem: False)
    layer, x = convselect.SelectedConv2d(8, 8, 3, padding=1), torch.randn(2, 8, 12, 12)
    layer(x)
    assert seen == ["winograd4"]
    torch.use_deterministic_algorithms(True)
    try:
        layer(x)
        assert seen == ["winograd4", "im2col_gemm"]
        (row,) = explain_problem(CONV3._replace(deterministic=True))
    finally:
        torch.use_deterministic_algorithms(False)
    assert row.why_not["winograd4"].endswith("may give other bits in every run; deterministic results are asked for.")
    layer(x)
    assert seen[-1] == "winograd4"


def test_cudnns_own_flag_asks_for_it_on_gpus(monkeypatch):
    from convselect.aten.arguments import problem_of

    class OnGpu:
        """A tensor as far as a problem is made of it."""

        def __init__(self, t):
            self.shape, self.dtype, self.is_cpu, self.is_cuda = t.shape, t.dtype, False, True
            self.device = types.SimpleNamespace(type="cuda")
            self.is_contiguous, self.dim, self.stride = t.is_contiguous, t.dim, t.stride

    x, weight = OnGpu(torch.empty(1, 4, 8, 8)), OnGpu(torch.empty(4, 4, 3, 3))
    assert not problem_of(x, weight, (1, 0, 1, 1)).deterministic
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        assert problem_of(x, weight, (1, 0, 1, 1)).deterministic
        assert not problem_of(torch.empty(1, 4, 8, 8), torch.empty(4, 4, 3, 3), (1, 0, 1, 1)).deterministic


# ---- failures -------------------------------------------------------------------------------------------------------


class _Failing:
    """winograd4, which raises while `error` is set."""

    def __init__(self, monkeypatch) -> None:
        self.error: Exception | None = None
        self.calls = 0
        run = BY_NAME["winograd4"].run_checked

        def run_checked(*arguments):
            self.calls += 1
            if self.error is not None:
                raise self.error
            return run(*arguments)

        monkeypatch.setattr(BY_NAME["winograd4"], "run_checked", run_checked)
        use_fake(monkeypatch, "winograd4")


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    MemoryError("winograd: no scratch memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to ..."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["torch", "python", "cpu allocator", "cublas"])
def test_out_of_memory_is_natives_turn_and_passes(monkeypatch, error):
    failing = _Failing(monkeypatch)
    layer, x = convselect.SelectedConv2d(8, 8, 3, padding=1), torch.randn(2, 8, 12, 12)
    with use("native"):
        want = layer(x)
    failing.error = error
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2 * execute.REST_CALLS):
            torch.testing.assert_close(layer(x), want)
    assert [str(w.message).split(" for ")[0] for w in caught] == ["convselect: winograd4 found too little memory"]
    assert failing.calls == execute.FAILURES_IN_A_ROW + 1  # and once more after a rest
    failing.error = None
    for _ in range(execute.REST_CALLS + 1):
        layer(x)
    assert failing.calls > execute.FAILURES_IN_A_ROW + 1
    assert not execute.failures  # it is back
    calls = failing.calls
    layer(x)
    assert failing.calls == calls + 1


def test_other_failures_rest_too_and_single_ones_do_not(monkeypatch):
    failing = _Failing(monkeypatch)
    layer, x = convselect.SelectedConv2d(8, 8, 3, padding=1), torch.randn(2, 8, 12, 12)
    with pytest.warns(convselect.ConvselectWarning, match=r"winograd4 failed on .*broken.*; native runs instead"):
        for n in range(20):
            failing.error = ValueError("broken") if n % 3 else None  # never three in a row
            layer(x)
    assert failing.calls == 20
    failing.error = ValueError("broken")
    for _ in range(20):
        layer(x)
    # Two failures were pending: another makes it rest.
    assert failing.calls == 22
    other = torch.randn(2, 8, 13, 12)  # another problem has failures of its own
    for _ in range(20):
        layer(other)
    assert failing.calls == 25


@pytest.mark.compile
def test_backward_passes_and_graphs_survive_it(monkeypatch):
    failing = _Failing(monkeypatch)
    failing.error = MemoryError()
    layer, x = convselect.SelectedConv2d(8, 8, 3, padding=1), torch.randn(2, 8, 12, 12)
    stock = nn.Conv2d(8, 8, 3, padding=1)
    stock.load_state_dict(layer.state_dict())
    torch._dynamo.reset()
    with pytest.warns(convselect.ConvselectWarning, match="too little memory"):
        for module in (layer, torch.compile(layer, backend="aot_eager")):
            layer.zero_grad(), stock.zero_grad()
            module(x).square().sum().backward()
            stock(x).square().sum().backward()
            torch.testing.assert_close(layer.weight.grad, stock.weight.grad)
    torch._dynamo.reset()
    assert failing.calls > 2


def test_a_forced_algorithm_raises_every_time(monkeypatch):
    failing = _Failing(monkeypatch)
    failing.error = MemoryError("no scratch")
    layer, x = convselect.SelectedConv2d(8, 8, 3, padding=1), torch.randn(2, 8, 12, 12)
    with use("winograd4"):
        for _ in range(2 * execute.FAILURES_IN_A_ROW):
            with pytest.raises(MemoryError, match="no scratch"):
                layer(x)
    assert not execute.failures


def test_what_is_remembered_of_failures_is_bounded(monkeypatch):
    monkeypatch.setattr(execute, "_MOST_FAILING", 5)
    with pytest.warns(convselect.ConvselectWarning):
        for H in range(1, 40):
            execute._failed("winograd4", CONV3._replace(H=H), ValueError())
    assert 0 < len(execute.failures) <= 5


def test_interrupts_pass():
    def interrupted(*_):
        raise KeyboardInterrupt

    x, weight = torch.randn(2, 8, 12, 12), torch.randn(8, 8, 3, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BY_NAME["winograd4"], "run_checked", interrupted)
        with pytest.raises(KeyboardInterrupt):
            execute.execute(Choice("winograd4", "model"), x, weight, CONV3, (1152, 144, 12, 1))
    assert not execute.failures
