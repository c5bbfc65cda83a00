# Clew's set-up and checks. `make demo` and `make test` are all a user needs; a second call downloads nothing.

PYTHON ?= python3
TORCH := 2.13.0
BIN := .venv/bin
TORCHVISION := .venvs/torchvision/torchvision
# Made anew when pyproject.toml changes, and only then.
STAMP := .venv/installed-$(shell cksum < pyproject.toml | tr ' ' '-')

.PHONY: setup demo rehearse test test-slow test-vllm test-serve-llm test-skyrl lint clean

setup: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Clew needs Python 3.11 or later: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	# By itself: where pip is shown a CPU build of this version, that is the one the rest then settles on.
	$(BIN)/pip install "torch==$(TORCH)"
	$(BIN)/pip install -e ".[dev,ray,aws]"
	@rm -f .venv/installed-*
	@touch $@

demo: $(STAMP)
	$(BIN)/clew train laptop

# docs/hyperpod.md, without an account: what needs no AWS is run, what comes of it is checked.
rehearse: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/rehearse_hyperpod.py

test: $(STAMP)
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow and not vllm and not serve_llm and not skyrl"

test-slow: $(STAMP) $(TORCHVISION)
	$(BIN)/pytest -m slow

# For one test: Hugging Face's AutoProcessor wants it, Clew does not. Kept apart from .venv (see the test).
$(TORCHVISION): | $(STAMP)
	$(BIN)/pip install --no-deps --target .venvs/torchvision torchvision==0.28.0

# vLLM on a CPU, with an environment of its own: it takes minutes to install and pins much of what it needs.
test-vllm:
	PYTHON=$(PYTHON) scripts/setup_vllm.sh
	OMP_NUM_THREADS=1 .venvs/vllm/bin/pytest -m vllm tests/test_vllm_*.py

# `clew serve` on Ray Serve LLM and vLLM, on a CPU. Again an environment of its own: Ray pins another vLLM.
test-serve-llm:
	PYTHON=$(PYTHON) scripts/setup_serve_llm.sh
	OMP_NUM_THREADS=1 .venvs/serve-llm/bin/pytest -m serve_llm tests/test_serve_llm*.py

# The real SkyRL and TRL, in an environment of their own. 75: the script could not reach the package registry.
test-skyrl:
	@PYTHON=$(PYTHON) scripts/setup_skyrl.sh; status=$$?; \
	if [ $$status -eq 75 ]; then echo "test-skyrl: skipped, the package registry cannot be reached"; exit 0; fi; \
	[ $$status -eq 0 ] && OMP_NUM_THREADS=1 .venvs/skyrl/bin/pytest -m skyrl tests/test_skyrl_*.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv .venvs build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
