"""What setup.cfg cannot say: a wheel brings the CPU kernels compiled where there is a compiler to do it.

Without one the wheel is pure, and the kernels are compiled at first use. So it is in an editable install too, whose
sources may change.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

LIBRARIES = "ds_sparse/ops/cpu/*.so"


class BuildWithKernels(build_py):
    """Puts the compiled library beside its sources in the folder that is packed."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for of_another_build in Path(self.build_lib).glob(LIBRARIES):
            of_another_build.unlink()
        failure = runpy.run_path("ops/cpu/build.py")["ship"](Path(self.build_lib, LIBRARIES).parent)
        if failure is not None:
            self.warn(f"the CPU kernels are not compiled now but at first use: {failure}")


class WheelOfThisMachine(bdist_wheel):
    """Named after the platform when there is a library inside; every Python 3 takes it, for ctypes loads it."""

    def get_tag(self) -> tuple[str, str, str]:
        self.root_is_pure = not any(Path(self.bdist_dir).glob(LIBRARIES))
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfThisMachine})
