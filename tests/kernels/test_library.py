"""The C kernels as Python calls them: loading, arguments, threads, memory, forks."""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import _guarded
import fresh
import pytest
import torch
from places import TESTS
from problems import PROBLEMS, operands_of, random_operands, relative_error
from tolerances import FORWARD, WEIGHT_GRADIENT_FACTOR

from convselect.base import warnings as warnings_of
from convselect.base.problem import Direction, conv_problem, layout_of
from convselect.base.warnings import ConvselectWarning
from convselect.freeze import attention, pointwise, pooling, reduce
from convselect.kernels import _huge_pages, _library, _spot_check
from convselect.kernels.pool import ALL
from convselect.kernels.reference import Reference

KERNELS = [(name, before) for name, tiles in _guarded.kernels().items() for before in tiles]
SLOTS = int(re.search(r"CS_SLOTS = (\d+)", (_guarded.CSRC / "scratch.h").read_text()).group(1))
KEPT_BYTES = 64 << 20
# Large enough for threads to share, one for every kernel's kind.
TYPICAL = (
    conv_problem(2, 32, 40, 40, 32, 3, 3, padding=1),
    conv_problem(2, 64, 40, 40, 64, 3, 3, padding=1, groups=64),
    conv_problem(2, 64, 28, 28, 64, 3, 3, padding=1, groups=16),
    conv_problem(2, 3, 64, 64, 32, 7, 7, padding=3, stride=2),
    conv_problem(2, 64, 28, 28, 64, 1, 1),
    conv_problem(2, 32, 4, 400, 32, 1, 9, padding=(0, 4)),
)
needs_library = pytest.mark.skipif(not _library.available(), reason="the C library is not installed")
every_kernel = pytest.mark.parametrize(("name", "before"), KERNELS, ids=lambda v: str(v))


def python(code: str, timeout_s: float = 120, **environment: str) -> str:
    """Run code in a fresh process that finds the test helpers; what it prints."""
    arguments = ["-c", textwrap.dedent(code)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    if "OMP_THREAD_LIMIT" in environment:  # read when torch is imported
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, cwd=TESTS, capture_output=True, text=True, timeout=timeout_s
        )
    else:
        done = fresh.run(arguments, env=environment, cwd=TESTS, timeout=timeout_s)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def cases(name: str, before: tuple[int, ...]):
    """(problem, operands) of every direction that the kernel computes, for the first typical problem that it takes."""
    found = []
    for typical in TYPICAL:
        for direction in Direction:
            p = typical._replace(direction=direction)
            operands = operands_of(p, *random_operands(p))
            try:
                _library.call(name, *operands, p, before)
            except NotImplementedError:
                continue
            found.append((p, operands))
        if found:
            return found
    raise AssertionError(f"{name}{before or ''} takes no typical problem")


def check(got: torch.Tensor, name: str, before: tuple[int, ...], p, operands) -> None:
    want = Reference().run(*(t.double() for t in operands), p._replace(dtype="float64"))
    bound = FORWARD[p.dtype, _guarded.grade(name, before, p)]
    assert relative_error(got, want) <= bound * (
        WEIGHT_GRADIENT_FACTOR if p.direction == Direction.BACKWARD_WEIGHT else 1
    )


# ---- loading ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "available", "warns"),
    [
        ({"CONVSELECT_NO_NATIVE": "1"}, False, 0),
        ({"CONVSELECT_NO_NATIVE": "0"}, True, 0),
        ({"CONVSELECT_LIBRARY": "/nowhere/library.so"}, False, 1),
        ({"CONVSELECT_LIBRARY": __file__}, False, 1),  # not a library
        ({"CONVSELECT_LIBRARY": ctypes.util.find_library("c") or "libc.so.6"}, False, 1),  # somebody else's
        ({"CONVSELECT_LIBRARY": ""}, True, 0),
    ],
)
@needs_library
def test_what_is_loaded(environment, available, warns):
    code = (
        "import warnings; from convselect.kernels import _library\n"
        "with warnings.catch_warnings(record=True) as given: print(_library.available(), len(given))"
    )
    assert python(code, **environment).split() == [str(available), str(warns)]


@needs_library
def test_a_library_of_another_version_is_not_used_and_said_so(monkeypatch):
    _library.library.cache_clear()
    monkeypatch.setattr(_library, "ABI", _library.ABI + 1)
    monkeypatch.setattr(warnings_of, "_given", set())
    try:
        with pytest.warns(ConvselectWarning, match="of another version"):
            assert not _library.available()
    finally:
        _library.library.cache_clear()


def test_a_library_that_was_not_built_is_no_news(monkeypatch, recwarn):
    _library.library.cache_clear()
    monkeypatch.delenv("CONVSELECT_LIBRARY", raising=False)
    monkeypatch.setattr(_library.os.path, "exists", lambda path: False)
    try:
        assert not _library.available()
        assert not recwarn
    finally:
        _library.library.cache_clear()


@needs_library
def test_importing_loads_nothing():
    code = "import convselect; from convselect.kernels import _library; print(_library.library.cache_info().currsize)"
    assert python(code).strip() == "0"


@pytest.mark.parametrize(
    ("capability", "best", "isa"),
    [("DEFAULT", 2, 0), ("NO AVX", 2, 0), ("AVX2", 2, 1), ("AVX2", 0, 0), ("AVX512", 2, 2), ("AVX512", 1, 1)],
)
def test_no_instruction_set_that_torch_was_told_not_to_use(capability, best, isa, monkeypatch):
    class Loaded:
        def cs_best_isa(self) -> int:
            return best

    monkeypatch.setattr(_library, "library", Loaded)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert _library.isa.__wrapped__() == isa


@needs_library
def test_an_unknown_instruction_set_is_declined():
    p = TYPICAL[0]
    x, weight, _ = random_operands(p)
    for level in (-1, _library.library().cs_best_isa() + 1, 99):
        with pytest.raises(NotImplementedError):
            _library.call(*KERNELS[0][:1], x, weight, p, KERNELS[0][1], isa_level=level)


def test_structs_are_as_the_header_has_them():
    header = re.sub(r"/\*.*?\*/", "", (_guarded.CSRC / "convselect.h").read_text(), flags=re.DOTALL)
    structs = {
        "cs_conv": _library.Conv, "cs_volume": _library.Volume, "cs_epilogue": _library.Epilogue,
        "cs_block": _library.Block, "cs_repetition": _library.Repetition, "cs_layer": _library.Layer,
        "cs_input": _library.Input, "cs_spot": _spot_check.Spot,
        "cs_found": _spot_check.Found, "cs_instruction": pointwise._Instruction,
        "cs_pointwise_program": pointwise._Program, "cs_reduction": reduce._Reduction, "cs_pooling": pooling._Pooling,
        "cs_joining": reduce._Joining, "cs_grouped_norm": reduce._GroupedNorm, "cs_attention": attention._Attention,
    }  # fmt: skip
    for of, struct in structs.items():
        body = re.search(r"typedef struct \{([^}]*)\} " + of, re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)).group(
            1
        )
        fields = []
        kinds = r"cs_conv|int64_t|int32_t|double|const float|float|const int64_t|const cs_instruction|const void|void"
        for kind, names in re.findall(rf"({kinds}) ([^;]+);", body):
            numbers = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "double": ctypes.c_double}
            numbers |= {"float": ctypes.c_float, "cs_conv": _library.Conv}
            size = ctypes.c_void_p if "*" in names else numbers[kind]
            for name in names.split(","):
                plain, *counts = re.findall(r"\w+", name.replace("CS_POINTWISE_DIMS", str(pointwise.DIMS)))
                count = math.prod(map(int, counts))
                fields.append((plain, size * count if counts else size))
        own = [tuple(field) for part in reversed(struct.__mro__) for field in vars(part).get("_fields_", ())]
        assert fields == own
    for name, number in {
        **{f"CS_{name}": getattr(_library, name) for name in ("OK", "NO_MEMORY", "UNSUPPORTED", "NONFINITE")},
        "CS_FORWARD": 0, "CS_BACKWARD_DATA": 1, "CS_BACKWARD_WEIGHT": 2, "CS_F32": 0, "CS_BF16": 1, "CS_F16": 2,
        "CS_F64": 3,
        "CS_CONTIGUOUS": 0, "CS_CHANNELS_LAST": 1, "CS_LINEAR": 0,
        **{f"CS_{name.upper()}": code for name, code in _library.ACTIVATIONS.items() if name},
        **{f"CS_{name.upper()}": code for name, code in pointwise.CODES.items() if name != "pow"},
        "CS_POWER": pointwise.CODES["pow"], "CS_ADD_RELU": pointwise._ADD_RELU, "CS_MUL_ADD": pointwise._MUL_ADD,
    }.items():  # fmt: skip
        assert re.search(rf"\b{name} = {number}\b", header), name
    for name, number in {"ABI": _library.ABI, "POINTWISE_DIMS": pointwise.DIMS, "POINTWISE_INPUTS": pointwise.INPUTS,
                         "POINTWISE_REGISTERS": pointwise.REGISTERS}.items():  # fmt: skip
        assert re.search(rf"#define CS_{name} {number}\b", header), name


@needs_library
def test_a_call_passes_few_frames_of_python():
    p = TYPICAL[0]
    x, weight, _ = random_operands(p)
    arguments = (x, weight, p, None, torch.randn(p.K))
    algorithm = next(a for a in ALL if a.name == "winograd4")
    algorithm.run_checked(*arguments)
    files: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: files.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        algorithm.run_checked(*arguments)
    finally:
        sys.setprofile(before)
    assert len(files) <= 7
    assert {os.path.basename(file) for file in files} == {"_c_algorithm.py", "_library.py"}


# ---- arguments --------------------------------------------------------------------------------------------------

SEEN = conv_problem(2, 3, 5, 6, 4, 3, 3, padding=1)


@pytest.fixture
def seen(monkeypatch):
    """A kernel made of Python that keeps what it is given, and returns `status`."""

    class Seen:
        def __init__(self) -> None:
            self.status = _library.OK
            self.calls: list[tuple[dict[str, int], tuple]] = []

        def __call__(self, conv, *rest):
            fields = {name: getattr(conv._obj, name) for name, _ in _library.Conv._fields_}
            self.calls.append((fields, rest))
            return self.status

    function = Seen()
    monkeypatch.setattr(_library, "_function", lambda name, before: function)
    monkeypatch.setattr(_library, "isa", lambda: 1)
    _library._prepared.cache_clear()
    yield function
    _library._prepared.cache_clear()


@pytest.mark.parametrize("direction", list(Direction), ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed", "offset", "expanded"])
def test_the_struct_describes_the_operands(direction, layout, seen):
    p = SEEN._replace(direction=direction)
    first, second = operands_of(p, *random_operands(p, layout, "channels_last"))
    p = p._replace(layout=layout_of(first))
    out = _library.call("any", first, second, p, leading_ints=(4,))
    ((fields, (m, a, b, c, epilogue)),) = seen.calls
    for name in "NCHWKRSPQ":
        assert fields[name] == getattr(p, name)
    assert (fields["pad_top"], fields["pad_left"], fields["dil_h"], fields["groups"]) == (1, 1, 1, 1)
    assert fields["direction"] == list(Direction).index(direction)
    assert (m, c, epilogue) == (4, out.data_ptr(), None)
    for tensor, address in ((first, a), (second, b)):
        assert (address == tensor.data_ptr()) == (layout_of(tensor) != "strided")
    streamed = _library.LAYOUTS["channels_last" if layout == "channels_last" else "contiguous"]
    names = ["x_layout"] if direction == Direction.BACKWARD_WEIGHT else ["x_layout", "y_layout"]
    assert {fields[name] for name in names} == {streamed}
    assert fields["weight_layout"] == (0 if direction == Direction.BACKWARD_WEIGHT else 1)
    assert out.shape == p.result_shape
    assert out.dtype == torch.float32
    want = "channels_last" if streamed and direction != Direction.BACKWARD_WEIGHT else "contiguous"
    assert layout_of(out) == want


def test_the_number_of_threads_is_that_of_the_call(seen):
    x, weight, _ = random_operands(SEEN)
    for threads in (1, 2, 3, 1):
        torch.set_num_threads(threads)
        _library.call("any", x, weight, SEEN)
    assert [fields["threads"] for fields, _ in seen.calls] == [1, 2, 3, 1]


def test_what_does_not_match_the_problem_never_reaches_a_kernel(seen):
    x, weight, grad_y = random_operands(SEEN)
    small = torch.randn(2, 3, 5, 5)
    for a, b in ((small, weight), (x, weight[:, :2]), (x.double(), weight), (x, weight.bfloat16()), (x, grad_y),
                 (x.to("meta"), weight), (x, weight.to("meta"))):  # fmt: skip
        with pytest.raises(ValueError, match="operands"):
            _library.call("any", a, b, SEEN)
    bias, residual = torch.randn(4), torch.randn(SEEN.y_shape)
    for options in (dict(bias=bias[:3]), dict(bias=bias[None]), dict(residual=residual[:1]),
                    dict(residual=residual.double())):  # fmt: skip
        with pytest.raises(ValueError, match=r"bias|residual"):
            _library.call("any", x, weight, SEEN, **options)
    for direction in (Direction.BACKWARD_DATA, Direction.BACKWARD_WEIGHT):
        p = SEEN._replace(direction=direction)
        with pytest.raises(ValueError, match="forward"):
            _library.call("any", *operands_of(p, x, weight, grad_y), p, activation="relu")
    with pytest.raises(KeyError):
        _library.call("any", x, weight, SEEN, activation="softmax")
    assert not seen.calls


def test_an_epilogue_is_handed_over_as_the_kernel_expects_it(seen):
    x, weight, _ = random_operands(SEEN, "channels_last")
    bias = torch.randn(8)[::2].bfloat16()  # neither float32 nor dense
    residual = torch.randn(SEEN.y_shape)
    read = []
    real, seen_call = _library.Epilogue, type(seen).__call__

    def call(self, conv, a, b, out, epilogue):
        e = epilogue._obj
        assert isinstance(e, real)
        y_shape, layout = SEEN.y_shape, "channels_last"
        read.append((_guarded.at(e.bias, (4,), torch.float32).clone(), e.activation))
        assert torch.equal(_guarded.at(e.residual, y_shape, torch.float32, layout), residual)
        return seen_call(self, conv, a, b, out, epilogue)

    type(seen).__call__ = call
    _library.call("any", x, weight, SEEN, bias=bias, residual=residual, activation="silu")
    ((got_bias, activation),) = read
    assert torch.equal(got_bias, bias.float())
    assert activation == 3


def test_lazy_tensors_are_made_real(seen):
    """A negation that is only a flag, and a zero that has no memory at all."""
    x, weight, _ = random_operands(SEEN)
    read = []

    def call(self, conv, a, b, out, epilogue):
        read.append(_guarded.at(a, SEEN.x_shape, torch.float32).clone())
        return _library.OK

    type(seen).__call__ = call
    _library.call("any", torch._neg_view(x), weight, SEEN)
    _library.call("any", torch._efficientzerotensor(SEEN.x_shape), weight, SEEN)
    assert torch.equal(read[0], -x)
    assert torch.equal(read[1], torch.zeros_like(x))


def test_a_kernel_that_fails_is_an_error(seen):
    x, weight, _ = random_operands(SEEN)
    for status, error in ((_library.NO_MEMORY, MemoryError), (_library.UNSUPPORTED, NotImplementedError)):
        seen.status = status
        with pytest.raises(error, match="any"):
            _library.call("any", x, weight, SEEN)


@needs_library
def test_large_results_are_in_huge_pages_and_small_ones_as_they_are(monkeypatch):
    """Whole pages within the result, before the kernel writes to it."""
    asked = []
    monkeypatch.setattr(_huge_pages, "_madvise", lambda: lambda *arguments: asked.append(arguments) or 0)
    monkeypatch.setattr(_huge_pages, "LARGE_BYTES", 3 * _huge_pages.HUGE_PAGE)
    _library._prepared.cache_clear()
    try:
        for size, times in ((24, 0), (1300, 1)):
            p = conv_problem(1, 1, size, size, 1, 3, 3)
            x, weight, _ = random_operands(p)
            x, weight = x.float(), weight.float()
            out = _library.call("cs_thin", x, weight, p)
            assert len(asked) == times
            assert relative_error(out, Reference().run(x, weight, p)) < 1e-5
        ((start, length, advice),) = asked
        assert start % _huge_pages.HUGE_PAGE == length % _huge_pages.HUGE_PAGE == 0
        assert out.data_ptr() <= start < start + length <= out.data_ptr() + out.nbytes
        assert advice == _huge_pages.MADV_HUGEPAGE
    finally:
        _library._prepared.cache_clear()


def test_a_system_without_such_pages_is_no_error(monkeypatch):
    tensor = torch.empty(_huge_pages.LARGE_BYTES // 4)
    monkeypatch.setattr(_huge_pages, "_madvise", lambda: None)
    _huge_pages.use_huge_pages(tensor)
    monkeypatch.setattr(_huge_pages, "_madvise", lambda: lambda *_: -1)
    _huge_pages.use_huge_pages(tensor)


# ---- threads ----------------------------------------------------------------------------------------------------


@needs_library
@every_kernel
def test_any_number_of_threads_is_right_and_the_same_every_time(name, before, nan_memory):
    for p, operands in cases(name, before):
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            first, *others = (_library.call(name, *operands, p, before) for _ in range(4))
            check(first, name, before, p, operands)
            assert all(torch.equal(first, other) for other in others), f"{p}, {threads} threads"


def digests() -> list[str]:
    """What every kernel computes, asked of two threads and of three."""
    found = []
    for (name, before), threads in itertools.product(KERNELS, (2, 3)):
        torch.set_num_threads(threads)
        for p, operands in cases(name, before):
            result = _library.call(name, *operands, p, before)
            found.append(f"{name} {before} {p} {threads} {hashlib.sha256(result.numpy().tobytes()).hexdigest()}")
    return found


@needs_library
def test_how_many_threads_are_delivered_changes_no_bit():
    """OpenMP may deliver fewer threads than were asked for."""
    code = """
        import json, test_library
        print(json.dumps(test_library.digests()))
    """
    one, two = (json.loads(python(code, OMP_THREAD_LIMIT=limit)) for limit in "12")
    assert one == two == digests()  # here there are as many as are asked for
    assert len(one) >= 2 * len(KERNELS)


@needs_library
@every_kernel
def test_several_python_threads_at_once(name, before):
    """ctypes lets go of the GIL, so these calls do run at once; each has its own scratch memory."""
    found = cases(name, before)
    wants = [_library.call(name, *operands, p, before) for p, operands in found]

    def work(i: int) -> bool:
        torch.set_num_threads(1 + i % 2)
        p, operands = found[i % len(found)]
        want = wants[i % len(found)]
        if i % 2:
            return relative_error(_library.call(name, *operands, p, before), want) < 1e-5
        return all(torch.equal(_library.call(name, *operands, p, before), want) for _ in range(5))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(24)))


# ---- memory -----------------------------------------------------------------------------------------------------


def scratch_bytes() -> int:
    return _library.library().cs_scratch_bytes()


@pytest.mark.slow
@needs_library
@every_kernel
def test_scratch_memory_is_bounded_and_given_back(name, before):
    for typical in TYPICAL:
        p = typical._replace(N=4, H=3 * typical.H, W=3 * typical.W)
        for direction in Direction:
            p = p._replace(direction=direction)
            x, weight, grad_y = torch.ones(p.x_shape), torch.ones(p.weight_shape), torch.ones(p.y_shape)
            try:
                _library.call(name, *operands_of(p, x, weight, grad_y), p, before)
            except NotImplementedError:
                break
            assert 0 <= scratch_bytes() <= SLOTS * KEPT_BYTES
            _library.library().cs_free_scratch()
            assert scratch_bytes() == 0


@needs_library
def test_workspace_covers_scratch_memory():
    """What a kernel takes beyond torch's own allocator is in its algorithm's `workspace_bytes`. Blocks are rounded up
    to 4 KiB, and to 2 MiB if they are larger than an eighth of it."""
    measured = 0
    for algorithm in ALL:
        for listed in (*PROBLEMS.values(), *TYPICAL):
            for direction in Direction:
                p = listed._replace(direction=direction)
                if algorithm.name == "reference" or algorithm.why_not(p) is not None:
                    continue
                _library.library().cs_free_scratch()
                algorithm.run(*operands_of(p, *random_operands(p)), p)
                taken, promised = scratch_bytes(), algorithm.workspace_bytes(p)
                measured += taken > 0
                granularity = 2 << 20 if taken >= 2 << 20 else 4096
                assert taken <= promised + SLOTS * granularity, f"{algorithm.name} {p}"
    assert measured


@needs_library
def test_threads_that_end_leave_no_memory_behind():
    code = """
        import threading, torch, test_library
        from pathlib import Path
        from convselect.kernels import _library

        found = [(name, before, *test_library.cases(name, before)[0]) for name, before in test_library.KERNELS]
        kept = []

        def work(threads):
            torch.set_num_threads(threads)
            for name, before, p, operands in found:
                _library.call(name, *operands, p, before)
            kept.append(test_library.scratch_bytes())

        def run(count):
            for i in range(count):
                thread = threading.Thread(target=work, args=(1 + i % 2,))
                thread.start()
                thread.join()

        resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        alive = lambda: len(list(Path("/proc/self/task").iterdir()))
        run(30)
        before, threads = resident(), alive()
        run(200)
        print(resident() - before, sum(kept[30:]), alive() - threads)
    """
    grown, left_behind, more_threads = map(int, python(code).split())
    assert left_behind > 2**30  # had nothing been freed
    assert grown < left_behind / 10  # what malloc keeps for the next thread comes and goes by 50 MiB
    assert more_threads <= 2


# ---- the process around it --------------------------------------------------------------------------------------


@needs_library
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("threads_before", [1, 2])
def test_a_forked_child_can_go_on_with_one_thread(threads_before):
    """As data loaders do. (With several, a child of a process that used OpenMP hangs, in torch as well.)"""
    code = f"""
        import os, torch, test_library
        from convselect.kernels import _library

        torch.set_num_threads({threads_before})
        found = [(n, b, p, o) for n, b in test_library.KERNELS for p, o in test_library.cases(n, b)]
        torch.set_num_threads(1)
        want = [_library.call(n, *o, p, b) for n, b, p, o in found]
        children = []
        for _ in range(3):
            child = os.fork()
            if child == 0:
                same = all(torch.equal(_library.call(n, *o, p, b), w) for (n, b, p, o), w in zip(found, want))
                os._exit(0 if same else 1)
            children.append(child)
        print([os.waitpid(child, 0)[1] for child in children])
    """
    assert python(code).strip() == "[0, 0, 0]"


@needs_library
def test_denormals_stay():
    """Loading or running a library must not switch them off for the thread, as those linked with -ffast-math do."""
    code = """
        import torch, test_library
        from convselect.kernels import _library

        tiny = torch.full((64,), 1e-39)
        assert bool((tiny * 0.5 > 0).all())
        assert _library.available()
        assert bool((tiny * 0.5 > 0).all()), "loading"
        for name, before in test_library.KERNELS:
            for p, operands in test_library.cases(name, before):
                for threads in (1, 2):
                    torch.set_num_threads(threads)
                    _library.call(name, *operands, p, before)
                    assert bool((tiny * 0.5 > 0).all()) and 1e-310 * 0.5 > 0, name
    """
    python(code)
