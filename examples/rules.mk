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
