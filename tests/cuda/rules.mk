# The shaders as CUDA, on an NVIDIA GPU. Each pipeline is one compilation, with the function constants that the tests and the
# benchmark need.

CUDA_BUILD := $(BUILD)/cuda
CUDA_HOME ?= $(if $(NVCC),$(patsubst %/bin/nvcc,%,$(realpath $(NVCC))))
CUDA_LINK := -L$(CUDA_HOME)/lib64 -lcudart_static -ldl -lrt -lm -pthread
CUDA_TEST_FLAGS := -O2 $(SHADER_TEST_FLAGS) -DTQKV__LONG_COLUMNS=32 -DTQKV__MERGE_VALUES=4096 -DTQKV__INDEX_COLUMNS=64 -DGPU_DEVICE -isystem $(CUDA_HOME)/include
CUDA_TESTS := driver gpu codec_cases attend_cases index_cases learn_cases defect_cases
GPU_PRESENT := $(if $(NVCC),$(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU'))

$(CUDA_BUILD)/prepared: tests/metal/prep.py metallib/msl.py $(SHADER_SOURCES) $(TQKV_FILES) tests/cuda/shim/metal_stdlib
	@rm -rf $(CUDA_BUILD)/pipelines $(CUDA_BUILD)/pipelines_slots
	@python3 tests/metal/prep.py cuda $(@D)/source $(SHADER_SOURCES)
	@touch $@

# $(1) sources, $(2) more flags.
define cuda_objects
$(CUDA_BUILD)/%.o: $(1) $(SHADER_TEST_HEADERS) $(wildcard tests/cuda/*.h)
	@mkdir -p $$(@D)
	@$(CXX) $(2) $(CUDA_TEST_FLAGS) -c $$< -o $$@
endef

$(eval $(call cuda_objects,tests/metal/%.cpp))
$(eval $(call cuda_objects,tests/cuda/%.cpp))
$(eval $(call cuda_objects,tests/%.c,-x c++))

$(CUDA_BUILD)/driver: $(CUDA_TESTS:%=$(CUDA_BUILD)/%.o) \
		$(patsubst %,$(CUDA_BUILD)/%.o,simt runner test_tables device pipelines cuda_cases)
	@$(CXX) $^ -o $@ $(CUDA_LINK)

# $(1) lists the pipelines and runs none, so its tests fail; their failures do not matter. $(2) what the folder's name ends
# with, $(3) more flags.
compile_pipelines = $(1) | grep '^pipeline ' | sort -u >$(CUDA_BUILD)/wanted; \
	python3 tests/cuda/pipelines.py $(CUDA_BUILD)/source $(CUDA_BUILD)/pipelines$(2) $(CUDA_BUILD)/wanted $(NVCC) $(CUDA_FLAGS) $(3)

# Where rows lie apart, attend_matrix also as on Apple's GPUs.
SLOT_CASES := attend/lists attend/pages

.PHONY: cuda-pipelines test-gpu
cuda-pipelines: $(CUDA_BUILD)/driver $(CUDA_BUILD)/prepared
	@$(call compile_pipelines,$< --device list)
	@$(call compile_pipelines,$< --device list $(SLOT_CASES),_slots,-DTQKV_SHARED_MATRIX_SLOTS=true)

ifeq ($(filter-out 0,$(GPU_PRESENT)),)
test-gpu: ## the shader tests on an NVIDIA GPU
	@echo "skipped: no nvcc or no NVIDIA GPU"
else
test-gpu: cuda-pipelines
	@echo "== shaders on an NVIDIA GPU"
	@$(CUDA_BUILD)/driver --device $(CUDA_BUILD)/pipelines
	@$(CUDA_BUILD)/driver --device $(CUDA_BUILD)/pipelines_slots $(SLOT_CASES)
endif

# ---- Speed ----

CUDA_BENCH := bench bench_harness bench_attend bench_batch bench_index

$(CUDA_BUILD)/bench_kernels.o: tests/cuda/bench_kernels.cu tests/cuda/bench_kernels.h
	@mkdir -p $(@D)
	@$(NVCC) -std=c++17 -arch=sm_90 -O3 -c $< -o $@

$(CUDA_BUILD)/bench: $(patsubst %,$(CUDA_BUILD)/%.o,$(CUDA_BENCH) bench_kernels pipelines device gpu simt runner test_tables)
	@$(CXX) $^ -o $@ $(CUDA_LINK)

.PHONY: bench-pipelines bench-gpu
bench-pipelines: $(CUDA_BUILD)/bench $(CUDA_BUILD)/prepared
	@$(call compile_pipelines,$< list --list)

ifeq ($(filter-out 0,$(GPU_PRESENT)),)
bench-gpu: ## time the shaders on an NVIDIA GPU, and PyTorch if it is installed
	@echo "skipped: no nvcc or no NVIDIA GPU"
else
bench-gpu: bench-pipelines
	@$(CUDA_BUILD)/bench $(CUDA_BUILD)/pipelines | tee $(CUDA_BUILD)/bench.txt
	@python3 tests/cuda/torch_attention.py $(CUDA_BUILD)/bench.txt
endif
