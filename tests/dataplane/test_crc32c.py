import numpy as np
import pytest

from kvstore_service import _native


def crc32c_plain(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_known_vectors(data, value):
    assert _native.crc32c(data) == _native.crc32c_portable(data) == crc32c_plain(data) == value


def test_every_length_and_the_interleaved_streams(rng):
    for size in [*range(70), 1344, 4031, 4032, 4033, 4096, 4120, 8064, 9000]:
        data = rng.bytes(size)
        assert _native.crc32c(data) == _native.crc32c_portable(data) == crc32c_plain(data), size


def test_one_flipped_bit_is_seen(rng):
    data = bytearray(rng.bytes(4096))
    before = _native.crc32c(bytes(data))
    for position in rng.integers(0, 4096 * 8, 50):
        data[position // 8] ^= 1 << (position % 8)
        assert _native.crc32c(bytes(data)) != before
        data[position // 8] ^= 1 << (position % 8)


def test_dtype_of_runs_is_the_struct():
    from decode_worker._native import RUN_DTYPE

    assert RUN_DTYPE.itemsize == 32
    assert [RUN_DTYPE.fields[n][1] for n in RUN_DTYPE.names] == [0, 4, 8, 12, 16, 20, 22, 24]
    assert np.zeros(2, RUN_DTYPE).nbytes == 64
