"""MIOpen's find-db: lines that map onto a problem are kept, others are counted by reason."""

from __future__ import annotations

import pytest
from stores import LINES

from convselect.base.problem import Direction, conv_problem
from convselect.store.find_db import environment_of, parse, read

FORWARD = conv_problem(8, 64, 56, 56, 128, 3, 3, stride=2, padding=1, device="cuda")


def test_what_maps_is_kept_in_the_forward_convention():
    found = parse(LINES.splitlines(), {})
    times = {(row.problem, row.algorithm): row.min_us for row in found.rows}
    nhwc = dict(layout="channels_last", weight_layout="channels_last", dtype="float16")
    depthwise = conv_problem(1, 96, 14, 14, 96, 5, 5, padding=2, groups=96, device="cuda")
    assert times == {
        (FORWARD, "miopen:ConvBinWinograd3x3U"): 250.0,
        (FORWARD, "miopen:GemmFwdRest"): 1500.0,
        (FORWARD._replace(direction=Direction.BACKWARD_DATA, **nhwc), "miopen:ConvHipImplicitGemmBwd"): 125.0,
        (
            FORWARD._replace(direction=Direction.BACKWARD_WEIGHT, dtype="bfloat16"),
            "miopen:ConvAsmBwdWrW3x3",
        ): 500.0,
        (depthwise, "miopen:ConvOclDirectFwd"): 10.0,
    }
    assert found.problems == 4
    assert {row.status for row in found.rows} == {"ok"}
    assert {row.clock for row in found.rows} == {"event"}


def test_what_does_not_map_is_counted_by_reason():
    assert parse(LINES.splitlines(), {}).skipped == {
        "three spatial dimensions": 1,
        "a layout that is not ours": 2,
        "an element type that is not ours": 2,
        "computed in another type than it is stored in": 1,
        "sizes that no convolution has": 1,
        "sizes that do not fit each other (transposed, or rounded otherwise)": 1,
        "a key that cannot be read": 1,
        "not a line of a find-db": 1,
        "a time that is none": 1,
        "a solver without a time": 1,
    }


@pytest.mark.parametrize(
    ("name", "device", "version"),
    [
        ("gfx90a68.HIP.fdb.txt", "gfx90a, 104 compute units", None),
        ("gfx942130.HIP.fdb.txt", "gfx942, 304 compute units", None),
        ("gfx906_60.HIP.2_6_0_b3b9a61c.ufdb.txt", "gfx906, 60 compute units", "2_6_0_b3b9a61c"),
        ("gfx1030_36.OpenCL.fdb.txt", "gfx1030, 36 compute units", None),
        ("gfx90878.HIP.3_2_0.ufdb.txt", "gfx908, 120 compute units", "3_2_0"),
    ],
)
def test_the_file_is_named_after_its_gpu(name, device, version):
    found = environment_of(name)
    assert (found["device"], found["miopen"]) == (device, version)
    assert found["family"] == f"rocm-{device.partition(',')[0]}"


def test_a_file_that_does_not_say_whose_it_is_is_refused(tmp_path):
    path = tmp_path / "times.txt"
    path.write_text(LINES)
    with pytest.raises(ValueError, match="which GPU"):
        read(path)
    named = path.rename(tmp_path / "gfx90a68.HIP.fdb.txt")
    assert len(read(named).rows) == 5
