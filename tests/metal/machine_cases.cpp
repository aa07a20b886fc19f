// The machine of simt.h itself: the launches that it refuses, and the kernels that exist.
#include "shader_cases.h"

namespace
{

const char *const families[] = {"encode", "encode_kv", "probe", "decode", "rotate", "attend", "attend_merge"};

void run_entry_points(const void *)
{
    int found = 0, expected = 1;
    for (const simt::kernel *k = simt::first_kernel(); k; k = k->next) found++;
    for (const char *family : families)
        for (int head_dim : gpu_head_dims) {
            std::string name = std::string("tqkv_") + family + "_d" + std::to_string(head_dim);
            CHECK(simt::find_kernel(name.c_str()) != nullptr, "%s is missing", name.c_str());
            expected++;
        }
    for (const char *name : {"tqkv_tables", "tqkv_encode_kv_d192_128", "tqkv_attend_d192_128"})
        CHECK(simt::find_kernel(name) != nullptr, "%s is missing", name);
    expected += 2;
    CHECK(found == expected, "%d kernels, not %d", found, expected);
}

// Runs a valid dispatch of rotate after one change.
std::string rotate_after(void (*change)(simt::launch &))
{
    float rows[2 * 64] = {};
    tqkv__rotate_args args = {2};
    simt::launch l = {};
    l.threadgroups = {1, 1, 1};
    l.threads = {64, 1, 1};
    l.buffers[0] = &args;
    l.buffers[1] = rows;
    l.constants.set[TQKV_FC_UNROTATE] = true;
    change(l);
    return simt::run(*simt::find_kernel("tqkv_rotate_d64"), l, gpu_schedules[0]);
}

void check_refusal(const std::string &message, const char *expected)
{
    CHECK(message.find(expected) != std::string::npos, "'%s' does not say '%s'", message.c_str(), expected);
}

void run_refusals(const void *)
{
    CHECK(rotate_after([](simt::launch &) {}).empty(), "a valid dispatch is refused");
    check_refusal(rotate_after([](simt::launch &l) { l.buffers[1] = nullptr; }), "buffer 1 is not bound");
    check_refusal(rotate_after([](simt::launch &l) { l.threads.x = 33; }), "not a multiple of 32");
    check_refusal(rotate_after([](simt::launch &l) { l.threads.x = 1056; }), "not a multiple of 32 up to 1024");
    check_refusal(rotate_after([](simt::launch &l) { l.threadgroup_bytes[0] = 40; }), "not a multiple of 16");
    check_refusal(rotate_after([](simt::launch &l) { l.threadgroup_bytes[0] = 32784; }), "more than 32 KiB");
    check_refusal(rotate_after([](simt::launch &l) { l.constants.set[TQKV_FC_UNROTATE] = false; }), "is not set");
}

// Attention with 8 simdgroups, more than tqkv.h plans, stays within Metal's 32 KiB of threadgroup memory.
void run_memory_limits(const void *)
{
    for (int d : gpu_head_dims) {
        const int n = 8; // simdgroups
        int attend = TQKV__ATTEND_TABLE_BYTES + TQKV__ATTEND_QUERY_BYTES(d) + TQKV__ATTEND_WEIGHT_BYTES(d, n) +
                     TQKV__ATTEND_STATE_BYTES(d, n);
        CHECK(attend <= 32768, "attend at D=%d takes %d bytes", d, attend);
        CHECK(TQKV__MERGE_BYTES(d, TQKV__MERGE_SIMDGROUPS(d)) <= 32768, "attend_merge at D=%d", d);
    }
}

} // namespace

void machine_cases()
{
    test_add(run_entry_points, nullptr, 0, "machine/entry_points");
    test_add(run_refusals, nullptr, 0, "machine/refusals");
    test_add(run_memory_limits, nullptr, 0, "machine/memory_limits");
}
