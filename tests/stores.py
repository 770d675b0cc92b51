"""What tests of the store put into one: an environment, problems, rows, decisions, a find-db of MIOpen's."""

from __future__ import annotations

from convselect.base.problem import conv_problem
from convselect.machine.environment import fingerprint
from convselect.measure.rows import Row
from convselect.store.store import Decision

HERE = {"family": "cpu-x86-avx2-c", "device": "a processor", "torch": "2.13.0", "host_flags": {"avx512_bf16": False}}
P1 = conv_problem(1, 8, 9, 9, 8, 3, 3, padding=1)
P2 = conv_problem(2, 8, 9, 9, 8, 1, 1, direction="backward_weight", dtype="bfloat16", layout="channels_last", threads=2)
MARK = fingerprint(HERE)
A = Decision(P1, "native 8B", "winograd4", {"tile": 4, "cut": 12}, "verify", 1.5, 3, 12)
B = Decision(P2, "native 8B", "native", None, "measure", None, 1, 0)
# Written by hand. Forward: 64 channels, 56x56, 3x3, 128 outputs, stride 2; its gradients swap the two images.
LINES = """
64-56-56-3x3-128-28-28-8-1x1-2x2-1x1-0-NCHW-FP32-F=ConvBinWinograd3x3U:0.25,0,miopenConvolutionFwdAlgoWinograd;\
GemmFwdRest:1.5,1806336,miopenConvolutionFwdAlgoGEMM
128-28-28-3x3-64-56-56-8-1x1-2x2-1x1-0-NHWC-NHWC-NHWC-FP16-B=ConvHipImplicitGemmBwd:0.125,0,implicit
128-28-28-3x3-64-56-56-8-1x1-2x2-1x1-0-NCHW-BF16-W=ConvAsmBwdWrW3x3:0.5,64,direct;ConvBad:-0.1,0,direct;ConvWorse:x,0,d
96-14-14-5x5-96-14-14-1-2x2-1x1-1x1-0-NCHW-FP32-F_g96=miopenConvolutionFwdAlgoDirect:ConvOclDirectFwd,0.01,0,<unused>,k
64-56-56-3x3-128-56-56-8-1x1-2x2-1x1-0-NCHW-FP32-F=Gemm:1,0,gemm
32-8-16-16-3x3x3-32-8-16-16-1-1x1x1-1x1x1-1x1x1-0-NCDHW-FP32-F=Gemm3d:1,0,gemm
64-8-8-1x1-64-8-8-1-0x0-1x1-1x1-0-NCHWc-FP32-F=A:1,0,a
64-8-8-1x1-64-8-8-1-0x0-1x1-1x1-0-NHWC-NCHW-NCHW-FP32-F=A:1,0,a
64-8-8-1x1-64-8-8-1-0x0-1x1-1x1-0-NCHW-INT8-F=A:1,0,a
64-8-8-1x1-64-8-8-1-0x0-1x1-1x1-0-NCHW-INT8INT8INT32-F=A:1,0,a
64-8-8-1x1-64-8-8-1-0x0-1x1-1x1-0-NCHW-FP16-F_ciFP8_cwFP8=A:1,0,a
64-8-8-1x1-64-8-8-1-0x0-1x1-1x1-0-NCHW-FP32-F_g5=A:1,0,a
what is this
64-what=A:1,0,a
"""


def rows_of(problem, *names, us=10.0, repeat=0):
    return [
        Row("net", problem, name, 1, "ok", "thread", us + i, us + i + 1, us + i, us + i + 2, us + i + 3, 9, repeat)
        for i, name in enumerate(names)
    ]


def numbered(i):
    return conv_problem(1, 1 + i, 9, 9, 8, 3, 3)
