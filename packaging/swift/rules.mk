# The Swift package, whose manifest is Package.swift.

.PHONY: apinotes test-swift
apinotes: ## write packaging/swift's notes on NULL anew, after a change of tqkv.h's declarations
	@python3 packaging/swift/apinotes.py

test-swift:
	@echo "== the Swift package"
	@CPPFLAGS="$(CPPFLAGS)" sh packaging/swift/test.sh $(abspath $(BUILD))/swift

TEST_TARGETS += test-swift
# clang-19 reads the notes.
DEB_TEST += python3 clang
DEB_MORE += $(if $(filter bookworm,$(CODENAME)),clang-19)
