"""Lane offsets and the figures that follow from a geometry."""

import numpy as np
import pytest

from decode_worker.window.geometry import WindowGeometry

RESIDENT = np.array([[True, True], [False, True], [False, False]])


def geometry(**changes) -> WindowGeometry:
    values = {
        "layers": 3, "kv_heads": 2, "record_bytes": 512, "label_bytes": 2048, "sink": 4, "k": 80, "slack": 10,
        "tail": 576, "resident": RESIDENT, "resident_places": 1024,
    }  # fmt: skip
    return WindowGeometry(**{**values, **changes})


def test_lanes_do_not_overlap_and_fill_the_slot():
    g = geometry()
    ends = g.offsets.ravel() + g.places.ravel().astype(np.uint64) * np.uint64(512)
    assert g.offsets.ravel()[0] == 0
    assert (g.offsets.ravel()[1:] == ends[:-1]).all()
    assert ends[-1] == g.window_bytes <= g.slot_bytes < g.window_bytes + 4096
    assert (g.windows(8192)[..., 0] == g.offsets + np.uint64(8192)).all()


def test_figures_count_window_labels_and_slot_maps():
    g = geometry()
    offloaded, resident = 3, 3
    assert g.resident_bytes == resident * 1024 * 512
    assert g.window_bytes == g.resident_bytes + offloaded * (4 + 80 + 10 + 576) * 512
    assert g.device_bytes == g.slot_bytes + offloaded * (2048 + 90 * 8)
    assert g.offloaded_bytes(1000) == offloaded * 1000 * 512


def test_impossible_geometries_are_refused():
    for wrong in ({"record_bytes": 100}, {"k": 0}, {"resident": RESIDENT[:2]}):
        with pytest.raises(ValueError, match=r"record_bytes|positive|shape"):
            geometry(**wrong)
