"""kvctl heat: a trace's picture, decoded here and compared pixel by pixel."""

import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore_service import _native, kvctl
from kvstore_service.kvctl.heat import cell_px, picture, png
from tests.service.test_trace import kvctl_trace, read_all
from tests.support.daemon_process import Daemon
from tests.support.life import until
from tests.support.world import LANES, LAYERS, TestWorker

ACCESS = np.dtype(list(_native.ACCESS_FIELDS))
RED, YELLOW, WHITE = (255, 0, 0), (255, 255, 0), (255, 255, 255)


def decoded(content: bytes) -> tuple[NDArray[np.uint8], str]:
    """(pixels, description) of an RGB picture without filters; every checksum is checked."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    chunks: dict[bytes, bytes] = {}
    at = 8
    while at < len(content):
        (length,) = struct.unpack_from(">I", content, at)
        kind, body = content[at + 4 : at + 8], content[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", content, at + 8 + length) == (zlib.crc32(kind + body),)
        chunks[kind], at = body, at + 12 + length
    assert list(chunks) == [b"IHDR", b"tEXt", b"IDAT", b"IEND"]
    width, height, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert rest == [8, 2, 0, 0, 0]
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3), chunks[b"tEXt"].partition(b"\0")[2].decode("latin-1")


def trace(path: Path, counts: dict[tuple[int, int], tuple[int, int]]) -> Path:
    """{(layer, lane): (accesses, of them hits)}"""
    records = []
    for (layer, lane), (wanted, hits) in counts.items():
        part = np.zeros(wanted, ACCESS)
        part["layer"], part["lane"], part["hit"] = layer, lane, np.arange(wanted) < hits
        part["extent"] = range(wanted)
        records.append(part)
    np.save(path, np.concatenate(records) if records else np.zeros(0, ACCESS))
    return path


def test_a_picture_has_the_colours_of_its_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = trace(tmp_path / "t.npy", {(0, 0): (701, 600), (0, 2): (191, 191), (1, 1): (446, 0), (2, 2): (1, 0)})
    out = tmp_path / "heat.png"
    assert kvctl.main(["heat", str(file), str(out)]) == 0
    pixels, description = decoded(out.read_bytes())
    assert pixels.shape == (3 * 16, 3 * 16, 3)
    cells = {
        (0, 0): WHITE, (0, 2): RED, (1, 1): YELLOW, (2, 2): (65, 0, 0),
    }  # fmt: skip
    for layer in range(3):
        for head in range(3):
            cell = pixels[layer * 16 : layer * 16 + 16, head * 16 : head * 16 + 16]
            assert (cell == cells.get((layer, head), (0, 0, 0))).all(), (layer, head)
    said = capsys.readouterr().out
    assert said == f"{out}: {description}\n"
    assert "layers 0 to 2 from top to bottom, KV heads 0 to 2 from left to right" in said
    assert "white 701 (layer 0, head 0)" in said
    first = out.read_bytes()
    assert kvctl.main(["heat", str(file), str(out)]) == 0
    assert out.read_bytes() == first


def test_misses_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = trace(tmp_path / "t.npy", {(0, 0): (9, 9), (0, 1): (3, 1)})
    out = tmp_path / "heat.png"
    assert kvctl.main(["heat", "--format=json", "--misses", str(file), str(out)]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "layers": 1, "heads": 2, "cell_px": 16, "extents": 2, "peak": {"layer": 0, "head": 1, "extents": 2},
    }  # fmt: skip
    pixels, _ = decoded(out.read_bytes())
    assert not pixels[:, :16].any()
    assert (pixels[:, 16:] == 255).all()


def test_a_daemons_trace_becomes_a_picture(daemon: Daemon, worker: TestWorker, tmp_path: Path) -> None:
    tracing = kvctl_trace(daemon, file := tmp_path / "accesses.npy", 4)
    until(lambda: file.exists() and file.stat().st_size > 0, "the trace to begin")
    read_all(worker, times=2)
    tracing.communicate(timeout=30)
    assert tracing.returncode == 0
    daemon.stop()  # it takes no part in this
    out = tmp_path / "heat.png"
    assert kvctl.main(["--socket", daemon.socket, "heat", str(file), str(out)]) == 0
    pixels, _ = decoded(out.read_bytes())
    assert pixels.shape == (LAYERS * 16, LANES * 16, 3)
    assert (pixels == 255).all()  # every head was read as often


def test_what_is_no_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = trace(tmp_path / "good.npy", {(0, 0): (1, 0)})
    np.save(tmp_path / "other.npy", np.zeros(3))
    np.savez(tmp_path / "several.npz", a=np.zeros(3))
    (tmp_path / "text.npy").write_text("nothing")
    (tmp_path / "cut.npy").write_bytes(good.read_bytes()[:40])
    (tmp_path / "zip.npy").write_bytes(b"PK\x03\x04 and no more")
    np.save(tmp_path / "one.npy", np.zeros((), ACCESS))
    np.save(tmp_path / "square.npy", np.zeros((2, 2), ACCESS))
    (tmp_path / "empty").touch()
    signed = np.dtype([(name, "i8") for name in ACCESS.names])
    np.save(tmp_path / "signed.npy", np.full(3, -5, signed))
    np.save(tmp_path / "texts.npy", np.zeros(3, [(name, "U4") for name in ACCESS.names]))
    bad = ("other.npy", "several.npz", "text.npy", "cut.npy", "empty", "zip.npy", "one.npy", "square.npy")
    for name in (*bad, "signed.npy", "texts.npy"):
        assert kvctl.main(["heat", str(tmp_path / name), str(tmp_path / "out.png")]) == 1
        assert capsys.readouterr().err == f"kvctl: {tmp_path / name} is no trace; kvctl trace writes one\n"
    wide = trace(tmp_path / "wide.npy", {(65535, 65535): (1, 0)})
    unused = trace(tmp_path / "unused.npy", {})
    for file, out, why in (
        (tmp_path / "none.npy", tmp_path / "out.png", "No such file or directory; name a file of kvctl trace"),
        (good, tmp_path / "none" / "out.png", "No such file or directory; choose another file"),
        (wide, tmp_path / "out.png", "65536 layers of 65536 heads"),
        (unused, tmp_path / "out.png", "holds no access"),
    ):
        assert kvctl.main(["heat", str(file), str(out)]) == 1
        said = capsys.readouterr().err
        assert why in said
        assert said.count("\n") == 1
    assert not (tmp_path / "out.png").exists()


def test_many_cells_are_small_ones() -> None:
    assert [cell_px(32, 8), cell_px(80, 128), cell_px(5000, 2)] == [16, 8, 1]
    counts = np.arange(1, 7).reshape(2, 3)
    pixels, text = decoded(png(picture(counts, 4), "six"))
    assert (pixels.shape, text) == ((8, 12, 3), "six")
    assert len(np.unique(pixels[::4, ::4].reshape(-1, 3), axis=0)) == 6
