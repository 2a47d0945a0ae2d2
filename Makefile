.PHONY: setup demo test check format clean

setup:
	@scripts/setup.sh

demo: setup
	@.venv/bin/headgate demo $(ARGS)

test: setup check
	@.venv/bin/python -m pytest $(ARGS)

check: setup
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/clang-format --dry-run --Werror $$(git ls-files 'csrc/*.h' 'csrc/*.cc')
	@.venv/bin/mypy
	@.venv/bin/lint-imports --no-cache

format: setup
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .
	@.venv/bin/clang-format -i $$(git ls-files 'csrc/*.h' 'csrc/*.cc')

clean:
	rm -rf build .venv .setup.lock
