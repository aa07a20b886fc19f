/* >>plan-report: what the kernel `tables` reports, compared with what the host has */

TQKV_METAL_API bool tqkv_metal_has_matrices(const void *bytes)
{
    const tqkv__table_report *report = (const tqkv__table_report *)bytes;
    for (int lane = 0; lane < TQKV__SIMD_WIDTH; lane++)
        for (int i = 0; i < 2; i++) {
            const int row = TQKV__MATRIX_ROW(lane), column = TQKV__MATRIX_COLUMN(lane) + i;
            int product = 0;
            for (int k = 0; k < 8; k++) product += TQKV__MATRIX_TEST(row, k, 3) * TQKV__MATRIX_TEST(k, column, 5);
            if (report->matrix_product[lane][i] != (float)product) return false;
        }
    return true;
}

/* Compares the sizes first, because the offsets of the tables depend on them. */
TQKV_METAL_API const char *tqkv_metal_stale_table(const void *bytes)
{
    const tqkv__table_report *report = (const tqkv__table_report *)bytes;
#define TQKV__STRUCT_NAME(name) "size of tqkv__" #name,
#define TQKV__STRUCT_SIZE(name) sizeof(tqkv__##name),
#define TQKV__SIZES_OF(x, i, D) {TQKV__KERNEL_SIZES(D)},
#define TQKV__DIFFERS(member)   memcmp(report->tables.member, tqkv__tables.member, sizeof report->tables.member) != 0
#define TQKV__CHECK_BOOK(report, bits) \
    if (TQKV__DIFFERS(codebook_##bits)) return "table codebook_" #bits; \
    if (TQKV__DIFFERS(boundaries_##bits)) return "table boundaries_" #bits; \
    if (TQKV__DIFFERS(factors_##bits)) return "table factors_" #bits;
    static const char *const names[] = {TQKV__SHARED_STRUCTS(TQKV__STRUCT_NAME)};
    static const size_t sizes[] = {TQKV__SHARED_STRUCTS(TQKV__STRUCT_SIZE)};
    static const int32_t kernels[TQKV__KERNEL_DIMS][TQKV__N_KERNEL_SIZES] = {TQKV__KERNELS(TQKV__SIZES_OF, )};
    if (report->table_version != TQKV_TABLE_VERSION) return "table version";
    for (int i = 0; i < TQKV__N_SHARED_STRUCTS; i++)
        if (report->struct_sizes[i] != sizes[i]) return names[i];
    TQKV__BOOKS(TQKV__CHECK_BOOK, report)
    if (TQKV__DIFFERS(signs)) return "table signs";
    if (TQKV__DIFFERS(hadamard_12)) return "table hadamard_12";
    if (TQKV__DIFFERS(hadamard_20)) return "table hadamard_20";
    if (TQKV__DIFFERS(hadamard_28)) return "table hadamard_28";
    if (TQKV__DIFFERS(hadamard_36)) return "table hadamard_36";
    return memcmp(report->kernel_sizes, kernels, sizeof kernels) != 0 ? "dispatch of its kernels" : NULL;
}
