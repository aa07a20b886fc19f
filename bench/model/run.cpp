// Runs one counted kernel on the machine of simt.h and prints how often its blocks ran and what its accesses cost. If a
// result is wrong, it prints no counts.
//   run attend FORMAT GROUP POSITIONS KERNEL HEAD_DIM COLUMNS PAGE
//                                                          one KV head, threadgroups of 4 simdgroups and so many rows;
//                                                          pages of so many positions, 0: none
//   run plan FORMAT GROUP POSITIONS KERNEL HEAD_DIM KV_HEADS    prints how it is planned; counts nothing
//   run encode FORMAT TOKENS                               head_dim 128
//   run lookup WAY ROUNDS                                  variants/lookup.metal
//   run scores WAY ROWS                                    variants/scores.metal
#include "gpu.h"
#include <algorithm>
#include <map>
#include <math.h>
#include <random>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace
{

enum { base_dim = 128, n_simdgroups = 4, FIRST_BYTE_WAY = 7 };

struct lane_counts {
    std::vector<uint64_t> of[simt::simd_width];
};
std::map<unsigned, lane_counts> blocks; // by simdgroup; [lane][block]

// An access of a simdgroup that some lanes have not reached yet.
struct access {
    unsigned arrived;
    uint64_t address[simt::simd_width];
};
// Key: simdgroup, place in the code, how often a lane has reached it.
std::map<std::pair<unsigned, std::pair<unsigned, uint64_t>>, access> accesses;
std::map<unsigned, lane_counts> visits;
// Cycles of all threadgroup accesses of a simdgroup, by number of banks.
const unsigned bank_counts[] = {16, 32};
double cycles_of_banks[2];
double bytes_loaded, bytes_of_lines; // of device loads; of the 128-byte lines that they touch

uint64_t &count(lane_counts &counts, unsigned index)
{
    std::vector<uint64_t> &of = counts.of[simt::current->thread_index_in_simdgroup];
    if (of.size() <= index) of.resize(index + 1);
    return of[index];
}

// In each cycle a bank serves one word to all lanes that ask for it, and delivers at most one word.
double access_cycles(const access &a, unsigned bytes, unsigned banks)
{
    std::vector<uint64_t> words;
    unsigned n_words = (bytes + 3) / 4;
    for (uint64_t address : a.address)
        for (unsigned i = 0; i < n_words; i++) words.push_back(address / 4 + i);
    std::sort(words.begin(), words.end());
    words.erase(std::unique(words.begin(), words.end()), words.end());
    std::vector<unsigned> load(banks);
    for (uint64_t word : words) load[word % banks]++;
    double delivered = (double)(simt::simd_width * bytes) / (4.0 * banks);
    return std::max(delivered, (double)*std::max_element(load.begin(), load.end()));
}

double access_lines(const access &a, unsigned bytes)
{
    std::vector<uint64_t> lines;
    for (uint64_t address : a.address)
        for (uint64_t line = address / 128; line <= (address + bytes - 1) / 128; line++) lines.push_back(line);
    std::sort(lines.begin(), lines.end());
    return (double)(std::unique(lines.begin(), lines.end()) - lines.begin());
}

float posted(const simt::slot *slots, unsigned lane)
{
    float value;
    memcpy(&value, slots[lane].bytes, sizeof value);
    return value;
}

uint32_t posted_bits(const simt::slot *slots, unsigned lane)
{
    uint32_t value;
    memcpy(&value, slots[lane].bytes, sizeof value);
    return value;
}

} // namespace

// ---- What the counted kernel calls ----

extern "C" {

void model_visit(unsigned block) { count(blocks[simt::current->simdgroup_index_in_threadgroup], block)++; }

// An access of `bytes` bytes a lane. It stays incomplete if a lane does not get here: such accesses are rare, and their
// cycles are not counted.
void model_touch(bool is_device, unsigned place, unsigned bytes, uint64_t address)
{
    unsigned simdgroup = simt::current->simdgroup_index_in_threadgroup;
    uint64_t nth = count(visits[simdgroup], place)++;
    auto key = std::make_pair(simdgroup, std::make_pair(place, nth));
    access &a = accesses[key];
    a.address[a.arrived++] = address;
    if (a.arrived < simt::simd_width) return;
    if (is_device) {
        bytes_loaded += simt::simd_width * bytes;
        bytes_of_lines += 128 * access_lines(a, bytes);
    } else {
        for (int i = 0; i < 2; i++) cycles_of_banks[i] += access_cycles(a, bytes, bank_counts[i]);
    }
    accesses.erase(key);
}

void model_check_constants(const long *values, unsigned mask, const char *kernel_name)
{
    for (int i = 0; i < simt::max_constants; i++)
        if ((mask >> i & 1) && simt::constants->value[i] != values[i]) {
            fprintf(stderr, "%s: function constant %d is %ld, compiled as %ld\n", kernel_name, i,
                    (long)simt::constants->value[i], values[i]);
            exit(1);
        }
}

unsigned long model_address(const void *pointer) { return (unsigned long)pointer; }
float model_half(unsigned short bits)
{
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float magnitude =
        exponent ? ldexpf((float)(fraction + 1024), exponent - 25) : ldexpf((float)fraction, -24); // no Inf here
    return bits & 0x8000 ? -magnitude : magnitude;
}
float model_rint(float x) { return rintf(x); }
float model_sqrt(float x) { return sqrtf(x); }
float model_tanh(float x) { return tanhf(x); }
float model_exp2(float x) { return exp2f(x); }
float model_saturate(float x) { return x > 0.0f ? std::min(x, 1.0f) : 0.0f; }
uint32_t model_shuffle(uint32_t value, uint32_t lane, const char *file, int line)
{
    if (lane >= simt::simd_width) simt::bad_lane("simd_shuffle", lane, file, line);
    return posted_bits(simt::exchange(&value, sizeof value, "simd_shuffle", file, line), lane);
}
uint32_t model_quad_shuffle(uint32_t value, uint32_t lane, const char *file, int line)
{
    if (lane >= 4) simt::bad_lane("quad_shuffle", lane, file, line);
    unsigned quad = simt::current->thread_index_in_simdgroup & ~3u;
    return posted_bits(simt::exchange(&value, sizeof value, "quad_shuffle", file, line), quad + lane);
}
uint32_t model_shuffle_xor(uint32_t value, uint32_t mask, const char *file, int line)
{
    unsigned lane = simt::current->thread_index_in_simdgroup ^ mask;
    return posted_bits(simt::exchange(&value, sizeof value, "simd_shuffle_xor", file, line), lane);
}
float model_sum(float value, const char *file, int line)
{
    const simt::slot *slots = simt::exchange(&value, sizeof value, "simd_sum", file, line);
    float sum = 0.0f;
    for (unsigned i = 0; i < simt::simd_width; i++) sum += posted(slots, i);
    return sum;
}
float model_max(float value, const char *file, int line)
{
    const simt::slot *slots = simt::exchange(&value, sizeof value, "simd_max", file, line);
    float most = posted(slots, 0);
    for (unsigned i = 1; i < simt::simd_width; i++) most = std::max(most, posted(slots, i));
    return most;
}
typedef float pair __attribute__((vector_size(8)));
pair model_multiply(pair left, pair right, pair sum, const char *file, int line)
{
    const float own[] = {left[0], left[1], right[0], right[1]};
    const simt::slot *slots = simt::exchange(own, sizeof own, "simdgroup_multiply_accumulate", file, line);
    const simt::matrix_place place = simt::matrix_places[simt::current->thread_index_in_simdgroup];
    for (unsigned k = 0; k < 8; k++) {
        float a[4], b[4];
        memcpy(a, slots[simt::lane_of_matrix_place(place.row, k)].bytes, sizeof a);
        memcpy(b, slots[simt::lane_of_matrix_place(k, place.column)].bytes, sizeof b);
        for (unsigned i = 0; i < 2; i++) sum[i] = fmaf(a[k % 2], b[2 + i], sum[i]);
    }
    return sum;
}
bool model_any(bool value, const char *file, int line)
{
    const simt::slot *slots = simt::exchange(&value, sizeof value, "simd_any", file, line);
    bool any = false;
    for (unsigned i = 0; i < simt::simd_width; i++) any = any || slots[i].bytes[0];
    return any;
}
void model_threadgroup_barrier(bool orders_memory, const char *file, int line)
{
    simt::barrier(simt::threadgroup_scope, orders_memory, file, line);
}
void model_simdgroup_barrier(bool orders_memory, const char *file, int line)
{
    simt::barrier(simt::simdgroup_scope, orders_memory, file, line);
}
void model_store_atomic(uint32_t *object, uint32_t value) { *object = value; }

} // extern "C"

// ---- The problems ----

namespace
{

std::mt19937 generator(1);

std::vector<float> gaussian(size_t n)
{
    std::normal_distribution<float> normal;
    std::vector<float> values(n);
    for (float &value : values) value = normal(generator);
    return values;
}

[[noreturn]] void fail(const std::string &message)
{
    fprintf(stderr, "%s\n", message.c_str());
    exit(1);
}

struct owned_store {
    tqkv_store store = {};
    std::vector<float> codes, norms; // codes are floats for alignment
    std::vector<int32_t> table;

    owned_store(tqkv_format format, int n_positions, int head_dim = base_dim)
    {
        store.format = format;
        store.head_dim = head_dim;
        store.n_kv_heads = 1;
        store.capacity = n_positions;
        store.codes_size = tqkv_codes_size(&store);
        store.norms_size = tqkv_norms_size(&store);
        codes.resize(store.codes_size / sizeof(float));
        norms.resize(store.norms_size / sizeof(float) + 1);
        store.codes = codes.data();
        store.norms = norms.data();
    }
    void cut(int page_size) // into pages, in descending order
    {
        if (!page_size) return;
        for (int page = store.capacity / page_size; page-- > 0;) table.push_back(page);
        store.pages = table.data();
        store.n_pages = (int)table.size();
        store.page_size = page_size;
    }
    void encode(const std::vector<float> &rows)
    {
        if (tqkv_encode(&store, rows.data(), store.capacity, 0) != TQKV_OK) fail("tqkv_encode");
    }
};

// kernel: GPU_LANES or GPU_MATRICES
void run_attend(tqkv_format format, int group, int n_positions, int kernel, int head_dim, int columns, int page_size)
{
    owned_store keys(format, n_positions, head_dim), values(format, n_positions, head_dim);
    const size_t n = (size_t)n_positions * (size_t)head_dim;
    keys.cut(page_size);
    values.cut(page_size);
    if (page_size) values.store.pages = keys.store.pages; // one table, as a cache has it
    keys.encode(gaussian(n));
    values.encode(gaussian(n));
    std::vector<float> q = gaussian((size_t)(group * head_dim)), out(q.size()), expected(q.size());
    tqkv_attention a = {};
    a.keys = &keys.store;
    a.values = &values.store;
    a.n_heads = group;
    a.n_queries = 1;
    a.end = n_positions;
    std::string wrong = gpu_attend(&a, q.data(), out.data(), {columns, n_simdgroups, 1, 0, kernel});
    if (!wrong.empty()) fail(wrong);
    if (tqkv_attend(&a, q.data(), expected.data()) != TQKV_OK) fail("tqkv_attend");
    double difference = 0, size = 0;
    for (size_t i = 0; i < q.size(); i++) {
        difference += pow((double)out[i] - (double)expected[i], 2);
        size += pow((double)expected[i], 2);
    }
    // The processor multiplies integers, the shaders floats.
    if (!(sqrt(difference / size) <= 0.02)) fail("attend: relative error " + std::to_string(sqrt(difference / size)));
}

// kernel: 0 for the planned one
void print_plan(tqkv_format format, int group, int n_positions, int kernel, int head_dim, int n_heads)
{
    owned_store store(format, n_positions, head_dim);
    store.store.n_kv_heads = n_heads;
    store.store.codes_size *= (size_t)n_heads;
    store.store.norms_size *= (size_t)n_heads;
    tqkv_attention a = {};
    a.keys = a.values = &store.store;
    a.n_heads = group * n_heads;
    a.n_queries = 1;
    a.end = n_positions;
    tqkv_metal_plan plan;
    tqkv_metal_dispatch *const d = plan.d;
    const gpu_attention planned(a);
    const tqkv_metal_buffer nothing = gpu_buffer(nullptr);
    if (tqkv_metal_plan_attend(&planned.metal, nothing, nothing, nothing, &plan) != TQKV_OK)
        fail("tqkv_metal_plan_attend");
    gpu_force(d, {0, 0, 0, 0, kernel});
    size_t bytes = 0;
    for (int i = 0; i < TQKV_METAL_MEMORIES; i++)
        bytes += d[0].memory[i] + d[0].memory_each[i] * (size_t)d[0].n_simdgroups;
    printf("kernel %d\nthreadgroups %lld\nsimdgroups %d\nmemory %zu\n",
           d[0].kernel.family == TQKV_METAL_ATTEND_MATRIX ? GPU_MATRICES : GPU_LANES,
           (long long)d[0].grid[0] * d[0].grid[1] * d[0].grid[2], d[0].n_simdgroups, bytes);
    const tqkv__attend_args args = gpu_args<tqkv__attend_args>(d[0]);
    printf("short %d\ngrowth %d\nblocks %zu\ncolumns %d\n", args.n_short, TQKV__STRETCH_GROWTH, d[0].grid[1],
           d[0].kernel.constants[TQKV_FC_COLUMNS] - 1);
}

void run_encode(tqkv_format format, int n_tokens)
{
    owned_store counted(format, n_tokens), expected(format, n_tokens);
    std::vector<float> rows = gaussian((size_t)n_tokens * base_dim);
    expected.encode(rows);
    std::string wrong = gpu_encode(&counted.store, rows.data(), n_tokens, 0, nullptr);
    if (!wrong.empty()) fail(wrong);
    if (memcmp(counted.store.codes, expected.store.codes, counted.store.codes_size) ||
        memcmp(counted.store.norms, expected.store.norms, counted.store.norms_size))
        fail("encode: other bytes");
}

// Of the 4 bits or the byte at value i of a lane's words of a round.
double looked_up(const uint32_t *words, int way, int i)
{
    if (way < FIRST_BYTE_WAY) return (double)tqkv__tables.codebook_4[words[i / 8] >> (i % 8 * 4) & 15];
    return (double)(int8_t)(words[i / 4] >> (i % 4 * 8));
}

// variants/lookup.metal: random codes and the sums of their weighted centroids, or of bytes.
void run_lookup(int way, int n_rounds)
{
    const int n_threads = n_simdgroups * simt::simd_width;
    std::vector<uint32_t> codes((size_t)(n_rounds * n_threads * 4));
    std::vector<float> weights = gaussian(8), sums((size_t)n_threads);
    for (uint32_t &word : codes) word = (uint32_t)generator();
    tqkv__rotate_args args = {n_rounds};
    std::string wrong = gpu_dispatch("lookup", 0, 0)
                            .constant(TQKV_FC_FORMAT, way)
                            .input(0, &args, sizeof args)
                            .input(1, codes.data(), codes.size() * sizeof(uint32_t))
                            .input(2, weights.data(), weights.size() * sizeof(float))
                            .output(3, sums.data(), sums.size() * sizeof(float))
                            .memory(0, 2 * TQKV__TABLE_BYTES)
                            .run({1, 1, 1}, n_simdgroups);
    if (!wrong.empty()) fail(wrong);
    for (int t = 0; t < n_threads; t++) {
        double expected = 0, size = 0;
        const int values = way < FIRST_BYTE_WAY ? 32 : 16, n_weights = values / 4;
        for (int i = 0; i < n_rounds * values; i++) {
            const uint32_t *words = &codes[(size_t)((i / values * n_threads + t) * 4)];
            double product = looked_up(words, way, i % values) * (double)weights[(size_t)(i % n_weights)];
            expected += product;
            size += product * product;
        }
        double off = fabs((double)sums[(size_t)t] - expected) / sqrt(size);
        if (!(off < 2e-5)) fail("lookup " + std::to_string(way) + ": off by " + std::to_string(off));
    }
}

// variants/scores.metal: random codes, with four queries.
void run_scores(int way, int n_rows)
{
    const size_t n_words = (size_t)n_rows * 16;
    std::vector<uint32_t> memory(n_words + 32);
    uint32_t *codes =
        (uint32_t *)(((uintptr_t)memory.data() + 127) / 128 * 128); // rows are aligned to lines as on a GPU
    std::vector<float> queries = gaussian(4 * base_dim), scores((size_t)n_rows * 4);
    for (uint32_t &word : memory) word = (uint32_t)generator();
    tqkv__rotate_args args = {n_rows};
    std::string wrong = gpu_dispatch("scores", 0, 0)
                            .constant(TQKV_FC_FORMAT, way)
                            .input(0, &args, sizeof args)
                            .input(1, codes, n_words * sizeof(uint32_t))
                            .input(2, queries.data(), queries.size() * sizeof(float))
                            .output(3, scores.data(), scores.size() * sizeof(float))
                            .memory(0, TQKV__TABLE_BYTES)
                            .memory(1, queries.size() * sizeof(float))
                            .run({1, 1, 1}, n_simdgroups);
    if (!wrong.empty()) fail(wrong);
    for (size_t row = 0; row < (size_t)n_rows; row++)
        for (size_t c = 0; c < 4; c++) {
            double expected = 0;
            for (size_t i = 0; i < base_dim; i++)
                expected += (double)tqkv__tables.codebook_4[codes[row * 16 + i / 8] >> (i % 8 * 4) & 15] *
                            (double)queries[c * base_dim + i];
            // Sums of 128 products of size 1 are about 11.
            if (!(fabs((double)scores[row * 4 + c] - expected) < 2e-4)) fail("scores " + std::to_string(way));
        }
}

// A simdgroup runs a block if any of its lanes does.
void print_counts()
{
    std::vector<uint64_t> total;
    for (const auto &entry : blocks) {
        std::vector<uint64_t> most;
        for (const std::vector<uint64_t> &of : entry.second.of) {
            if (most.size() < of.size()) most.resize(of.size());
            for (size_t i = 0; i < of.size(); i++) most[i] = std::max(most[i], of[i]);
        }
        if (total.size() < most.size()) total.resize(most.size());
        for (size_t i = 0; i < most.size(); i++) total[i] += most[i];
    }
    for (size_t i = 0; i < total.size(); i++) printf("block %zu %llu\n", i, (unsigned long long)total[i]);
    for (int i = 0; i < 2; i++) printf("banks %u %.0f\n", bank_counts[i], cycles_of_banks[i]);
    printf("loaded %.0f\nlines %.0f\n", bytes_loaded, bytes_of_lines);
}

} // namespace

int main(int argc, char **argv)
{
    gpu_schedules = {{simt::ascending, 1, 0xff, false}};
    if (argc == 9 && !strcmp(argv[1], "attend"))
        run_attend((tqkv_format)atoi(argv[2]), atoi(argv[3]), atoi(argv[4]), atoi(argv[5]), atoi(argv[6]),
                   atoi(argv[7]), atoi(argv[8]));
    else if (argc == 8 && !strcmp(argv[1], "plan")) {
        print_plan((tqkv_format)atoi(argv[2]), atoi(argv[3]), atoi(argv[4]), atoi(argv[5]), atoi(argv[6]),
                   atoi(argv[7]));
        return 0;
    } else if (argc == 4 && !strcmp(argv[1], "encode"))
        run_encode((tqkv_format)atoi(argv[2]), atoi(argv[3]));
    else if (argc == 4 && !strcmp(argv[1], "lookup"))
        run_lookup(atoi(argv[2]), atoi(argv[3]));
    else if (argc == 4 && !strcmp(argv[1], "scores"))
        run_scores(atoi(argv[2]), atoi(argv[3]));
    else
        fail("usage: see the first lines of run.cpp");
    print_counts();
    return 0;
}
