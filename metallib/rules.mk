# make metallib: the shaders compiled by Apple's compiler. SDK=iphoneos for iOS.

SDK ?= macosx
METALLIB := metallib/default.metallib
METALLIB_BUILD := $(BUILD)/metallib/$(SDK)
METALLIB_TARGET := $(if $(filter iphone%,$(SDK)),-mios-version-min=16.0,-mmacosx-version-min=13.0)
# No fast math and no contraction: codes and norms must be the same bytes as those of tqkv.h.
METALLIB_FLAGS := -std=metal3.0 -fno-fast-math -ffp-contract=off $(METALLIB_TARGET) -Wall -Wextra

.PHONY: metallib
ifneq ($(shell xcrun --sdk $(SDK) --find metal 2>/dev/null),)
metallib: $(METALLIB) ## compile the shaders into metallib/default.metallib (macOS)

$(METALLIB_BUILD)/%.air: shaders/%.metal $(wildcard shaders/*.h) tqkv.h
	@mkdir -p $(@D)
	xcrun --sdk $(SDK) metal $(METALLIB_FLAGS) -c $< -o $@

$(METALLIB): $(SHADER_NAMES:%=$(METALLIB_BUILD)/%.air)
	xcrun --sdk $(SDK) metallib $^ -o $@
else
metallib: ## compile the shaders into metallib/default.metallib (macOS)
	@echo "make metallib needs macOS with Xcode and its Metal compiler (xcrun --sdk $(SDK) --find metal finds none)"; exit 1
endif
