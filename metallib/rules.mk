# make metallib: the shaders as a library. By Apple's compiler where there is one, else by metallib/air with stock LLVM 14.
# TARGET: the oldest system that loads it.

TARGET ?= macos13
METALLIB_TARGETS := macos13 macos14 macos15 macos26 ios16
METALLIB_BUILD := $(BUILD)/metallib
METALLIB_SOURCE := metallib/tqkv.metal
# The library in the repository is for macOS 13; others stay in the build folder. It changes once for a series of changes,
# because git keeps every version: where it is of other shaders, or by another builder, the tests build one of the present.
METALLIB := metallib/default.metallib
METALLIB_PRESENT := $(METALLIB_BUILD)/air/macos13/default.metallib
METALLIB_PRESENT_SOURCE := $(METALLIB_BUILD)/current.metal
METALLIB_TESTED := $(METALLIB_BUILD)/tested.metallib
METALLIB_OUTPUT = $(if $(filter macos13,$(TARGET)),$(METALLIB),$(METALLIB_BUILD)/$(TARGET).metallib)

# $(1): of air or xcrun
METALLIB_MADE = $(METALLIB_BUILD)/$(1)/$(TARGET)/default.metallib
METALLIB_SDK := $(if $(filter ios%,$(TARGET)),iphoneos,macosx)
# Xcode 26 without its Metal Toolchain has a program of that name that fails.
XCRUN_METAL := $(shell xcrun --sdk $(METALLIB_SDK) metal --version >/dev/null 2>&1 && echo yes)
METALLIB_BY ?= $(if $(XCRUN_METAL),xcrun,air)

# LLVM 14 is the last whose pointers have types, as in all that Apple's runtimes read. Later releases of Debian and Ubuntu do
# not package it.
CODENAME := $(shell . /etc/os-release 2>/dev/null && echo $$VERSION_CODENAME)
# clang's sanitizers come with it only where packages are installed with those that they recommend.
CLANG_VERSION_bookworm := 14
CLANG_VERSION_noble := 18
CLANG_VERSION_trixie := 19
DEB_TEST += $(CLANG_VERSION_$(CODENAME):%=libclang-rt-%-dev)
DEB_TEST += python3 $(if $(filter bookworm jammy noble,$(CODENAME)),clang-14 llvm-14)

ifeq ($(filter $(TARGET),$(METALLIB_TARGETS)),)
$(error TARGET is one of $(METALLIB_TARGETS))
endif

.PHONY: metallib
metallib: $(METALLIB_SOURCE) $(call METALLIB_MADE,$(METALLIB_BY)) ## compile the shaders into metallib/default.metallib: TARGET=macos13
	@cp $(call METALLIB_MADE,$(METALLIB_BY)) $(METALLIB_OUTPUT)
	@$(if $(filter airmacos13,$(METALLIB_BY)$(TARGET)),python3 metallib/record.py write metallib/README.md $(METALLIB) \
		$(METALLIB_SOURCE) $(AIR_TOOLS))
	@echo "$(METALLIB_OUTPUT): by $(if $(filter xcrun,$(METALLIB_BY)),Apple's compiler (xcrun metal),metallib/air and stock \
	LLVM $(AIR_LLVM)), for $(TARGET)"

# All shaders in one file. It changes only when the shaders do.
.PHONY: metallib-source
metallib-source:
	@mkdir -p $(METALLIB_BUILD)
	@python3 metallib/amalgamate.py $(METALLIB_BUILD)/tqkv.metal $(SHADER_KERNELS)

$(METALLIB_SOURCE): metallib-source
	@cmp -s $(METALLIB_BUILD)/tqkv.metal $@ || cp $(METALLIB_BUILD)/tqkv.metal $@

# ---- Apple's compiler ----

XCRUN_STANDARD := $(patsubst macos26,metal4.0,$(patsubst macos15,metal3.2,$(patsubst macos14,metal3.1,$(TARGET))))
XCRUN_VERSION := $(if $(filter ios%,$(TARGET)),-mios-version-min=$(TARGET:ios%=%).0,-mmacosx-version-min=$(TARGET:macos%=%).0)
# No fast math and no contraction: codes and norms must be the same bytes as those of tqkv.h.
XCRUN_FLAGS := -std=$(if $(filter metal%,$(XCRUN_STANDARD)),$(XCRUN_STANDARD),metal3.0) -fno-fast-math -ffp-contract=off \
	$(XCRUN_VERSION) -Wall -Wextra
XCRUN_BUILD := $(METALLIB_BUILD)/xcrun/$(TARGET)

$(XCRUN_BUILD)/%.air: shaders/%.metal $(wildcard shaders/*.h) $(TQKV_FILES)
	@mkdir -p $(@D)
	xcrun --sdk $(METALLIB_SDK) metal $(XCRUN_FLAGS) -c $< -o $@

$(XCRUN_BUILD)/default.metallib: $(SHADER_NAMES:%=$(XCRUN_BUILD)/%.air)
	xcrun --sdk $(METALLIB_SDK) metallib $^ -o $@

# ---- Stock LLVM ----

AIR_LLVM := 14
AIR_TOOLS := clang-$(AIR_LLVM) opt-$(AIR_LLVM) llvm-as-$(AIR_LLVM)
AIR_SOURCES := $(wildcard metallib/air/*.py) metallib/air/shim/metal_stdlib metallib/msl.py
AIR_BUILD := metallib/air/build.py --llvm $(AIR_LLVM)

# $(1): the target
air_library = python3 $(AIR_BUILD) --target $(1) --keep $(METALLIB_BUILD)/air/$(1)/modules -o $@ $(SHADER_KERNELS)

# Through the one file: a change of tqkv.h that Metal does not see builds nothing.
$(METALLIB_BUILD)/air/%/default.metallib: $(AIR_SOURCES) $(METALLIB_PRESENT_SOURCE)
	@for tool in $(AIR_TOOLS); do command -v $$tool >/dev/null || { echo "$$tool is missing: make deps-test"; exit 1; }; done
	@mkdir -p $(@D)
	@$(call air_library,$*)

$(METALLIB_PRESENT_SOURCE): metallib-source
	@cmp -s $(METALLIB_BUILD)/tqkv.metal $@ || cp $(METALLIB_BUILD)/tqkv.metal $@

# ---- The library in the repository ----

$(METALLIB_TESTED): $(METALLIB_PRESENT_SOURCE) $(AIR_SOURCES) $(METALLIB)
	@if cmp -s $< $(METALLIB_SOURCE) && python3 metallib/record.py check metallib/README.md $(METALLIB) $(METALLIB_SOURCE) && \
		python3 metallib/record.py builder metallib/README.md; then cp $(METALLIB) $@; else $(call air_library,macos13); fi

.PHONY: check-metallib-record check-metallib check-metallib-rebuilt
# Part of `make test`: the library, the source and the table in the README belong together.
check-metallib-record: metallib-source
	@echo "== the library in the repository"
	@python3 metallib/record.py check metallib/README.md $(METALLIB) $(METALLIB_SOURCE) || { echo "make metallib"; exit 1; }
	@cmp -s $(METALLIB_BUILD)/tqkv.metal $(METALLIB_SOURCE) || echo "It is of other shaders than these: make metallib before a release."
	@echo "1 passed, 0 failed"

check-metallib: check-metallib-record ## metallib/ is that of the shaders: the library, the source, the table in its README
	@cmp $(METALLIB_BUILD)/tqkv.metal $(METALLIB_SOURCE) || { echo "$(METALLIB_SOURCE) is not that of the shaders: make metallib"; exit 1; }
	@echo "1 passed, 0 failed"

# Another LLVM 14 than the one that built it may give other bytes.
ifeq ($(shell for tool in $(AIR_TOOLS); do command -v $$tool || echo missing; done | grep missing),)
AIR_INSTALLED := yes
check-metallib-rebuilt: check-metallib $(METALLIB_PRESENT)
	@echo "== the library in the repository, built again"
	@if why=$$(python3 metallib/record.py made-by metallib/README.md $(AIR_TOOLS)); then \
		cmp $(METALLIB_PRESENT) $(METALLIB) || { echo "$(METALLIB) is not what the shaders give: make metallib"; exit 1; }; \
		echo "1 passed, 0 failed"; \
	else echo "skipped: $$why"; fi
else
check-metallib-rebuilt: check-metallib
	@echo "== the library in the repository, built again"
	@echo "skipped: no LLVM $(AIR_LLVM)"
endif

TEST_TARGETS += check-metallib-record
