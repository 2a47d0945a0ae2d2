"""What workers and disks can be made to suffer in tests is not in the module that is shipped."""

from pathlib import Path

from kvstore_service import _native

TRACES = (b"shim", b"RunFaults", b"HeldRuns")


def test_the_shipped_module_knows_no_faults(shim: Path) -> None:
    shipped = Path(_native.__file__).read_bytes()
    assert not any(trace in shipped for trace in TRACES)
    assert TRACES[0] in shim.read_bytes()
    assert not [name for name in dir(_native) if "shim" in name]
    assert not hasattr(_native.DataPlane, "set_faults")
    assert "late" not in _native.WINDOW_KINDS
