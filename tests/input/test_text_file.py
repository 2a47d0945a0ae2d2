"""What a text file that cannot be taken is called."""

from pathlib import Path

import pytest

from decode_worker import text_file


@pytest.mark.parametrize("letter", ["a", "é", "€"])
def test_a_text_that_is_too_long_is_called_so_wherever_it_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, letter: str
) -> None:
    monkeypatch.setattr(text_file, "BYTES_MAX", 1024)
    path = tmp_path / "long.txt"
    path.write_text(letter * 2000)
    with pytest.raises(ValueError, match=r"--document .*long\.txt: longer than 1KiB; give a shorter text"):
        text_file.read_text("--document", path)


def test_a_text_that_ends_inside_a_letter_is_malformed(tmp_path: Path) -> None:
    path = tmp_path / "cut.txt"
    path.write_bytes("aé".encode()[:-1])
    with pytest.raises(ValueError, match="byte 1 is not UTF-8"):
        text_file.read_text("--document", path)
