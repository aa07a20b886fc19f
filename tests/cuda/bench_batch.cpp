// Times one query of each of 16 sequences of 500 to 8000 positions, whose pages lie in one pool in no order: all in one
// call, and one call each.
#include "bench.h"

namespace
{

enum { SEQUENCES = 16, LONGEST = 8000, PAGE_SIZE = 64 };

// A pool, its sequences, and what their calls read and write.
struct batch {
    tqkv_store keys, values;
    std::vector<tqkv_metal_store> streams;   // [SEQUENCES][2]
    std::vector<tqkv_metal_attention> calls; // [SEQUENCES]
    size_t row;
    float *out, *scratch;
    std::vector<tqkv_metal_buffer> qs, outs;
    tqkv_metal_plan together;
};

int length_of(int sequence) { return LONGEST / SEQUENCES * (sequence + 1); }
int pages_of(int sequence) { return (length_of(sequence) + PAGE_SIZE - 1) / PAGE_SIZE; }

void add_sequence(batch &b, int sequence, int group, const int32_t *pages, size_t first)
{
    for (const tqkv_store *from : {&b.keys, &b.values}) {
        tqkv_metal_store s = gpu_store(from);
        s.shape.page_size = PAGE_SIZE;
        s.shape.n_pages = pages_of(sequence);
        s.pages = {const_cast<int32_t *>(pages), first * sizeof(int32_t)};
        b.streams[(size_t)(2 * sequence + (from == &b.values))] = s;
    }
    tqkv_metal_attention &a = b.calls[(size_t)sequence];
    a.keys = &b.streams[(size_t)(2 * sequence)];
    a.values = a.keys + 1;
    a.attention.n_heads = group * N_KV_HEADS;
    a.attention.n_queries = 1;
    a.attention.end = length_of(sequence);
}

void add_sequences(batch &b, int group, int n_pages)
{
    std::vector<int32_t> pages((size_t)n_pages);
    for (size_t i = 0; i < pages.size(); i++) pages[i] = (int32_t)(i * 7919 % pages.size()); // a prime: all of them
    const int32_t *on_device = device_copy(pages);
    b.streams.resize(2 * SEQUENCES);
    b.calls.resize(SEQUENCES);
    size_t first = 0;
    for (int i = 0; i < SEQUENCES; first += (size_t)pages_of(i++)) add_sequence(b, i, group, on_device, first);
}

tqkv_metal_plan plan_batch(const batch &b, const tqkv__batch_item *items, tqkv__batch_item *planned)
{
    tqkv_metal_plan plan;
    check_plan(tqkv_metal_plan_attend_batch(b.calls.data(), SEQUENCES, b.qs.data(), gpu_buffer(items), planned,
                                            gpu_buffer(b.scratch), b.outs.data(), &plan));
    return plan;
}

tqkv_metal_plan plan_sequence(const batch &b, size_t i)
{
    tqkv_metal_plan plan;
    check_plan(tqkv_metal_plan_attend(&b.calls[i], b.qs[i], gpu_buffer(b.scratch), b.outs[i], &plan));
    return plan;
}

void make_batch(tqkv_format key_format, tqkv_format value_format, int group, uint32_t seed, batch &b)
{
    int n_pages = 0;
    for (int i = 0; i < SEQUENCES; i++) n_pages += pages_of(i);
    b.keys = make_stream(key_format, 128, n_pages * PAGE_SIZE, N_KV_HEADS, seed);
    b.values = make_stream(value_format, 128, n_pages * PAGE_SIZE, N_KV_HEADS, seed + 500);
    add_sequences(b, group, n_pages);
    b.row = (size_t)(group * N_KV_HEADS * 128);
    const float *q = gaussian_array(b.row * SEQUENCES, 78);
    b.out = device_array<float>(b.row * SEQUENCES);
    for (size_t i = 0; i < SEQUENCES; i++) {
        b.qs.push_back({const_cast<float *>(q), i * b.row * sizeof(float)});
        b.outs.push_back({b.out, i * b.row * sizeof(float)});
    }
    std::vector<tqkv__batch_item> planned(SEQUENCES);
    size_t scratch = plan_batch(b, nullptr, nullptr).scratch_size;
    for (size_t i = 0; i < SEQUENCES; i++) scratch = std::max(scratch, plan_sequence(b, i).scratch_size);
    b.scratch = device_array<float>(scratch / sizeof(float));
    tqkv__batch_item *items = device_array<tqkv__batch_item>(SEQUENCES);
    b.together = plan_batch(b, items, planned.data());
    if (!opt.list)
        CUDA(cudaMemcpy(items, planned.data(), SEQUENCES * sizeof(tqkv__batch_item), cudaMemcpyHostToDevice));
}

void attend_each(const batch &b)
{
    for (size_t i = 0; i < SEQUENCES; i++) launch(plan_sequence(b, i));
}

// Both ways must write the same bits.
void check_batch(const std::string &name, const batch &b)
{
    const size_t n = b.row * SEQUENCES;
    attend_each(b);
    const std::vector<float> alone = on_host(b.out, n);
    CUDA(cudaMemset(b.out, 0xff, n * sizeof(float)));
    launch(b.together);
    const std::vector<float> together = on_host(b.out, n);
    report_right(name, !memcmp(alone.data(), together.data(), n * sizeof(float)), 0.0);
}

} // namespace

void bench_batch(tqkv_format key_format, tqkv_format value_format, int group)
{
    const std::string name = std::string("batch/") + tqkv_format_name(key_format) + "_" +
                             tqkv_format_name(value_format) + "/d128/g" + std::to_string(group) + "/16";
    if (!is_wanted(name)) return;
    const device_scope scope;
    std::vector<batch> copies(opt.list || opt.check ? 1 : 4); // together several times the L2
    for (size_t i = 0; i < copies.size(); i++) make_batch(key_format, value_format, group, 10 + (uint32_t)i, copies[i]);
    run_bench((int)copies.size(), [&] { check_batch(name, copies[0]); },
              {{name, [&](int i) { launch(copies[(size_t)i].together); }},
               {name + "/loop", [&](int i) { attend_each(copies[(size_t)i]); }}});
    report_ratio(name + "/loop", name + "/loop", name);
}
