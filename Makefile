.PHONY: setup demo test soak check format clean

TEST_PROCESSES ?= 2
SOAK_MINUTES ?= 60
PRESSURE_MINUTES ?= 10
SOAK_SEEDS ?= 10000

setup:
	@scripts/setup.sh

demo: setup
	@.venv/bin/headgate demo $(ARGS)

test: setup check
	@.venv/bin/python -m pytest -n $(TEST_PROCESSES) --dist loadgroup --no-loadscope-reorder $(ARGS)

# One line per soak; each adds its counts to bench/results/reliability.json.
soak: setup
	@.venv/bin/python -m tests.crash.soak --minutes $(SOAK_MINUTES)
	@.venv/bin/python -m tests.crash.pressure --minutes $(PRESSURE_MINUTES)
	@.venv/bin/python -m tests.crash.power.cuts --seeds $(SOAK_SEEDS)
	@.venv/bin/python -m tests.hostile.fuzz

check: setup
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/clang-format --dry-run --Werror $$(git ls-files 'csrc/*.h' 'csrc/*.cc')
	@! git grep -nE '^.{121,}' -- 'csrc/*.h' 'csrc/*.cc' 'csrc/*.inc'
	@.venv/bin/buf lint
	@.venv/bin/buf breaking --against proto/baseline.binpb
	@.venv/bin/mypy
	@.venv/bin/lint-imports --no-cache

format: setup
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .
	@.venv/bin/clang-format -i $$(git ls-files 'csrc/*.h' 'csrc/*.cc')

clean:
	rm -rf build .venv .setup.lock
