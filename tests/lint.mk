# Static analysis: `make lint`. This file and .clang-tidy give the reason for each check that is left out.

DEB_LINT := build-essential clang clang-format clang-tidy cppcheck shellcheck valgrind libxxhash-dev
LINT_FLAGS := -std=c99 -D_POSIX_C_SOURCE=200809L -I. $(CPPFLAGS)
LINT_TESTS := $(filter-out tests/compile_%.c,$(wildcard tests/*.c tests/fuzz/*.c))
# MPI is not among the packages of the lint.
LINT_EXAMPLES := $(filter-out examples/mpi_context.c,$(wildcard examples/*.c))

.PHONY: deps-lint lint lint-tidy lint-analyzer lint-gcc lint-cppcheck lint-shell
deps-lint: ## install what `make lint` needs
	@$(call install,$(DEB_LINT))

lint: lint-gcc lint-analyzer lint-tidy lint-cppcheck lint-shell ## static analysis: gcc, clang, clang-tidy, cppcheck, shellcheck
	@echo "lint: clean"

# gcc's analyzer on the implementation and on each test.
lint-gcc: $(LINT_TESTS:%=$(BUILD)/lint/%.analyzed) $(BUILD)/lint/tqkv.h.analyzed

$(BUILD)/lint/%.c.analyzed: %.c $(TEST_HEADERS)
	@mkdir -p $(@D)
	gcc -O1 -fanalyzer $(LINT_FLAGS) $(WARNINGS) -c $< -o /dev/null && touch $@

$(BUILD)/lint/tqkv.h.analyzed: tqkv.h
	@mkdir -p $(@D)
	gcc -O1 -fanalyzer -x c -DTQKV_IMPLEMENTATION -DTQKV_STATIC $(LINT_FLAGS) $(WARNINGS) -Wno-unused-function -c $< \
		-o /dev/null && touch $@

# clang's analyzer: its default checkers without what .clang-tidy leaves out, for the same reasons.
lint-analyzer: tqkv.h
	clang --analyze --analyzer-output text -Xclang -analyzer-disable-checker -Xclang core.uninitialized \
		-Xclang -analyzer-disable-checker -Xclang core.UndefinedBinaryOperatorResult \
		-Xclang -analyzer-config -Xclang core.CallAndMessage:ArgInitializedness=false -Xclang -analyzer-werror \
		-x c -DTQKV_IMPLEMENTATION $(LINT_FLAGS) tqkv.h

lint-tidy:
	clang-tidy --quiet tqkv.h -- -x c -DTQKV_IMPLEMENTATION $(LINT_FLAGS)
	clang-tidy --quiet $(LINT_TESTS) -- $(LINT_FLAGS)
	clang-tidy --quiet $(LINT_EXAMPLES) -- -std=c99 -I. $(CPPFLAGS)

# Without style: it asks for const where a callback's type has none, and for smaller scopes. Without uninitvar in two files:
# arrays filled by loops and by called functions, and members that a set of instructions leaves out.
lint-cppcheck:
	cppcheck --std=c99 --quiet --error-exitcode=1 --enable=warning,performance,portability --suppress=uninitvar:tqkv.h \
		--suppress=legacyUninitvar:tqkv.h --suppress=uninitvar:tests/reference.h \
		--template='{file}:{line}: {id}: {message}' -I. $(CPPFLAGS) -D_POSIX_C_SOURCE=200809L -DTQKV_IMPLEMENTATION \
		-D__x86_64__ -D__SSE2__ -D__LP64__ $(LINT_TESTS) $(LINT_EXAMPLES)

# SC2086: options in one variable must be split. SC2016: $1 in single quotes belongs to awk.
lint-shell:
	shellcheck -e SC2086,SC2016 $(wildcard tests/*.sh tests/metal/mac/*.sh examples/tests/*.sh bench/*.sh .ci/run)
