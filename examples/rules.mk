# The examples' own targets: their tests, and the charts of docs/.

DEMOS += pages engine latent sparse advise tinylm context_shift pressure checkpoints prompt_cache server threads_pthread threads_openmp snapshot_file

# Without an OpenMP compiler the example still builds, and runs on one thread.
FLAGS_threads_openmp = $(shell echo 'int main(void) { return 0; }' | \
	$(CC) -fopenmp -x c - -o /dev/null 2>/dev/null && echo -fopenmp)

# For this machine: the model's products take most of the time.
$(foreach demo,tinylm pressure checkpoints prompt_cache server,$(eval FLAGS_$(demo) := -march=native))

# ---- With MPI: one context over four ranks ----

MPI_FOUND := $(shell command -v mpicc)
# Open MPI refuses to run as root, and more ranks than cores, unless told so.
MPI_RUN = mpirun $(shell mpirun --version 2>/dev/null | grep -q 'Open MPI' && echo --oversubscribe --timeout 60 && \
	test "$$(id -u)" = 0 && echo --allow-run-as-root)

CC_mpi_context := mpicc

.PHONY: deps-mpi demo-mpi
deps-mpi: ## install what `make demo-mpi` needs: Open MPI
	@$(call install,$(if $(filter Darwin,$(SYSTEM)),open-mpi,openmpi-bin libopenmpi-dev))

demo-mpi: $(BUILD)/mpi_context ## one context over four processes; the same program runs on four machines
	@$(MPI_RUN) -n 4 $<

# ---- The tests ----

EXAMPLE_TESTS := $(TEST_BUILD)/examples
$(eval $(call example_programs,$(EXAMPLE_TESTS),$(TEST_TQKV)))

$(EXAMPLE_TESTS)/tinylm_test: examples/tests/tinylm_test.c $(TEST_TQKV) $(wildcard examples/*.[ch])
	@mkdir -p $(@D)
	$(CC) $(STANDARD) $(CPPFLAGS) $(CFLAGS) -march=native $(WARNINGS) $(INCLUDE) $< $(TEST_TQKV) -o $@ $(LIBRARIES)

$(EXAMPLE_TESTS)/prompt_cache_test: examples/tests/prompt_cache_test.c $(TEST_TQKV) examples/prompt_cache.h
	@mkdir -p $(@D)
	$(CC) $(STANDARD) $(CPPFLAGS) $(CFLAGS) $(WARNINGS) $(INCLUDE) $< $(TEST_TQKV) -o $@ $(LIBRARIES)

.PHONY: test-examples
test-examples: $(DEMOS:%=$(EXAMPLE_TESTS)/%) $(EXAMPLE_TESTS)/tinylm_test $(EXAMPLE_TESTS)/prompt_cache_test $(MPI_FOUND:%=$(EXAMPLE_TESTS)/mpi_context)
	@echo "== examples"
	@MPI_RUN="$(if $(MPI_FOUND),$(MPI_RUN))" sh examples/tests/test.sh $(EXAMPLE_TESTS)
	@CC="$(CC)" CFLAGS="$(STANDARD) $(CPPFLAGS) $(IMPLEMENTED) $(WARNINGS) -Wno-unknown-pragmas" \
		sh examples/tests/snippets.sh $(BUILD)/snippets $(TEST_TQKV)

.PHONY: test-projects
test-projects:
	@echo "== example projects"
	@sh examples/tests/projects.sh $(abspath $(BUILD))/projects

TEST_TARGETS += test-examples test-projects
DEB_TEST += cmake meson clang
BREW_TEST += cmake meson

# ---- Charts: docs/*.svg from what the examples and `make bench` print ----

.PHONY: deps-charts
deps-charts: ## install what `make charts` needs
	@$(call install,$(if $(filter Darwin,$(SYSTEM)),gnuplot,gnuplot-nox))

$(BUILD)/charts/histogram.txt: $(BUILD)/real_kv
	@mkdir -p $(@D)
	$(BUILD)/real_kv --histogram > $@

docs/quality.svg: $(wildcard bench/models/results/*-prose.txt) docs/charts/quality.gp docs/charts/style.gp
	gnuplot -e "input='bench/models/results'; output='$@'" docs/charts/style.gp docs/charts/quality.gp

docs/budget.svg: $(wildcard bench/models/results/*-budget.txt) docs/charts/budget.gp docs/charts/style.gp
	gnuplot -e "input='bench/models/results'; output='$@'" docs/charts/style.gp docs/charts/budget.gp

docs/recall.svg: bench/models/results/recall.txt docs/charts/recall.gp docs/charts/style.gp
	gnuplot -e "input='$<'; output='$@'" docs/charts/style.gp docs/charts/recall.gp

docs/%.svg: $(BUILD)/charts/%.txt docs/charts/%.gp docs/charts/style.gp
	gnuplot -e "input='$<'; output='$@'" docs/charts/style.gp docs/charts/$*.gp

docs/speed.svg: $(shell grep -l "^. kind: cpu" bench/results/*.txt | head -n 1) docs/charts/speed.gp docs/charts/style.gp
	gnuplot -e "input='$<'; output='$@'" docs/charts/style.gp docs/charts/speed.gp

.PHONY: charts
charts: docs/quality.svg docs/budget.svg docs/recall.svg docs/histogram.svg docs/speed.svg ## draw docs/*.svg; minutes with CFLAGS="-O2 -march=native"
