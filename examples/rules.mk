# The examples' own targets: their tests, and the charts of docs/.

DEMOS += tinylm

$(BUILD)/tinylm_test: examples/tests/tinylm_test.c $(wildcard examples/*.[ch]) tqkv.h
	@mkdir -p $(@D)
	$(CC) $(STANDARD) $(CPPFLAGS) $(CFLAGS) $(WARNINGS) -I. $< -o $@ $(LIBRARIES)

.PHONY: test-examples
test-examples: $(addprefix $(BUILD)/,encode_attend real_kv tinylm tinylm_test)
	@echo "== examples"
	@sh examples/tests/test.sh $(BUILD)

.PHONY: test-projects
test-projects:
	@echo "== example projects"
	@sh examples/tests/projects.sh $(abspath $(BUILD))/projects

TEST_TARGETS += test-examples test-projects
DEB_TEST += cmake
BREW_TEST += cmake

# ---- Charts: docs/*.svg from what the examples print and `make bench` leaves in build/charts/speed.txt ----

CHART_WINDOWS ?= 16
GNUPLOT = gnuplot -e "input='$<'; output='$@'" docs/charts/style.gp

.PHONY: deps-charts
deps-charts: ## install what `make charts` needs
	@$(call install,$(if $(filter Darwin,$(SYSTEM)),gnuplot,gnuplot-nox))

$(BUILD)/charts/quality.txt: $(BUILD)/tinylm
	@mkdir -p $(@D)
	$(BUILD)/tinylm score --all --windows $(CHART_WINDOWS) > $@

$(BUILD)/charts/histogram.txt: $(BUILD)/real_kv
	@mkdir -p $(@D)
	$(BUILD)/real_kv --histogram > $@

docs/%.svg: $(BUILD)/charts/%.txt docs/charts/%.gp docs/charts/style.gp
	$(GNUPLOT) docs/charts/$*.gp

.PHONY: charts
charts: docs/quality.svg docs/histogram.svg ## draw docs/*.svg; takes minutes
	@if test -s $(BUILD)/charts/speed.txt; then $(MAKE) docs/speed.svg; \
	else echo "docs/speed.svg left as it is: it draws what make bench measures, run that first"; fi
