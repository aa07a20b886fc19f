# The library of the present shaders: its own bitcode on the machine of simt.h, and what a reader that shares nothing with the builder finds in it.

LIBRARY_TESTS := tests/metal/library
# Left to `make test-metallib`: modules of most head_dims, other versions of LLVM and targets; cases that launch the same kernels in
# another way.
LIBRARY_CHECKS := library/kernels library/attributes _d128 index tables attend_list damage/ refusals/ lowering
LIBRARY_LATER := -attend/company -attend/slices -attend/strides -attend/shape -attend/pages -bits_of_slices -cache/ -golden/

# Another library, and the source beside it: make test-metallib-quick LIBRARY=FILE LIBRARY_SOURCE=FILE
LIBRARY ?= $(METALLIB_TESTED)
LIBRARY_SOURCE ?= $(METALLIB_PRESENT_SOURCE)
LLC := llc-$(AIR_LLVM)
LIBRARY_CPP := clang++ -std=c++14 -Itests/metal -isystem tests/metal/shim/cpu
LIBRARY_PLAIN := $(patsubst %,$(METAL_BUILD)/plain/%.o,simt runner $(SHADER_TESTS)) $(SHADER_IMPLEMENTATION)

# Further versions that read the library.
DEB_MORE += $(if $(filter bookworm,$(CODENAME)),llvm-15 llvm-16 llvm-19)

# A driver that runs a library. At -O0, but with values in registers: llc takes 8 s for what the driver then runs in 24, 6 for 38
# without, and several times as long at -O1. Without the processor's conversion of halves: air.cpp counts them.
# $(1) name, $(2) library
define library_driver
$(METAL_BUILD)/$(1)/launchers.cpp: $(2) $(wildcard $(LIBRARY_TESTS)/*.py)
	@rm -rf $$(@D)
	@python3 $(LIBRARY_TESTS)/launch.py $(2) $$(@D)

$(METAL_BUILD)/$(1)/driver: $(METAL_BUILD)/$(1)/launchers.cpp $(LIBRARY_TESTS)/air.cpp tests/metal/simt.h $(LIBRARY_PLAIN)
	@ls $$(@D)/*.ll | xargs -P2 -I{} $(LLC) -O0 -optimize-regalloc -regalloc=basic -mattr=-f16c -relocation-model=pic -filetype=obj {} -o {}.o
	@$(LIBRARY_CPP) -O1 -c $$< -o $$(@D)/launchers.o
	@$(LIBRARY_CPP) -O2 $(SHADER_NATIVE) $(WARNINGS) -c $(LIBRARY_TESTS)/air.cpp -o $$(@D)/air.o
	@$(CXX) $$(@D)/*.o $(LIBRARY_PLAIN) -o $$@ -lm
endef
$(eval $(call library_driver,library,$(LIBRARY)))
$(eval $(call library_driver,library-of-source,$(METALLIB_BUILD)/source/default.metallib))

$(METALLIB_BUILD)/source/default.metallib: $(LIBRARY_SOURCE) $(AIR_SOURCES)
	@mkdir -p $(@D)/shaders
	@cp $(LIBRARY_SOURCE) $(@D)/shaders/tqkv.metal
	@python3 $(AIR_BUILD) --keep $(@D)/modules -o $@ $(@D)/shaders/tqkv.metal

.PHONY: test-metallib-quick test-metallib check-metallib-source check-metallib-source-cuda \
	test-metallib-bugs compare-metallib
ifneq ($(and $(AIR_INSTALLED),$(shell command -v $(LLC) 2>/dev/null)),)
test-metallib-quick: $(METAL_BUILD)/library/driver check-metallib-source
	@echo "== $(LIBRARY): container, modules, refusals"
	@python3 $(LIBRARY_TESTS)/check.py $(LIBRARY) $(LIBRARY_SOURCE) $(METAL_BUILD)/library/check $(LIBRARY_CHECKS)
	@echo "== $(LIBRARY): pipelines of it, by LLVM's optimiser"
	@python3 $(LIBRARY_TESTS)/specialise.py $(LIBRARY)
	@echo "== $(LIBRARY): its bitcode on the CPU"
	@$< --one-schedule $(LIBRARY_LATER)

test-metallib: ## the library in the box: its bitcode on the CPU, an independent reader, planted bugs
test-metallib: check-metallib-rebuilt test-metallib-quick $(METAL_BUILD)/library-of-source/driver check-metallib-source-cuda test-metallib-bugs
	@echo "== $(LIBRARY): container, modules, refusals"
	@python3 $(LIBRARY_TESTS)/check.py $(LIBRARY) $(LIBRARY_SOURCE) $(METAL_BUILD)/library/check
	@echo "== $(LIBRARY): all its pipelines, by LLVM's optimiser"
	@python3 $(LIBRARY_TESTS)/specialise.py $(LIBRARY) --all
	@echo "== $(LIBRARY): its bitcode on the CPU, every schedule"
	@$(METAL_BUILD)/library/driver
	@$(METAL_BUILD)/library/driver --flush
	@echo "== $(LIBRARY_SOURCE): its bitcode on the CPU"
	@$(METAL_BUILD)/library-of-source/driver --one-schedule

# Plants bugs in copies of the builder and of a shader. BUGS: parts of names.
test-metallib-bugs: $(METAL_BUILD)/library/driver
	@echo "== metallib/air: planted bugs"
	@LINK="$(CXX) $(METAL_BUILD)/library/air.o $(LIBRARY_PLAIN)" LLC="$(LLC) -O1 -mattr=-f16c -relocation-model=pic" \
	CPP="$(LIBRARY_CPP) -O1" LIBRARY="$(LIBRARY)" LIBRARY_SOURCE="$(LIBRARY_SOURCE)" python3 $(LIBRARY_TESTS)/bugs.py $(METAL_BUILD) $(BUGS)

# Compares with libraries of Apple's compiler in a folder: shapes of metadata, records, attributes, functions.
compare-metallib: $(LIBRARY) ## compare the library with libraries made by Apple's compiler: APPLE=FOLDER
	@test -n "$(APPLE)" || { echo "compare-metallib needs APPLE=FOLDER with .metallib files"; exit 1; }
	@python3 $(LIBRARY_TESTS)/compare.py $(LIBRARY) $(APPLE)
else
test-metallib-quick test-metallib test-metallib-bugs compare-metallib:
	@echo "skipped: no LLVM $(AIR_LLVM), make deps-test installs it"
endif

# The one file passes what the separate shaders pass.
check-metallib-source: $(LIBRARY_SOURCE)
	@echo "== $(LIBRARY_SOURCE): type check with address spaces, compiled for the CPU"
	@for mode in clang cpu cuda; do python3 tests/metal/prep.py $$mode $(METAL_BUILD)/one/$$mode $(LIBRARY_SOURCE) || exit 1; done
	@$(TYPE_CHECK) $(METAL_BUILD)/one/clang/$(notdir $(LIBRARY_SOURCE)).cpp
	@$(CXX) $(SHADER_CPU) -fsyntax-only $(METAL_BUILD)/one/cpu/$(notdir $(LIBRARY_SOURCE)).cpp
	@echo "2 passed, 0 failed"

check-metallib-source-cuda: check-metallib-source
	@echo "== $(LIBRARY_SOURCE): compiled as CUDA"
ifeq ($(NVCC),)
	@echo "skipped: no nvcc"
else
	@echo '#define SIMT_CONSTANTS $(CUDA_CONSTANTS)' > $(METAL_BUILD)/one/pipeline.h
	@$(NVCC) $(CUDA_FLAGS) -include $(METAL_BUILD)/one/pipeline.h -cubin $(METAL_BUILD)/one/cuda/$(notdir $(LIBRARY_SOURCE)).cu \
		-o $(METAL_BUILD)/one/tqkv.cubin
	@echo "1 passed, 0 failed"
endif

TEST_TARGETS += test-metallib-quick
