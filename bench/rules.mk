# `make bench` measures this machine's limits and how close tqkv comes to them; with GGML_PREFIX=FOLDER also ggml, whose
# headers are in FOLDER/include and libraries in FOLDER/lib. BENCH_FLAGS: see build/bench --help. A full run also writes
# the chart's data.

BENCH_FLAGS ?=
BENCH_HEADERS := $(wildcard bench/*.h) bench/rules.mk tqkv.h
BENCH_COMPILE = $(CC) $(STANDARD) -D_POSIX_C_SOURCE=200809L $(CPPFLAGS) $(CFLAGS) $(WARNINGS)
GGML_LIBRARIES ?= -lggml -lggml-cpu -lggml-base

$(BUILD)/bench: bench/bench.c $(BENCH_HEADERS)
	@mkdir -p $(@D)
	$(BENCH_COMPILE) $< -o $@ $(LIBRARIES)

$(BUILD)/bench-ggml: bench/bench.c bench/ggml.c $(BENCH_HEADERS)
	@mkdir -p $(@D)
	$(BENCH_COMPILE) -DBENCH_GGML -isystem $(GGML_PREFIX)/include bench/bench.c bench/ggml.c -o $@ \
		-L$(GGML_PREFIX)/lib -Wl,-rpath,$(GGML_PREFIX)/lib $(GGML_LIBRARIES) $(LIBRARIES)

.PHONY: bench
bench: $(BUILD)/$(if $(GGML_PREFIX),bench-ggml,bench) ## measure speed; GGML_PREFIX=... compares with ggml
	@mkdir -p $(BUILD)/charts
	@$< $(or $(BENCH_FLAGS),--chart $(BUILD)/charts/speed.txt)

# Checks that the benchmark builds and measures, not the speed.
.PHONY: test-bench
test-bench: $(BUILD)/bench
	@echo "== bench"
	@$< --quick --rounds 1 --format tq4 | awk '/^ratio [a-z0-9_]+ [0-9.e+-]+$$/ && $$3 > 0 { ratios++ } \
		END { print (ratios > 0) + 0 " passed, " (ratios == 0) + 0 " failed"; exit ratios == 0 }'

TEST_TARGETS += test-bench

# ---- A prediction for the inner loops on an Apple core, made on any Linux machine ----

ifneq ($(SYSTEM),Darwin)
MCA_INCLUDE := $(BUILD)/mca/include
$(MCA_INCLUDE)/xxhash.h: /usr/include/xxhash.h
	@mkdir -p $(@D)
	@cp /usr/include/xxhash.h /usr/include/xxh3.h $(@D)

.PHONY: bench-mca
bench-mca: $(MCA_INCLUDE)/xxhash.h ## predict the inner loops' speed on an Apple core; needs clang and llvm-mca
	@sh bench/mca.sh $(MCA_INCLUDE) $(BUILD)/mca
endif
