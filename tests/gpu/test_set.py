"""The set by its name."""

import subprocess
import sys

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import decode_worker.kernels.sets
from decode_worker.engine.engine import device_of
try:
    device_of("triton")
except ValueError as error:
    print(error)
"""


def test_without_triton_everything_else_works_and_choosing_it_is_one_line():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, timeout=60)
    assert done.stdout == "kernels='triton' needs Triton, which is not installed: pip install 'headgate[gpu]'\n", (
        done.stderr
    )
