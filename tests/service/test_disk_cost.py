"""What a read costs the disk: measured, written by hand, or taken for an ordinary one, and always shown."""

import errno
from pathlib import Path

import pytest

from kvstore_service._native import DISK_COST
from kvstore_service.client import AdminClient
from kvstore_service.client.private import PrivateDaemon
from kvstore_service.daemon.config import ConfigError, load
from kvstore_service.daemon.disk.cost import OFF, DiskCost
from tests.support import shim_build


def test_a_cost_is_written_by_hand_measured_or_off() -> None:
    assert load([], {}).disk_cost is None
    assert load(["--disk-cost=12.5,0.4,2"], {}).disk_cost == (12.5, 0.4, 2.0)
    assert load([], {"KVSTORE_DISK_COST": "off"}).disk_cost == OFF
    assert load(["--disk-cost=12.5,0.4,2"], {}).values()["disk_cost"] == "12.5,0.4,2"
    for wrong in ("12", "1,2,3,4", "a,b,c", "-1,0,0"):
        with pytest.raises(ConfigError, match="disk_cost"):
            load([f"--disk-cost={wrong}"], {})


def test_a_disk_that_cannot_be_measured_is_taken_for_an_ordinary_one(tmp_path: Path) -> None:
    cost = DiskCost.of(None, tmp_path / "gone")
    assert cost.us == DISK_COST
    assert "default" in str(cost)
    assert "No such file" in str(cost)
    assert str(DiskCost.of(OFF, tmp_path)).endswith("reads through 0 blocks (off)")
    assert DiskCost.of((15.0, 0.4, 2.5), tmp_path).origin == "configured"


@pytest.mark.parametrize(
    ("site", "number", "code"),
    [
        ("probe.open", errno.EOPNOTSUPP, "UNAVAILABLE"),
        ("probe.write", errno.ENOSPC, "RESOURCE_EXHAUSTED"),
        ("probe.read", errno.EIO, "UNAVAILABLE"),
    ],
)
def test_a_probe_that_fails_says_why_and_leaves_nothing(tmp_path: Path, site: str, number: int, code: str) -> None:
    native = shim_build.native()
    native.io_shim_set([(site, "fail", 1, 1, number)])
    try:
        with pytest.raises(native.NativeError) as error:
            native.measure_disk(str(tmp_path))
    finally:
        native.io_shim_set([])
    assert error.value.code == code
    assert list(tmp_path.iterdir()) == []


def test_the_status_shows_it(tmp_path: Path) -> None:
    with (
        PrivateDaemon(tmp_path / "data", "8MiB", options=("--disk-cost=15,0.4,2.5",)) as daemon,
        AdminClient.connect(daemon.socket, daemon.broker) as admin,
    ):
        shown = admin.get_status().disk_cost
    assert shown == "15.0 us + 0.40 a KiB + 2.5 a piece: reads through 7 blocks (configured)"
