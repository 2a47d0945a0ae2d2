"""csrc/core stands alone, and means the same on host and device."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
HEADERS = sorted(path.name for path in (CSRC / "core").iterdir())
KERNELS = Path(__file__).with_name("core.cu")
STANDARD = {"cmath", "cstddef", "cstdint", "emmintrin.h"}
ARCHITECTURES = ("80", "90a")
NVCC_MIN = (12, 8)  # __nv_atomic_load_n
COMPILE_S_MAX = 240


def compiled(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S_MAX)
    assert done.returncode == 0, done.stderr


def included(path: Path) -> set[str]:
    return set(re.findall(r'^\s*#\s*include\s*([<"].+[>"])', path.read_text(), re.MULTILINE))


@pytest.fixture(scope="module")
def nvcc() -> str:
    found = shutil.which("nvcc")
    if found is None:
        pytest.skip("nvcc is not installed: whether csrc/core compiles for a device is not checked")
    told = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60).stdout
    version = re.search(r"release (\d+)\.(\d+)", told)
    assert version is not None, told
    if (int(version[1]), int(version[2])) < NVCC_MIN:
        pytest.skip(f"nvcc {version[0]} is older than {NVCC_MIN[0]}.{NVCC_MIN[1]}, which csrc/core/cell.h needs")
    return found


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_is_whole(header: str) -> None:
    compiled([
        "g++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", "-include", f"core/{header}",
        "-x", "c++", "/dev/null",
    ])  # fmt: skip


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_depends_on_core_alone(header: str) -> None:
    allowed = {f"<{name}>" for name in STANDARD} | {f'"core/{name}"' for name in HEADERS}
    assert included(CSRC / "core" / header) <= allowed


def test_kernels_include_every_header() -> None:
    assert included(KERNELS) == {f'"core/{name}"' for name in HEADERS}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile(nvcc: str, architecture: str, tmp_path: Path) -> None:
    compiled([
        nvcc, "-std=c++20", "--Werror", "all-warnings", f"-I{CSRC}",
        f"-gencode=arch=compute_{architecture},code=sm_{architecture}", "-c", str(KERNELS),
        "-o", str(tmp_path / "core.o"), "--keep", "--keep-dir", str(tmp_path),
    ])  # fmt: skip
    instructions = (tmp_path / "core.ptx").read_text()
    assert "ld.acquire.sys" in instructions, "a cell's sequence is loaded without order"
    assert "st.release.sys" in instructions, "a cell's sequence is stored without order"
