# Static analysis: `make lint`. This file and .clang-tidy give the reason for each check that is left out.

DEB_LINT := build-essential clang clang-format clang-tidy cppcheck shellcheck valgrind libxxhash-dev
LINT_FLAGS := -std=c99 -D_POSIX_C_SOURCE=200809L -DTQKV_METAL $(INCLUDE) $(CPPFLAGS)
# The implementation is analysed once, in this file; the others see declarations.
LINT_IMPLEMENTATION := tests/test_tables.c
# MPI is not among the packages of the lint.
LINT_OTHERS := $(filter-out examples/mpi_context.c bench/ggml.c $(LINT_IMPLEMENTATION),\
	$(wildcard tests/*.c tests/metal/*.c tests/fuzz/*.c tests/large/*.c examples/*.c bench/*.c \
	$(filter-out examples/tests/snippets.c,$(wildcard examples/tests/*.c))))

.PHONY: deps-lint lint lint-length lint-clang lint-tidy lint-gcc lint-cppcheck lint-shell lint-bugs
deps-lint: ## install what `make lint` needs
	@$(call install,$(DEB_LINT))

lint: lint-length lint-bugs lint-clang lint-gcc lint-tidy lint-cppcheck lint-shell ## static analysis: gcc, clang-tidy with clang's analyzer, cppcheck, shellcheck
	@echo "lint: clean"

# Functions of more than 40 lines, between braces in the first column, and comments of more than 120 columns, which
# clang-format leaves as they are. Lists of cases may be longer: test_X_cases.
lint-length:
	@awk 'FNR == 1 { first = comment = 0 } \
		/^{$$/ { first = name ~ /_cases\(void\)$$/ ? 0 : FNR } { name = $$0 } \
		/^}$$/ && first { n = FNR - first - 1; first = 0; \
			if (n > 40) { print FILENAME ":" FNR - n ": a function of " n " lines"; long = 1 } } \
		/\/\*/ { comment = 1 } \
		length > 120 && (comment || /\/\//) { print FILENAME ":" FNR ": a comment of " length " columns"; long = 1 } \
		/\*\// { comment = 0 } END { exit long }' \
		$(filter-out shaders/attend.h shaders/attend_values.h shaders/merge.h,$(SOURCES_FORMATTED))

# Planted bugs whose place is gone.
lint-bugs:
	@for bugs in tests/metal/bugs.py tests/metal/host/bugs.py tests/metal/library/bugs.py; do \
		python3 $$bugs $(BUILD)/lint --plant || exit 1; done

# gcc's analyzer. Of the implementation the portable code: the sets have its loops, and neither allocate nor open anything.
lint-gcc: $(LINT_OTHERS:%=$(BUILD)/lint/%.analyzed) $(LINT_IMPLEMENTATION:%=$(BUILD)/lint/%.analyzed)

$(LINT_OTHERS:%=$(BUILD)/lint/%.analyzed): LINT_AS := $(IMPLEMENTED)
$(BUILD)/lint/%.c.analyzed: %.c $(TEST_HEADERS) tests/lint.mk
	@mkdir -p $(@D)
	gcc -O1 -fanalyzer $(LINT_FLAGS) $(WARNINGS) $(or $(LINT_AS),-DTQKV_NO_AVX2) -c $< -o /dev/null && touch $@

# clang says only where it optimises which loops it cannot unroll, and not of all processors.
lint-clang:
	clang -O2 $(LINT_FLAGS) $(WARNINGS) -c $(LINT_IMPLEMENTATION) -o /dev/null

# clang's analyzer is among its checks.
lint-tidy:
	clang-tidy --quiet src/tqkv_metal.m -- -x c $(LINT_FLAGS)
	clang-tidy --quiet $(LINT_IMPLEMENTATION) -- $(LINT_FLAGS)
	clang-tidy --quiet $(LINT_OTHERS) -- $(LINT_FLAGS) $(IMPLEMENTED)

# Without style: it asks for const where a callback's type has none, and for smaller scopes. Without uninitvar in src/ and one file:
# arrays filled by loops and by called functions, and members that a set of instructions leaves out. In src/ without
# ctunullpointer: formats without a codebook pass none; ctuuninitvar: a list is filled field by field.
LINT_CPPCHECK := cppcheck --std=c99 --quiet --error-exitcode=1 --enable=warning,performance,portability \
	$(foreach check,uninitvar legacyUninitvar ctuuninitvar ctunullpointer,--suppress=$(check):src/*) \
	--suppress=uninitvar:tests/reference.h --template='{file}:{line}: {id}: {message}' $(filter-out -std%,$(LINT_FLAGS)) \
	-D__x86_64__ -D__SSE2__ -D__LP64__
lint-cppcheck:
	$(LINT_CPPCHECK) $(LINT_IMPLEMENTATION)
	$(LINT_CPPCHECK) $(IMPLEMENTED) $(LINT_OTHERS)

# SC2086: options in one variable must be split. SC2016: $1 in single quotes belongs to awk.
lint-shell:
	shellcheck -e SC2086,SC2016 $(wildcard tests/build/*.sh tests/metal/mac/*.sh examples/tests/*.sh packaging/swift/*.sh bench/*.sh .ci/run)
