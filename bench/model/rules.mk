# `make model` predicts the speed on Apple's GPUs from counted operations. clang compiles the shaders to LLVM's code.

MODEL_SOURCES := $(SHADER_SOURCES) $(wildcard bench/model/variants/*.metal)
MODEL_OBJECTS := $(METAL_BUILD)/model/run.o $(METAL_BUILD)/plain/gpu.o $(METAL_BUILD)/plain/simt.o \
	$(METAL_BUILD)/plain/attend_merge.metal.o $(METAL_BUILD)/plain/runner.o $(SHADER_IMPLEMENTATION)
# Compiled like a pipeline: constants known, functions inlined. Not vectorised: a lane of a GPU is scalar. Wide loads stay
# wide.
MODEL_COMPILE := clang++ -x c++ -std=c++14 -O2 -fno-vectorize -fno-slp-vectorize -mllvm -disable-loop-idiom-all \
	-mllvm -disable-vector-combine -ffp-contract=off -D__METAL_VERSION__=300 \
	-Wno-unknown-pragmas -Itests/metal -isystem bench/model/shim $(INCLUDE) -Ishaders -S -emit-llvm

$(METAL_BUILD)/model/prepared: tests/metal/prep.py $(MODEL_SOURCES)
	@python3 tests/metal/prep.py cpu $(@D)/source $(MODEL_SOURCES)
	@touch $@

$(METAL_BUILD)/model/run.o: bench/model/run.cpp $(SHADER_TEST_HEADERS)
	@mkdir -p $(@D)
	@$(CXX) -O2 $(SHADER_TEST_FLAGS) -c $< -o $@

.PHONY: model model-shapes test-model
model: $(METAL_BUILD)/model/prepared $(MODEL_OBJECTS) ## predict the speed on Apple's GPUs from counted operations
	@MODEL_COMPILE="$(MODEL_COMPILE)" MODEL_OBJECTS="$(MODEL_OBJECTS)" python3 bench/model/model.py $(METAL_BUILD)

model-shapes: $(METAL_BUILD)/model/prepared $(MODEL_OBJECTS) # of the model's tables that of the shapes of models
	@MODEL_COMPILE="$(MODEL_COMPILE)" MODEL_OBJECTS="$(MODEL_OBJECTS)" python3 bench/model/model.py $(METAL_BUILD) --models

test-model: $(METAL_BUILD)/model/prepared $(MODEL_OBJECTS)
	@echo "== shaders: counted operations"
	@MODEL_COMPILE="$(MODEL_COMPILE)" MODEL_OBJECTS="$(MODEL_OBJECTS)" python3 bench/model/model.py $(METAL_BUILD) --check

test-shaders: test-model
