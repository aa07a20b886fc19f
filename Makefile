# GNU make, Linux and macOS. Everything is built under build/.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules
.SUFFIXES:

# ---- Goals beside one that installs: one after the other, installs first, each by a make that finds what they brought ----

INSTALLS := $(filter deps deps-%,$(MAKECMDGOALS))
OTHERS := $(filter-out $(INSTALLS),$(MAKECMDGOALS))
ifneq ($(and $(INSTALLS),$(word 2,$(INSTALLS) $(OTHERS))),)
.PHONY: $(INSTALLS) $(OTHERS)
before :=
$(foreach goal,$(INSTALLS) $(OTHERS),$(eval $(goal): $(before))$(eval before := $(goal)))
$(INSTALLS) $(OTHERS):
	+@$(MAKE) --no-print-directory $@
else

SYSTEM := $(shell uname -s)
MACHINE := $(shell uname -m)
BUILD := build
# Packages of Python; `make clean` leaves them.
PYTHON := $(BUILD)/python
PYTHON_READY := $(PYTHON)/.ready

WARNINGS := -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror
CFLAGS ?= -O2
STANDARD := -std=c99
LIBRARIES := -lm -pthread

# Packages of `deps`, `deps-test` and `deps-more`; included files add to the *_TEST and *_MORE ones.
DEB := gcc libc6-dev libxxhash-dev
BREW := xxhash
DEB_TEST := g++ clang clang-format lcov qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross
BREW_TEST := clang-format lcov

ifeq ($(SYSTEM),Darwin)
BREW_PREFIX := $(shell brew --prefix 2>/dev/null)
# The Swift package's xxhash.h serves where Homebrew's is missing.
CPPFLAGS += $(if $(BREW_PREFIX),-I$(BREW_PREFIX)/include) -isystem packaging/swift/CTqkv/xxhash
endif

# What `make test` runs; included files add to it.
TEST_TARGETS :=
TEST_BUILD := $(BUILD)/tests
# The runner's build whose tests the others link, and the implementation in it, for any program that only needs one.
REFERENCE_BUILD := $(if $(filter Darwin,$(SYSTEM)),default,gcc)
TEST_TQKV := $(patsubst %,$(TEST_BUILD)/$(REFERENCE_BUILD)/%.o,test_tables runner)

# Without lint_bugs.metal: lint.py expects findings on its lines as they are.
SOURCES_FORMATTED := $(filter-out tests/metal/lint_bugs.metal,$(sort $(shell find src shaders metallib/air tests examples bench engines -type f \
	\( -name '*.[chm]' -o -name '*.cpp' -o -name '*.cu' -o -name '*.metal' -o -name metal_stdlib \))))
# Other versions of clang-format lay some lines out differently.
CLANG_FORMAT ?= clang-format
FORMAT_VERSION := 14
is_format_version = $(CLANG_FORMAT) --version | grep -q 'version $(FORMAT_VERSION)\.'

# Lists the targets with a comment `## TEXT`. The start of a name decides the group.
.PHONY: help
help:
	@awk '/^[a-z0-9.-]+:.* ## / && !seen[$$1]++ { \
			text = $$0; sub(/.* ## /, "", text); sub(/:.*/, ""); \
			group = /metal|gpu|shaders|mac|apinotes/ ? "Macs and GPUs" : /^(bench|model|quality|size)/ ? "Measure it" : \
				/^(tqkv|apinotes|deps-|format|goldens|charts|clean|fuzz-)/ ? "Work on it" : \
				/^(test|coverage|fuzz|lint|check|compare)/ ? "Test it" : "Use it"; \
			targets[group] = targets[group] sprintf("  %-17s %s\n", $$0, text) \
		} \
		END { \
			print "Start here: make -j2 deps demo, then README.md; to change something: make -j2 deps test-gcc, then CONTRIBUTING.md\n"; \
			n = split("Use it/Test it/Measure it/Work on it/Macs and GPUs", groups, "/"); \
			for (i = 1; i <= n; i++) printf "%s%s\n%s", (i > 1 ? "\n" : ""), groups[i], targets[groups[i]] \
		}' $(MAKEFILE_LIST)

# ---- Packages: installs what is missing; needs no network if nothing is ----

ifeq ($(SYSTEM),Darwin)
install = for package in $(sort $(1)); do brew list --versions $$package >/dev/null || brew install $$package || exit 1; done
else
# Before it begins, apt says how much comes.
install = missing=; for package in $(sort $(1)); do \
		dpkg -s $$package 2>/dev/null | grep -q '^Status: install ok installed' || missing="$$missing $$package"; \
	done; \
	test -z "$$missing" && exit 0; \
	echo "make $@ installs$$missing"; \
	command -v apt-get >/dev/null || { echo "make $@ installs by apt-get or brew: here install the like of these"; exit 1; }; \
	as_root=; test "$$(id -u)" = 0 || as_root=sudo; \
	apt="$$as_root env LC_ALL=C DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300"; \
	install="$$apt install --no-install-recommends"; \
	$$apt update && { $$install --assume-no $$missing | grep -E '^(Need to get|After this)'; $$install -y $$missing; } || \
		{ echo "make $@ could not install$$missing"; exit 1; }
endif

.PHONY: deps deps-test deps-more
deps: ## install what the library and the examples need
	@$(call install,$(if $(filter Darwin,$(SYSTEM)),$(BREW),$(DEB)))

deps-test: ## install what the tests need
	@$(call install,$(if $(filter Darwin,$(SYSTEM)),$(BREW) $(BREW_TEST),$(DEB) $(DEB_TEST)))
	@$(MAKE) --no-print-directory $(PYTHON_READY)

deps-more: ## install what the tests skip where it is missing: further compilers, versions of LLVM, zig
	@$(call install,$(if $(filter Darwin,$(SYSTEM)),,$(DEB_MORE)))
	@$(MAKE) --no-print-directory $(ZIG_READY)

# ---- The header that users copy ----

# By name only: a test that builds from it must not mend what check-header is about to compare.
ifneq ($(filter tqkv.h,$(MAKECMDGOALS)),)
.PHONY: tqkv.h
tqkv.h: ## join src/ into tqkv.h; tqkv_metal.m likewise
	awk -f src/amalgamate.awk src/$@ >$@.new && mv $@.new $@
endif
ifneq ($(filter tqkv_metal.m,$(MAKECMDGOALS)),)
.PHONY: tqkv_metal.m
tqkv_metal.m:
	awk -f src/amalgamate.awk src/$@ >$@.new && mv $@.new $@
endif

.PHONY: check-header
check-header: ## fail where tqkv.h or tqkv_metal.m is not what src/ gives
	@echo "== tqkv.h, tqkv_metal.m"
	@for joined in tqkv.h tqkv_metal.m; do \
		awk -f src/amalgamate.awk src/$$joined | cmp - $$joined || { \
			echo "$$joined is joined from src/: edit src/, then make $$joined"; echo "0 passed, 1 failed"; exit 1; }; \
	done; echo "2 passed, 0 failed"

# What everything here is built from: src, or . for the joined file.
TQKV ?= src
TQKV_FILES := $(if $(filter .,$(TQKV)),tqkv.h tqkv_metal.m,$(wildcard src/*.[hm] src/*/*.[hm] src/*/*/*.h))
INCLUDE = -I$(TQKV) -I.

# ---- Examples ----

# The implementation takes a quarter of a minute to compile: the examples share this object.
$(BUILD)/tqkv.o: examples/make/tqkv.c $(TQKV_FILES)
	@mkdir -p $(@D)
	$(CC) $(STANDARD) $(CPPFLAGS) $(CFLAGS) $(WARNINGS) $(INCLUDE) -c $< -o $@

# Programs that define TQKV_IMPLEMENTATION, as their users do, take it from an object, too.
IMPLEMENTED := -DTQKV_NO_IMPLEMENTATION
# FLAGS_name, CC_name: of one example, not of the object that it shares.
FLAGS_encode_attend := $(IMPLEMENTED)
FLAGS_pages := $(IMPLEMENTED)

# $(1) folder, $(2) the implementation. `make test` builds them with objects that it has anyway.
define example_programs
$(1)/%: examples/%.c $(2) $(wildcard examples/*.h)
	@mkdir -p $$(@D)
	$$(or $$(CC_$$*),$(CC)) $(STANDARD) $(CPPFLAGS) $(CFLAGS) $$(FLAGS_$$*) $(WARNINGS) $(INCLUDE) $$< $(2) -o $$@ $(LIBRARIES)
endef
$(eval $(call example_programs,$(BUILD),$(BUILD)/tqkv.o))

DEMOS := encode_attend real_kv
-include examples/rules.mk

# The most important last, as the end of the output is what one sees.
DEMOS_FIRST := engine tinylm encode_attend
run_demos = for demo in $(1); do echo "== examples/$$demo.c"; ./$(BUILD)/$$demo || exit 1; done

.PHONY: demo demo-all
demo: $(DEMOS_FIRST:%=$(BUILD)/%) ## start here: build and run three examples, the code to copy last
	@$(call run_demos,$(DEMOS_FIRST))

demo-all: $(DEMOS:%=$(BUILD)/%) ## build and run all examples of docs/examples.md that need neither MPI, ggml nor a GPU
	@$(call run_demos,$(DEMOS))

# ---- Installation; CMakeLists.txt installs the same files ----

PREFIX ?= /usr/local
TREE = $(DESTDIR)$(PREFIX)
# The tests use pkg-config on what was installed; tests/build/compile.sh uses the compilers for musl and Windows.
DEB_TEST += pkg-config musl-tools
DEB_MORE += gcc-mingw-w64-x86-64-win32
BREW_TEST += pkgconf

.PHONY: install uninstall
install: ## install tqkv.h, tqkv.pc and tqkv_metal.m: PREFIX=/usr/local DESTDIR=
	install -d "$(TREE)/include" "$(TREE)/share/pkgconfig" "$(TREE)/share/tqkv"
	install -m 644 tqkv.h "$(TREE)/include"
	install -m 644 tqkv_metal.m $(wildcard metallib/default.metallib) "$(TREE)/share/tqkv"
	version=$$(sed -n 's/^#define TQKV_VERSION_[A-Z]* //p' tqkv.h | paste -s -d . -) && \
		sed "s/@PROJECT_VERSION@/$$version/" tqkv.pc.in >"$(TREE)/share/pkgconfig/tqkv.pc"

uninstall: ## remove what `make install` installed
	rm -f "$(TREE)/include/tqkv.h" "$(TREE)/share/pkgconfig/tqkv.pc"
	rm -rf "$(TREE)/share/tqkv"

include tests/rules.mk
-include tests/fuzz/rules.mk
-include tests/lint.mk
-include tests/metal/rules.mk
-include packaging/swift/rules.mk
-include tests/cuda/rules.mk
-include bench/rules.mk
-include bench/models/rules.mk
-include engines/llama.cpp/rules.mk

# ---- Everything together ----

TEST_TARGETS += format-check test-docs

# Links between the documents, and the names in docs/architecture.md.
.PHONY: test-docs
test-docs:
	@echo "== documents"
	@python3 docs/check.py

.PHONY: test test-all clean format format-check
# The longest start first: the others then fill the cores to the end.
LONGEST := test-metallib-quick test-examples test-s390x test-aarch64 test-sanitize test-metal-cases test-shaders-quick test-metal \
	test-metal-arc test-isa
test: ## run all tests: no GPU, no network
	+@sh tests/build/say_failed.sh $(MAKE) --no-print-directory test-all

test-all: check-header $(filter $(TEST_TARGETS),$(LONGEST)) $(filter-out $(LONGEST),$(TEST_TARGETS))

format: ## lay out the sources
	@$(is_format_version) || { echo "make format needs clang-format $(FORMAT_VERSION): CLANG_FORMAT=clang-format-$(FORMAT_VERSION)"; exit 1; }
	$(CLANG_FORMAT) -i $(SOURCES_FORMATTED)

format-check: ## fail where `make format` would change something
	@echo "== format of $(words $(SOURCES_FORMATTED)) sources"
	@if ! $(is_format_version); then echo "skipped: no clang-format $(FORMAT_VERSION)"; \
	elif $(CLANG_FORMAT) --dry-run -Werror $(SOURCES_FORMATTED); then echo "1 passed, 0 failed"; \
	else echo "0 passed, 1 failed"; exit 1; fi

clean: ## remove what was built, but not what was downloaded
	rm -rf $(filter-out $(PYTHON),$(wildcard $(BUILD)/*))

endif
