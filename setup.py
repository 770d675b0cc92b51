"""Only what pyproject.toml cannot say: the C kernels, one library that is called through ctypes.

`optional`: without a C compiler, or with one that lacks OpenMP, the package installs without it and every algorithm
computes with PyTorch's operations. No Python or torch header is included, so none needs to be installed.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

CSRC = Path("convselect/kernels/csrc")
# Not -ffast-math: a library linked with it makes the loading thread flush denormals. -fno-math-errno and
# -fno-trapping-math only drop errno and floating-point exception flags, which nobody reads. -fno-wrapv and -g0 undo
# what Python adds for itself: other loops than those measured, and a third more time for compiling.
FLAGS = [
    "-std=gnu11", "-O3", "-g0", "-fno-wrapv", "-fopenmp", "-fvisibility=hidden",
    "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi",
    "-Werror=implicit-function-declaration",  # a library that cannot be loaded is as good as none, and says nothing
]  # fmt: skip
# Added to the above: `CSRC_CFLAGS=-Og` compiles in a quarter of the time what nobody will measure.
MORE = os.environ.get("CSRC_CFLAGS", "").split()


class BuildLibrary(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        """`_csrc.so`: the library is nothing to a Python version, so its name has none."""
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Sources are compiled side by side: three of them are the same kernels for three instruction sets."""
        compile_in_order = self.compiler.compile

        def compile_each(sources: list[str], **options: object) -> list[str]:
            with ThreadPoolExecutor() as pool:
                objects = pool.map(lambda source: compile_in_order([source], **options), sources)
                return [name for names in objects for name in names]

        self.compiler.compile = compile_each
        super().build_extension(ext)


class TagByPlatform(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """py3-none-PLATFORM: the library is called through ctypes. Without it there is only Python: py3-none-any."""
        platform = super().get_tag()[2]
        built = any(Path(self.bdist_dir).rglob("_csrc.so"))
        return "py3", "none", platform if built else "any"


setup(
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": TagByPlatform},
    ext_modules=[
        Extension(
            "convselect.kernels._csrc",
            sources=sorted(str(path) for path in CSRC.glob("*.c")),
            depends=sorted(str(path) for pattern in ("*.h", "*.inc") for path in CSRC.glob(pattern)),
            extra_compile_args=[*FLAGS, *MORE],
            extra_link_args=["-fopenmp"],
            optional=True,
        )
    ],
)
