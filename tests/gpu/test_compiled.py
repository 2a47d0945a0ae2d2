"""What the compiler makes of every kernel, for devices that this machine has not."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = ("sm_80", "sm_90")
COMPILE_S = 280
THREE_PROGRAMS = 65536 // (3 * 128) // 8 * 8  # registers of a thread, where three programs of 4 warps share an SM
LLAMA = "bfloat16-4-128"
REGISTERS_MAX = {"attend": THREE_PROGRAMS, "similarity": 128, "select": 128, "delta": 128, "draw": 128}
REGISTERS_OF_OTHERS_MAX = 64
STACK_MAX = {"delta": 8}  # sixteen warps leave it 128 registers, and it wants 129


class Kernel(NamedTuple):
    name: str
    shape: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    ptx: str

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.ptx))


def compile_all(target: str, folder: Path) -> Iterator[Kernel]:
    """In a process of its own: this one may have chosen the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment.setdefault("TRITON_CACHE_DIR", str(ROOT / "build" / "triton"))
    command = [sys.executable, "-m", "decode_worker.gpu.compile", "--ptx", str(folder), target]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=COMPILE_S)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        told = json.loads(line)
        ptx = (folder / told["ptx"]).read_text()
        yield Kernel(told["kernel"], told["shape"], told["registers"], told["stack_bytes"], told["shared_bytes"], ptx)


@pytest.fixture(scope="module", params=TARGETS)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    return list(compile_all(request.param, tmp_path_factory.mktemp(request.param)))


def named(kernels: list[Kernel], name: str) -> list[Kernel]:
    found = [kernel for kernel in kernels if kernel.name == name]
    assert found, f"no kernel {name} among {sorted({kernel.name for kernel in kernels})}"
    return found


@pytest.mark.timeout(300)
def test_registers_and_spills(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        assert kernel.stack_bytes <= STACK_MAX.get(kernel.name, 0), kernel[:5]
        if kernel.shape == LLAMA:
            assert kernel.registers <= REGISTERS_MAX.get(kernel.name, REGISTERS_OF_OTHERS_MAX), kernel[:5]


@pytest.mark.timeout(300)
def test_three_programs_of_attention_share_a_multiprocessor(kernels: list[Kernel]) -> None:
    for kernel in named(kernels, "attend"):
        if not kernel.shape.startswith("float32"):
            assert kernel.registers <= THREE_PROGRAMS, kernel[:5]
            assert kernel.shared_bytes <= 160 * 1024 // 3, kernel[:5]


@pytest.mark.timeout(300)
def test_nothing_is_read_past_coherence(kernels: list[Kernel]) -> None:
    """What a peer writes while a kernel runs is never read through the non-coherent cache."""
    for kernel in kernels:
        assert kernel.count(r"ld\.global[a-z0-9.]*\.nc") == 0, kernel[:5]


@pytest.mark.timeout(300)
def test_attention_reads_records_in_words_of_16_bytes(kernels: list[Kernel]) -> None:
    for kernel in named(kernels, "attend"):
        assert kernel.count(r"cp\.async\.cg\.shared\.global [^;]*, 0x10\b") >= 4, kernel[:5]
        assert kernel.count(r"ld\.global[a-z0-9.]*\.b16") == 0, kernel[:5]
        assert kernel.count(r"cp\.async\.ca\.shared\.global [^;]*, 0x8\b") == 0, kernel[:5]
        assert kernel.count(r"cp\.async\.wait_group\s+[1-9]") > 0, f"no look is under way meanwhile: {kernel[:5]}"


@pytest.mark.timeout(300)
def test_attention_ends_a_part_before_it_counts_it(kernels: list[Kernel]) -> None:
    for kernel in named(kernels, "attend"):
        (counted,) = re.finditer(r"atom\.global\.(gpu\.acq_rel|acq_rel\.gpu)\.add", kernel.ptx)
        before = kernel.ptx[: counted.start()]
        assert before.rfind("bar.sync") > before.rfind("st.global") > 0, kernel[:5]
        assert kernel.count(r"ld\.global\.cg") > 0, kernel[:5]


@pytest.mark.timeout(300)
def test_records_are_pulled_and_written_in_wide_words(kernels: list[Kernel]) -> None:
    for kernel in named(kernels, "gather"):
        assert kernel.count(r"ld\.global\.v4\.b32") > 0, kernel[:5]
        assert kernel.count(r"st\.global\.v4\.b32") > 0, kernel[:5]
    for kernel in named(kernels, "append"):
        assert kernel.count(r"st\.global\.(b8|b16)\b") == 0, kernel[:5]
    for kernel in named(kernels, "arrive"):
        assert kernel.count(r"st\.global\.b16\b") == 0, kernel[:5]


@pytest.mark.timeout(300)
def test_what_was_read_is_released_behind_the_last_read_and_beside_no_poison(kernels: list[Kernel]) -> None:
    pulls = [kernel for kernel in named(kernels, "gather") if kernel.count(r"st\.release\.sys")]
    assert len(pulls) == len({kernel.shape for kernel in pulls}) == len({k.shape for k in named(kernels, "gather")})
    for kernel in pulls:
        assert kernel.count(r"ld\.global\.v4\.b32") > 0, kernel[:5]
        (released,) = re.finditer(r"st\.release\.sys\.global\.b64", kernel.ptx)
        before = kernel.ptx[: released.start()]
        (counted,) = re.finditer(r"atom\.global\.(sys\.acq_rel|acq_rel\.sys)\.add", before)
        (poison,) = re.finditer(r"ld\.acquire\.sys\.global\.b64", before)
        assert before[: counted.start()].rfind("bar.") > before.rfind("ld.global.v4"), "read before it counts itself"
        assert "bar." in before[counted.start() : poison.start()], "and the poison after the others"
        assert "bar." in before[poison.start() :]


@pytest.mark.timeout(300)
def test_a_wait_acquires_and_a_poisoning_releases_at_system_scope(kernels: list[Kernel]) -> None:
    for kernel in named(kernels, "await_ticket") + named(kernels, "arrive"):
        assert kernel.count(r"ld\.acquire\.sys\.global\.b64") >= 3, "two poison words, and the cells"
        assert kernel.count(r"st\.release\.sys\.global\.b64|fence\.acq_rel\.sys;\s*st\.") >= 1
        assert kernel.count(r"%globaltimer") >= 2
        assert kernel.count(r"nanosleep") >= 1
        assert kernel.count(r"(atom|red)[a-z0-9._]*\.sys") == 0, "the peer's mapping is read-only: polling never writes"


@pytest.mark.timeout(300)
def test_threads_that_wait_branch_on_what_all_of_them_have_seen(kernels: list[Kernel]) -> None:
    """Others would leave some of them alone at the next exchange, which is one of the whole warp."""
    for kernel in named(kernels, "await_ticket") + named(kernels, "arrive") + named(kernels, "ask"):
        polled = kernel.ptx[kernel.ptx.index("ld.acquire.sys") :]
        assert re.search(r"\b(bra|(?:shfl|redux)\.sync)\b", polled)[1] != "bra", kernel[:5]


@pytest.mark.timeout(300)
def test_who_waits_for_another_program_acquires_what_that_one_releases(kernels: list[Kernel]) -> None:
    for kernel in named(kernels, "select") + named(kernels, "arrive"):
        looks = kernel.count(r"(ld|atom)\.global\.(gpu\.acquire|acquire\.gpu)\.")
        assert looks == 2, f"the first look and the one of the loop: {kernel[:5]}"
        (counted,) = re.finditer(r"atom\.global\.(gpu\.acq_rel|acq_rel\.gpu)\.add\.u32", kernel.ptx)
        before = kernel.ptx[: counted.start()]
        assert before.rfind("bar.") > before.rfind("st.global") > 0, kernel[:5]


@pytest.mark.timeout(300)
def test_a_probe_waits_as_a_step_does(kernels: list[Kernel]) -> None:
    for kernel in named(kernels, "ask"):
        assert kernel.count(r"ld\.acquire\.sys\.global\.b64") >= 3, "two poison words, and the cell"
        posted = kernel.ptx.find("st.release.sys.global.b64")
        before = kernel.ptx[:posted]
        assert before.rfind("bar") > before.rfind("st.global") > 0, "described before it"
        assert kernel.count(r"%globaltimer") >= 2
    assert named(kernels, "compare")


@pytest.mark.timeout(300)
def test_a_post_acquires_its_credit_and_releases_its_ticket_at_system_scope(kernels: list[Kernel]) -> None:
    assert any(kernel.count(r"ld\.acquire\.sys\.global\.b64") >= 3 for kernel in named(kernels, "delta"))
    (kernel,) = named(kernels, "post")
    (released,) = re.finditer(r"st\.release\.sys\.global\.b64", kernel.ptx)
    before = kernel.ptx[: released.start()]
    assert before.rfind("bar.sync") > before.rfind("st.global") > 0, "described before it"
    (counted,) = re.finditer(r"atom\.global\.(sys\.acq_rel|acq_rel\.sys)\.add", before)
    assert before.find("bar.sync") < counted.start(), "each program's pairs before it counts itself"


@pytest.mark.timeout(300)
def test_a_step_s_number_is_released_at_system_scope_behind_what_its_rows_tell(kernels: list[Kernel]) -> None:
    (kernel,) = named(kernels, "advance")
    (released,) = re.finditer(r"st\.release\.sys\.global\.b64", kernel.ptx)
    before = kernel.ptx[: released.start()]
    assert before.rfind("bar.sync") > before.rfind("st.global") > 0, "the step's words before it"
    (counted,) = re.finditer(r"atom\.global\.(sys\.acq_rel|acq_rel\.sys)\.add", before)
    assert before.rfind("bar.", 0, counted.start()) > before.rfind("st.global", 0, counted.start()) > 0, "and the rows'"


@pytest.mark.timeout(300)
def test_tokens_are_weighed_in_double_precision(kernels: list[Kernel]) -> None:
    (kernel,) = named(kernels, "weigh")
    assert kernel.count(r"fma\.rn\.f64") > 0
    assert kernel.count(r"ex2\.approx") == 0
