# The library's own bitcode on the machine of simt.h, and what a reader that shares nothing with the builder finds in it.

LIBRARY_TESTS := tests/metal/library
LIBRARY_BUILD := $(METAL_BUILD)/library
# The same tests for another library: make test-metallib LIBRARY=FILE
LIBRARY ?= $(METALLIB)
LLC := llc-$(AIR_LLVM)
LIBRARY_CPP := clang++ -std=c++14 -Itests/metal
# Other versions that must read the file, where they are installed.
LIBRARY_READERS := 14 15 16 19
DEB_TEST += $(if $(shell grep -s 'bookworm' /etc/os-release),llvm-15 llvm-16 llvm-19)

$(LIBRARY_BUILD)/launchers.cpp: $(LIBRARY) $(wildcard $(LIBRARY_TESTS)/*.py)
	@rm -rf $(@D)
	@python3 $(LIBRARY_TESTS)/launch.py $(LIBRARY) $(@D)

$(LIBRARY_BUILD)/air.o: $(LIBRARY_TESTS)/air.cpp tests/metal/simt.h $(LIBRARY_BUILD)/launchers.cpp
	@$(LIBRARY_CPP) -O2 $(WARNINGS) -c $< -o $@

# Without the processor's conversion of halves: air.cpp counts them.
$(LIBRARY_BUILD)/driver: $(LIBRARY_BUILD)/launchers.cpp $(LIBRARY_BUILD)/air.o \
		$(patsubst %,$(METAL_BUILD)/plain/%.o,simt runner test_tables $(SHADER_TESTS))
	@ls $(@D)/*.ll | xargs -P2 -I{} $(LLC) -O1 -mattr=-f16c -relocation-model=pic -filetype=obj {} -o {}.o
	@$(LIBRARY_CPP) -O1 -c $< -o $(@D)/launchers.o
	@$(CXX) $(@D)/*.o $(filter %.o,$(filter-out $(@D)/%,$^)) -o $@ -lm
