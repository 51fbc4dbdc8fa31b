# A fresh Debian machine needs Python >= 3.11, make and git; everything else is installed here.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
VLLM_TESTS := $(addprefix tests/policies/sampling/test_vllm,.py _refuses.py _server.py)
MODEL := models/SmolLM2-135M-Instruct
QUICKSTART := examples/quickstart
DB ?= runs/demo/labels.db

unexport PYTHONDONTWRITEBYTECODE # where it is set, every test process compiles all that it imports

.PHONY: install model browser nodes proxy vllm demo few-demo label test check test-vllm test-deploy test-all clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[cluster,demo,dev]'
	touch $@

model: install
	$(BIN)/python examples/quickstart/fetch_model.py $(MODEL)

browser:
	@command -v chromium >/dev/null || (apt-get update --quiet=2 && apt-get install --yes --quiet=2 chromium)

nodes: # network namespaces stand for machines; without `ip` their test is skipped
	@command -v ip >/dev/null || (apt-get update --quiet=2 && apt-get install --yes --quiet=2 iproute2)

proxy: | nodes # what a server with the labeling app has; without them tests are skipped
	@which curl systemd-analyze /usr/sbin/nginx /usr/sbin/logrotate >/dev/null || \
	    (apt-get update --quiet=2 && \
	    apt-get install --yes --quiet=2 curl systemd nginx-light logrotate)

vllm: $(VLLM)/.installed

# its own versions of some packages, over those of $(VENV)
$(VLLM)/.installed: tests/vllm-requirements.txt $(VENV)/.installed
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --no-deps --no-compile --requirement $<
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')')" \
	    >$$($(VLLM)/bin/python -c 'import site; print(site.getsitepackages()[0])')/base.pth
	touch $@

demo: model
	$(BIN)/python -m rlhf.cli --version
	$(BIN)/rlhf loop --config $(QUICKSTART)/loop.yaml --config $(QUICKSTART)/signal.yaml

label: install
	$(BIN)/rlhf label --db $(DB)

check: model browser
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -m 'not slow' --numprocesses 3 --dist loadfile --no-loadscope-reorder

test-vllm: vllm
	$(VLLM)/bin/python -m pytest -m 'not slow' $(VLLM_TESTS)

test-deploy: install nodes proxy # the wheel, the service behind nginx, upgrades, the image's steps
	$(BIN)/pytest -m slow tests/examples/deploy

few-demo: model # the demo with the real model, cut short
	few=$$(mktemp -d); trap 'rm -rf "$$few"' EXIT; \
	awk '/"split": "train"/ && train++ < 12 || /"split": "test"/ && test++ < 6' \
	    $(QUICKSTART)/prompts.jsonl >$$few/prompts.jsonl; \
	echo 'stages: {ppo: {steps: 2}}' >$$few/short.yaml; \
	$(BIN)/rlhf loop --config $(QUICKSTART)/loop.yaml --config $(QUICKSTART)/signal.yaml \
	    --config $$few/short.yaml --prompts $$few/prompts.jsonl --out $$few/run && \
	    test -s $$few/run/round-0/evaluate/report.html

test: # packages come while others unpack or the checks begin; deployment mostly waits, the last two take a core each
	$(MAKE) --jobs 2 install browser
	$(MAKE) nodes proxy
	$(MAKE) --jobs 2 check vllm
	$(MAKE) --jobs 3 test-vllm few-demo test-deploy

test-all: model browser nodes proxy test-vllm
	$(VLLM)/bin/python -m pytest -m slow $(VLLM_TESTS)
	$(BIN)/pytest

clean:
	rm -rf $(VENV) $(VLLM) build dist *.egg-info
