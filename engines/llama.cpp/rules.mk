# tqkv as a backend that llama.cpp loads. LLAMA=FOLDER: the source of that llama.cpp, whose headers no package installs;
# LLAMA_BUILD: where its shared libraries are.

LLAMA_FOLDER := $(BUILD)/llama
LLAMA_READY := $(LLAMA_FOLDER)/.ready
# A version of PyPI's llama-cpp-python, whose sdist has a llama.cpp in it.
LLAMA_VERSION ?= 0.3.36
LLAMA ?= $(LLAMA_FOLDER)/llama_cpp_python-$(LLAMA_VERSION)/vendor/llama.cpp
LLAMA_BUILD ?= $(LLAMA_FOLDER)/build-$(LLAMA_VERSION)
LLAMA_BIN = $(LLAMA_BUILD)/bin

BACKEND := $(LLAMA_FOLDER)/libggml-tqkv$(if $(filter Darwin,$(SYSTEM)),.dylib,.so)
BACKEND_CORE := options ends stream plan cache attend
BACKEND_ALL := $(BACKEND_CORE) buffer nodes backend
BACKEND_HEADERS := $(wildcard engines/llama.cpp/*.h) examples/profile.h examples/data_file.h examples/thread_pool.h
# OpenMP where the compiler has it: ggml's threads are then tqkv's, too.
OPENMP := $(shell echo 'int main(void) { return 0; }' | $(CXX) -fopenmp -x c++ - -o /dev/null 2>/dev/null && echo -fopenmp)
CXX_BACKEND = $(CXX) -std=c++17 $(CPPFLAGS) $(CFLAGS) $(filter-out -Wpedantic,$(WARNINGS)) -fPIC -fvisibility=hidden $(OPENMP) \
	$(INCLUDE) -Iexamples
GGML_VERSION = $(shell sed -n 's/^set(GGML_VERSION_\(MAJOR\|MINOR\|PATCH\) \([0-9]*\)).*/\2/p' $(LLAMA)/ggml/CMakeLists.txt | paste -s -d . -)

$(LLAMA_FOLDER)/tqkv.o: engines/llama.cpp/tqkv.c $(TQKV_FILES)
	@mkdir -p $(@D)
	$(CC) $(STANDARD) $(CPPFLAGS) $(CFLAGS) $(WARNINGS) -fPIC -fvisibility=hidden $(INCLUDE) -c $< -o $@

$(LLAMA_FOLDER)/%.o: engines/llama.cpp/%.cpp $(BACKEND_HEADERS) tqkv.h
	@mkdir -p $(@D)
	$(CXX_BACKEND) -isystem $(LLAMA)/ggml/include -isystem $(LLAMA)/ggml/src -DTQKV_GGML_VERSION='"$(GGML_VERSION)"' -c $< -o $@

# The names of ggml's libraries are those that the program has loaded; a program finds the backend by its path.
$(BACKEND): $(BACKEND_ALL:%=$(LLAMA_FOLDER)/%.o) $(LLAMA_FOLDER)/tqkv.o
	$(CXX) -shared $(OPENMP) $^ -o $@ -L$(LLAMA_BIN) -lggml -lggml-base $(if $(filter Darwin,$(SYSTEM)),,-Wl,-Bsymbolic) $(LIBRARIES)

.PHONY: llama-backend
llama-backend: ## tqkv as a backend that llama.cpp loads: LLAMA=its source LLAMA_BUILD=its build folder
	@test -e $(LLAMA)/ggml/src/ggml-backend-impl.h || { echo "make llama-backend: LLAMA=$(LLAMA) is no source of llama.cpp"; exit 1; }
	@$(MAKE) --no-print-directory $(BACKEND)
	@echo "GGML_BACKEND_PATH=$(abspath $(BACKEND)) LLAMA_ARG_DEVICE=TQKV llama-cli -m MODEL.gguf"

# ---- The sdist ----

.PHONY: deps-llama llama-demo test-llama test-llama-histories
deps-llama: ## fetch and build the llama.cpp that PyPI's llama-cpp-python has, and a model: LLAMA_VERSION=0.3.36
	@$(call install,$(if $(filter Darwin,$(SYSTEM)),$(BREW) cmake,$(DEB) g++ python3-venv cmake ninja-build))
	@$(MAKE) --no-print-directory $(MODELS_READY) $(LLAMA_BUILD)/.ready

$(LLAMA_FOLDER)/llama_cpp_python-%/.fetched: | $(PYTHON_READY)
	@echo "llama-cpp-python $*, 75 MB, into $(LLAMA_FOLDER)"
	@mkdir -p $(LLAMA_FOLDER)
	@$(PYTHON)/bin/pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
		--dest $(LLAMA_FOLDER) llama-cpp-python==$*
	@tar -xzf $(LLAMA_FOLDER)/llama_cpp_python-$*.tar.gz -C $(LLAMA_FOLDER)
	@$(PYTHON)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement engines/llama.cpp/demo/requirements.txt
	@touch $@

LLAMA_TOOLS := llama-perplexity llama-completion llama-bench llama-server llama-quantize
$(LLAMA_BUILD)/.ready: $(LLAMA_FOLDER)/llama_cpp_python-$(LLAMA_VERSION)/.fetched
	@cmake -S $(LLAMA) -B $(LLAMA_BUILD) -G Ninja -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF \
		-DLLAMA_BUILD_EXAMPLES=OFF >$(LLAMA_BUILD).log
	@NINJA_STATUS="llama.cpp %f of %t, %es " ninja -C $(LLAMA_BUILD) $(LLAMA_TOOLS) | tee -a $(LLAMA_BUILD).log | \
		awk 'NR % 20 == 0 { print; fflush() } { last = $$0 } END { print last }'
	@touch $@

# ---- Tests ----

LLAMA_PROGRAM = $(CXX) -std=c++17 -O1 $(WARNINGS) -isystem $(LLAMA)/include -isystem $(LLAMA)/ggml/include $< -o $@ -L$(LLAMA_BIN) \
	-lllama -lggml -lggml-base -Wl,-rpath,$(abspath $(LLAMA_BIN))

LLAMA_TEST := $(LLAMA_FOLDER)/llama_test
$(LLAMA_TEST): engines/llama.cpp/tests/llama_test.cpp engines/llama.cpp/tests/drive.h
	@mkdir -p $(@D)
	$(LLAMA_PROGRAM)

# Bounds of the mean divergence of a step in nats, by formats and model.
test-llama: $(BACKEND) $(LLAMA_TEST) ## what people do with a cache, in llama.cpp with and without the backend: after make deps-llama
	@echo "== llama.cpp"
	@$(PYTHON)/bin/python engines/llama.cpp/tests/tiny_models.py $(LLAMA_FOLDER)/tiny
	@sh engines/llama.cpp/tests/test.sh $(abspath $(BACKEND)) $(LLAMA_TEST) $(LLAMA_FOLDER)/tiny $(LLAMA_BIN) $(PYTHON)/bin/python

# What real text loses after copies, states and shifts: a few minutes.
$(LLAMA_FOLDER)/histories: engines/llama.cpp/tests/histories.cpp engines/llama.cpp/tests/drive.h
	@mkdir -p $(@D)
	$(LLAMA_PROGRAM)

test-llama-histories: $(BACKEND) $(LLAMA_FOLDER)/histories ## losses of copied, restored, shifted sequences: LLAMA_MODEL=
	@test -e $(PYTHON)/texts/prose.txt || { echo "make test-llama-histories: first run make deps-texts"; exit 1; }
	@TQKV=small $(LLAMA_FOLDER)/histories $(abspath $(BACKEND)) $(LLAMA_MODEL) $(PYTHON)/texts/prose.txt

# Without llama.cpp and ggml.
BACKEND_TEST := $(TEST_BUILD)/backend
$(BACKEND_TEST)/core_test: engines/llama.cpp/tests/core_test.cpp engines/llama.cpp/tests/stand_in.h $(BACKEND_CORE:%=engines/llama.cpp/%.cpp) $(BACKEND_HEADERS) $(TEST_TQKV)
	@mkdir -p $(@D)
	$(CXX) -std=c++17 $(CPPFLAGS) -O1 $(filter-out -Wpedantic,$(WARNINGS)) $(INCLUDE) -Iexamples -Iengines/llama.cpp \
		$(filter %.cpp %.o,$^) -o $@ $(LIBRARIES)

.PHONY: test-backend
test-backend: $(BACKEND_TEST)/core_test
	@echo "== the backend for llama.cpp, without llama.cpp"
	@$<

TEST_TARGETS += test-backend

# ---- The table ----

LLAMA_MODEL ?= $(PYTHON)/models/smollm2.gguf
LLAMA_TEXT ?= docs/integrating.md
LLAMA_DEPTH ?= 4096
LLAMA_THREADS ?= 2

$(LLAMA_FOLDER)/measure: engines/llama.cpp/demo/measure.cpp engines/llama.cpp/tests/drive.h
	@mkdir -p $(@D)
	$(LLAMA_PROGRAM)

.PHONY: llama-speed
llama-speed: $(BACKEND) $(LLAMA_FOLDER)/measure ## speed of caches in llama.cpp by turns, beside F16: LLAMA_SPEED="--depths 0,4096 --threads 2" TQKV_ISA=
	@$(PYTHON)/bin/python engines/llama.cpp/demo/speed.py $(abspath $(BACKEND)) $(LLAMA_FOLDER)/measure $(LLAMA_MODEL) $(LLAMA_SPEED)

llama-demo: $(BACKEND) $(LLAMA_FOLDER)/measure ## loss, speed and memory of caches in llama.cpp, after make deps-llama: LLAMA_DEPTH=4096 LLAMA_THREADS=2
	@$(PYTHON)/bin/python engines/llama.cpp/demo/demo.py $(LLAMA_BIN) $(BACKEND) $(LLAMA_FOLDER)/measure $(LLAMA_MODEL) $(LLAMA_TEXT) \
		$(LLAMA_FOLDER) --depth $(LLAMA_DEPTH) --threads $(LLAMA_THREADS)
	@echo "From Python, by llama-cpp-python:"
	@ln -sfn $(abspath $(LLAMA_BIN)) $(LLAMA)/../../llama_cpp/lib
	@PYTHONPATH=$(LLAMA)/../.. $(PYTHON)/bin/python engines/llama.cpp/demo/load.py $(abspath $(BACKEND)) $(LLAMA_MODEL) 2>$(LLAMA_FOLDER)/python.log
	@grep '^tqkv:' $(LLAMA_FOLDER)/python.log
