// Caches on a GPU, by histories of calls at random: on the processor, through the context of a cache, and as plans.
// Caches that learn centre and scale of their keys: at every step the snapshot and, within rounding, the
// outputs of the processor's cache, however positions come, through edits, copies and failures;
// a query's bits are those that it has alone.
#include "forms.h"
#include "shader_cases.h"
#include "../cache_fixture.h"

namespace
{

// In place of a context: appends and attends on the machine of simt.h.
struct machine {
    tqkv__backend backend; // first, as in struct tqkv_metal
    counting memory;
    tqkv_result answer; // instead of TQKV_OK, after all work
    int raw;            // positions whose queries read rows as they came; -1: not known
};

machine *machine_of(tqkv_metal *m) { return (machine *)(void *)m; }

tqkv_strides strides_or(tqkv_strides s, int n_heads, int dim)
{
    return {s.token ? s.token : (size_t)(n_heads * dim), s.head ? s.head : (size_t)dim};
}

// Values [from, from + dim) of rows [n][n_heads], without gaps.
std::vector<char> packed(const void *rows, tqkv_strides s, tqkv_type type, int n, int n_heads, int from, int dim)
{
    const size_t value = size_of(type), row = (size_t)dim * value;
    std::vector<char> to((size_t)(n * n_heads) * row);
    for (int i = 0; i < n * n_heads; i++)
        memcpy(&to[(size_t)i * row],
               (const char *)rows +
                   ((size_t)(i / n_heads) * s.token + (size_t)(i % n_heads) * s.head + (size_t)from) * value,
               row);
    return to;
}

// What was wrong fails the case, which goes on: another run may only list its kernels.
tqkv_result finished(machine *m, const std::string &wrong)
{
    CHECK(wrong.empty(), "%s", wrong.c_str());
    return m->answer;
}

tqkv_result run_append(tqkv_metal *m, const tqkv_cache *c, const void *k, const void *v, int n)
{
    static const tqkv_cache_strides no_gaps = {{0, 0}, {0, 0}, {0, 0}, {0, 0}};
    const tqkv_store *keys = test_keys(c), *values = test_values(c), *tail = test_tail(c);
    const int heads = keys->n_kv_heads, tail_dim = tail ? tail->head_dim : 0;
    const tqkv_strides of_k = strides_or(keys->strides, heads, keys->head_dim + tail_dim),
                       of_v = strides_or(values->strides, heads, values->head_dim);
    std::vector<char> rows = packed(k, of_k, keys->type, n, heads, 0, keys->head_dim), others;
    const std::vector<char> tails = packed(k, of_k, keys->type, n, heads, keys->head_dim, tail_dim);
    if (v) others = packed(v, of_v, keys->type, n, heads, 0, values->head_dim);
    if (v) rows.insert(rows.end(), tails.begin(), tails.end()); // behind the keys
    tqkv_metal_plan plan;
    uint32_t unfit = 0;
    gpu_plan(tqkv_metal_plan_cache_append, c, c, &no_gaps, rows.data(), v ? others.data() : tails.data(), n, &unfit,
             &plan);
    if (plan.result != TQKV_OK) return plan.result;
    const tqkv_result r = finished(machine_of(m), gpu_run(plan));
    return r == TQKV_OK && unfit ? TQKV_NOT_FINITE : r;
}

// With the strides of the cache.
tqkv_result run_some(tqkv_metal *m, const tqkv_cache *c, const tqkv_attention *some, const void *q, int n, void *out)
{
    tqkv_metal_attention call = {};
    if (some) call.attention = *some;
    if (some && some->list.rows) call.list = gpu_buffer(some->list.rows);
    if (some && some->tree) call.tree = gpu_buffer(some->tree);
    tqkv_metal_plan plan;
    const std::vector<uint32_t> memory = gpu_plan_in_scratch(plan, [&](const void *scratch, tqkv_metal_plan *to) {
        tqkv_metal_plan_cache_attend(c, gpu_buffer(c), nullptr, &call, gpu_buffer(q), n, gpu_buffer(scratch),
                                     gpu_buffer(out), to);
    });
    if (plan.result != TQKV_OK) return plan.result;
    bool rewrites = false; // outputs of a tree that are written twice, in this order
    for (int i = 0; i < plan.n; i++) rewrites = rewrites || plan.d[i].barrier == out;
    CHECK(machine_of(m)->raw < 0 || rewrites == (some && some->tree && test_view(c, 1).keys == test_keys(c) &&
                                                 test_view(c, 0).end - n < machine_of(m)->raw),
          "a barrier on the outputs, or none");
    return finished(machine_of(m), gpu_run(plan));
}

tqkv_result run_attend(tqkv_metal *m, const tqkv_cache *c, const void *q, int n, void *out)
{
    return run_some(m, c, nullptr, q, n, out);
}

double error_of_type(tqkv_type type) { return type == TQKV_TYPE_F32 ? 0.0 : type == TQKV_TYPE_F16 ? 1e-3 : 8e-3; }

// The first n values.
void check_near(typed_rows rows, typed_rows near, size_t n, double limit)
{
    const std::vector<char> got = rows.packed(), expected = near.packed();
    double wrong = 0, all = 0;
    for (size_t i = 0; i < n; i++) {
        const double own = (double)near.value(expected, i), difference = (double)rows.value(got, i) - own;
        wrong += difference * difference;
        all += own * own;
    }
    CHECK(wrong <= limit * limit * all, "outputs differ by %g", sqrt(wrong / all));
}

void open_machine(machine *m, int raw)
{
    m->backend.memory = counting_allocator(&m->memory);
    m->backend.has_kernels = tqkv__has_kernels;
    m->backend.append = run_append;
    m->backend.attend = run_attend;
    m->raw = raw;
}

// ---- Histories ----

enum { CPU, WAITING, RECORDED, SIDES, TOKENS = 64, MOST = 24, MOST_HEADS = 16 };

// Every kind of cache that a GPU takes. Half of them learn centre and scale of their keys.
tqkv_cache_desc random_desc(data_random *random)
{
    static const int dims[] = {64, 128, 32, 512, 80, 448, 192, 64, 256, 96, 48};
    static const float sinks[MOST_HEADS] = {0.5f, -1.0f, 2.0f, 0.0f, 1.0f};
    const auto below = [&](int limit) { return data_below(random, limit); };
    tqkv_cache_desc d = {};
    d.head_dim = dims[below(11)];
    d.n_kv_heads = 1 + below(2);
    d.capacity = 30 + below(30) + (below(2) ? 130 : 0); // a quarter of which is what a cache learns from, or 16
    const bool latent = d.head_dim == 448 || d.head_dim == 512;
    d.n_heads = d.n_kv_heads * (1 + below(below(3) ? 3 : MOST_HEADS / 2));
    d.key_format = test_no_format(below(TEST_FORMATS + 1));
    d.value_format = test_no_format(below(TEST_FORMATS + 1));
    d.ring = below(2) != 0;
    d.window = below(2) ? 1 + below(25) : 0;
    if (below(2)) d.exact_first = below(4) ? below(9) : 20, d.exact_last = below(20);
    if (below(2)) d.calibrate = d.ring && d.capacity < 100 ? 16 : below(6) || d.ring ? 16 + below(24) : 512;
    d.pairs = test_no_pairs(below(3));
    d.type = test_no_type(below(5) > 2 ? below(2) + 1 : 0);
    d.shared = latent && below(3);
    if (d.shared) d.value_format = TQKV_FORMAT_DEFAULT;
    d.tail_dim = latent && below(4) ? 64 : 0;
    d.tail_format = d.tail_dim ? test_no_format(below(TEST_FORMATS + 1)) : TQKV_FORMAT_DEFAULT;
    d.value_dim = d.head_dim == 192 && below(2) ? 128 : 0;
    d.sinks = below(2) ? sinks : nullptr;
    d.softcap = below(4) ? 0.0f : 20.0f;
    d.non_causal = below(6) == 0;
    d.matrix_group = below(3) ? 0 : 2;
    return d;
}

int random_layout(data_random *random) { return data_below(random, 3) ? 0 : 1 + data_below(random, LAYOUTS - 1); }

// The same cache three times; a machine in place of a context, unless there is one. RECORDED: in plans, which a caller
// of tqkv_metal_record has.
struct history {
    data_random random;
    tqkv_cache_desc desc;
    machine gpu;
    tqkv_cache *caches[SIDES];
    int key_dim, value_dim;
    bool given;         // a scale, with which a cache does not learn
    bool wild;          // rows that halves may not hold, and scores that have no bound
    bool fresh;         // the last append has learned, which an edit can take back
    typed_rows k, v, q; // of TOKENS
    std::vector<typed_rows> out;
    size_t bytes; // of WAITING
    explicit history(int seed);
    ~history();
    history(const history &) = delete;
    int below(int limit) { return data_below(&random, limit); }
    tqkv_metal *machine_as_context() { return (tqkv_metal *)(void *)&gpu; }
    void make();
    void shape_rows();
    void compare(const char *when, int sides = SIDES) const;
    void check_newest(int t, int n, const tqkv_attention &some);
    void check_outputs(int n, const tqkv_result results[SIDES]) const;
    void append_alone(tqkv_cache *alone, int t, int n, bool same);
    void fail_to_append(int t, int n);
    void append();
    void attend();
    void edit();
    void copy();
    void lose();
};

history::history(int seed)
    : random({(uint64_t)seed}), desc(random_desc(&random)), gpu(), caches(), key_dim(desc.head_dim + desc.tail_dim),
      value_dim(desc.value_dim ? desc.value_dim : desc.head_dim), given(below(5) == 0), wild(seed % 8 == 7),
      fresh(false), k(desc.type, TOKENS, desc.n_kv_heads, key_dim, random_layout(&random)),
      v(desc.type, TOKENS, desc.n_kv_heads, value_dim, random_layout(&random)),
      q(desc.type, TOKENS, desc.n_heads, key_dim, random_layout(&random)),
      out(SIDES, typed_rows(desc.type, MOST, desc.n_heads, value_dim, random_layout(&random))), bytes(0)
{
    open_machine(&gpu, 0);
    desc.strides = {k.at.strides, v.at.strides, q.at.strides, out[0].at.strides};
    k.fill(81, DATA_STUDENT, 1.0f);
    v.fill(82, DATA_STUDENT, 1.0f);
    q.fill(83, DATA_STUDENT, 0.3f); // scores of standard deviation 1, for the bound
    shape_rows();
    make();
}

history::~history()
{
    for (tqkv_cache *c : caches) tqkv_cache_destroy(c);
    CHECK_NO_LEAK(&gpu.memory);
}

// Halves that it learns from have room in a GPU's cache from the first on.
void history::make()
{
    float *const scales = test_scales(1, desc.n_kv_heads, key_dim, 2.0);
    if (given) desc.key_scale = scales;
    const tqkv_result expected = tqkv_cache_create(&desc, &caches[CPU]);
    desc.metal = gpu_context ? gpu_context : machine_as_context();
    gpu.memory.fail_at = gpu_context ? 0 : 1;
    if (expected == TQKV_OK && !gpu_context)
        CHECK_RESULT(tqkv_cache_create(&desc, &caches[WAITING]), TQKV_OUT_OF_MEMORY);
    gpu.memory.fail_at = 0;
    for (int i = WAITING; i < SIDES; i++) CHECK_RESULT(tqkv_cache_create(&desc, &caches[i]), expected);
    bytes = tqkv_cache_bytes(caches[WAITING]);
    const size_t without = tqkv_cache_bytes(caches[CPU]);
    if (expected == TQKV_OK && !desc.exact_last) // whose rings hold fewer on the processor
        CHECK(desc.calibrate && !given ? bytes > without : bytes == without, "room for halves");
    desc.key_scale = nullptr;
    free(scales);
}

// Where a cache learns, channels of keys differ in size and have a constant part, and some positions have the values
// of the one before, or nearly. Wild: the first channel is the same in all but the first position.
void history::shape_rows()
{
    const int repeats[] = {0, 0, 2, 40}, repeat = repeats[below(4)];
    typed_rows &judged = desc.shared ? k : v;
    float *const scales = test_scales(7, desc.n_kv_heads, key_dim, 8.0);
    const auto value = [&](const typed_rows &rows, const char *at) {
        return rows.value(rows.bytes, (size_t)(at - rows.bytes.data()) / size_of(desc.type));
    };
    for (int i = 0; desc.calibrate && !given && i < TOKENS * desc.n_kv_heads; i++) {
        const int token = i / desc.n_kv_heads;
        for (int c = 0; c < key_dim; c++) {
            char *const at = k.row(i) + (size_t)c * size_of(desc.type);
            const int channel = i % desc.n_kv_heads * key_dim + c;
            k.set(at, (value(k, at) + (desc.shared ? 0.0f : (float)(channel % 5))) * scales[channel]);
            if (wild && c == 0) k.set(at, token ? 1.0f : 6e4f);
        }
        for (int c = 0; repeat && token % repeat && c < judged.dim; c++) {
            const size_t at = (size_t)c * size_of(desc.type);
            judged.set(judged.row(i) + at, value(judged, judged.row(i - desc.n_kv_heads) + at) * (c % 3       ? 1.0f
                                                                                                  : token % 2 ? 1.25f
                                                                                                              : 0.8f));
        }
    }
    free(scales);
}

// All caches have the processor's snapshot; on a GPU the halves' memory stays.
void history::compare(const char *when, int sides) const
{
    stream first = stream_of_cache(caches[CPU]);
    for (int i = WAITING; i < sides; i++) {
        stream other = stream_of_cache(caches[i]);
        CHECK(stream_is_equal(&first, &other), "%s, at %d: side %d has another snapshot", when,
              (int)tqkv_cache_end(caches[CPU]), i);
        stream_free(&other);
    }
    stream_free(&first);
    CHECK(tqkv_cache_bytes(caches[WAITING]) == bytes, "%s: other memory", when);
}

// The newest of n queries, which stand on both sides of the last position that is read as it came: the processor has no
// view of them, but one of the newest alone.
void history::check_newest(int t, int n, const tqkv_attention &some)
{
    const size_t each = (size_t)(desc.n_heads * value_dim), last = (size_t)(n - 1) * each;
    tqkv_attention view = test_view(caches[CPU], 1);
    view.list = some.list;
    view.tree = some.tree;
    view.n_queries = n;
    const std::vector<char> queries = q.packed(), got = out[RECORDED].packed();
    std::vector<float> floats((size_t)(n * desc.n_heads * key_dim)), newest(each);
    std::vector<double> expected(last + each);
    for (size_t i = 0; i < floats.size(); i++) floats[i] = q.value(queries, (size_t)(t * desc.n_heads * key_dim) + i);
    for (size_t i = 0; i < each; i++) newest[i] = q.value(got, last + i);
    reference_attend_as(REFERENCE_FLOATS, &view, floats.data(), expected.data());
    const double error = reference_relative_error(newest.data(), &expected[last], each);
    CHECK(wild || error <= 2e-5 + error_of_type(desc.type), "the query up to %d: relative error %g",
          (int)tqkv_cache_end(caches[CPU]), error);
}

// Outputs of n queries: as recorded so waited for, and near the processor's unless it has no view of such queries.
void history::check_outputs(int n, const tqkv_result results[SIDES]) const
{
    const tqkv_store *tail = test_tail(caches[CPU]);
    const double limit = error_of_type(desc.type) + reference_gpu_difference(test_keys(caches[CPU])->format,
                                                                             tail ? tail->format : TQKV_FORMAT_DEFAULT,
                                                                             test_values(caches[CPU])->format, 1.0);
    CHECK_RESULT(results[RECORDED], results[WAITING]);
    if (results[CPU] == TQKV_OK) CHECK_RESULT(results[WAITING], TQKV_OK);
    if (results[WAITING] != TQKV_OK) return;
    CHECK(out[WAITING].bytes == out[RECORDED].bytes, "recorded, other bits");
    if (results[CPU] == TQKV_OK && !wild)
        check_near(out[WAITING], out[CPU], (size_t)(n * desc.n_heads * value_dim), limit);
}

// A copy from before an append gets its positions one after the other. same: the queries must have the bits that they
// have there. How many positions it has learned from is known then.
void history::append_alone(tqkv_cache *alone, int t, int n, bool same)
{
    typed_rows own = out[WAITING];
    const size_t size = (size_t)value_dim * size_of(desc.type);
    for (int i = 0; i < n; i++) {
        const bool learned = test_keys(alone)->channel_scale;
        CHECK_RESULT(tqkv_cache_append(alone, k.row((t + i) * desc.n_kv_heads),
                                       desc.shared ? nullptr : v.row((t + i) * desc.n_kv_heads), 1),
                     TQKV_OK);
        if (!learned && test_keys(alone)->channel_scale && gpu.raw == 0) gpu.raw = (int)tqkv_cache_end(alone);
        const tqkv_result r = tqkv_cache_attend(alone, q.row((t + i) * desc.n_heads), 1, own.first());
        CHECK(!same || r == TQKV_OK, "%s", tqkv_result_string(r));
        for (int h = 0; same && h < desc.n_heads; h++)
            CHECK(!memcmp(own.row(h), out[WAITING].row(i * desc.n_heads + h), size),
                  "query %d of %d has other bits alone", i, n);
    }
}

// A failure of the GPU leaves the cache as it was, unless a ring has lost its oldest positions.
void history::fail_to_append(int t, int n)
{
    gpu.answer = TQKV_METAL_ERROR;
    const tqkv_result r = tqkv_cache_append(caches[WAITING], k.row(t * desc.n_kv_heads),
                                            desc.shared ? nullptr : v.row(t * desc.n_kv_heads), n);
    gpu.answer = TQKV_OK;
    CHECK(r == TQKV_METAL_ERROR || r == TQKV_OUT_OF_RANGE, "%s", tqkv_result_string(r));
    compare("failed", RECORDED); // commands of the other side may have failed
}

// Appends and attends with as many queries; ends of caches that refuse stay where they are.
void history::append()
{
    // All of which halves hold rotated, too, or neither: a GPU looks at rows as they came where the cache learns.
    const float sizes[] = {1e-9f, 7e-6f, 3e-4f, 1.0f, 65519.0f, 6e5f, 1e9f};
    const int n = 1 + below(below(3) ? 7 : (int)MOST), t = below(TOKENS - MOST);
    typed_rows &judged = desc.shared ? k : v;
    char *const row = judged.row(t * desc.n_kv_heads);
    const size_t value = size_of(desc.type);
    for (int c = 0; wild && c < judged.dim; c++) judged.set(row + (size_t)c * value, c ? 0.0f : sizes[below(7)]);
    const void *rows = k.row(t * desc.n_kv_heads), *queries = q.row(t * desc.n_heads),
               *values = desc.shared ? nullptr : v.row(t * desc.n_kv_heads);
    const bool learned = test_keys(caches[WAITING])->channel_scale;
    tqkv_cache *alone = nullptr;
    tqkv_result results[SIDES];
    const bool wraps = desc.ring && tqkv_cache_end(caches[CPU]) + n > desc.capacity;
    if (!gpu_context && !wraps && below(3) == 0) fail_to_append(t, n);
    if (below(2)) CHECK_RESULT(tqkv_cache_fork(caches[WAITING], nullptr, &alone), TQKV_OK);
    for (int i = CPU; i <= WAITING; i++) results[i] = tqkv_cache_append(caches[i], rows, values, n);
    results[RECORDED] = run_append(machine_as_context(), caches[RECORDED], rows, values, n);
    for (int i = WAITING; i < SIDES; i++) CHECK_RESULT(results[i], results[CPU]);
    if (results[CPU] == TQKV_OK) {
        tqkv_metal_cache_appended(caches[RECORDED], n);
        fresh = !learned && test_keys(caches[WAITING])->channel_scale;
        for (typed_rows &o : out) std::fill(o.bytes.begin(), o.bytes.end(), (char)0xee);
        for (int i = CPU; i <= WAITING; i++)
            results[i] = tqkv_cache_attend(caches[i], queries, n, out[(size_t)i].first());
        const bool wrapped = desc.ring && tqkv_cache_end(caches[CPU]) > desc.capacity,
                   same = !desc.non_causal && (!wrapped || (desc.window && n <= desc.capacity - desc.window + 1));
        if (alone)
            append_alone(alone, t, n, same && results[WAITING] == TQKV_OK);
        else if (fresh)
            gpu.raw = -1;
        results[RECORDED] = run_attend(machine_as_context(), caches[RECORDED], queries, n, out[RECORDED].first());
        check_outputs(n, results);
        for (int i = 0; i < 3 && fresh; i++) attend();
    }
    tqkv_cache_destroy(alone);
}

// Queries by a list, a tree or both, which only plans take: of a cache that has just learned on both sides of the last
// position that is read as it came.
void history::attend()
{
    enum { LENGTH = 3 };
    const int learned_from = std::min(desc.calibrate, std::max(16, desc.capacity / 4)),
              beyond = fresh ? (int)tqkv_cache_end(caches[CPU]) - learned_from : 0,
              n = std::min(1 + below(6) + std::max(beyond, 0), (int)MOST), t = below(TOKENS - MOST), way = 1 + below(3);
    const void *queries = q.row(t * desc.n_heads);
    uint64_t tree[MOST];
    int32_t list[MOST * LENGTH];
    tqkv_attention some = {};
    tqkv_result results[SIDES];
    for (int i = 0; i < n; i++) tree[i] = data_bits(&random) | (uint64_t)1 << i;
    for (int i = 0; i < LENGTH * n; i++) list[i] = i % LENGTH ? list[i - 1] + 1 + below(3) : below(4);
    if (way & 1) some.tree = tree;
    if (way & 2) some.list.rows = list, some.list.length = LENGTH, some.list.block = 4, some.list.newest = 1 + below(3);
    if (tqkv_cache_end(caches[CPU]) < n) return;
    for (typed_rows &o : out) std::fill(o.bytes.begin(), o.bytes.end(), (char)0xee);
    results[CPU] = test_attend_some(caches[CPU], &some, queries, n, out[CPU].first());
    results[WAITING] = results[RECORDED] =
        run_some(machine_as_context(), caches[RECORDED], &some, queries, n, out[RECORDED].first());
    out[WAITING] = out[RECORDED];
    check_outputs(n, results);
    if (desc.ring || results[CPU] != TQKV_OUT_OF_RANGE) return;
    CHECK_RESULT(results[RECORDED], TQKV_OK);
    check_newest(t, n, some);
}

// The processor moves the codes of caches on the GPU.
void history::edit()
{
    const int way = below(3), kept[] = {0, 2, 3};
    const int64_t to = tqkv_cache_end(caches[CPU]) - below(7);
    tqkv_result results[SIDES];
    gpu.raw = -1;
    for (int i = 0; i < SIDES; i++) {
        results[i] = way == 0   ? tqkv_cache_truncate(caches[i], to)
                     : way == 1 ? tqkv_cache_keep(caches[i], 5, kept, 3)
                                : tqkv_cache_remove(caches[i], 2, 4);
        CHECK_RESULT(results[i], results[CPU]);
    }
}

// Each side goes on with what the next one has saved, or with a fork, of another capacity.
void history::copy()
{
    tqkv_cache *copies[SIDES] = {};
    const bool forks = below(2);
    tqkv_cache_desc other = {}, loaded = {};
    tqkv_result results[SIDES];
    other.capacity = desc.capacity + (below(2) ? 5 : -5);
    loaded.sinks = desc.sinks;
    loaded.type = desc.type;
    loaded.strides = desc.strides;
    loaded.n_heads = desc.sinks ? desc.n_heads : 0;
    for (int i = 0; i < SIDES; i++) {
        loaded.metal = i == CPU ? nullptr : desc.metal;
        stream s = stream_of_cache(caches[(i + 1) % SIDES]);
        results[i] = forks ? tqkv_cache_fork(caches[i], &other, &copies[i])
                           : tqkv_cache_load(&loaded, stream_read, &s, &copies[i]);
        CHECK_RESULT(results[i], forks ? results[CPU] : TQKV_OK);
        stream_free(&s);
    }
    if (results[CPU] != TQKV_OK) return;
    for (int i = 0; i < SIDES; i++) {
        tqkv_cache_destroy(caches[i]);
        caches[i] = copies[i];
    }
    if (forks) desc.capacity = other.capacity;
    bytes = tqkv_cache_bytes(caches[WAITING]);
    gpu.raw = -1;
}

// Appends that count, in command buffers that fail. A cache that was to learn with them learns again, from the next.
void history::lose()
{
    tqkv_cache *const c = caches[RECORDED];
    const int64_t end = tqkv_cache_end(c);
    int room = fresh ? -1 : desc.capacity - (int)std::min<int64_t>(end, desc.capacity);
    for (int i = below(3), n; i >= 0 && room >= 0; i--, room -= n)
        tqkv_metal_cache_appended(c, n = below(std::min(room, 12) + 1));
    for (int i = 0; i < 2; i++) CHECK_RESULT(tqkv_metal_cache_failed(c, end), TQKV_OK); // the second time nothing
}

// Appends thrice, then calls at random.
void run_history(const void *parameters)
{
    const struct {
        void (history::*call)();
        const char *name;
    } calls[] = {{&history::append, "appended"}, {&history::append, "appended"}, {&history::append, "appended"},
                 {&history::attend, "attended"}, {&history::edit, "edited"},     {&history::copy, "copied"},
                 {&history::lose, "lost"}};
    const int seed = *(const int *)parameters;
    data_random random = {(uint64_t)seed};
    history h(seed);
    for (int i = 1; i < 10 && h.caches[CPU] && h.caches[WAITING] && h.caches[RECORDED]; i++) {
        const int number = i < 4 ? 7 * data_below(&random, 36) : data_below(&random, 252);
        h.random.state = (uint64_t)(number * 1000 + seed);
        (h.*calls[number % 7].call)();
        h.compare(calls[number % 7].name);
    }
}

// A cache with a context allocates from it, fails as it does and is then as it was; what a cache refuses does not get
// there.
void run_context(const void *)
{
    const cache_row shape = {TQKV_I8, TQKV_TQ4, 64, 8, false, 0, -1};
    counting others = {};
    machine gpu = {};
    open_machine(&gpu, -1);
    tqkv_cache_desc desc = cache_desc(&shape, &others);
    desc.metal = (tqkv_metal *)(void *)&gpu;
    tqkv_cache *cache = cache_make(&shape, &desc);
    REQUIRE(cache, "no cache");
    CHECK(gpu.memory.live == 1 && gpu.memory.calls == 1 && others.calls == 0, "memory of another");
    cache_append_seed(cache, 3, 5, 64);
    float *rows = cache_data(9, 4, 64), out[CACHE_HEADS * CACHE_GROUP * 64];
    gpu.answer = TQKV_METAL_ERROR;
    CHECK_RESULT(tqkv_cache_append(cache, rows, rows, 4), TQKV_OUT_OF_RANGE);
    CHECK_RESULT(tqkv_cache_append(cache, rows, rows, 1), TQKV_METAL_ERROR);
    CHECK_RESULT(tqkv_cache_attend(cache, rows, 1, out), TQKV_METAL_ERROR);
    CHECK_RESULT(tqkv_cache_attend(cache, rows, 1, rows), TQKV_INVALID_ARGUMENT);
    CHECK(tqkv_cache_end(cache) == 5, "a failed append counts");
    tqkv_cache_destroy(cache);
    desc.head_dim = 112; // no kernels
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_UNSUPPORTED);
    CHECK_NO_LEAK(&gpu.memory);
    free(rows);
}

} // namespace

void learn_shader_cases()
{
    for (int seed = 0; seed < (gpu_record ? 48 : gpu_on_device ? 8 : 100); seed++)
        test_add(run_history, &seed, sizeof seed, "cache/history/%d", seed);
    if (!gpu_on_device) test_add(run_context, nullptr, 0, "cache/context");
}
