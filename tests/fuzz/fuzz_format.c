/* make fuzz FUZZERS=format SECONDS=60; AFL++: make fuzz-afl FUZZERS=format. Names and numbers of formats
   and instruction sets. */
#include "fuzz.h"

static void check_name(const uint8_t *bytes, size_t size)
{
    char *name = (char *)test_alloc(size + 1);
    if (size) memcpy(name, bytes, size);
    name[size] = '\0';
    tqkv_format format = tqkv_format_from_name(name);
    bool is_known = false;
    for (int i = 0; i < TEST_FORMATS; i++) is_known |= !strcmp(name, tqkv_format_name(test_formats[i]));
    CHECK(is_known == (format != TQKV_FORMAT_DEFAULT), "\"%s\" is format %d", name, (int)format);
    CHECK(!is_known || !strcmp(tqkv_format_name(format), name), "\"%s\" is %s", name, tqkv_format_name(format));
    tqkv_result result = tqkv_isa_force(name);
    CHECK(result == TQKV_OK || result == TQKV_INVALID_ARGUMENT || result == TQKV_UNSUPPORTED, "\"%s\"", name);
    CHECK(result != TQKV_OK || !strcmp(tqkv_isa_name(), name), "\"%s\" is %s", name, tqkv_isa_name());
    tqkv_isa_force(NULL);
    free(name);
}

static void check_number(int number, int head_dim)
{
    tqkv_format format = test_no_format(number);
    bool is_known = number >= (int)TQKV_F16 && number <= (int)TQKV_TQ2;
    bool is_dim = false;
    for (int i = 0; i < TEST_ALL_HEAD_DIMS; i++) is_dim |= head_dim == test_all_head_dims[i];
    CHECK(tqkv_format_name(format) != NULL, "format %d has no name", number);
    CHECK((tqkv_format_from_name(tqkv_format_name(format)) == format) == (is_known || number == 0), "format %d",
          number);
    CHECK((test_row_bytes(format, head_dim) != 0) == (is_known && is_dim), "format %d of %d", number, head_dim);
    int norms = test_norms_per_row(format, head_dim);
    CHECK((norms != 0) == (is_known && is_dim && format != TQKV_F16), "format %d of %d", number, head_dim);
    CHECK(tqkv_result_string(test_no_result(number)) != NULL, "result %d has no text", number);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    test_failure_aborts = true;
    check_name(bytes, size);
    fuzz_input input = {bytes, size};
    int number = fuzz_int(&input), head_dim = fuzz_int(&input);
    check_number(number, head_dim);
    check_number(number % 12, head_dim & 2047);
    return 0;
}
