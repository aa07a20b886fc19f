# Builds the runner in many ways: `make test-gcc` and so on. Each prints 'N passed, N failed'.
# The implementation, in test_tables.c, is compiled in each way; the tests only where sanitizers or another machine need it.

TEST_SOURCES := $(sort $(filter-out tests/make_goldens.c,$(wildcard tests/*.c)))
TEST_HEADERS := $(TQKV_FILES) $(wildcard tests/*.h) examples/thread_pool.h examples/data_file.h examples/snapshot_file.h examples/profile.h
# The sets that `make test` runs; isa/known compares them with tqkv.h. POSIX is for popen and pthreads.
ISAS := scalar avx2 avx512 neon
# The STEM of each test_STEM.c, whose cases main.c adds.
TEST_STEMS := $(patsubst tests/test_%.c,%,$(wildcard tests/test_*.c))
TEST_FLAGS = '-DTEST_STEMS=$(patsubst %,X(%),$(TEST_STEMS))' -D_POSIX_C_SOURCE=200809L -DTQKV_METAL '-DTQKV_ASSERT(x)=((x) ? (void)0 : abort())' -DTEST_ISAS='"$(ISAS)"' $(WARNINGS) $(INCLUDE) $(CPPFLAGS)

# Cases whose results must not depend on the compiler; cases that are quick enough for an emulator.
EXACT_CASES := golden tables codec/ types/
ATTEND_CASES := attend/exact attend/pair attend/ring attend/group defect
EMULATED_STEMS := attend attend_options codec defects golden snapshot store_snapshot types
EMULATED_CASES := $(EXACT_CASES) snapshot $(filter-out attend/pair,$(ATTEND_CASES)) attend/pair/tq4 attend/pair/i8
# Without vectors every head size takes the same loops: attention in integers with options has all formats.
NOT_PLAIN := -/plain
# Kinds of values, and formats of keys, in which the order of bytes is that of others.
ONE_KIND := -/outliers -/magnitudes -/one_hot -/constant -golden/attend/tq3- -golden/attend/tq6- -golden/attend/tq5_bytes-
# Formats whose loops are those of others: four of nine are enough for the emulator.
ONE_WIDTH := -exact/tq2 -exact/tq3 -exact/tq5 -exact/tq6

# Formats that plain C on any machine has in common with others.
ONE_PLAIN := $(patsubst %,-golden/attend/%-,tq2 f16 tq6_bytes)

# qemu calculates the x87's registers by integers, at a hundredth of the speed: formats, sizes and contexts that show how they
# round. The runs on plain C have the others.
# A head_dim of each order of the rotation, and the largest.
X87_SIZES := 32 80 96 112 128 144 1024
OTHER_SIZES := $(patsubst %,-/%/,48 64 160 192 224 256 288 320 384 448 512 576 640 768 896)
X87_CASES := golden tables $(foreach d,$(X87_SIZES),codec/reference/tq4/$(d)/ codec/reference/i8/$(d)/) codec/environment codec/half \
	codec/decode types/codec/f16/f16 types/rounding snapshot -held_back attend/exact/tq4/64 attend/exact/i8/96 attend/ring_wrapped/64 \
	attend/ring_often/128 attend/group/9/ -group/9/512 -group/9/1024 attend/pair/tq4-tq4 attend/pair/i8-i8 defect -all_queries/1024 $(NOT_PLAIN) $(OTHER_SIZES) \
	$(filter -golden%,$(ONE_KIND)) $(ONE_PLAIN) -golden/attend/tq5- -/long -/many

# $(1) name, $(2) compiler, $(3) flags, $(4) command that runs the program, $(5) parts of case names; empty for all,
# $(6) stems of the tests that are compiled so, too, and linked; empty: those of the reference build,
# $(7) further prerequisites of an object, $(8) flags of the tests, where the implementation alone needs those of (3)
define runner_variant
FLAGS_OF_$(1) := $(3)
FLAGS_OF_TESTS_$(1) := $(8)
$(TEST_BUILD)/$(1)/%.o: tests/%.c $(TEST_HEADERS) tests/rules.mk $(7)
	@mkdir -p $$(@D)
	@$(2) $$(or $$(if $$(filter-out test_tables,$$*),$$(FLAGS_OF_TESTS_$(1))),$$(FLAGS_OF_$(1))) $$(TEST_FLAGS) -c $$< -o $$@

$(if $(6),$(TEST_BUILD)/$(1)/main.o: TEST_STEMS := tables $(6))
$(TEST_BUILD)/$(1)/runner: $(TEST_BUILD)/$(1)/test_tables.o $(if $(6),$(patsubst %,$(TEST_BUILD)/$(1)/%.o,main runner $(6:%=test_%)),\
		$(patsubst tests/%.c,$(TEST_BUILD)/$(REFERENCE_BUILD)/%.o,$(filter-out tests/test_tables.c,$(TEST_SOURCES))))
	@$(2) $$(filter-out -x c++,$(3)) $$^ -o $$@ $(LIBRARIES)

.PHONY: test-$(1)
test-$(1): $(TEST_BUILD)/$(1)/runner
	@echo "== runner: $(2) $(3)"
	@$(4) $$< $(5)

TEST_TARGETS += test-$(1)
endef

# What one instruction set without sanitizers is enough for: the bits of more pairs, scratch of the largest shapes.
ONCE_CASES := -attend/more_bits -attend/scratch/8x -attend/scratch/100x -attend/long_in -attend/long_w
# Besides, what sanitizers see in other cases: errors of sums, bits of many contexts, each golden's loop, widths that share
# a loop; claims of snapshots that cost a second of the largest allocations.
SANITIZED_CASES := $(ONCE_CASES) -codec_error -attend/bits -attend/equal -golden/tq -golden/convert $(ONE_WIDTH) \
	-held_back/0_of_1_with -held_back/9000 -captured -integer/hard -score_error -attend/length -attend/mode -integer/long_in \
	-integer/long_w -ends_long -non_causal_long -long_context -cache/parallel_append -latent/integer -golden/attend -attend/parallel \
	-threads/one_cache -threads/hook -threads/pool

# Reads of memory that nothing wrote, by what was computed from it; with plain C, for what all sets have in common.
MSAN_STEMS := attend attend_options cache codec latent_cache length list snapshot store_snapshot
MSAN_CASES := attend/softcap attend/window attend/ring attend/exceptions attend/far attend/everything attend/slices \
	attend/many_rows cache snapshot/round_trip codec/one_by_one
# AddressSanitizer sees what null and object-size see; without them and with -g1 the implementation compiles in half the time.
# pointer-overflow, for a wrap at the end of memory, would take another half minute: clang-O0 has it.
SANITIZE := -O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize=null,object-size,pointer-overflow \
	-fno-sanitize-recover=all
# AVX-512 takes half a minute more: test-sanitize-avx512, by hand. Electric Fence runs it in `make test`, see test-fence.
SANITIZE_QUICK := $(SANITIZE) -DTQKV_NO_AVX512
# What the tests themselves do is no part of the library: UBSan there would cost another third of their time to compile.
SANITIZE_TESTS := -std=c99 -O1 -g1 -fno-omit-frame-pointer -fsanitize=address
# AddressSanitizer keeps freed memory, by default 256 MiB of it, and then takes each page from the system anew: a third of its
# time. Tests that read what they have freed do so at once.
export ASAN_OPTIONS ?= quarantine_size_mb=8
OVERFLOW := -fsanitize=pointer-overflow -fno-sanitize-recover=all

ifeq ($(SYSTEM),Darwin)
$(eval $(call runner_variant,default,$(CC),-std=c99 -O2,,))
$(eval $(call runner_variant,O0,$(CC),-std=c99 -O0,,$(EXACT_CASES)))
$(eval $(call runner_variant,O3,$(CC),-std=c11 -O3 -ffp-contract=fast,,$(EXACT_CASES) $(ATTEND_CASES)))
$(eval $(call runner_variant,cxx,$(CXX),-x c++ -std=c++11 -O2,,$(EXACT_CASES)))
$(eval $(call runner_variant,sanitize,$(CC),-std=c99 $(SANITIZE),,$(SANITIZED_CASES),$(filter-out tables,$(TEST_STEMS)),,$(SANITIZE_TESTS)))
else
# With products and sums contracted, as gcc does unless asked for ISO C: the sets here, the portable code on aarch64. Other builds
# of gcc do not contract: the sanitized one has goldens for that, UNCONTRACTED_CASES.
$(eval $(call runner_variant,gcc,gcc,-std=c99 -O2 -ffp-contract=fast,,,,,-std=c99 -O1))
$(eval $(call runner_variant,gcc-O0,gcc,-std=c11 -O0 -DTQKV_NO_AVX2,,golden $(NOT_PLAIN) tables codec/decode types/))
# This build takes the file that users copy; the others take src/.
$(TEST_BUILD)/gcc-O0/test_tables.o: TQKV := .
$(TEST_BUILD)/gcc-O0/test_tables.o: $(wildcard tqkv.h)
# Attention in integers by plain C beside floats by vectors: the same bits.
$(eval $(call runner_variant,no-integer,gcc,-std=c99 -O1 -DTQKV_NO_AVX512 -DTQKV_NO_INTEGER,,golden/attend integer/pair integer/hard -/many -/long -integer/long))
$(eval $(call runner_variant,clang-O0,clang,-std=c99 -O0 $(OVERFLOW),,golden $(NOT_PLAIN) tables codec/decode attend/ring cache -threads/ -cache/parallel))
$(eval $(call runner_variant,clangxx-O3,clang++,-x c++ -std=c++11 -O3 -march=native -ffp-contract=fast,,$(EXACT_CASES) $(ATTEND_CASES)))
$(eval $(call runner_variant,sanitize,gcc,-std=c99 $(SANITIZE_QUICK),,$(SANITIZED_CASES),$(filter-out tables,$(TEST_STEMS)),,$(SANITIZE_TESTS)))
$(eval $(call runner_variant,msan,clang,-std=c99 -O1 -g1 -DTQKV_NO_AVX2 -fsanitize=memory -fno-sanitize-recover=all,,$(MSAN_CASES),$(MSAN_STEMS)))
$(eval $(call runner_variant,tsan,gcc,-std=c99 -O1 -g1 -DTQKV_NO_AVX512 -fsanitize=thread,,threads/ -threads/team/1 batch/bits batch/waves,batch snapshot threads))
$(eval $(call runner_variant,sanitize-avx512,gcc,-std=c99 $(SANITIZE),,$(SANITIZED_CASES),$(filter-out tables,$(TEST_STEMS)),,$(SANITIZE_TESTS)))
TEST_TARGETS := $(filter-out test-sanitize-avx512,$(TEST_TARGETS))

# Each allocation ends where a page without access begins: reads behind it by code as it is delivered, on the best set.
FENCED_CASES := attend/group/1/ attend/group/3/ attend/group/4/ $(foreach f,tq2 tq3 tq4 tq5 tq6 tq8 i8 f16,attend/exact/$(f)/80/ attend/exact/$(f)/112/) \
	value_dim/attend types/attend strides/ list/full index/scores integer/pair/tq4 integer/pair/tq5 integer/pair/i8 codec/decode \
	codec/reference/tq4 codec/reference/tq8 codec/reference/i8
DEB_TEST += electric-fence

.PHONY: test-fence
test-fence: $(TEST_BUILD)/$(REFERENCE_BUILD)/runner
	@echo "== runner under Electric Fence"
	@EF_DISABLE_BANNER=1 EF_ALIGNMENT=1 LD_PRELOAD=libefence.so.0 $< $(FENCED_CASES)

TEST_TARGETS += test-fence
endif

# The example with client threads, a scheduler and a thread pool. By hand only: the model's products take three minutes.
SERVER_TSAN := -std=c99 -O1 -g1 -fsanitize=thread

.PHONY: server-tsan
server-tsan: $(TEST_BUILD)/tsan/test_tables.o $(TEST_BUILD)/tsan/runner.o
	gcc $(SERVER_TSAN) $(WARNINGS) $(INCLUDE) $(CPPFLAGS) examples/server.c $^ -o $(TEST_BUILD)/tsan/server $(LIBRARIES)
	TSAN_OPTIONS=halt_on_error=1 $(TEST_BUILD)/tsan/server

# ---- Each other instruction set of this processor; the runs above use the best one ----

ISA_CASES := golden codec/ types/ value_dim/ latent/ attend/ pages/ batch/ strides/ index/ list/ captured/attend defect fault cache

# Goldens of the sets by gcc without contraction; the runs of test-gcc and test-isa contract.
UNCONTRACTED_CASES := golden/tq4/128/ golden/tq5/128/ golden/tq8/80/ golden/tq3/144/
# The runs at -O0 have all goldens of plain C, of attention in integers too, and so have s390x and, of some sizes, i386.
SCALAR_CASES := -golden/ -latent/integer -attend/bits -attend/equal -attend/mode

.PHONY: test-isa test-isa-sanitize
test-isa: $(TEST_BUILD)/$(REFERENCE_BUILD)/runner
	@echo "== runner on the other instruction sets"
	@for isa in $(ISAS); do less=; test $$isa = scalar && less="$(SCALAR_CASES)"; \
		test $$isa = $$($< --best) || $< --isa $$isa $(ISA_CASES) $(ONCE_CASES) $$less \
		-cache/parallel_append -ends_long -non_causal_long -long_context -long_in_slices || exit 1; done

test-isa-sanitize: $(TEST_BUILD)/sanitize/runner
	@echo "== runner on the other instruction sets, sanitized"
	@for isa in $(ISAS); do test $$isa = $$($< --best) || $< --isa $$isa attend/pair attend/ring attend/linear defect \
		$(UNCONTRACTED_CASES) || exit 1; done
	@$< $(UNCONTRACTED_CASES)

TEST_TARGETS += test-isa test-isa-sanitize

# ---- Other machines under qemu: 64-bit ARM; 32-bit x86 without SSE, whose registers are wider than a float; s390x,
# ---- which is big-endian. Snapshots cross between all of them. ----

ifneq ($(filter x86_64,$(MACHINE)),)
ifneq ($(SYSTEM),Darwin)
QEMU_aarch64 := qemu-aarch64 -L /usr/aarch64-linux-gnu
QEMU_i386 := sh tests/build/run_i386.sh
QEMU_s390x := qemu-s390x -L /usr/s390x-linux-gnu
QEMU := $(QEMU_aarch64)
CROSS_INCLUDE := $(TEST_BUILD)/include
CROSS_MACHINES := aarch64 i386 s390x
DEB_TEST += gcc-i686-linux-gnu libc6-dev-i386-cross gcc-s390x-linux-gnu libc6-dev-s390x-cross

# xxhash.h alone: the rest of /usr/include is for this machine.
$(CROSS_INCLUDE)/xxhash.h: /usr/include/xxhash.h
	@mkdir -p $(@D)
	@cp /usr/include/xxhash.h /usr/include/xxh3.h $(@D)

$(eval $(call runner_variant,aarch64,aarch64-linux-gnu-gcc,-std=c99 -O3 -ffp-contract=fast -isystem $(CROSS_INCLUDE),$(QEMU_aarch64),$(EMULATED_CASES) -held_back $(ONE_WIDTH) $(patsubst %,-codec/reference/%/,tq2 tq6 tq5_bytes tq6_bytes) $(filter -golden%,$(ONE_KIND)),$(EMULATED_STEMS),$(CROSS_INCLUDE)/xxhash.h,-std=c99 -O2 -isystem $(CROSS_INCLUDE)))
$(eval $(call runner_variant,i386,i686-linux-gnu-gcc,-std=c99 -O2 -mno-sse -static -isystem $(CROSS_INCLUDE),$(QEMU_i386),$(X87_CASES),$(EMULATED_STEMS),$(CROSS_INCLUDE)/xxhash.h))
$(eval $(call runner_variant,s390x,s390x-linux-gnu-gcc,-std=c99 -O2 -isystem $(CROSS_INCLUDE),$(QEMU_s390x),golden $(NOT_PLAIN) -/long -/many $(ONE_KIND) $(ONE_PLAIN) tables codec/reference/tq5/ codec/environment codec/half snapshot -held_back attend/pair/tq4 attend/pair/i8-i8 learn/chunks/3 learn/copies/3 calibrate/exact/64,attend calibrate codec golden learn snapshot store_snapshot,$(CROSS_INCLUDE)/xxhash.h))

.PHONY: test-snapshot-crossing
test-snapshot-crossing: $(TEST_BUILD)/gcc/runner $(CROSS_MACHINES:%=$(TEST_BUILD)/%/runner)
	@$(TEST_BUILD)/gcc/runner --save $(TEST_BUILD)/x86_64.snapshot >/dev/null
	@$(foreach machine,$(CROSS_MACHINES),echo "== snapshots between x86-64 and $(machine)" && \
		$(QEMU_$(machine)) $(TEST_BUILD)/$(machine)/runner --load $(TEST_BUILD)/x86_64.snapshot && \
		$(QEMU_$(machine)) $(TEST_BUILD)/$(machine)/runner --save $(TEST_BUILD)/$(machine).snapshot && \
		$(TEST_BUILD)/gcc/runner --load $(TEST_BUILD)/$(machine).snapshot && \
		cmp $(TEST_BUILD)/x86_64.snapshot $(TEST_BUILD)/$(machine).snapshot && echo "1 passed, 0 failed" &&) true

TEST_TARGETS += test-snapshot-crossing
endif
endif

# ---- Not part of `make test`: more than 2^31 values, in minutes and 5.1 GiB (peak resident size); random contexts to 2^20
# ---- positions in 0.8 GiB, some of 65536 under qemu ----

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

# ---- Reads of uninitialised memory, in the portable code and with AVX2 ----

.PHONY: test-valgrind
test-valgrind: $(TEST_BUILD)/$(REFERENCE_BUILD)/runner
	@echo "== runner under valgrind"
	@valgrind --quiet --error-exitcode=3 --leak-check=full $< --isa scalar $(VALGRIND_CASES)
	@valgrind --quiet --error-exitcode=3 --leak-check=full $< --isa avx2 $(VALGRIND_CASES)

VALGRIND_CASES := fault/cache fault/attend_partial snapshot/round_trip/1/ snapshot/slow_streams snapshot/header attend/pair/tq5 \
	attend/pair/tq8 codec/one_by_one

# ---- The header in each language standard, and what it must refuse ----

.PHONY: test-compile
test-compile:
	@echo "== compile tests"
	@clang++ -x c++ -std=c++11 $(TEST_FLAGS) -fsyntax-only $(filter-out tests/test_tables.c,$(TEST_SOURCES)) && echo "1 passed, 0 failed"
	@CPPFLAGS="$(CPPFLAGS)" WARNINGS="$(WARNINGS)" sh tests/build/compile.sh $(TEST_BUILD)/compile
TEST_TARGETS += test-compile

# ---- Goldens and coverage ----

.PHONY: goldens coverage
goldens: $(TEST_BUILD)/make_goldens ## regenerate tests/goldens.h and attend_goldens.h, after a deliberate change only
	TQKV_ISA=scalar $< > $(TEST_BUILD)/goldens.h
	TQKV_ISA=scalar $< attend > $(TEST_BUILD)/attend_goldens.h
	mv $(TEST_BUILD)/goldens.h $(TEST_BUILD)/attend_goldens.h tests

$(TEST_BUILD)/make_goldens: tests/make_goldens.c tests/golden.h tests/attend_golden.h tests/data.h $(TQKV_FILES)
	@mkdir -p $(@D)
	$(CC) $(STANDARD) -O2 $(TEST_FLAGS) $< -o $@ $(LIBRARIES)

COVERAGE := $(TEST_BUILD)/coverage
LCOV_BRANCHES := --rc lcov_branch_coverage=1
coverage: ## share of the lines and branches of src/ that the tests run, by file
	@rm -rf $(COVERAGE) && mkdir -p $(COVERAGE)
	@for source in $(TEST_SOURCES:tests/%.c=%); do \
		gcc -std=c99 -O1 --coverage $(TEST_FLAGS) -c tests/$$source.c -o $(COVERAGE)/$$source.o || exit 1; done
	@gcc --coverage $(COVERAGE)/*.o -o $(COVERAGE)/runner $(LIBRARIES)
	@$(COVERAGE)/runner
	@for isa in $(ISAS); do $(COVERAGE)/runner --isa $$isa $(ISA_CASES) || exit 1; done
	@{ lcov --quiet $(LCOV_BRANCHES) --capture --directory $(COVERAGE) --output-file $(COVERAGE)/all.info && \
		lcov --quiet $(LCOV_BRANCHES) --extract $(COVERAGE)/all.info '*/src/*' --output-file $(COVERAGE)/tqkv.info; } \
		>$(COVERAGE)/lcov.log 2>&1 || { cat $(COVERAGE)/lcov.log; exit 1; }
	@awk -F: '/^SF/ { n = split($$2, path, "/") } /^LF/ { lines += $$2; all = $$2 } /^LH/ { lines_hit += $$2; hit = $$2 } \
		/^BRF/ { branches += $$2 } /^BRH/ { branches_hit += $$2 } \
		/^end_of_record/ && all { printf "coverage %-18s %.4f of %d lines\n", path[n], hit / all, all; all = 0 } \
		END { printf "ratio coverage_lines %.4f\nratio coverage_branches %.4f\n", lines_hit / lines, \
			branches_hit / branches; \
			exit lines_hit < 0.95 * lines || branches_hit < 0.90 * branches }' $(COVERAGE)/tqkv.info
