"""Configuration: precedence, units, and errors that name key, value and fix."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvstore_service.daemon.config import NAMES, ConfigError, load, to_yaml
from kvstore_service.shared.types import format_size, parse_size


def test_flags_stand_above_environment_above_file(tmp_path: Path) -> None:
    file = tmp_path / "kvstored.yaml"
    file.write_text("dram_bytes: 1GiB\nnvme_bytes: 2GiB\nio_depth: 8\n")
    environment = {"KVSTORE_NVME_BYTES": "3GiB", "KVSTORE_IO_DEPTH": "16"}
    config = load([f"--config={file}", "--io-depth", "32"], environment)
    assert (config.dram_bytes, config.nvme_bytes, config.io_depth) == (1 << 30, 3 << 30, 32)
    assert config.origins["dram_bytes"] == f"file {file}"
    assert config.origins["nvme_bytes"] == "environment KVSTORE_NVME_BYTES"
    assert config.origins["io_depth"] == "flag --io-depth"
    assert config.origins["pack_tokens"] == "default"


def test_flags_may_be_spelled_with_underscores() -> None:
    assert load(["--dram_bytes", "8MiB"], {}).dram_bytes == 8 << 20


@pytest.mark.parametrize(
    ("arguments", "environment", "named"),
    [
        (["--dram-byte=1GiB"], {}, ["--dram-byte", "--dram-bytes"]),
        ([], {"KVSTORE_DRAM": "1GiB"}, ["KVSTORE_DRAM", "KVSTORE_DRAM_BYTES"]),
        (["--slots-max=many"], {}, ["slots_max", "many", "whole number"]),
        (["--pack-tokens=300"], {}, ["pack_tokens", "300", "multiple of 256"]),
        (["--dram-bytes=8 parsecs"], {}, ["dram_bytes", "8 parsecs", "GiB"]),
        (["--metrics-addr=0.0.0.0:1"], {}, ["metrics_addr", "loopback"]),
        (["--tcp=0.0.0.0:7000"], {}, ["tcp", "tls"]),
        (["--tcp=0.0.0.0:7000", "--tls=/"], {}, ["tls", "ca.crt"]),
        (["--window=pigeon"], {}, ["window", "pigeon", "gdr", "shm"]),
        (["--allow-uids=root"], {}, ["allow_uids", "root"]),
        (["--allow-uids=own,12345"], {}, ["allow_uids", "own"]),
        (["--allow-uids=12345"], {}, ["12345", "socket_group"]),
        (["--admin-uids=12345"], {}, ["12345", "socket_group"]),
        (["--socket-group=nobodys-group"], {}, ["socket_group", "nobodys-group", "id"]),
        (["--socket-group=4294967296"], {}, ["socket_group", "4294967296", "id below"]),
        (["--nvme-bytes=99999999TiB"], {}, ["nvme_bytes", "99999999TiB", "less than 8388608TiB"]),
        (["--nvme-bytes=" + "9" * 400], {}, ["nvme_bytes", "less than 8388608TiB"]),
        (["--socket=/" + "x" * 200], {}, ["socket", "107"]),
        (["--socket=/tmp/a", "--broker=/tmp/a"], {}, ["broker", "/tmp/a"]),
    ],
)
def test_errors_name_key_value_and_fix(arguments: list[str], environment: dict[str, str], named: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        load(arguments, environment)
    for word in named:
        assert word in str(raised.value)


def test_an_unknown_key_of_the_file_names_the_closest(tmp_path: Path) -> None:
    file = tmp_path / "kvstored.yaml"
    file.write_text("nvme_byte: 1GiB\n")
    with pytest.raises(ConfigError, match="nvme_byte; did you mean nvme_bytes"):
        load([f"--config={file}"], {})


def test_the_printed_configuration_can_be_loaded_again(tmp_path: Path) -> None:
    config = load(["--dram-bytes=3GiB", f"--data-dir={tmp_path}", "--metrics-addr=off"], {})
    file = tmp_path / "kvstored.yaml"
    file.write_text(to_yaml(config))
    assert load([f"--config={file}"], {}).values() == config.values()


def test_config_print_says_where_values_come_from() -> None:
    command = [sys.executable, "-m", "kvstore_service.daemon.server", "config", "print", "--io-depth=7"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    assert "# flag --io-depth" in shown
    assert set(yaml.safe_load(shown)) == set(NAMES)


def test_wrong_usage_ends_with_status_2_and_one_line() -> None:
    command = [sys.executable, "-m", "kvstore_service.daemon.server", "--dram-byte=1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=dict(os.environ))
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("8GiB", 8 << 30), ("1.5 KiB", 1536), ("512MB", 512_000_000), ("7", 7), ("3 b", 3), ("2tib", 2 << 40)],
)
def test_sizes_take_units(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("size_bytes", [0, 1, 1023, 1024, 5 << 20, 1 << 30, 3 << 40])
def test_whole_sizes_survive_a_round_trip(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 GiB/s", "1e9"])
def test_nonsense_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_size(text)
