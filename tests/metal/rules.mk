# The Metal shaders without a Mac: type check, execution on the CPU, sanitizers, planted bugs, lint.

METAL_BUILD := $(BUILD)/metal
SHADER_KERNELS := $(sort $(wildcard shaders/*.metal))
SHADER_SOURCES := $(SHADER_KERNELS) $(sort $(wildcard shaders/*.h))
SHADER_NAMES := $(SHADER_KERNELS:shaders/%.metal=%)
# What they include of src/.
SHADER_SHARED := src/api/types.h src/base/tables.h src/gpu/sizes.h
SHADER_TESTS := gpu driver codec_cases attend_cases index_cases learn_cases defect_cases machine_cases
SHADER_TEST_HEADERS := $(TQKV_FILES) $(wildcard tests/*.h tests/metal/*.h)

DEB_TEST += clang python3
BREW_TEST += python3

# Flags of a shader, compiled through a shim, and of the C++ of the tests. Products must stay rounded: see shaders/common.h.
SHADER_FLAGS := -std=c++14 -g1 -ffp-contract=off -D__METAL_VERSION__=300 -Itests/metal -Wall -Wextra -Wno-unknown-pragmas \
	-Werror
SHADER_CPU := $(SHADER_FLAGS) -isystem tests/metal/shim/cpu
# With the processor's fma: a call of the library costs a tenth of the run.
SHADER_NATIVE := $(if $(filter x86_64,$(MACHINE)),-march=native)
SHADER_TEST_FLAGS := -std=c++14 -g -D_POSIX_C_SOURCE=200809L -D_DARWIN_C_SOURCE -DTQKV_METAL $(WARNINGS) $(INCLUDE) -Itests/metal -isystem tests/metal/shim/cpu $(CPPFLAGS)
SHADER_IMPLEMENTATION := $(TEST_BUILD)/$(REFERENCE_BUILD)/test_tables.o
TYPE_CHECK := clang -x c++ $(SHADER_FLAGS) -isystem tests/metal/shim/clang -nostdinc -target aarch64-none-elf -Wconversion \
	-Wdouble-promotion -fsyntax-only

$(METAL_BUILD)/%/prepared: tests/metal/prep.py metallib/msl.py $(SHADER_SOURCES)
	@python3 tests/metal/prep.py $* $(@D)/source $(SHADER_SOURCES)
	@touch $@

.PRECIOUS: $(METAL_BUILD)/%/prepared

# The implementation, in test_tables.c, is that of a runner, and not sanitized here: tests/rules.mk has its sanitized builds.
# $(1) name, $(2) compiler, $(3) flags, $(4) flags of simt.cpp instead, $(5) runs the driver, $(6) its options,
# $(7) another object of test_tables.c
define shader_variant
$(METAL_BUILD)/$(1)/%.metal.o: $(METAL_BUILD)/cpu/prepared $(SHADER_SHARED) tests/metal/simt.h tests/metal/shim/cpu/metal_stdlib
	@mkdir -p $$(@D)
	@$(2) $(3) $(SHADER_CPU) $(if $(filter plain,$(1)),$(SHADER_NATIVE)) -Ishaders -c $(METAL_BUILD)/cpu/source/$$*.metal.cpp -o $$@

$(METAL_BUILD)/$(1)/simt.o: tests/metal/simt.cpp tests/metal/simt.h
	@mkdir -p $$(@D)
	@$(2) -O2 $(4) $(SHADER_TEST_FLAGS) -c $$< -o $$@

$(METAL_BUILD)/$(1)/%.o: tests/metal/%.cpp $(SHADER_TEST_HEADERS)
	@mkdir -p $$(@D)
	@$(2) $(3) $(SHADER_TEST_FLAGS) -c $$< -o $$@

$(METAL_BUILD)/$(1)/%.o: tests/%.c $(SHADER_TEST_HEADERS)
	@mkdir -p $$(@D)
	@$(2) -x c++ $(3) $(SHADER_TEST_FLAGS) -c $$< -o $$@

$(METAL_BUILD)/$(1)/driver: $(SHADER_NAMES:%=$(METAL_BUILD)/$(1)/%.metal.o) \
		$(patsubst %,$(METAL_BUILD)/$(1)/%.o,simt runner $(SHADER_TESTS)) $(or $(7),$(SHADER_IMPLEMENTATION))
	@$(2) $(3) $$^ -o $$@ -lm

.PHONY: test-shaders-$(1)
test-shaders-$(1): $(METAL_BUILD)/$(1)/driver
	@echo "== shaders on the CPU: $(2) $(3)"
	@$(5) $$< $(6)
endef

# setarch: ThreadSanitizer needs its own address layout. suppress_equal_*: at 0, it reports the race of every lane.
# The ASan variant runs the shaders as for hardware with cheap shuffles.
SHADER_ASAN := -O1 -DTQKV_CHEAP_SHUFFLE=true -DTQKV_SHARED_MATRIX_SLOTS=false -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
SHADER_TSAN := -O1 -fsanitize=thread
SHADER_TSAN_RUN := TSAN_OPTIONS=suppress_equal_addresses=0:suppress_equal_stacks=0:halt_on_error=1 \
	$(if $(filter Linux,$(SYSTEM)),setarch -R)

# Position-independent for the library of host/rules.mk without sanitizers. -O2 takes half as long again to compile, for a tenth
# of the run; gcc's code runs half as long again as clang's.
$(eval $(call shader_variant,plain,clang++,-O1 -fPIC,-fPIC,,))
$(eval $(call shader_variant,asan,clang++,$(SHADER_ASAN),-DSIMT_ASAN,,--one-schedule))
$(eval $(call shader_variant,tsan,clang++,$(SHADER_TSAN),-DSIMT_TSAN,$(SHADER_TSAN_RUN),--one-schedule))

# An engine with an encoder of its own, with the machine in place of a GPU.
$(METAL_BUILD)/plain/metal_plan: examples/metal_plan.cpp $(TQKV_FILES) tests/metal/simt.h $(SHADER_NAMES:%=$(METAL_BUILD)/plain/%.metal.o) \
		$(METAL_BUILD)/plain/simt.o $(METAL_BUILD)/plain/runner.o $(SHADER_IMPLEMENTATION)
	@$(CXX) -O1 $(filter-out -DTQKV_METAL,$(SHADER_TEST_FLAGS)) $(IMPLEMENTED) $(filter-out %.h %.m,$^) -o $@ -lm

.PHONY: demo-plan
demo-plan: $(METAL_BUILD)/plain/metal_plan ## build and run examples/metal_plan.cpp: plans of Metal calls, run here
	@$<

# The micro-benchmark of a Mac, tests/metal/mac/lookup.m, times kernels whose sums are right.
$(METAL_BUILD)/lookup/prepared: tests/metal/prep.py metallib/msl.py tests/metal/mac/lookup.metal
	@python3 tests/metal/prep.py cpu $(@D)/source tests/metal/mac/lookup.metal
	@touch $@

$(METAL_BUILD)/lookup/test: tests/metal/mac/lookup_test.cpp $(METAL_BUILD)/lookup/prepared tests/metal/mac/lookup.metal \
		$(METAL_BUILD)/plain/gpu.o $(METAL_BUILD)/plain/simt.o $(METAL_BUILD)/plain/runner.o $(SHADER_IMPLEMENTATION)
	@$(CXX) -O1 $(SHADER_CPU) -Ishaders -c $(@D)/source/lookup.metal.cpp -o $(@D)/lookup.metal.o
	@$(CXX) -O1 $(SHADER_TEST_FLAGS) $< $(@D)/lookup.metal.o $(filter %.o,$^) -o $@ -lm

.PHONY: test-lookup
test-lookup: $(METAL_BUILD)/lookup/test
	@echo "== ways to look up codes"
	@$<

.PHONY: test-shaders-flush
test-shaders-flush: $(METAL_BUILD)/plain/driver
	@echo "== shaders on a machine that flushes subnormals"
	@$< --flush

ifneq ($(QEMU),)
# The stack switch of the machine on 64-bit ARM, and the sums of the shaders there.
$(eval $(call shader_variant,aarch64,aarch64-linux-gnu-g++,-O1 -static -isystem $(CROSS_INCLUDE),,$(QEMU),--one-schedule \
	machine tables attend/divided/d64 golden/tq5/64,$(METAL_BUILD)/aarch64/test_tables.o))
$(METAL_BUILD)/aarch64/codec_cases.o $(METAL_BUILD)/aarch64/test_tables.o: $(CROSS_INCLUDE)/xxhash.h
SHADER_CROSS := test-shaders-aarch64
DEB_TEST += g++-aarch64-linux-gnu
endif

.PHONY: check-shaders
check-shaders: $(METAL_BUILD)/clang/prepared
	@echo "== shaders: type check with address spaces"
	@for name in $(SHADER_NAMES); do $(TYPE_CHECK) -Ishaders $(METAL_BUILD)/clang/source/$$name.metal.cpp || exit 1; done
	@echo "$(words $(SHADER_NAMES)) passed, 0 failed"

.PHONY: lint-shaders
lint-shaders:
	@echo "== shaders: lint, and its own test"
	@python3 tests/metal/lint.py $(SHADER_SOURCES)
	@python3 tests/metal/lint.py --expect tests/metal/lint_bugs.metal

.PHONY: test-shaders-bugs
test-shaders-bugs: $(patsubst %,$(METAL_BUILD)/%/driver,plain asan tsan)
	@echo "== shaders: planted bugs"
	@PLAIN="clang++ -O1 $(SHADER_CPU)" PLAIN_LINK="clang++" ASAN="clang++ $(SHADER_ASAN) $(SHADER_CPU)" \
	ASAN_LINK="clang++ $(SHADER_ASAN)" TSAN="clang++ $(SHADER_TSAN) $(SHADER_CPU)" TSAN_LINK="clang++ $(SHADER_TSAN)" \
	TSAN_RUN="$(SHADER_TSAN_RUN)" TYPE_CHECK="$(TYPE_CHECK)" IMPLEMENTATION="$(SHADER_IMPLEMENTATION)" \
	python3 tests/metal/bugs.py $(METAL_BUILD) $(BUGS)

# nvcc compiles the shaders without a GPU: the pipelines for I8 keys, TQ4 values and 4 columns.
NVCC ?= $(shell command -v nvcc 2>/dev/null)
CUDA_FLAGS := -x cu -std=c++17 -arch=sm_90a -fmad=false -diag-suppress=20168,128 -D__METAL_VERSION__=300 -Itests/cuda/shim -Ishaders
CUDA_CONSTANTS := 8, 2, 1, 1, 1, 1, 4, 1, 1, 1, 0, 1, 1, 1

.PHONY: check-shaders-cuda
check-shaders-cuda: $(METAL_BUILD)/cuda/prepared
	@echo "== shaders: compiled as CUDA"
ifeq ($(NVCC),)
	@echo "skipped: no nvcc"
else
	@echo '#define SIMT_CONSTANTS $(CUDA_CONSTANTS)' > $(METAL_BUILD)/cuda/pipeline.h
	@for name in $(SHADER_NAMES); do $(NVCC) $(CUDA_FLAGS) -include $(METAL_BUILD)/cuda/pipeline.h -cubin \
		$(METAL_BUILD)/cuda/source/$$name.metal.cu -o $(METAL_BUILD)/cuda/$$name.cubin || exit 1; done
	@echo "$(words $(SHADER_NAMES)) passed, 0 failed"
endif

# Every case in one order of the simdgroups, and in all orders those whose simdgroups share memory in every way there is.
# Left to `make test-shaders`: the largest shapes in all orders.
SCHEDULED_CASES := attend/shape attend/divided batch/ encode/tq4 rotate/
LARGE_SHAPES := attend/shape/group1_queries600 attend/shape/group2_queries200

.PHONY: test-shaders-once test-shaders-quick test-shaders
test-shaders-once: $(METAL_BUILD)/plain/driver $(METAL_BUILD)/plain/metal_plan
	@echo "== shaders on the CPU"
	@$< --one-schedule $(SCHEDULED_CASES:%=-%)
	@$< $(SCHEDULED_CASES) $(LARGE_SHAPES:%=-%)
	@$< --one-schedule $(LARGE_SHAPES)
	@$(METAL_BUILD)/plain/metal_plan >/dev/null && echo "1 passed, 0 failed"

test-shaders-quick: check-shaders lint-shaders test-shaders-once test-lookup

test-shaders: test-shaders-quick test-shaders-plain check-shaders-cuda test-shaders-flush test-shaders-asan test-shaders-tsan \
		test-shaders-bugs $(SHADER_CROSS)
test-shaders: ## everything about the shaders

TEST_TARGETS += test-shaders-quick

include metallib/rules.mk
include tests/metal/library/rules.mk

-include tests/metal/host/rules.mk
