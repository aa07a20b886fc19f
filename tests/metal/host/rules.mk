# Tests of what tqkv_metal.m has in Objective-C, and the cases of the shaders, whose plans it records; the rest of it is in
# the implementation that the runner tests. On Linux a stand-in for Metal runs the real shaders on the CPU, all under
# ASan and UBSan. On a Mac they use Metal. `make check-macos` type-checks the file with Apple's headers on any machine.

HOST_BUILD := $(METAL_BUILD)/host
comma := ,
HOST_TESTS := main buffers refusal_tests cache_tests library_tests context_tests pipeline_tests
HOST_HEADERS := $(TQKV_FILES) $(wildcard $(addsuffix /*.h,tests tests/metal tests/metal/host tests/metal/mac))
HOST_WARNINGS := -DTQKV_METAL -Wall -Wextra -Werror
STANDIN_HEADERS := $(wildcard tests/metal/standin/*.h tests/metal/standin/*/*.h)
HOST_EXAMPLES := metal_encode_attend
# The host alone, beside an object with the implementation: that takes half a minute to compile.
HOST_SOURCE := $(TQKV)/tqkv_metal.m
HOST_ALONE := $(IMPLEMENTED)
HOST_TQKV := $(HOST_BUILD)/tests/test_tables.o $(HOST_BUILD)/tests/runner.o
# The cases of the shaders, and the machine that they name.
HOST_SHADER_CASES := $(HOST_BUILD)/driver.o $(patsubst %,$(METAL_BUILD)/plain/%.o,simt $(filter-out driver machine_cases,$(SHADER_TESTS)))

DEB_TEST += clang lld gobjc libgnustep-base-dev gnustep-make

# Objects of tests, and of the host alone. $(1) folder, $(2) flags, $(3) of the host's, in which allocations and locks can fail
# too, not only calls of Metal, $(4) Objective-C's headers
define host_objects
$(1)/%.o: %.m $(HOST_HEADERS) $(STANDIN_HEADERS) $(4)
	@mkdir -p $$(@D)
	@clang $(2) -c $$< -o $$@

$(1)/tqkv_metal.o: $(HOST_SOURCE) $(HOST_HEADERS) $(STANDIN_HEADERS) $(4)
	@mkdir -p $$(@D)
	@clang $(2) $(3) $(HOST_ALONE) -c $$< -o $$@
endef

ifeq ($(SYSTEM),Darwin)

# Virtual machines show a GPU of an older family than its chip's.
HOST_FAMILY := -DTQKV_METAL_ANY_FAMILY
HOST_FLAGS := -g -O1 -fsanitize=address,undefined $(HOST_WARNINGS) $(HOST_FAMILY) -D_DARWIN_C_SOURCE $(INCLUDE) $(CPPFLAGS)
HOST_LINK := $(HOST_FLAGS) -framework Metal -framework Foundation
HOST_LIBRARY := $(METALLIB)
HOST_RUN :=
HOST_OBJECTS := tqkv_metal $(HOST_TESTS:%=tests/metal/host/%) tests/runner tests/test_tables

else

STANDIN := tests/metal/standin
# AddressSanitizer sees what null and object-size see.
STANDIN_SANITIZE := -g1 -O1 -fsanitize=address,undefined -fno-sanitize=null,object-size,vptr -fno-sanitize-recover=all \
	-fno-omit-frame-pointer
HOST_GNUSTEP := -fobjc-runtime=gcc -DGNUSTEP -DGNUSTEP_BASE_LIBRARY=1 -DGNU_RUNTIME=1 -fexceptions -fobjc-exceptions \
	-D_NATIVE_OBJC_EXCEPTIONS -fconstant-string-class=NSConstantString -isystem /usr/include/GNUstep \
	-isystem $(HOST_BUILD)/gnustep -I$(STANDIN)
HOST_FLAGS := $(STANDIN_SANITIZE) $(HOST_WARNINGS) -DSTANDIN -D_GNU_SOURCE $(INCLUDE) $(CPPFLAGS)
GNUSTEP_LINK := -lgnustep-base -lobjc -ldl -lm -pthread
HOST_LINK := $(STANDIN_SANITIZE) $(GNUSTEP_LINK)
HOST_FAILING := -Dcalloc=standin_calloc -Dpthread_mutex_init=standin_mutex_init
HOST_LIBRARY := $(HOST_BUILD)/standin.metallib
HOST_RUN := LSAN_OPTIONS=suppressions=$(STANDIN)/leaks.txt:print_suppressions=0
HOST_OBJECTS := tqkv_metal $(HOST_TESTS:%=tests/metal/host/%) tests/runner tests/test_tables $(STANDIN)/standin
# Of the codebooks and boundaries the first and the last: one loop compares them.
HOST_STALE := tables_alone $(foreach bits,2 8,codebook_$(bits) boundaries_$(bits) factors_$(bits)) signs version dispatch matrices \
	rows_args rotate_args attend_args merge_args batch_item

HOST_OBJC := $(HOST_BUILD)/gnustep/objc
# clang uses gcc's Objective-C runtime: link its headers, and no other header of gcc, into the include path.
$(HOST_BUILD)/gnustep/objc:
	@mkdir -p $(@D)
	@ln -sfn $$(dirname $$(gcc -print-libgcc-file-name))/include/objc $@

# The same under ARC, see arc.m. One line of gcc's headers does not compile under ARC.
HOST_ARC := -fobjc-arc $(patsubst -fobjc-runtime=%,-fobjc-runtime=gnustep-1.5,$(subst /gnustep,/arc,$(HOST_GNUSTEP)))

$(HOST_BUILD)/arc/objc: $(HOST_BUILD)/gnustep/objc
	@mkdir -p $@
	@cp $</*.h $@
	@sed -i 's/return object->class_pointer;/return *(Class *)(__bridge void *)object;/' $@/runtime.h

$(eval $(call host_objects,$(HOST_BUILD)/arc,$(HOST_FLAGS) $(HOST_FAILING) $(HOST_ARC),,$(HOST_BUILD)/arc/objc))

$(HOST_BUILD)/runner-arc: $(HOST_BUILD)/arc/tqkv_metal.o $(HOST_BUILD)/$(STANDIN)/arc.o \
		$(filter-out %/tqkv_metal.o,$(HOST_OBJECTS:%=$(HOST_BUILD)/%.o)) $(HOST_SHADER_CASES)
	@clang++ $^ -o $@ $(HOST_LINK)

$(HOST_BUILD)/metal_encode_attend-arc: $(HOST_BUILD)/arc/examples/metal_encode_attend.o $(HOST_BUILD)/arc/tqkv_metal.o \
		$(HOST_BUILD)/$(STANDIN)/arc.o $(HOST_BUILD)/$(STANDIN)/standin.o $(HOST_TQKV)
	@clang++ $^ -o $@ $(HOST_LINK)

# The shaders as position-independent code for the stand-in's library. UBSan's other checks, which double the time to compile
# them, are in `make test-shaders`; LLVM's best instructions and registers cost a quarter more, for a run that is as long.
STANDIN_SHADER := clang++ -fPIC -g1 -O1 -mllvm -fast-isel -mllvm -regalloc=basic -fsanitize=address,bounds,alignment \
	-fno-sanitize-recover=all -fno-omit-frame-pointer $(SHADER_CPU) $(SHADER_NATIVE)

$(HOST_BUILD)/library/%.metal.o: $(METAL_BUILD)/cpu/prepared $(SHADER_SHARED) tests/metal/simt.h tests/metal/shim/cpu/metal_stdlib
	@mkdir -p $(@D)
	@$(STANDIN_SHADER) -Ishaders -c $(METAL_BUILD)/cpu/source/$*.metal.cpp -o $@

$(HOST_BUILD)/library/simt.o: tests/metal/simt.cpp tests/metal/simt.h
	@mkdir -p $(@D)
	@clang++ -fPIC -O2 -DSIMT_ASAN $(SHADER_TEST_FLAGS) -c $< -o $@

$(HOST_BUILD)/library/library.o: $(STANDIN)/library.cpp $(STANDIN)/standin.h tests/metal/simt.h
	@mkdir -p $(@D)
	@clang++ -fPIC -O1 $(SHADER_TEST_FLAGS) -I$(STANDIN) -c $< -o $@

# Each context reads it, writes it as a file, and loads that.
$(HOST_LIBRARY): $(SHADER_NAMES:%=$(HOST_BUILD)/library/%.metal.o) $(HOST_BUILD)/library/simt.o $(HOST_BUILD)/library/library.o
	@clang++ -shared $(STANDIN_SANITIZE) -Wl,--compress-debug-sections=zlib $^ -o $@.so
	@python3 $(STANDIN)/pack.py library $@.so

# Libraries of changed headers, each with the kernel `tables` alone. Without sanitizers: a context reads its tables and refuses.
$(HOST_BUILD)/stale/made: $(METAL_BUILD)/cpu/prepared $(SHADER_SHARED) $(STANDIN)/pack.py $(HOST_BUILD)/library/simt.o \
		$(HOST_BUILD)/library/library.o
	@mkdir -p $(HOST_STALE:%=$(@D)/%/shaders)
	@python3 $(STANDIN)/pack.py stale src $(@D) $(HOST_STALE)
	@for stale in $(HOST_STALE); do clang++ -fuse-ld=lld -shared -fPIC -O0 $(filter-out -g1,$(SHADER_CPU)) -I$(@D)/$$stale/shaders \
		$(METAL_BUILD)/cpu/source/tables.metal.cpp $(filter %.o,$^) -o $(@D)/$$stale.metallib.so || exit 1; done
	@python3 $(STANDIN)/pack.py library $(HOST_STALE:%=$(@D)/%.metallib.so)
	@touch $@

endif

$(eval $(call host_objects,$(HOST_BUILD),$(HOST_FLAGS) $(HOST_GNUSTEP),$(HOST_FAILING),$(HOST_OBJC)))

# The implementation and what counts the cases, without sanitizers: tests/rules.mk has its sanitized builds.
$(HOST_BUILD)/tests/%.o: $(TEST_BUILD)/$(REFERENCE_BUILD)/%.o
	@mkdir -p $(@D)
	@cp $< $@

$(HOST_BUILD)/driver.o: tests/metal/driver.cpp $(SHADER_TEST_HEADERS)
	@mkdir -p $(@D)
	@$(CXX) -O1 -DGPU_HOST $(SHADER_TEST_FLAGS) -c $< -o $@

$(HOST_BUILD)/runner: $(HOST_OBJECTS:%=$(HOST_BUILD)/%.o) $(HOST_SHADER_CASES)
	@clang++ $^ -o $@ $(HOST_LINK)

# What runs on a Mac for a report; here over the stand-in. A Mac with the Command Line Tools alone can build it.
REPORT_PROGRAMS := pipelines speed lookup
REPORT_FLAGS := -O2 $(HOST_WARNINGS) -DTQKV_METAL_ANY_FAMILY -D_DARWIN_C_SOURCE $(INCLUDE) $(HOST_GNUSTEP)
REPORT_LINK := $(if $(HOST_GNUSTEP),$(GNUSTEP_LINK),-framework Metal -framework Foundation)
REPORT_OBJECTS := $(patsubst %,$(HOST_BUILD)/mac/%.o,tqkv_metal $(if $(HOST_GNUSTEP),$(STANDIN)/standin)) $(HOST_TQKV)
# As on a Mac the programs, the stand-in and the shaders under them have no sanitizers: they run seven times.
PLAIN_LIBRARY := $(if $(HOST_GNUSTEP),$(HOST_BUILD)/tsan/standin.metallib,$(HOST_LIBRARY))

$(eval $(call host_objects,$(HOST_BUILD)/mac,$(REPORT_FLAGS),,$(HOST_OBJC)))

$(REPORT_PROGRAMS:%=$(HOST_BUILD)/mac/%): $(HOST_BUILD)/mac/%: $(HOST_BUILD)/mac/tests/metal/mac/%.o $(REPORT_OBJECTS)
	@clang++ $^ -o $@ $(REPORT_LINK)

$(HOST_BUILD)/mac/runner: $(HOST_TESTS:%=$(HOST_BUILD)/mac/tests/metal/host/%.o) $(REPORT_OBJECTS) $(HOST_SHADER_CASES)
	@clang++ $^ -o $@ $(REPORT_LINK)

# What lookup compiles when it runs.
LOOKUP_SOURCE := $(HOST_BUILD)/mac/lookup.metal
$(LOOKUP_SOURCE): tests/metal/mac/lookup.metal metallib/amalgamate.py metallib/msl.py $(TQKV_FILES)
	@mkdir -p $(@D)
	@python3 metallib/amalgamate.py $@ $<

$(HOST_BUILD)/mac/lookup: | $(LOOKUP_SOURCE)

# The library is embedded in the object file.
$(HOST_BUILD)/embedded.o: $(HOST_SOURCE) $(TQKV_FILES) $(HOST_LIBRARY) $(HOST_OBJC)
	@clang $(HOST_FLAGS) $(HOST_GNUSTEP) $(HOST_ALONE) -DTQKV_METALLIB_EMBED='"$(HOST_LIBRARY)"' -c $< -o $@

$(HOST_BUILD)/runner-embedded: $(HOST_BUILD)/embedded.o $(filter-out %/tqkv_metal.o,$(HOST_OBJECTS:%=$(HOST_BUILD)/%.o)) \
		$(HOST_SHADER_CASES)
	@clang++ $^ -o $@ $(HOST_LINK)

# As on a Mac: the example, and tqkv_metal.m as it ships, which is all else.
$(HOST_BUILD)/whole/tqkv_metal.o: tqkv_metal.m tqkv.h $(HOST_OBJC)
	@mkdir -p $(@D)
	@clang $(filter-out -fsanitize%,$(HOST_FLAGS)) $(HOST_GNUSTEP) -DTQKV_NO_AVX512 -c $< -o $@

$(HOST_BUILD)/metal_encode_attend: $(HOST_BUILD)/examples/metal_encode_attend.o $(HOST_BUILD)/whole/tqkv_metal.o \
		$(filter %/standin.o,$(HOST_OBJECTS:%=$(HOST_BUILD)/%.o))
	@clang++ $^ -o $@ $(HOST_LINK)

# What makes, keeps or frees an object, and of the rest one format.
HOST_ARC_CASES := context/ cache/one cache/strides cache/history/1 refusals/ rotate/ attend/pages/d64 encode/tq4/d64 batch/d64
# Of the shaders' cases what goes through tqkv_metal.m as others do, and takes long here.
HOST_LATER := $(if $(HOST_GNUSTEP),-golden/ -attend/length -attend/sections -attend/shape)

# The cases take long, and start before what is built of the finished library.
.PHONY: test-metal test-metal-cases test-metal-arc test-metal-threads
test-metal-cases: $(HOST_BUILD)/runner $(HOST_LIBRARY) $(if $(HOST_STALE),$(HOST_BUILD)/stale/made)
	@echo "== tqkv_metal.m: $(if $(HOST_GNUSTEP),stand-in$(comma) shaders on the CPU,Metal)"
	@$(HOST_RUN) $< --library $(HOST_LIBRARY) --stale $(HOST_BUILD)/stale $(HOST_LATER)

test-metal: test-metal-cases $(PLAIN_LIBRARY) $(patsubst %,$(HOST_BUILD)/%,runner-embedded metal_encode_attend $(REPORT_PROGRAMS:%=mac/%) mac/runner)
	@echo "== tqkv_metal.m: library embedded, example, programs of a report"
	@$(HOST_RUN) $(HOST_BUILD)/runner-embedded --library $(HOST_LIBRARY) --embedded context/embedded context/source/failures
	@$(HOST_RUN) $(HOST_BUILD)/metal_encode_attend $(HOST_LIBRARY)
	@$(HOST_RUN) sh tests/metal/mac/test.sh $(HOST_BUILD) $(PLAIN_LIBRARY)
	@clang $(filter-out -fsanitize%,$(HOST_FLAGS)) $(HOST_GNUSTEP) -DTQKV_STATIC -fsyntax-only tqkv_metal.m && \
		echo "1 passed, 0 failed"
ifneq ($(HOST_GNUSTEP),)
	@clang -fsyntax-only $(HOST_GNUSTEP) -fmodules -fmodules-cache-path=$(HOST_BUILD)/modules -Ipackaging/swift/CTqkv/include \
		-fmodule-map-file=packaging/swift/CTqkv/include/module.modulemap -D_GNU_SOURCE -DTQKV_METAL \
		packaging/swift/CTqkvMetal/tqkv_metal.m && echo "1 passed, 0 failed"

test-metal-arc: $(HOST_BUILD)/runner-arc $(HOST_BUILD)/metal_encode_attend-arc $(HOST_LIBRARY) $(HOST_BUILD)/stale/made
	@echo "== tqkv_metal.m: under ARC"
	@$(HOST_RUN) $< --library $(HOST_LIBRARY) --stale $(HOST_BUILD)/stale $(HOST_ARC_CASES)
	@$(HOST_RUN) $(HOST_BUILD)/metal_encode_attend-arc $(HOST_LIBRARY)

TEST_TARGETS += test-metal-arc
endif

# What a Mac's owner sends back. report.sh builds what it runs: where that fails the report says so.
MAC_REPORT := $(BUILD)/mac-report.txt
REPORT_MAKE = $(MAKE) # by this name, `make -n` only prints it

.PHONY: mac-report
mac-report: ## on a Mac: what its GPU makes of the libraries, into build/mac-report.txt, in ten minutes: FULL=1 for all
	@MAKE="$(strip $(REPORT_MAKE))" XCRUN_LIBRARY=$(XCRUN_BUILD)/default.metallib FULL="$(FULL)" \
		sh tests/metal/mac/report.sh $(HOST_BUILD) $(MAC_REPORT) $(METALLIB) $(METALLIB_SOURCE)

.PHONY: demo-metal
demo-metal: $(HOST_BUILD)/metal_encode_attend $(HOST_LIBRARY) ## build and run examples/metal_encode_attend.m
	@$(HOST_RUN) $< $(HOST_LIBRARY)

# Not part of `make test` on a Mac, where they need the GPU and Xcode.
ifneq ($(SYSTEM),Darwin)
TEST_TARGETS += test-metal-cases test-metal test-metal-threads

# Threads share a context under ThreadSanitizer. The shaders are not instrumented: their machine switches stacks.
HOST_TSAN := $(HOST_BUILD)/tsan
HOST_TSAN_FLAGS := -fsanitize=thread $(filter-out $(STANDIN_SANITIZE),$(HOST_FLAGS)) -g -O1 $(HOST_GNUSTEP)
HOST_TSAN_RUN := TSAN_OPTIONS=halt_on_error=1:detect_deadlocks=0 setarch -R
TSAN_NAMES := $(filter-out tests/test_tables,$(HOST_OBJECTS))

$(eval $(call host_objects,$(HOST_TSAN),$(HOST_TSAN_FLAGS),,$(HOST_OBJC)))

$(HOST_TSAN)/tests/runner.o: tests/runner.c $(HOST_HEADERS)
	@mkdir -p $(@D)
	@clang -fsanitize=thread -O1 -D_GNU_SOURCE $(INCLUDE) $(CPPFLAGS) -c $< -o $@

$(HOST_TSAN)/standin.metallib: $(SHADER_NAMES:%=$(METAL_BUILD)/plain/%.metal.o) $(METAL_BUILD)/plain/simt.o \
		$(HOST_BUILD)/library/library.o
	@mkdir -p $(@D)
	@clang++ -shared $^ -o $@.so
	@python3 $(STANDIN)/pack.py library $@.so

$(HOST_TSAN)/runner: $(TSAN_NAMES:%=$(HOST_TSAN)/%.o) $(HOST_BUILD)/tests/test_tables.o $(HOST_SHADER_CASES)
	@clang++ -fsanitize=thread $^ -o $@ $(GNUSTEP_LINK)

# Plants bugs, one at a time, in copies of tqkv_metal.m. BUGS: parts of names.
.PHONY: test-metal-bugs
test-metal-bugs: test-metal test-metal-arc $(HOST_TSAN)/runner $(HOST_TSAN)/standin.metallib
	@echo "== tqkv_metal.m: planted bugs"
	@export ASAN_LINK="$(HOST_LINK)" ASAN_OBJECTS="$(filter-out %/tqkv_metal.o,$(HOST_OBJECTS:%=$(HOST_BUILD)/%.o)) $(HOST_SHADER_CASES)" \
	ASAN_RUN="$(HOST_RUN) RUNNER --library $(HOST_LIBRARY) --stale $(HOST_BUILD)/stale"; \
	ASAN="clang $(HOST_FLAGS) $(HOST_FAILING) $(HOST_GNUSTEP) $(HOST_ALONE)" \
	ARC="clang $(HOST_FLAGS) $(HOST_FAILING) $(HOST_ARC) $(HOST_ALONE)" \
	ARC_LINK="$$ASAN_LINK" ARC_OBJECTS="$$ASAN_OBJECTS $(HOST_BUILD)/$(STANDIN)/arc.o" ARC_RUN="$$ASAN_RUN" \
	TSAN="clang $(HOST_TSAN_FLAGS) $(HOST_ALONE)" TSAN_LINK="-fsanitize=thread $(GNUSTEP_LINK)" \
	TSAN_OBJECTS="$(filter-out %/tqkv_metal.o,$(TSAN_NAMES:%=$(HOST_TSAN)/%.o)) $(HOST_BUILD)/tests/test_tables.o $(HOST_SHADER_CASES)" \
	TSAN_RUN="$(HOST_TSAN_RUN) RUNNER --library $(HOST_TSAN)/standin.metallib" \
	python3 tests/metal/host/bugs.py $(HOST_BUILD) $(BUGS)

test-metal-threads: $(HOST_TSAN)/runner $(HOST_TSAN)/standin.metallib
	@echo "== tqkv_metal.m: threads under ThreadSanitizer"
	@$(HOST_TSAN_RUN) $< --library $(HOST_TSAN)/standin.metallib context/threads cache/history/1 cache/one_memory
endif

# ---- Apple's headers ----

# SDK: the folder of a MacOSX.sdk; on a Mac also a name known to xcrun, and by itself the newest.
SDK ?= $(if $(filter Darwin,$(SYSTEM)),macosx)
MACOS_SDK = $(if $(wildcard $(SDK)/usr/include),$(SDK),$(shell xcrun --sdk $(SDK) --show-sdk-path 2>/dev/null))
MACOS_BUILD := $(BUILD)/macos
MACOS_CLANG = clang -target arm64-apple-macos13 -isysroot $(MACOS_SDK) -isystem $(MACOS_BUILD)/include $(HOST_WARNINGS) $(INCLUDE)
MACOS_SOURCES := tqkv_metal.m $(HOST_EXAMPLES:%=examples/%.m)
MACOS_TESTS := $(HOST_TESTS:%=tests/metal/host/%.m) $(REPORT_PROGRAMS:%=tests/metal/mac/%.m)
# Where the SDK has C++'s own headers.
MACOS_CPP = $(if $(wildcard $(MACOS_SDK)/usr/include/c++/v1/vector),$(patsubst %,tests/metal/%.cpp,simt $(SHADER_TESTS)))
MACOS_LINK = $(if $(filter Darwin,$(SYSTEM)),,$(if $(shell command -v ld64.lld || command -v ld64.lld-14),-fuse-ld=lld,none))
MACOS_LIBRARIES := -framework Metal -framework Foundation -framework CoreFoundation -lobjc

.PHONY: check-macos check-macos-types check-macos-link
check-macos: check-macos-types check-macos-link ## type-check with Apple's headers what a Mac compiles: SDK=/path/to/MacOSX.sdk

# Checks the sources with and without ARC, the tests without, tqkv.h as Objective-C++, and the tests in C and C++ of a Mac.
check-macos-types:
	@test -n "$(MACOS_SDK)" || { echo "check-macos needs SDK=/path/to/MacOSX.sdk"; exit 1; }
	@echo "== Apple's headers, up to $$(grep -o '__MAC_[0-9_]* ' $(MACOS_SDK)/usr/include/AvailabilityVersions.h | tail -1)"
	@mkdir -p $(MACOS_BUILD)/include
	@cp $(wildcard $(addsuffix /include/xxh*.h,/usr $(BREW_PREFIX))) $(MACOS_BUILD)/include
	@for source in $(MACOS_TESTS); do $(MACOS_CLANG) -fsyntax-only $$source || exit 1; done
	@for source in $(TEST_SOURCES); do $(MACOS_CLANG) $(STANDARD) $(TEST_FLAGS) -fsyntax-only $$source || exit 1; done
	@for source in $(MACOS_CPP); do $(MACOS_CLANG) -stdlib=libc++ $(SHADER_TEST_FLAGS) -fsyntax-only $$source || exit 1; done
	@for arc in -fno-objc-arc -fobjc-arc; do \
		for source in $(MACOS_SOURCES); do $(MACOS_CLANG) $$arc -fsyntax-only $$source || exit 1; done; \
		$(MACOS_CLANG) $$arc -x objective-c++ -std=c++11 -stdlib=libc++ -fsyntax-only -include tqkv.h /dev/null || exit 1; \
	done
	@echo "$(words $(MACOS_TESTS) $(TEST_SOURCES) $(MACOS_CPP) $(MACOS_SOURCES) $(MACOS_SOURCES) both) passed, 0 failed"

# Links the example as a Mach-O program if there are a linker and the SDK's library stubs. An arbitrary file takes the place
# of the embedded library.
check-macos-link: check-macos-types
ifneq ($(SYSTEM),Darwin)
	@$(if $(filter none,$(MACOS_LINK)),echo "not linked: no lld")
	@test -e $(MACOS_SDK)/usr/lib/libSystem.tbd || echo "not linked: the SDK has no libSystem.tbd"
endif
	@test "$(MACOS_LINK)" = none -o ! -e $(MACOS_SDK)/usr/lib/libSystem.tbd || for arc in -fno-objc-arc -fobjc-arc; do \
		for source in $(MACOS_SOURCES); do \
			$(MACOS_CLANG) $$arc -O1 -DTQKV_METALLIB_EMBED='"LICENSE"' -c $$source \
				-o $(MACOS_BUILD)/$$(basename $$source .m).o || exit 1; \
		done; \
		$(MACOS_CLANG) $(MACOS_LINK) $(MACOS_BUILD)/tqkv_metal.o $(MACOS_BUILD)/metal_encode_attend.o $(MACOS_LIBRARIES) \
			-o $(MACOS_BUILD)/metal_encode_attend && file $(MACOS_BUILD)/metal_encode_attend && \
			grep -qa "$$(head -1 LICENSE)" $(MACOS_BUILD)/metal_encode_attend || exit 1; \
	done
