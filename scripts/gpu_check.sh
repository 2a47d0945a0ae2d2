#!/usr/bin/env bash
# All that only a machine with an NVIDIA GPU can say, in less than ten minutes (docs/gpu.md).
#
#   scripts/gpu_check.sh --bring [DIR]     before, where there is a network: collects what that machine lacks
#   scripts/gpu_check.sh [PART ...]        there, without one; -h lists parts and options
#
# That machine has Python, torch for CUDA with its Triton, numpy, safetensors, tokenizers, pip, CMake, Ninja and a C++
# compiler. DIR (default: build/brought) is brought along beside the sources: wheels for its Python, and liburing.
# BROUGHT names another DIR there. Where `make setup` has made .venv, that is taken and nothing needs to be brought.
set -euo pipefail
cd "$(dirname "$0")/.."
brought=${BROUGHT:-build/brought}
there=${GPU_CHECK_PYTHON:-3.12}  # the other machine's Python
size_max_mib=64
seconds=570  # that building and checking may take

say() { printf 'gpu_check: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

bring() {
  local to=$1 platforms=() deb glibc
  for glibc in 17 27 28 31 34 35; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  mkdir -p "$to"
  say "wheels for Python $there"
  { python3 scripts/requirements.py build; python3 scripts/requirements.py base; echo pytest; } |
    grep -v '^numpy' > "$scratch/requirements"
  python3 -m pip --disable-pip-version-check -q download --only-binary :all: --python-version "$there" \
    --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 -c constraints.txt \
    -r "$scratch/requirements" -d "$scratch/wheels"
  say "liburing"
  (cd "$scratch" && apt-get -qq download liburing2:amd64 liburing-dev:amd64)
  for deb in "$scratch"/*.deb; do dpkg-deb -x "$deb" "$scratch/liburing"; done
  rm -rf "${to:?}/wheels" "$to/liburing"
  mkdir -p "$to/liburing/lib"
  mv "$scratch/wheels" "$to/wheels"
  mv "$scratch/liburing/usr/include" "$to/liburing/include"
  # The library itself under each of its names: links may not survive the way.
  for deb in liburing.so liburing.so.2; do
    cp -L "$scratch/liburing/usr/lib/x86_64-linux-gnu/liburing.so.2" "$to/liburing/lib/$deb"
  done
  [ "$(du -sm "$to" | cut -f1)" -le "$size_max_mib" ] || fail "$to is larger than $size_max_mib MiB"
  say "$(du -sh "$to" | cut -f1) in $to: bring it along"
}

venv=build/gpu-check/venv
pip=(python3 -m pip --disable-pip-version-check -q --python "$venv/bin/python" install --no-index --no-deps)

# Over the machine's own packages, with the brought ones before them.
environment() {
  [ -d "$brought/wheels" ] ||
    fail "nothing lies in $brought: run scripts/gpu_check.sh --bring where there is a network, or make setup"
  if [ ! -x "$venv/bin/python" ]; then
    say "environment"
    python3 -m venv --without-pip "$venv"
    python3 - "$venv" <<'PYTHON'
import glob, site, sys
(own,) = glob.glob(f"{sys.argv[1]}/lib/python*/site-packages")
with open(f"{own}/machine.pth", "w") as file:
    file.writelines(f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages())
PYTHON
    "${pip[@]}" "$brought"/wheels/*.whl
  fi
  export PATH="$PWD/$venv/bin:$(python3 -c 'import os, sys; print(os.path.dirname(sys.executable))'):$PATH"
  export CMAKE_PREFIX_PATH="$PWD/$brought/liburing"
}

build() {
  local want
  want=$({ find csrc proto CMakeLists.txt pyproject.toml -type f -print0 | sort -z | xargs -0 sha256sum
    find decode_worker kvstore_service -name '*.py' ! -path '*/_proto/*' | sort; } | sha256sum)
  if [ "$(cat "$venv/.native" 2>/dev/null)" != "$want" ]; then
    say "native build"
    "${pip[@]}" --no-build-isolation -e .
    echo "$want" > "$venv/.native"
  fi
}

if [ "${1:-}" = --bring ]; then
  bring "${2:-$brought}"
  exit
fi
if [ -e .venv/.packages ]; then
  python=.venv/bin/python
  build() { scripts/setup.sh; }
else
  python=build/gpu-check/venv/bin/python
  environment
fi
# Beside the ordinary build the one whose daemon fails and dawdles on order.
"$python" -c 'from tests.support import shim_build; shim_build.path()' &
build
wait $! || fail "the test build of the data plane failed"
say "built after $SECONDS s"
exec "$python" -m tests.gpu_check --seconds $((seconds - SECONDS)) "$@"
