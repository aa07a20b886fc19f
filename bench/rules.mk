# `make bench` measures this machine's limits and how close tqkv comes to them. With GGML_PREFIX=FOLDER also ggml, and with
# IK_PREFIX=FOLDER the ggml of ik_llama.cpp: headers are in FOLDER/include and libraries in FOLDER/lib. BENCH_FLAGS: see
# build/bench --help.
#
# `make bench-results NAME=zen4` writes bench/results/zen4.txt in about six minutes, `make bench-page` then BENCHMARKS.md.
# GGML_AVX2_PREFIX: a ggml without AVX-512, to compare with on AVX2. THREADS=16: one token by so many threads, too.

BENCH_FLAGS ?=
BENCH_HEADERS := $(wildcard bench/*.h) examples/thread_pool.h bench/rules.mk $(TQKV_FILES)
BENCH_COMPILE = $(CC) $(STANDARD) -D_POSIX_C_SOURCE=200809L $(CPPFLAGS) $(CFLAGS) $(WARNINGS) $(INCLUDE)
# Static libraries name none of C++'s.
ggml_static = $(if $(wildcard $(1)/lib/libggml.a),$(if $(filter Darwin,$(SYSTEM)),-lc++,-lstdc++))

BENCH_PEERS := $(if $(GGML_PREFIX),$(BUILD)/peer-ggml.so) $(if $(IK_PREFIX),$(BUILD)/peer-ik.so) \
	$(if $(GGML_AVX2_PREFIX),$(BUILD)/peer-ggml-avx2.so)

BENCH_SOURCES := $(filter-out bench/ggml.c,$(wildcard bench/*.c))

$(BUILD)/bench: $(BUILD)/tqkv.o
$(TEST_BUILD)/bench: $(TEST_TQKV)
$(TEST_BUILD)/bench: CFLAGS += -O0
$(BUILD)/bench $(TEST_BUILD)/bench: $(BENCH_SOURCES) $(BENCH_HEADERS)
	$(BENCH_COMPILE) $(BENCH_SOURCES) $(filter %.o,$^) -o $@ $(LIBRARIES) -ldl

$(BUILD)/peer-ggml.so: PREFIX_OF_PEER = $(GGML_PREFIX)
$(BUILD)/peer-ggml.so: PEER_FLAGS = -lggml -lggml-cpu -lggml-base
$(BUILD)/peer-ggml-avx2.so: PREFIX_OF_PEER = $(GGML_AVX2_PREFIX)
$(BUILD)/peer-ggml-avx2.so: PEER_FLAGS = -lggml -lggml-cpu -lggml-base
$(BUILD)/peer-ik.so: PREFIX_OF_PEER = $(IK_PREFIX)
$(BUILD)/peer-ik.so: PEER_FLAGS = -DPEER_IK -lggml
$(BUILD)/peer-%.so: bench/ggml.c $(BENCH_HEADERS)
	@mkdir -p $(@D)
	$(BENCH_COMPILE) -fPIC -shared -isystem $(PREFIX_OF_PEER)/include $< -o $@ \
		-L$(PREFIX_OF_PEER)/lib -Wl,-rpath,$(PREFIX_OF_PEER)/lib $(PEER_FLAGS) $(call ggml_static,$(PREFIX_OF_PEER)) $(LIBRARIES)

.PHONY: bench
bench: $(BUILD)/bench $(BENCH_PEERS) ## measure speed; GGML_PREFIX=... and IK_PREFIX=... compare with peers
	@$< $(if $(GGML_PREFIX),--ggml $(BUILD)/peer-ggml.so) $(if $(IK_PREFIX),--ik $(BUILD)/peer-ik.so) $(BENCH_FLAGS)

# ---- BENCHMARKS.md, from saved results ----

NAME ?= $(MACHINE)
.PHONY: bench-results bench-results-gpu bench-page test-bench-page
bench-results: $(BUILD)/bench $(BENCH_PEERS) ## measure for BENCHMARKS.md: NAME=... of the machine
	@CC="$(CC)" PEERS="$(BENCH_PEERS)" FLAGS="$(BENCH_FLAGS)" THREADS="$(THREADS)" sh bench/measure.sh bench/results/$(NAME).txt cpu

bench-results-gpu: ## the same on a machine with an NVIDIA GPU
	@CC="$(CC)" sh bench/measure.sh bench/results/$(NAME).txt gpu

bench-page: ## make BENCHMARKS.md and the other documents' tables from bench/results
	@python3 bench/page.py

test-bench-page:
	@echo "== BENCHMARKS.md"
	@python3 bench/page.py --check

TEST_TARGETS += test-bench-page

# Checks that the benchmark builds and measures, not the speed.
.PHONY: test-bench
test-bench: $(TEST_BUILD)/bench
	@echo "== bench"
	@$< --quick --rounds 1 --format tq4 | awk '/^ratio [a-z0-9_]+ [0-9.e+-]+$$/ && $$3 > 0 { ratios++ } \
		END { print (ratios > 0) + 0 " passed, " (ratios == 0) + 0 " failed"; exit ratios == 0 }'

TEST_TARGETS += test-bench

# ---- How large it is; bench/sizes.txt has the limits ----

$(BUILD)/size.o $(BUILD)/size-lines.o: examples/make/tqkv.c $(TQKV_FILES)
	@mkdir -p $(@D)
	@$(CC) $(STANDARD) $(CPPFLAGS) -O2 $(if $(filter %lines.o,$@),-g) $(INCLUDE) -c $< -o $@

.PHONY: size size-files
size: $(BUILD)/size.o ## lines by folder, bytes of the header and of the code, lines of tests, words of documents
	@echo "== sizes"
	@python3 bench/size.py src $< bench/sizes.txt

size-files: $(BUILD)/size-lines.o ## lines and code of each file of src/
	@python3 bench/size.py src $<

TEST_TARGETS += size
