# Builds the runner in many ways: `make test-gcc` and so on. Each prints 'N passed, N failed'.
# The implementation, in test_tables.c, is compiled in each way; the tests only where sanitizers or another machine need
# it.

TEST_SOURCES := $(sort $(filter-out tests/make_goldens.c,$(wildcard tests/*.c tests/metal/*.c)))
# Objects of all folders lie together.
TEST_NAMES := $(notdir $(TEST_SOURCES:.c=))
TEST_HEADERS := $(TQKV_FILES) $(wildcard tests/*.h) tests/metal/plan_fixture.h \
	$(patsubst %,examples/%.h,thread_pool data_file snapshot_file plan profile profile_write)
# The sets that `make test` runs; isa/known compares them with tqkv.h. POSIX is for popen and pthreads.
ISAS := scalar avx2 avx512 neon
# The STEM of each test_STEM.c, whose cases main.c adds.
TEST_STEMS := $(patsubst test_%,%,$(filter test_%,$(TEST_NAMES)))
TEST_FLAGS = '-DTEST_STEMS=$(patsubst %,X(%),$(TEST_STEMS))' -D_POSIX_C_SOURCE=200809L -DTQKV_METAL \
	'-DTQKV_ASSERT(x)=((x) ? (void)0 : abort())' -DTEST_ISAS='"$(ISAS)"' $(WARNINGS) $(INCLUDE) $(CPPFLAGS)

# Names of cases from files of tests/cases, without their comments: a name runs, or -name leaves out, what contains it.
cases = $(if $(1),$(strip $(shell sed 's/\#.*//' $(1:%=tests/cases/%.txt))))

# Changes when a test comes or goes.
$(TEST_BUILD)/stems: always
	@mkdir -p $(@D)
	@echo $(TEST_NAMES) | cmp -s - $@ || echo $(TEST_NAMES) >$@

.PHONY: always

# The tests that an emulator compiles: those of its cases.
EMULATED_STEMS := attend attend_history codec codec_history defects golden snapshot store_snapshot

# $(1) a name. What the build is stands in variables:
#   VARIANT_name_CC          the compiler
#   VARIANT_name_FLAGS       its flags
#   VARIANT_name_TEST_FLAGS  those of the tests, where the implementation alone needs the flags above
#   VARIANT_name_STEMS       the tests that are compiled so, too, and linked; empty: those of the reference build
#   VARIANT_name_NEEDS       further prerequisites of an object
#   VARIANT_name_RUN         the command that runs the program
#   VARIANT_name_CASES       files of tests/cases; empty: all cases
define compile_variant
@mkdir -p $(@D)
@$(VARIANT_$(VARIANT)_CC) \
	$(or $(if $(filter-out test_tables,$*),$(VARIANT_$(VARIANT)_TEST_FLAGS)),$(VARIANT_$(VARIANT)_FLAGS)) \
	$(TEST_FLAGS) -c $< -o $@
endef

define runner_variant
$(TEST_BUILD)/$(1)/%.o: tests/%.c $(TEST_HEADERS) tests/rules.mk $(VARIANT_$(1)_NEEDS)
	$$(compile_variant)
$(TEST_BUILD)/$(1)/%.o: tests/metal/%.c $(TEST_HEADERS) tests/rules.mk $(VARIANT_$(1)_NEEDS)
	$$(compile_variant)

$(TEST_BUILD)/$(1)/%.o: VARIANT := $(1)
$(patsubst %,$(TEST_BUILD)/$(1)/%.o,$(filter %history,$(TEST_NAMES))): $(wildcard tests/fuzz/*.[ch])
$(TEST_BUILD)/$(1)/main.o: $(TEST_BUILD)/stems

$(if $(VARIANT_$(1)_STEMS),$(TEST_BUILD)/$(1)/main.o: TEST_STEMS := tables $(VARIANT_$(1)_STEMS))
$(TEST_BUILD)/$(1)/runner: $(TEST_BUILD)/$(1)/test_tables.o $(if $(VARIANT_$(1)_STEMS),\
		$(patsubst %,$(TEST_BUILD)/$(1)/%.o,main runner $(VARIANT_$(1)_STEMS:%=test_%)),\
		$(patsubst %,$(TEST_BUILD)/$(REFERENCE_BUILD)/%.o,$(filter-out test_tables,$(TEST_NAMES))))
	@$(VARIANT_$(1)_CC) $(filter-out -x c++,$(VARIANT_$(1)_FLAGS)) $$^ -o $$@ $(LIBRARIES)

.PHONY: test-$(1)
test-$(1): $(TEST_BUILD)/$(1)/runner
	@echo "== runner: $(VARIANT_$(1)_CC) $(VARIANT_$(1)_FLAGS)"
	@$(VARIANT_$(1)_RUN) $$< $(call cases,$(VARIANT_$(1)_CASES))
endef

# AddressSanitizer sees what null and object-size see; without them and with -g1 the implementation compiles in half the
# time. pointer-overflow, for a wrap at the end of memory, would take another half minute: clang has it.
SANITIZE := -O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined \
	-fno-sanitize=null,object-size,pointer-overflow -fno-sanitize-recover=all
# AVX-512 takes half a minute more: test-sanitize-avx512, by hand. Electric Fence runs it in `make test`: test-fence.
SANITIZE_QUICK := $(SANITIZE) -DTQKV_NO_AVX512
# What the tests themselves do is no part of the library: UBSan there would cost another third of their time to compile.
SANITIZE_TESTS := -std=c99 -O1 -g1 -fno-omit-frame-pointer -fsanitize=address
VARIANT_sanitize_TEST_FLAGS := $(SANITIZE_TESTS)
VARIANT_sanitize_STEMS := $(filter-out tables,$(TEST_STEMS))
VARIANT_sanitize_CASES := once sanitized one_width
# AddressSanitizer keeps freed memory, by default 256 MiB of it, and then takes each page from the system anew: a third
# of its time. Tests that read what they have freed do so at once.
export ASAN_OPTIONS ?= quarantine_size_mb=8

ifeq ($(SYSTEM),Darwin)
VARIANTS := default O0 O3 cxx sanitize

VARIANT_default_CC := $(CC)
VARIANT_default_FLAGS := -std=c99 -O2

VARIANT_O0_CC := $(CC)
VARIANT_O0_FLAGS := -std=c99 -O0
VARIANT_O0_CASES := exact

VARIANT_O3_CC := $(CC)
VARIANT_O3_FLAGS := -std=c11 -O3 -ffp-contract=fast
VARIANT_O3_CASES := exact attend

VARIANT_cxx_CC := $(CXX)
VARIANT_cxx_FLAGS := -x c++ -std=c++11 -O2
VARIANT_cxx_CASES := exact

VARIANT_sanitize_CC := $(CC)
VARIANT_sanitize_FLAGS := -std=c99 $(SANITIZE)
else
VARIANTS := gcc gcc-O0 clang clangxx-O3 sanitize msan tsan

# With products and sums contracted, as gcc does unless asked for ISO C: the sets here, the portable code on aarch64.
# Other builds of gcc do not contract: the sanitized one has goldens for that, uncontracted.txt.
VARIANT_gcc_CC := gcc
VARIANT_gcc_FLAGS := -std=c99 -O2 -ffp-contract=fast
VARIANT_gcc_TEST_FLAGS := -std=c99 -O1

# This build takes the file that users copy; the others take src/.
VARIANT_gcc-O0_CC := gcc
VARIANT_gcc-O0_FLAGS := -std=c11 -O0 -DTQKV_NO_AVX2
VARIANT_gcc-O0_CASES := gcc-O0 no_plain
$(TEST_BUILD)/gcc-O0/test_tables.o: TQKV := .
$(TEST_BUILD)/gcc-O0/test_tables.o: $(wildcard tqkv.h)

# At -O0 it compiles sooner, and the goldens take three times as long.
VARIANT_clang_CC := clang
VARIANT_clang_FLAGS := -std=c99 -O1 -DTQKV_NO_AVX2 -fsanitize=pointer-overflow -fno-sanitize-recover=all
VARIANT_clang_CASES := clang no_plain

VARIANT_clangxx-O3_CC := clang++
VARIANT_clangxx-O3_FLAGS := -x c++ -std=c++11 -O3 -march=native -ffp-contract=fast
VARIANT_clangxx-O3_CASES := exact attend

VARIANT_sanitize_CC := gcc
VARIANT_sanitize_FLAGS := -std=c99 $(SANITIZE_QUICK)

VARIANT_msan_CC := clang
VARIANT_msan_FLAGS := -std=c99 -O1 -g1 -DTQKV_NO_AVX2 -fsanitize=memory -fno-sanitize-recover=all
VARIANT_msan_STEMS := attend attend_history cache codec codec_history snapshot
VARIANT_msan_CASES := msan

VARIANT_tsan_CC := gcc
VARIANT_tsan_FLAGS := -std=c99 -O1 -g1 -DTQKV_NO_AVX512 -fsanitize=thread
VARIANT_tsan_STEMS := batch snapshot threads
VARIANT_tsan_CASES := tsan

# By hand.
$(foreach what,CC TEST_FLAGS STEMS CASES,$(eval VARIANT_sanitize-avx512_$(what) := $$(VARIANT_sanitize_$(what))))
VARIANT_sanitize-avx512_FLAGS := -std=c99 $(SANITIZE)
$(eval $(call runner_variant,sanitize-avx512))

DEB_TEST += electric-fence

.PHONY: test-fence
test-fence: $(TEST_BUILD)/$(REFERENCE_BUILD)/runner
	@echo "== runner under Electric Fence"
	@EF_DISABLE_BANNER=1 EF_ALIGNMENT=1 LD_PRELOAD=libefence.so.0 $< $(call cases,fence)

TEST_TARGETS += test-fence
endif

$(foreach name,$(VARIANTS),$(eval $(call runner_variant,$(name))))
TEST_TARGETS += $(VARIANTS:%=test-%)

# The example with client threads, a scheduler and a thread pool. By hand only: the model's products take three minutes.
SERVER_TSAN := -std=c99 -O1 -g1 -fsanitize=thread

.PHONY: server-tsan
server-tsan: $(TEST_BUILD)/tsan/test_tables.o $(TEST_BUILD)/tsan/runner.o
	gcc $(SERVER_TSAN) $(WARNINGS) $(INCLUDE) $(CPPFLAGS) examples/server.c $^ -o $(TEST_BUILD)/tsan/server $(LIBRARIES)
	TSAN_OPTIONS=halt_on_error=1 $(TEST_BUILD)/tsan/server

# ---- Each other instruction set of this processor; the runs above use the best one ----

.PHONY: test-isa test-isa-sanitize
test-isa: $(TEST_BUILD)/$(REFERENCE_BUILD)/runner
	@echo "== runner on the other instruction sets"
	@for isa in $(ISAS); do less=; test $$isa = scalar && less="$(call cases,scalar)"; \
		test $$isa = $$($< --best) || $< --isa $$isa $(call cases,isa once) $$less || exit 1; done

test-isa-sanitize: $(TEST_BUILD)/sanitize/runner
	@echo "== runner on the other instruction sets, sanitized"
	@for isa in $(ISAS); do test $$isa = $$($< --best) || \
		$< --isa $$isa $(call cases,isa-sanitize uncontracted) || exit 1; done
	@$< $(call cases,uncontracted)

TEST_TARGETS += test-isa test-isa-sanitize

# ---- Other machines under qemu: 64-bit ARM; 32-bit x86 without SSE, whose registers are wider than a float; s390x,
# ---- which is big-endian. ----

ifneq ($(filter x86_64,$(MACHINE)),)
ifneq ($(SYSTEM),Darwin)
QEMU_aarch64 := qemu-aarch64 -L /usr/aarch64-linux-gnu
QEMU_i386 := sh tests/build/run_i386.sh
QEMU_s390x := qemu-s390x -L /usr/s390x-linux-gnu
QEMU := $(QEMU_aarch64)
CROSS_INCLUDE := $(TEST_BUILD)/include
# deps-test installs one cross compiler, deps-more the others.
CROSS_MACHINES := aarch64 $(patsubst i686,i386,$(foreach machine,i686 s390x,\
	$(if $(shell command -v $(machine)-linux-gnu-gcc),$(machine))))
CROSS_MISSING := $(filter-out $(CROSS_MACHINES),i386 s390x)
DEB_MORE += gcc-i686-linux-gnu libc6-dev-i386-cross gcc-s390x-linux-gnu libc6-dev-s390x-cross

# xxhash.h alone: the rest of /usr/include is for this machine.
$(CROSS_INCLUDE)/xxhash.h: /usr/include/xxhash.h
	@mkdir -p $(@D)
	@cp /usr/include/xxhash.h /usr/include/xxh3.h $(@D)

CROSS_FLAGS := -isystem $(CROSS_INCLUDE)

VARIANT_aarch64_CC := aarch64-linux-gnu-gcc
VARIANT_aarch64_FLAGS := -std=c99 -O3 -ffp-contract=fast $(CROSS_FLAGS)
VARIANT_aarch64_TEST_FLAGS := -std=c99 -O2 $(CROSS_FLAGS)
VARIANT_aarch64_STEMS := $(EMULATED_STEMS) calibrate
VARIANT_aarch64_CASES := exact aarch64 one_width one_format

VARIANT_i386_CC := i686-linux-gnu-gcc
VARIANT_i386_FLAGS := -std=c99 -O2 -mno-sse -static $(CROSS_FLAGS)
VARIANT_i386_STEMS := $(EMULATED_STEMS) cache calibrate snapshot_history
VARIANT_i386_CASES := i386 no_plain one_format one_plain

VARIANT_s390x_CC := s390x-linux-gnu-gcc
VARIANT_s390x_FLAGS := -std=c99 -O2 $(CROSS_FLAGS)
VARIANT_s390x_STEMS := attend attend_history calibrate codec codec_history golden history snapshot \
	snapshot_history store_snapshot
VARIANT_s390x_CASES := s390x no_plain one_format one_plain

define cross_variant
VARIANT_$(1)_RUN := $(QEMU_$(1))
VARIANT_$(1)_NEEDS := $(CROSS_INCLUDE)/xxhash.h
endef
$(foreach name,$(CROSS_MACHINES),$(eval $(call cross_variant,$(name))))
$(foreach name,$(CROSS_MACHINES),$(eval $(call runner_variant,$(name))))
TEST_TARGETS += $(CROSS_MACHINES:%=test-%) $(CROSS_MISSING:%=test-%)

.PHONY: $(CROSS_MISSING:%=test-%)
$(CROSS_MISSING:%=test-%):
	@echo "skipped: no compiler for $(@:test-%=%), make deps-more installs it"
endif
endif

# ---- Not part of `make test`: more than 2^31 values, in minutes and 5.1 GiB (peak resident size); random contexts to
# ---- 2^20 positions in 0.8 GiB, some of 65536 under qemu ----

LARGE_FLAGS = -O2 $(TEST_FLAGS)
$(TEST_BUILD)/large $(TEST_BUILD)/long: $(TEST_BUILD)/%: tests/large/%.c tests/attend_fixture.h $(TEST_TQKV)
	@$(CC) $(STANDARD) $(LARGE_FLAGS) $(filter %.c %.o,$^) -o $@ $(LIBRARIES)

.PHONY: test-large test-long test-long-aarch64
test-large: $(TEST_BUILD)/large ## attention over more than 2^31 values; needs 5.1 GiB
	@echo "== more than 2^31 values"
	@$<

test-long: $(TEST_BUILD)/long ## error and bits of attention at random lengths to 2^20; LONG_FLAGS="--seed N" or names
	@echo "== random lengths"
	@$< $(LONG_FLAGS)

$(TEST_BUILD)/long-aarch64: tests/large/long.c tests/attend_fixture.h $(TEST_BUILD)/aarch64/test_tables.o \
	$(TEST_BUILD)/aarch64/runner.o
	@aarch64-linux-gnu-gcc $(STANDARD) -isystem $(CROSS_INCLUDE) $(LARGE_FLAGS) $(filter %.c %.o,$^) -o $@ $(LIBRARIES)

test-long-aarch64: $(TEST_BUILD)/long-aarch64
	@echo "== 65536 positions under qemu"
	@$(QEMU) $< long/small

# ---- What the tests notice: one change of src/ at a time ----

.PHONY: test-mutants
test-mutants: $(TEST_BUILD)/$(REFERENCE_BUILD)/runner ## changes src/ in one place at a time, and counts what the tests catch: MUTANTS="--count 150 --only src/cache"
	@python3 tests/mutants.py $(<D) $(BUILD)/mutants $(MUTANTS)

# ---- Reads of uninitialised memory, in the portable code and with AVX2 ----

.PHONY: test-valgrind
test-valgrind: $(TEST_BUILD)/$(REFERENCE_BUILD)/runner
	@echo "== runner under valgrind"
	@valgrind --quiet --error-exitcode=3 --leak-check=full $< --isa scalar $(call cases,valgrind)
	@valgrind --quiet --error-exitcode=3 --leak-check=full $< --isa avx2 $(call cases,valgrind)

# ---- The header in each language standard, and what it must refuse ----

.PHONY: test-compile
test-compile:
	@echo "== compile tests"
	@clang++ -x c++ -std=c++11 $(TEST_FLAGS) -fsyntax-only $(filter-out tests/test_tables.c,$(TEST_SOURCES)) && \
		echo "1 passed, 0 failed"
	@CPPFLAGS="$(CPPFLAGS)" WARNINGS="$(WARNINGS)" sh tests/build/compile.sh $(TEST_BUILD)/compile
TEST_TARGETS += test-compile

# ---- On a machine without a compiler ----

.PHONY: test-order check-fresh
ifneq ($(SYSTEM),Darwin)
test-order:
	@echo "== what is installed before what is compiled"
	@sh tests/build/order.sh $(TEST_BUILD)/order

TEST_TARGETS += test-order
endif

check-fresh: ## README's commands on a fresh Debian; needs debootstrap, root, the network: COMMAND="make deps demo"
	@echo "== a fresh Debian"
	@sh tests/build/fresh.sh $(BUILD)/fresh $(if $(COMMAND),"$(COMMAND)")

# ---- Other systems, by zig's compilers ----

ZIG_READY := $(PYTHON)/.zig
ZIG_VERSION := 0.17.1

$(ZIG_READY): $(PYTHON_READY)
	@echo "zig $(ZIG_VERSION) into $(PYTHON): 101 MB to get, 410 MB on disk"
	@$(PYTHON)/bin/pip install --quiet --disable-pip-version-check --no-deps ziglang==$(ZIG_VERSION)
	@touch $@

.PHONY: test-zig
test-zig: $(TEST_BUILD)/$(REFERENCE_BUILD)/runner
	@echo "== other systems, by zig cc"
	@if test -e $(ZIG_READY); then WARNINGS="$(WARNINGS)" sh tests/build/zig.sh $(BUILD)/zig \
		$(wildcard $(PYTHON)/lib/python3*/site-packages/ziglang/zig) $$($< --best); \
	else echo "skipped: no zig, make deps-more installs it"; fi

TEST_TARGETS += test-zig

# ---- Goldens and coverage ----

.PHONY: goldens coverage
goldens: $(TEST_BUILD)/make_goldens ## regenerate tests/goldens.h, after a deliberate change only
	TQKV_ISA=scalar $< > $(TEST_BUILD)/goldens.h
	mv $(TEST_BUILD)/goldens.h tests

$(TEST_BUILD)/make_goldens: tests/make_goldens.c $(TEST_TQKV) $(wildcard tests/*golden*)
	$(CC) $(STANDARD) $(TEST_FLAGS) $< $(TEST_TQKV) -o $@ $(LIBRARIES)

COVERAGE := $(TEST_BUILD)/coverage
LCOV_BRANCHES := --rc lcov_branch_coverage=1
# Without the limits of the stack: counters take registers, and so more of it.
coverage: ## share of the lines and branches of src/ that the tests run, by file
	@rm -rf $(COVERAGE) && mkdir -p $(COVERAGE)
	@for source in $(TEST_SOURCES); do \
		gcc -std=c99 -O1 --coverage -DTEST_COVERAGE $(TEST_FLAGS) -c $$source -o $(COVERAGE)/$$(basename $$source .c).o || exit 1; done
	@gcc --coverage $(COVERAGE)/*.o -o $(COVERAGE)/runner $(LIBRARIES)
	@$(COVERAGE)/runner -/stack/
	@for isa in $(ISAS); do $(COVERAGE)/runner --isa $$isa $(call cases,isa) -/stack/ || exit 1; done
	@{ lcov --quiet $(LCOV_BRANCHES) --capture --directory $(COVERAGE) --output-file $(COVERAGE)/all.info && \
		lcov --quiet $(LCOV_BRANCHES) --extract $(COVERAGE)/all.info '*/src/*' --output-file $(COVERAGE)/tqkv.info; } \
		>$(COVERAGE)/lcov.log 2>&1 || { cat $(COVERAGE)/lcov.log; exit 1; }
	@awk -F: '/^SF/ { n = split($$2, path, "/") } /^LF/ { lines += $$2; all = $$2 } /^LH/ { lines_hit += $$2; hit = $$2 } \
		/^BRF/ { branches += $$2 } /^BRH/ { branches_hit += $$2 } \
		/^end_of_record/ && all { printf "coverage %-18s %.4f of %d lines\n", path[n], hit / all, all; all = 0 } \
		END { printf "ratio coverage_lines %.4f\nratio coverage_branches %.4f\n", lines_hit / lines, \
			branches_hit / branches; \
			exit lines_hit < 0.95 * lines || branches_hit < 0.90 * branches }' $(COVERAGE)/tqkv.info
