#!/usr/bin/env bash
# Prepares .venv and the native build; every step that is already done is skipped. Never prompts.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

system_packages() {
  local missing=() sudo=()
  command -v g++ >/dev/null || missing+=(g++)
  command -v spin >/dev/null || missing+=(spin)  # the ring's protocol, in `make test`
  [ -e /usr/include/liburing.h ] || missing+=(liburing-dev)
  python3 -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv)
  [ -e "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] || missing+=(python3-dev)
  [ ${#missing[@]} -eq 0 ] && return
  if [ "$(id -u)" -ne 0 ]; then
    sudo -n true 2>/dev/null || fail "missing system packages; install them with: sudo apt-get install ${missing[*]}"
    sudo=(sudo -n)
  fi
  command -v apt-get >/dev/null || fail "missing system packages: ${missing[*]} (Debian names); install them and run again"
  say "installing ${missing[*]}"
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -qq </dev/null
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" </dev/null >/dev/null
}

# Modules are compiled when they are imported, most of them never.
pip_install() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input -q install --no-compile "$@"; }

has_driver() { [ -e /proc/driver/nvidia/version ]; }

# PyTorch for CUDA names the Triton that it was built with; without a driver any will do, for its interpreter.
constraints() { if has_driver; then grep -v '^triton==' constraints.txt; else cat constraints.txt; fi; }

# Without an NVIDIA driver the CPU build: the one at hand, else PyTorch's CPU index, else whatever the default index has.
install_torch() {
  local torch
  torch=$(grep '^torch==' constraints.txt)
  "$venv/bin/python" -c "import importlib.metadata as m; v = m.version('torch').split('+')[0]; assert 'torch==' + v == '$torch'" \
    2>/dev/null && return
  say "installing $torch"
  if has_driver; then
    pip_install -c <(constraints) torch
  else
    pip_install --no-index --no-deps "$torch" 2>/dev/null ||
      pip_install --no-deps --timeout 15 --retries 1 --index-url https://download.pytorch.org/whl/cpu "$torch" 2>/dev/null ||
      pip_install -c constraints.txt torch
  fi
}

python_packages() {
  local want
  want=$(cat constraints.txt pyproject.toml scripts/setup.sh | sha256sum)
  [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.packages" 2>/dev/null)" = "$want" ] && return
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "Python 3.11 or newer is needed, found $(python3 -V)"
  [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
  say "installing Python packages"
  pip_install -c constraints.txt scikit-build-core nanobind grpcio-tools cmake ninja
  install_torch
  # The requirements of all extras, without building the project itself.
  pip_install -c <(constraints) $("$venv/bin/python" scripts/requirements.py dev)
  echo "$want" > "$venv/.packages"
}

native_build() {
  local want
  # An editable install knows modules by name: one that moved needs a new one.
  want=$({ find csrc proto CMakeLists.txt pyproject.toml -type f ! -name '*.md' ! -name '*.pml' -print0 | sort -z | xargs -0 sha256sum
    find decode_worker kvstore_service -name '*.py' ! -path '*/_proto/*' | sort; } | sha256sum)
  [ "$(cat "$venv/.native" 2>/dev/null)" = "$want" ] && return
  say "building the native core"
  PATH="$PWD/$venv/bin:$PATH" pip_install --no-build-isolation --no-deps -e .
  echo "$want" > "$venv/.native"
}

exec 9>.setup.lock
flock -w 1200 9 || fail "another setup has held .setup.lock for 20 minutes"
system_packages
python_packages
native_build
