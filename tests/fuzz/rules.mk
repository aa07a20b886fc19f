# The fuzzers: `make fuzz` looks for findings, `make test-fuzz` replays the committed inputs.

FUZZERS ?= snapshot cache codec attend format index profile
SECONDS ?= 60
FUZZ_BUILD := $(BUILD)/fuzz
# The vector loops take a minute to compile so, and more than ten with -O2 and UBSan, under which test-fuzz replays.
# Instrumented, some loops cannot be unrolled, as clang warns.
FUZZ_FLAGS := -std=c99 -O1 -g1 -fno-omit-frame-pointer -fno-sanitize-recover=all -Wno-pass-failed
FUZZ_SANITIZERS := address
FUZZ_LENGTH := 1024
# test_tables.c contains the implementation; runner.c handles failed checks.
FUZZ_SUPPORT := test_tables runner
FUZZ_HEADERS := $(TEST_HEADERS) $(wildcard tests/fuzz/*.h) tests/fuzz/rules.mk

# $(1) folder, $(2) compiler, $(3) compile flags, $(4) link flags, $(5) object with the main function
define fuzz_variant
$(1)/%.o: tests/fuzz/%.c $(FUZZ_HEADERS)
	@mkdir -p $$(@D)
	@$(2) $(FUZZ_FLAGS) $(3) $(TEST_FLAGS) -c $$< -o $$@

$(FUZZ_SUPPORT:%=$(1)/%.o): $(1)/%.o: tests/%.c $(FUZZ_HEADERS)
	@mkdir -p $$(@D)
	@$(2) $(FUZZ_FLAGS) $(3) $(TEST_FLAGS) -c $$< -o $$@

$(1)/fuzz_%: $(1)/fuzz_%.o $(FUZZ_SUPPORT:%=$(1)/%.o) $(5)
	@$(2) $(FUZZ_FLAGS) $(4) $$^ -o $$@ -lm

.SECONDARY: $(FUZZ_SUPPORT:%=$(1)/%.o) $(FUZZERS:%=$(1)/fuzz_%.o) $(5)
endef

# Without trace-cmp: instrumented comparisons in loops over values would take two thirds of the time.
$(eval $(call fuzz_variant,$(FUZZ_BUILD)/libfuzzer,clang,\
	-fsanitize=fuzzer-no-link -fno-sanitize-coverage=trace-cmp -fsanitize=$(FUZZ_SANITIZERS),\
	-fsanitize=fuzzer -fsanitize=$(FUZZ_SANITIZERS) -static-libstdc++ -static-libgcc))
$(eval $(call fuzz_variant,$(FUZZ_BUILD)/afl,afl-clang-fast,,-fsanitize=fuzzer))

.PHONY: fuzz fuzz-afl
fuzz: $(FUZZERS:%=$(FUZZ_BUILD)/libfuzzer/fuzz_%) ## fuzz for a while: FUZZERS="cache codec" SECONDS=60
	@for fuzzer in $(FUZZERS); do \
		echo "== fuzzer: $$fuzzer"; mkdir -p $(FUZZ_BUILD)/corpus/$$fuzzer; \
		$(FUZZ_BUILD)/libfuzzer/fuzz_$$fuzzer -max_total_time=$(SECONDS) -max_len=$(FUZZ_LENGTH) \
			-timeout=20 -print_final_stats=1 -artifact_prefix=$(FUZZ_BUILD)/$$fuzzer- \
			$(FUZZ_BUILD)/corpus/$$fuzzer tests/fuzz/corpus/$$fuzzer || exit 1; \
	done

# AFL++ (Debian: afl++) calls the same entry point.
fuzz-afl: $(FUZZERS:%=$(FUZZ_BUILD)/afl/fuzz_%)
	@for fuzzer in $(FUZZERS); do \
		AFL_SKIP_CPUFREQ=1 AFL_I_DONT_CARE_ABOUT_MISSING_CRASHES=1 AFL_NO_UI=1 afl-fuzz -V $(SECONDS) \
			-i tests/fuzz/corpus/$$fuzzer -o $(FUZZ_BUILD)/afl/$$fuzzer -- $(FUZZ_BUILD)/afl/fuzz_$$fuzzer || exit 1; \
	done

# ---- The committed inputs under sanitizers, with the objects of the sanitized runner ----

$(TEST_BUILD)/sanitize/fuzz/%.o: tests/fuzz/%.c $(FUZZ_HEADERS)
	@mkdir -p $(@D)
	@$(FUZZ_CC) $(SANITIZE_TESTS) $(TEST_FLAGS) -c $< -o $@

$(TEST_BUILD)/sanitize/fuzz_%: $(TEST_BUILD)/sanitize/fuzz/fuzz_%.o $(TEST_BUILD)/sanitize/fuzz/replay.o \
	$(FUZZ_SUPPORT:%=$(TEST_BUILD)/sanitize/%.o)
	@$(FUZZ_CC) $(SANITIZE) $^ -o $@ -lm

FUZZ_CC := $(if $(filter Darwin,$(SYSTEM)),$(CC),gcc)

.SECONDARY: $(FUZZERS:%=$(TEST_BUILD)/sanitize/fuzz/fuzz_%.o) $(TEST_BUILD)/sanitize/fuzz/replay.o
.PHONY: test-fuzz
test-fuzz: $(FUZZERS:%=$(TEST_BUILD)/sanitize/fuzz_%)
	@echo "== inputs of the fuzzers"
	@for fuzzer in $(FUZZERS); do $(TEST_BUILD)/sanitize/fuzz_$$fuzzer tests/fuzz/corpus/$$fuzzer || exit 1; done

TEST_TARGETS += test-fuzz

# ---- Lines of src/ that the inputs reach: the committed ones and those that `make fuzz` has kept ----

$(eval $(call fuzz_variant,$(FUZZ_BUILD)/coverage,clang,-fprofile-instr-generate -fcoverage-mapping,\
	-fprofile-instr-generate,$(FUZZ_BUILD)/coverage/replay.o))

.PHONY: fuzz-coverage fuzz-minimise
fuzz-coverage: $(FUZZERS:%=$(FUZZ_BUILD)/coverage/fuzz_%) ## share of the lines of src/, or of profile.h, that each fuzzer's inputs reach
	@cd $(FUZZ_BUILD)/coverage && for fuzzer in $(FUZZERS); do \
		found=$(abspath $(FUZZ_BUILD))/corpus/$$fuzzer; test -d $$found || found=; \
		LLVM_PROFILE_FILE=$$fuzzer.raw ./fuzz_$$fuzzer $(abspath tests/fuzz/corpus)/$$fuzzer $$found >/dev/null && \
		llvm-profdata merge $$fuzzer.raw -o $$fuzzer.profile && \
		llvm-cov export --summary-only ./fuzz_$$fuzzer -instr-profile $$fuzzer.profile -format lcov $(abspath src examples/profile.h) | \
			awk -F: -v name=$$fuzzer '/^LF/ { lines += $$2 } /^LH/ { hit += $$2 } \
				END { printf "ratio fuzz_coverage_%s %.4f (%d lines)\n", name, hit / lines, hit }' || exit 1; \
	done

# Takes a tenth of a second an input.
fuzz-minimise: $(FUZZERS:%=$(FUZZ_BUILD)/coverage/fuzz_%) ## keep about 20 inputs a fuzzer that reach the same lines
	@python3 tests/fuzz/minimise.py $(FUZZ_BUILD) $(FUZZERS)
