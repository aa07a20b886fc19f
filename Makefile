# GNU make, Linux and macOS. Everything is built under build/.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules
.SUFFIXES:

SYSTEM := $(shell uname -s)
MACHINE := $(shell uname -m)
BUILD := build

WARNINGS := -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror
CFLAGS ?= -O2
STANDARD := -std=c99
LIBRARIES := -lm -pthread

# Packages of `deps` and `deps-test`; included files add to the *_TEST ones.
DEB := build-essential libxxhash-dev
BREW := xxhash
DEB_TEST := clang clang-format lcov qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross
BREW_TEST := clang-format lcov

ifeq ($(SYSTEM),Darwin)
BREW_PREFIX := $(shell brew --prefix 2>/dev/null)
CPPFLAGS += $(if $(BREW_PREFIX),-I$(BREW_PREFIX)/include)
endif

# What `make test` runs; included files add to it.
TEST_TARGETS :=

SOURCES_FORMATTED := $(wildcard *.h *.m tests/*.c tests/*.h examples/*.c examples/*.h bench/*.c bench/*.h shaders/*.h \
	shaders/*.metal tests/fuzz/*.[ch] tests/large/*.c tests/metal/*.c tests/metal/*.h tests/metal/*.cpp tests/metal/model/*.cpp \
	tests/metal/model/variants/*.metal tests/metal/host/*.[hm] \
	tests/cuda/*.cpp tests/cuda/*.cu tests/cuda/*.h \
	tests/metal/standin/*.h tests/metal/standin/*.m tests/metal/standin/*.cpp tests/metal/standin/*/*.h examples/*.m)

.PHONY: help
help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | awk -F '\t' '{ printf "%-14s %s\n", $$1, $$2 }'

# ---- Packages: nothing happens, and no network is needed, where all of them are present ----

ifeq ($(SYSTEM),Darwin)
install = for package in $(1); do brew list --versions $$package >/dev/null || brew install $$package || exit 1; done
else
install = missing=; for package in $(1); do \
		dpkg -s $$package 2>/dev/null | grep -q '^Status: install ok installed' || missing="$$missing $$package"; \
	done; \
	test -z "$$missing" && exit 0; \
	as_root=; test "$$(id -u)" = 0 || as_root=sudo; \
	export DEBIAN_FRONTEND=noninteractive; \
	$$as_root apt-get update && $$as_root apt-get install -y $$missing
endif

.PHONY: deps deps-test
deps: ## install what the library and the examples need
	@$(call install,$(if $(filter Darwin,$(SYSTEM)),$(BREW),$(DEB)))

deps-test: ## install what the tests need
	@$(call install,$(if $(filter Darwin,$(SYSTEM)),$(BREW) $(BREW_TEST),$(DEB) $(DEB_TEST)))

# ---- Examples ----

DEMOS := encode_attend real_kv
-include examples/rules.mk

$(BUILD)/%: examples/%.c tqkv.h $(wildcard examples/*.h)
	@mkdir -p $(@D)
	$(CC) $(STANDARD) $(CPPFLAGS) $(CFLAGS) $(WARNINGS) -I. $< -o $@ $(LIBRARIES)

.PHONY: demo
demo: $(DEMOS:%=$(BUILD)/%) ## build and run the examples
	@for demo in $(DEMOS); do echo "== $$demo"; ./$(BUILD)/$$demo || exit 1; done

# ---- Installation; CMakeLists.txt installs the same files ----

PREFIX ?= /usr/local
TREE = $(DESTDIR)$(PREFIX)
# The tests use pkg-config on what was installed; tests/compile.sh uses the compilers for musl and Windows.
DEB_TEST += pkg-config musl-tools gcc-mingw-w64-x86-64-win32
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
-include tests/cuda/rules.mk
-include bench/rules.mk

# ---- Everything together ----

.PHONY: test clean format format-check
test: $(TEST_TARGETS) ## run all tests: no GPU, no network

clean: ## remove what was built
	rm -rf $(BUILD)

format: ## lay out the sources
	clang-format -i $(SOURCES_FORMATTED)

format-check: ## fail where `make format` would change something
	clang-format --dry-run -Werror $(SOURCES_FORMATTED)
