# Two commands for everyone: `make demo` and `make test`. Each installs what it needs into .venv, pinned, and runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
export PYTHONUNBUFFERED = 1

.PHONY: demo test check test-slow test-browser reproduce bench docs site release clean

demo: $(VENV)/.runtime
	$(BIN)/smupar transfer --rules sp smupar --sparsities 0 0.9375 --steps 100 --out runs/demo

test: $(VENV)/.dev check
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow -n 2 --dist loadfile

# The pages in a real browser. `make test` runs these too, where Chromium is installed.
test-browser: $(VENV)/.dev
	command -v chromium || (apt-get update && apt-get install --yes chromium) || $(BIN)/playwright install --with-deps chromium
	$(BIN)/python -m pytest tests/watch/test_browser.py tests/docs/test_site.py

# Every figure of the paper at the smallest scale; exit code 1 if a claim does not hold.
reproduce: $(VENV)/.runtime
	$(BIN)/smupar reproduce all --scale cpu

bench: $(VENV)/.runtime
	$(BIN)/smupar bench parameterize

# Pages that are generated from code; the tests fail when they are stale.
docs: $(VENV)/.runtime
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/pictures.py

# The documentation as a site in build/site, with every link and reference checked; serve it by .venv/bin/mkdocs serve.
site: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo build/site/index.html

# Everything that has to be right before a tag: tests, slow tests of what is installed, the site, version, changelog, links.
release: test test-browser site
	$(BIN)/python -m pytest -m "slow or not slow" tests/test_packaging.py
	$(BIN)/python tests/support/release.py
	rm -rf dist && $(BIN)/python -m hatchling build
	@echo "dist/ holds wheel and sdist; push the tag v$$($(BIN)/python -c 'import smupar; print(smupar.__version__)') to release them"

$(VENV)/.runtime: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt --editable '.[plot]'
	touch $@

# mup is here to be compared with; its own requirements would bring a torchvision that does not fit a CPU torch. lm-eval's would
# bring metrics that no task of ours uses (scikit-learn, scipy, nltk) and releases of years ago, to fit our python-dateutil.
$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	$(PIP) --no-deps mup==1.0.0 lm-eval==0.4.13
	touch $@

$(VENV)/.docs: $(VENV)/.runtime
	$(PIP) --constraint constraints.txt --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
