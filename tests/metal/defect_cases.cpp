// Defects that earlier systems had and a GPU can have, one case each. tests/metal/bugs.py plants them: the cases must
// fail then.
#include "shader_cases.h"
#include <sys/mman.h>

namespace
{

void run_format_is_required(const void *)
{
    tqkv_store s = test_store(TQKV_TQ4, 64, 1, 1, false);
    float row[64] = {};
    tqkv_metal_plan plan;
    CHECK_RESULT(gpu_plan(tqkv_metal_plan_decode, &s, 0, 1, TQKV_ROTATED, row, &plan), TQKV_OK);
    plan.d[0].kernel.constants[TQKV_FC_FORMAT] = 0;
    const std::string wrong = gpu_run(plan);
    const char *expected = gpu_on_device ? "tqkv_decode_d64" : "function constant 0 is not set";
    CHECK(wrong.find(expected) != std::string::npos, "'%s'", wrong.c_str());
    test_store_free(&s);
}

// Rows beyond the fourth GiB of a store. Only the pages of these rows exist.
void run_beyond_4_gib(const void *)
{
    const int capacity = 4500000, n = 40;
    tqkv_store far_store = test_shape(TQKV_TQ8, 1024), near_store = test_store(TQKV_TQ8, 1024, 1, n, false);
    far_store.capacity = capacity;
    far_store.codes_size = tqkv_codes_size(&far_store);
    far_store.norms_size = tqkv_norms_size(&far_store);
    CHECK(far_store.codes_size > UINT32_MAX, "%zu bytes", far_store.codes_size);
    far_store.codes =
        mmap(nullptr, far_store.codes_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(far_store.codes != MAP_FAILED, "no address space");
    far_store.norms = (float *)calloc(far_store.norms_size, 1);
    std::vector<float> source((size_t)n * 1024), out(1024, NAN);
    data_rows(23, DATA_GAUSSIAN, source.data(), n, 1024);
    CHECK_RESULT(tqkv_encode(&near_store, source.data(), n, 0), TQKV_OK);
    std::vector<simt::schedule> all(1, gpu_schedules[0]);
    all.swap(gpu_schedules); // with several schedules, a dispatch copies the store
    CHECK_RUN(gpu_call(tqkv_metal_plan_encode, &far_store, nullptr, source.data(), nullptr, n, capacity - n, nullptr));
    all.swap(gpu_schedules);
    CHECK(!memcmp((char *)far_store.codes + (size_t)(capacity - n) * 1024, near_store.codes, near_store.codes_size),
          "codes differ");
    tqkv_attention far_attention = test_attention(&far_store, &far_store, 1, 1, capacity);
    const tqkv_attention near_attention = test_attention(&near_store, &near_store, 1, 1, n);
    far_attention.kv_len = n;
    std::vector<double> expected(1024);
    reference_attend_as(REFERENCE_FLOATS, &near_attention, source.data(), expected.data());
    for (gpu_split split : {as_planned, gpu_split{GPU_MOST, 1, 1}}) {
        CHECK_RUN(gpu_attend(&far_attention, source.data(), out.data(), split));
        double error = reference_relative_error(out.data(), expected.data(), 1024);
        CHECK(error <= ATTEND_TOLERANCE, "relative error %g", error);
    }
    munmap(far_store.codes, far_store.codes_size);
    free(far_store.norms);
    test_store_free(&near_store);
}

// For 8 heads a key or value is decoded once, as for one head. The machine counts only halves; all formats are decoded
// in the same places. A whole stretch: strands load tiles that do not exist, too.
void run_decoded_once(const void *)
{
    for (int group : {1, 8}) {
        attend_row row = attend_default_row(TQKV_F16, TQKV_F16, 128);
        row.n_kv_heads = 1;
        row.group = group;
        row.end = 512;
        row.key_capacity = row.value_capacity = 512;
        uint64_t before = simt::widened_halves();
        const std::vector<gpu_split> splits = {as_planned, {group, 1, 1}};
        const size_t ways = check_attend(row, splits);
        uint64_t widened = simt::widened_halves() - before;
        uint64_t stored = 2 * 512 * 128 * gpu_schedules.size() * ways;
        CHECK(widened == stored, "%llu halves decoded of %llu, group %d", (unsigned long long)widened,
              (unsigned long long)stored, group);
    }
}

// Each simdgroup takes several tiles: it writes new weights while slow lanes may still read the old ones. Then scores
// grow from tile to tile and from simdgroup to simdgroup: the result needs all four maxima and sums.
void add_attend_defects()
{
    shape_row row = {attend_default_row(TQKV_I8, TQKV_TQ4, 64), {GPU_MOST, 1, 1}};
    row.problem.end = row.problem.key_capacity = row.problem.value_capacity = 320;
    test_add(run_shape, &row, sizeof row, "defect/barrier_before_next_tile");
    row.problem.key_format = TQKV_TQ8;
    row.problem.value_format = TQKV_TQ6;
    row.problem.query_size = 30.0f;
    row.split.n_simdgroups = 4;
    test_add(run_shape, &row, sizeof row, "defect/state_of_four_simdgroups");
    // The first window begins at slot 93 of 96, those of later threadgroups behind the end of the ring.
    row = {attend_default_row(TQKV_I8, TQKV_TQ4, 64), {4, 2, 1}};
    row.problem.key_ring = row.problem.value_ring = true;
    row.problem.key_capacity = row.problem.value_capacity = 96;
    row.problem.n_queries = 40;
    row.problem.window = 20;
    row.problem.end = 93 + 40 + 20 - 1;
    test_add(run_shape, &row, sizeof row, "defect/windows_behind_the_end");
}

} // namespace

void defect_shader_cases()
{
    test_add(run_format_is_required, nullptr, 0, "defect/no_pipeline_without_format");
    add_attend_defects();
    if (gpu_on_device) return; // a device copies the buffers and does not count operations
    test_add(run_beyond_4_gib, nullptr, 0, "defect/offsets_beyond_4_gib");
    test_add(run_decoded_once, nullptr, 0, "defect/decoded_once_for_the_group");
}
