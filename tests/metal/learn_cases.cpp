// Caches on a GPU, by histories of calls at random: on the processor, through the context of a cache, and as plans.
// Caches that learn centre and scale of their keys: at every step the snapshot and, within rounding, the
// outputs of the processor's cache, however positions come, through edits, copies and failures;
// a query's bits are those that it has alone.
#include "forms.h"
#include "shader_cases.h"
#include "../cache_fixture.h"
#include "../history.h"

namespace
{

struct learn_row {
    const char *name;
    tqkv_format key_format, value_format;
    int head_dim, value_dim, capacity, calibrate, learns_at; // learns_at: what calibrate comes to
    int exact_first, exact_last, tail_dim, window, tokens;
    tqkv_format tail_format;
    bool ring, shared, non_causal, strides;
    int matrix_group;
    tqkv_type type;
    int repeat; // only every so many positions is new; 0: all
};

enum { HEADS = CACHE_HEADS * CACHE_GROUP };

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
    tqkv_metal_plan_cache_append(c, gpu_buffer(c), &no_gaps, gpu_buffer(rows.data()),
                                 gpu_buffer(v ? others.data() : tails.data()), n, gpu_buffer(&unfit), &plan);
    if (plan.result != TQKV_OK) return plan.result;
    const tqkv_result r = finished(machine_of(m), gpu_run(plan));
    return r == TQKV_OK && unfit ? TQKV_NOT_FINITE : r;
}

tqkv_result run_some(tqkv_metal *m, const tqkv_cache *c, const tqkv_attention *some, const void *q, int n, void *out)
{
    static const tqkv_cache_strides no_gaps = {{0, 0}, {0, 0}, {0, 0}, {0, 0}};
    const tqkv_attention view = test_view(c, 0);
    const tqkv_store *tail = test_tail(c);
    const int key_dim = test_keys(c)->head_dim + (tail ? tail->head_dim : 0), value_dim = test_values(c)->head_dim,
              heads = view.n_heads;
    const tqkv_strides of_q = strides_or(view.query_strides, heads, key_dim),
                       of_out = strides_or(view.output_strides, heads, value_dim);
    const size_t value = size_of(view.query_type), row = (size_t)value_dim * value;
    const std::vector<char> queries = packed(q, of_q, view.query_type, n, heads, 0, key_dim);
    std::vector<char> outputs((size_t)(n * heads) * row);
    tqkv_metal_attention call = {};
    if (some) call.attention = *some;
    if (some && some->list.rows) call.list = gpu_buffer(some->list.rows);
    if (some && some->tree) call.tree = gpu_buffer(some->tree);
    tqkv_metal_plan plan;
    tqkv_metal_plan_cache_attend(c, gpu_buffer(c), &no_gaps, &call, gpu_buffer(nullptr), n, gpu_buffer(nullptr),
                                 gpu_buffer(nullptr), &plan);
    if (plan.result != TQKV_OK) return plan.result;
    const size_t bytes = plan.scratch_size;
    std::vector<uint32_t> scratch(bytes / 4 + 1, 0xffffffffu);
    tqkv_metal_plan_cache_attend(c, gpu_buffer(c), &no_gaps, &call, gpu_buffer(queries.data()), n,
                                 gpu_buffer(scratch.data()), gpu_buffer(outputs.data()), &plan);
    bool rewrites = false; // outputs of a tree that are written twice, in this order
    for (int i = 0; i < plan.n; i++) rewrites = rewrites || plan.d[i].barrier == outputs.data();
    CHECK(machine_of(m)->raw < 0 || rewrites == (some && some->tree && test_view(c, 1).keys == test_keys(c) &&
                                                 view.end - n < machine_of(m)->raw),
          "a barrier on the outputs, or none");
    const tqkv_result r = finished(machine_of(m), gpu_run(plan));
    for (int i = 0; r == TQKV_OK && i < n * heads; i++)
        memcpy((char *)out + ((size_t)(i / heads) * of_out.token + (size_t)(i % heads) * of_out.head) * value,
               &outputs[(size_t)i * row], row);
    CHECK(scratch.back() == 0xffffffffu || bytes % 4, "scratch: written behind its end");
    return r;
}

tqkv_result run_attend(tqkv_metal *m, const tqkv_cache *c, const void *q, int n, void *out)
{
    return run_some(m, c, nullptr, q, n, out);
}

double value_at(tqkv_type type, const char *rows, size_t i)
{
    float value;
    uint16_t half;
    memcpy(&value, rows + 4 * i, type == TQKV_TYPE_F32 ? 4 : 0);
    memcpy(&half, rows + 2 * i, 2);
    return type == TQKV_TYPE_F32 ? (double)value : (double)reference_wide(type, half);
}

double error_of_type(tqkv_type type) { return type == TQKV_TYPE_F32 ? 0.0 : type == TQKV_TYPE_F16 ? 1e-3 : 8e-3; }

void check_near(tqkv_type type, const std::vector<char> &got, const std::vector<char> &expected, size_t n, double limit)
{
    double wrong = 0, all = 0;
    for (size_t i = 0; i < n; i++) {
        const double own = value_at(type, expected.data(), i), difference = value_at(type, got.data(), i) - own;
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

enum { CPU, WAITING, RECORDED, SIDES, TOKENS = 40, MOST = 9, MOST_HEADS = 16 };

// Every kind of cache that a GPU takes.
tqkv_cache_desc random_desc(data_random *random)
{
    static const int dims[] = {64, 128, 32, 512, 80, 448, 192, 64, 256, 96, 48};
    static const float sinks[MOST_HEADS] = {0.5f, -1.0f, 2.0f, 0.0f, 1.0f};
    const auto below = [&](int limit) { return data_below(random, limit); };
    tqkv_cache_desc d = {};
    d.head_dim = dims[below(11)];
    d.n_kv_heads = 1 + below(2);
    d.capacity = 30 + below(30);
    const bool latent = d.head_dim == 448 || d.head_dim == 512;
    d.n_heads = d.n_kv_heads * (1 + below(MOST_HEADS / 2));
    d.key_format = test_no_format(below(TEST_FORMATS + 1));
    d.value_format = test_no_format(below(TEST_FORMATS + 1));
    d.ring = below(2) != 0;
    d.window = below(2) ? 1 + below(25) : 0;
    if (below(2)) d.exact_first = below(9), d.exact_last = below(20);
    if (below(3) == 0) d.calibrate = 16 + below(8);
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

// The same cache three times; a machine in place of a context, unless there is one. RECORDED: in plans, which a caller
// of tqkv_metal_record has.
struct history {
    data_random random;
    tqkv_cache_desc desc;
    machine gpu;
    tqkv_cache *caches[SIDES];
    int key_dim, value_dim;
    typed_rows k, v, q; // of TOKENS
    std::vector<char> out[SIDES];
    explicit history(int seed);
    ~history()
    {
        for (tqkv_cache *c : caches) tqkv_cache_destroy(c);
    }
    history(const history &) = delete;
    int below(int limit) { return data_below(&random, limit); }
    void compare(const char *when) const;
    void check_outputs(int n, const tqkv_result results[SIDES]) const;
    void append();
    void attend();
    void edit();
    void copy();
};

history::history(int seed)
    : random({(uint64_t)seed}), desc(random_desc(&random)), gpu(), caches(), key_dim(desc.head_dim + desc.tail_dim),
      value_dim(desc.value_dim ? desc.value_dim : desc.head_dim), k(desc.type, TOKENS, desc.n_kv_heads, key_dim, 0),
      v(desc.type, TOKENS, desc.n_kv_heads, value_dim, 0), q(desc.type, TOKENS, desc.n_heads, key_dim, 0)
{
    open_machine(&gpu, -1);
    k.fill(81, DATA_STUDENT, 1.0f);
    v.fill(82, DATA_STUDENT, 1.0f);
    q.fill(83, DATA_STUDENT, 0.3f); // scores of standard deviation 1, for the bound
    const tqkv_result expected = tqkv_cache_create(&desc, &caches[CPU]);
    desc.metal = gpu_context ? gpu_context : (tqkv_metal *)(void *)&gpu;
    for (int i = WAITING; i < SIDES; i++) CHECK_RESULT(tqkv_cache_create(&desc, &caches[i]), expected);
    for (std::vector<char> &o : out) o.resize((size_t)(MOST * desc.n_heads * value_dim) * size_of(desc.type));
}

// All caches have the processor's snapshot.
void history::compare(const char *when) const
{
    stream first = stream_of_cache(caches[CPU]);
    for (int i = WAITING; i < SIDES; i++) {
        stream other = stream_of_cache(caches[i]);
        CHECK(stream_is_equal(&first, &other), "%s, at %d: side %d has another snapshot", when,
              (int)tqkv_cache_end(caches[CPU]), i);
        stream_free(&other);
    }
    stream_free(&first);
}

// Outputs of n queries: as recorded so waited for, and near the processor's unless it has no view of such queries.
void history::check_outputs(int n, const tqkv_result results[SIDES]) const
{
    const size_t count = (size_t)(n * desc.n_heads * value_dim);
    const tqkv_store *tail = test_tail(caches[CPU]);
    const double limit = error_of_type(desc.type) + reference_gpu_difference(test_keys(caches[CPU])->format,
                                                                             tail ? tail->format : TQKV_FORMAT_DEFAULT,
                                                                             test_values(caches[CPU])->format, 1.0);
    CHECK_RESULT(results[RECORDED], results[WAITING]);
    if (results[WAITING] != TQKV_OK) return;
    CHECK(!memcmp(out[WAITING].data(), out[RECORDED].data(), count * size_of(desc.type)), "recorded, other bits");
    if (results[CPU] == TQKV_OK) check_near(desc.type, out[WAITING], out[CPU], count, limit);
}

// Appends and attends with as many queries; ends of caches that refuse stay where they are.
void history::append()
{
    const int n = 1 + below(MOST), t = below(TOKENS - MOST);
    const void *rows = k.row(t * desc.n_kv_heads), *queries = q.row(t * desc.n_heads),
               *values = desc.shared ? nullptr : v.row(t * desc.n_kv_heads);
    tqkv_metal *m = (tqkv_metal *)(void *)&gpu;
    tqkv_result results[SIDES];
    for (int i = CPU; i <= WAITING; i++) results[i] = tqkv_cache_append(caches[i], rows, values, n);
    results[RECORDED] = run_append(m, caches[RECORDED], rows, values, n);
    for (int i = WAITING; i < SIDES; i++) CHECK_RESULT(results[i], results[CPU]);
    if (results[CPU] != TQKV_OK) return;
    tqkv_metal_cache_appended(caches[RECORDED], n);
    for (int i = CPU; i <= WAITING; i++) results[i] = tqkv_cache_attend(caches[i], queries, n, out[i].data());
    results[RECORDED] = run_attend(m, caches[RECORDED], queries, n, out[RECORDED].data());
    check_outputs(n, results);
}

// Queries by a list, a tree or both, which only plans take.
void history::attend()
{
    enum { LENGTH = 3 };
    const int n = 1 + below(5), t = below(TOKENS - MOST), way = 1 + below(3);
    const void *queries = q.row(t * desc.n_heads);
    uint64_t tree[5];
    int32_t list[5 * LENGTH];
    tqkv_attention some = {};
    tqkv_result results[SIDES];
    for (int i = 0; i < n; i++) tree[i] = data_bits(&random) | (uint64_t)1 << i;
    for (int i = 0; i < LENGTH * n; i++) list[i] = i % LENGTH ? list[i - 1] + below(4) : below(4);
    if (way & 1) some.tree = tree;
    if (way & 2) some.list.rows = list, some.list.length = LENGTH, some.list.block = 4, some.list.newest = 1 + below(3);
    if (tqkv_cache_end(caches[CPU]) < n) return;
    results[CPU] = test_attend_some(caches[CPU], &some, queries, n, out[CPU].data());
    results[WAITING] = results[RECORDED] =
        run_some((tqkv_metal *)(void *)&gpu, caches[RECORDED], &some, queries, n, out[RECORDED].data());
    out[WAITING] = out[RECORDED];
    check_outputs(n, results);
}

// The processor moves the codes of caches on the GPU.
void history::edit()
{
    const int way = below(3), kept[] = {0, 2, 3};
    const int64_t to = tqkv_cache_end(caches[CPU]) - below(7);
    tqkv_result results[SIDES];
    for (int i = 0; i < SIDES; i++) {
        results[i] = way == 0   ? tqkv_cache_truncate(caches[i], to)
                     : way == 1 ? tqkv_cache_keep(caches[i], 5, kept, 3)
                                : tqkv_cache_remove(caches[i], 2, 4);
        CHECK_RESULT(results[i], results[CPU]);
    }
}

// Each side goes on with what the next one has saved, or with a fork.
void history::copy()
{
    tqkv_cache *copies[SIDES] = {};
    const bool forks = below(2);
    tqkv_cache_desc larger = {}, loaded = {};
    larger.capacity = desc.capacity + 5;
    loaded.sinks = desc.sinks;
    loaded.type = desc.type;
    loaded.n_heads = desc.sinks ? desc.n_heads : 0;
    for (int i = 0; i < SIDES; i++) {
        loaded.metal = i == CPU ? nullptr : desc.metal;
        stream s = stream_of_cache(caches[(i + 1) % SIDES]);
        CHECK_RESULT(forks ? tqkv_cache_fork(caches[i], &larger, &copies[i])
                           : tqkv_cache_load(&loaded, stream_read, &s, &copies[i]),
                     TQKV_OK);
        stream_free(&s);
    }
    for (int i = 0; i < SIDES; i++) {
        tqkv_cache_destroy(caches[i]);
        caches[i] = copies[i];
    }
    if (forks) desc.capacity += 5;
}

// Bytes: the number of a desc, then a call each.
int run_history_bytes(const uint8_t *bytes, size_t n)
{
    const struct {
        void (history::*call)();
        const char *name;
    } calls[] = {{&history::append, "appended"}, {&history::append, "appended"}, {&history::append, "appended"},
                 {&history::attend, "attended"}, {&history::edit, "edited"},     {&history::copy, "copied"}};
    if (n == 0) return 0;
    history h(bytes[0]);
    for (size_t i = 1; i < n && h.caches[CPU] && h.caches[WAITING] && h.caches[RECORDED]; i++) {
        h.random.state = (uint64_t)bytes[i] * 1000 + bytes[0];
        (h.*calls[bytes[i] % 6].call)();
        h.compare(calls[bytes[i] % 6].name);
    }
    return 0;
}

// Appends twice, then calls at random.
void run_history(const void *parameters)
{
    const int seed = *(const int *)parameters;
    data_random random = {(uint64_t)seed};
    uint8_t bytes[10] = {(uint8_t)seed};
    for (int i = 1; i < 10; i++) bytes[i] = (uint8_t)(i < 3 ? 6 * data_below(&random, 42) : data_below(&random, 256));
    run_history_bytes(bytes, 10);
    const history_row row = {run_history_bytes, seed, 1};
    if (!test_failures() || gpu_on_device || !history_fails(&row, bytes, 10, true)) return;
    const size_t n = history_shrink(&row, bytes, 10);
    printf("  these bytes fail:");
    for (size_t i = 0; i < n; i++) printf(" %d", bytes[i]);
    printf("\n");
}

// ---- Caches that learn ----

tqkv_cache_desc describe(const learn_row *row)
{
    const cache_row plain = {row->key_format, row->value_format, row->head_dim, row->capacity, row->ring, 0, -1};
    tqkv_cache_desc desc = cache_desc(&plain, nullptr);
    desc.sinks = cache_sinks;
    desc.value_dim = row->shared ? 0 : row->value_dim;
    if (row->shared) desc.value_format = TQKV_FORMAT_DEFAULT;
    desc.shared = row->shared;
    desc.tail_dim = row->tail_dim;
    desc.tail_format = row->tail_format;
    desc.window = row->window;
    desc.exact_first = row->exact_first;
    desc.exact_last = row->exact_last;
    desc.calibrate = row->calibrate;
    desc.type = row->type;
    desc.non_causal = row->non_causal;
    desc.matrix_group = row->matrix_group;
    return desc;
}

// The same cache on the processor (0) and on the machine (1), and rows for both.
struct pair_of_caches {
    const learn_row *row;
    int key_dim, value_dim;
    machine gpu;
    tqkv_cache *caches[2];
    std::vector<char> rows[3]; // of k, v and q: [tokens][heads][dim], with gaps where the row says so
    tqkv_strides strides[3];

    explicit pair_of_caches(const learn_row *r);
    ~pair_of_caches();
    pair_of_caches(const pair_of_caches &) = delete;
    pair_of_caches &operator=(const pair_of_caches &) = delete;
    tqkv_cache_desc desc(int side);
    void make();
    int heads_of(int which) const { return which == 2 ? (int)HEADS : (int)CACHE_HEADS; }
    int dim_of(int which) const { return which == 1 ? value_dim : key_dim; }
    const void *at(int which, int t) const
    {
        return &rows[which][(size_t)t * strides[which].token * size_of(row->type)];
    }
    void append(int t, int n);
    void compare(const char *what) const;
    void check_newest(int t, int n, const tqkv_attention *some, const char *out) const;
    // Outputs of the queries of rows [t, t + n) on the machine, which are close to the processor's.
    std::vector<char> attend(int t, int n, const tqkv_attention *some);
};

pair_of_caches::pair_of_caches(const learn_row *r) : row(r), gpu()
{
    key_dim = row->head_dim + row->tail_dim;
    value_dim = row->value_dim && !row->shared ? row->value_dim : row->head_dim;
    open_machine(&gpu, row->learns_at);
    for (int which = 0; which < 3; which++) {
        const int heads = heads_of(which), dim = dim_of(which), n = row->tokens;
        strides[which] = {(size_t)(heads * dim), (size_t)dim};
        if (row->strides) strides[which] = {(size_t)(heads * (dim + 3) + 5), (size_t)dim + 3};
        const int all = n * (int)strides[which].token;
        std::vector<float> values((size_t)all);
        float *scales = test_scales(7, heads, dim, 8.0);
        data_rows((uint64_t)(3 + which), DATA_STUDENT, values.data(), 1, all);
        for (int i = 0; i < all; i++) { // channels differ in size and have a constant part, but not those of queries
            const int channel = i % (int)strides[which].token % (heads * dim);
            const float constant = which == 1 || row->shared ? 0.0f : (float)(channel % 5); // all positions are new
            values[(size_t)i] =
                which == 2 ? 0.3f * values[(size_t)i] : (values[(size_t)i] + constant) * scales[channel];
            const int token = i / (int)strides[which].token;
            if (row->repeat && which == (row->shared ? 0 : 1) && token % row->repeat)
                values[(size_t)i] = values[(size_t)i - strides[which].token] * (channel % 3 ? 1.0f : 1.25f);
        }
        free(scales);
        rows[which].resize((size_t)all * size_of(row->type));
        for (int i = 0; i < all; i++) {
            const uint16_t half =
                row->type == TQKV_TYPE_F32 ? (uint16_t)0 : reference_narrow(row->type, values[(size_t)i]);
            memcpy(&rows[which][(size_t)i * size_of(row->type)],
                   row->type == TQKV_TYPE_F32 ? (const void *)&values[(size_t)i] : &half, size_of(row->type));
        }
    }
    caches[0] = caches[1] = nullptr;
    make();
}

pair_of_caches::~pair_of_caches()
{
    for (int side = 0; side < 2; side++) tqkv_cache_destroy(caches[side]);
    CHECK_NO_LEAK(&gpu.memory);
}

tqkv_cache_desc pair_of_caches::desc(int side)
{
    tqkv_cache_desc desc = describe(row);
    if (side) desc.metal = (tqkv_metal *)(void *)&gpu;
    return desc;
}

void pair_of_caches::make()
{
    for (int side = 0; side < 2; side++) {
        tqkv_cache_desc with = desc(side);
        if (row->strides) with.strides = {strides[0], strides[1], strides[2], {0, 0}};
        tqkv_cache_destroy(caches[side]);
        CHECK_RESULT(tqkv_cache_create(&with, &caches[side]), TQKV_OK);
    }
}

void pair_of_caches::append(int t, int n)
{
    for (int side = 0; side < 2; side++)
        CHECK_RESULT(tqkv_cache_append(caches[side], at(0, t), row->shared ? nullptr : at(1, t), n), TQKV_OK);
}

void pair_of_caches::compare(const char *what) const
{
    stream a = stream_of_cache(caches[0]), b = stream_of_cache(caches[1]);
    size_t first = 0;
    while (first < a.size && first < b.size && a.bytes[first] == b.bytes[first]) first++;
    CHECK(stream_is_equal(&a, &b), "%s, up to %d: snapshots differ at byte %d of %d and %d", what,
          (int)tqkv_cache_end(caches[0]), (int)first, (int)a.size, (int)b.size);
    CHECK(!test_keys(caches[0])->center == !test_keys(caches[1])->center, "%s: one has learned", what);
    stream_free(&a);
    stream_free(&b);
}

// Checks the newest query against double precision: it reads what the view of a cache shows.
void pair_of_caches::check_newest(int t, int n, const tqkv_attention *some, const char *out) const
{
    const double limit = row->type == TQKV_TYPE_F32 ? 2e-5 : row->type == TQKV_TYPE_F16 ? 1e-3 : 8e-3;
    const size_t each = (size_t)(HEADS * value_dim), all = (size_t)n * each, last = all - each;
    tqkv_attention view = test_view(caches[0], 1);
    if (some) {
        view.list = some->list;
        view.tree = some->tree;
    }
    view.n_queries = n;
    const std::vector<char> rows_of_q =
        packed(at(2, t), strides_or(view.query_strides, HEADS, key_dim), row->type, n, HEADS, 0, key_dim);
    std::vector<float> q((size_t)(n * HEADS * key_dim)), newest(each);
    std::vector<double> expected(all);
    for (size_t i = 0; i < q.size(); i++) q[i] = (float)value_at(row->type, rows_of_q.data(), i);
    for (size_t i = 0; i < each; i++) newest[i] = (float)value_at(row->type, out, last + i);
    reference_attend_as(REFERENCE_FLOATS, &view, q.data(), expected.data());
    const double error = reference_relative_error(newest.data(), &expected[last], each);
    CHECK(error <= limit, "the query up to %d: relative error %g", (int)tqkv_cache_end(caches[0]), error);
}

std::vector<char> pair_of_caches::attend(int t, int n, const tqkv_attention *some)
{
    const size_t count = (size_t)(n * HEADS * value_dim);
    std::vector<char> out[2];
    for (int side = 0; side < 2; side++) out[side].assign(count * size_of(row->type), (char)0xee);
    tqkv_metal *m = (tqkv_metal *)(void *)&gpu;
    const tqkv_result own = some ? test_attend_some(caches[0], some, at(2, t), n, out[0].data())
                                 : tqkv_cache_attend(caches[0], at(2, t), n, out[0].data());
    CHECK_RESULT(some ? run_some(m, caches[1], some, at(2, t), n, out[1].data())
                      : tqkv_cache_attend(caches[1], at(2, t), n, out[1].data()),
                 TQKV_OK);
    if (some && own == TQKV_OUT_OF_RANGE) { // queries on both sides: the processor has no view of them
        check_newest(t, n, some, out[1].data());
        return out[1];
    }
    CHECK_RESULT(own, TQKV_OK);
    const tqkv_format tail = row->tail_dim ? row->tail_format ? row->tail_format : TQKV_F16 : TQKV_FORMAT_DEFAULT;
    const double limit =
        error_of_type(row->type) +
        reference_gpu_difference(row->key_format, tail, row->shared ? row->key_format : row->value_format, 1.0);
    check_near(row->type, out[1], out[0], count, limit);
    check_newest(t, n, some, out[1].data());
    return out[1];
}

const int chunkings[][6] = {{1}, {60}, {7, 20, 1, 9}, {15, 1, 1, 3}, {16, 8}};

void run_chunks(const void *parameters)
{
    const learn_row *row = (const learn_row *)parameters;
    const size_t each =
        (size_t)(HEADS * (row->value_dim && !row->shared ? row->value_dim : row->head_dim)) * size_of(row->type);
    std::vector<char> alone;
    pair_of_caches caches(row);
    for (const int *chunks : chunkings) {
        caches.make();
        for (int end = 0, i = 0, n; end < row->tokens; end += n, i = chunks[i + 1] ? i + 1 : 0) {
            n = chunks[i] < row->tokens - end ? chunks[i] : row->tokens - end;
            if (row->ring && row->window && n > row->capacity - row->window + 1) n = row->capacity - row->window + 1;
            caches.append(end, n);
            caches.compare("appended");
            const int asked = row->ring && !row->window ? 1 : n;
            const std::vector<char> out = caches.attend(end + n - asked, asked, nullptr);
            if (chunks == chunkings[0]) alone.insert(alone.end(), out.begin(), out.end());
            const bool crosses = row->non_causal; // its queries see what comes with them
            CHECK(crosses || !memcmp(out.data(), &alone[(size_t)(end + n - asked) * each], out.size()),
                  "queries of [%d, %d) have other bits alone", end, end + n);
        }
        CHECK(test_keys(caches.caches[1])->channel_scale, "nothing was learned");
    }
}

// Trees and lists whose queries stand on both sides of the last position that is raw.
void run_lists(const void *parameters)
{
    enum { N = 6, LENGTH = 3 };
    const learn_row *row = (const learn_row *)parameters;
    static const uint64_t tree[N] = {1, 3, 5, 11, 19, 37};
    static const int32_t list[N * LENGTH] = {0, 1, -1, 1, 2, 3, 0, 2, 4, 0, -1, 9, 1, 3, -1, 2, 3, 5};
    pair_of_caches caches(row);
    for (int before = 0; before <= N; before += before == 2 ? 2 : 1) {
        const int end = row->learns_at + N - before;
        caches.make();
        caches.append(0, end - N);
        caches.append(end - N, N);
        for (int way = 1; way < 4; way++) {
            tqkv_attention some;
            memset(&some, 0, sizeof some);
            some.tree = way & 1 ? tree : nullptr;
            some.list.rows = way & 2 ? list : nullptr;
            some.list.length = way & 2 ? LENGTH : 0;
            some.list.block = way & 2 ? 4 : 0;
            some.list.newest = way & 2 ? 2 : 0;
            caches.attend(end - N, N, &some);
        }
    }
}

// A failure of the GPU, or of an allocation, leaves the cache as it was; the same call then learns the same.
void run_failures(const void *parameters)
{
    const learn_row *row = (const learn_row *)parameters;
    pair_of_caches caches(row);
    tqkv_cache *cache = nullptr;
    const tqkv_cache_desc desc = caches.desc(1);
    caches.gpu.memory.calls = 0;
    caches.gpu.memory.fail_at = 1;
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OUT_OF_MEMORY);
    CHECK(!cache && caches.gpu.memory.calls == 1, "not one allocation");
    caches.gpu.memory.fail_at = 0;
    const size_t bytes = tqkv_cache_bytes(caches.caches[1]);
    CHECK(bytes > tqkv_cache_bytes(caches.caches[0]), "no room for halves"); // the processor gets it when it appends
    const int sizes[] = {row->learns_at - 3, 6, 2};
    for (int i = 0, end = 0; i < 3; end += sizes[i++]) {
        const void *v = row->shared ? nullptr : caches.at(1, end);
        caches.gpu.answer = TQKV_METAL_ERROR;
        CHECK_RESULT(tqkv_cache_append(caches.caches[1], caches.at(0, end), v, sizes[i]), TQKV_METAL_ERROR);
        std::vector<float> out((size_t)(HEADS * caches.value_dim));
        caches.gpu.answer = TQKV_OK;
        CHECK(tqkv_cache_end(caches.caches[1]) == end, "a failed append counts");
        caches.compare("failed");
        if (end) caches.attend(end - 2, 2, nullptr);
        caches.append(end, sizes[i]);
        caches.compare("tried again");
        caches.attend(end, 1, nullptr);
        CHECK(tqkv_cache_bytes(caches.caches[1]) == bytes, "on a GPU the halves' memory stays");
    }
    const int too_many = 512 + 80;
    std::vector<char> many((size_t)too_many * caches.strides[0].token * 4, 0);
    if (row->exact_last && !row->ring)
        CHECK_RESULT(tqkv_cache_append(caches.caches[1], many.data(), row->shared ? nullptr : many.data(), too_many),
                     TQKV_OUT_OF_RANGE);
    caches.compare("refused");
}

// Appends that count, in command buffers that fail: with the one that was to learn gone, the cache learns again.
void run_failed_commands(const void *parameters)
{
    const learn_row *row = (const learn_row *)parameters;
    const int before = row->learns_at - 3;
    for (int undone = 1; undone <= 3;
         undone++) { // so many appends did not run, of which the second or the third learns
        pair_of_caches caches(row);
        tqkv_cache *c = caches.caches[1];
        caches.append(0, before - 1);
        if (undone < 3) caches.append(before - 1, 1);
        const int end = (int)tqkv_cache_end(c);
        if (undone == 3) tqkv_metal_cache_appended(c, 1);
        tqkv_metal_cache_appended(c, 6);
        if (undone > 1) tqkv_metal_cache_appended(c, 2);
        CHECK(test_keys(c)->channel_scale, "appends do not count at once");
        CHECK_RESULT(tqkv_metal_cache_failed(c, end), TQKV_OK);
        caches.compare("failed");
        CHECK_RESULT(tqkv_metal_cache_failed(c, end), TQKV_OK); // once more: nothing
        caches.attend(end - 2, 2, nullptr);
        caches.append(end, 7);
        caches.compare("tried again");
        caches.append(end + 7, 2);
        tqkv_metal_cache_appended(c, 3);
        CHECK_RESULT(tqkv_metal_cache_failed(c, end + 9), TQKV_OK);
        CHECK(test_keys(c)->channel_scale, "a later failure forgets the scale");
        for (int side = 0; side < 2; side++) CHECK_RESULT(tqkv_cache_truncate(caches.caches[side], end + 8), TQKV_OK);
        CHECK_RESULT(tqkv_metal_cache_failed(c, 0), TQKV_OK);
        CHECK(!test_keys(c)->channel_scale && !tqkv_cache_end(c), "an empty cache has forgotten the scale");
        CHECK_RESULT(tqkv_metal_cache_failed(c, 1), TQKV_OUT_OF_RANGE);
        CHECK_RESULT(tqkv_metal_cache_failed(NULL, 0), TQKV_INVALID_ARGUMENT);
    }
}

// With centre or scale given a cache does not learn; its halves' memory counts as long as it is there.
void run_set(const void *parameters)
{
    const learn_row *row = (const learn_row *)parameters;
    pair_of_caches caches(row);
    float *scales = test_scales(1, CACHE_HEADS, caches.key_dim, 2.0);
    for (int side = 0; side < 2; side++) {
        tqkv_cache_desc with = caches.desc(side);
        if (row->strides) with.strides = {caches.strides[0], caches.strides[1], caches.strides[2], {0, 0}};
        tqkv_cache_destroy(caches.caches[side]);
        caches.caches[side] = cache_given(&with, nullptr, scales, nullptr, nullptr);
    }
    free(scales);
    const size_t bytes = row->exact_last ? 0 : tqkv_cache_bytes(caches.caches[0]); // whose rings hold fewer
    CHECK(!bytes || tqkv_cache_bytes(caches.caches[1]) == bytes, "room for halves");
    caches.append(0, 20);
    caches.compare("set");
    caches.attend(0, 3, nullptr);
    tqkv_cache *fork = nullptr;
    CHECK_RESULT(tqkv_cache_fork(caches.caches[1], nullptr, &fork), TQKV_OK);
    CHECK(!bytes || tqkv_cache_bytes(fork) == bytes, "a copy has room for halves");
    tqkv_cache_destroy(fork);
}

// A copy of less capacity, which learns from as many positions as the cache.
void run_smaller(const void *parameters)
{
    const learn_row *row = (const learn_row *)parameters;
    pair_of_caches caches(row);
    tqkv_cache_desc smaller;
    memset(&smaller, 0, sizeof smaller);
    smaller.capacity = 70; // of which a quarter is 17
    caches.append(0, 18);
    for (int side = 0; side < 2; side++) {
        tqkv_cache *copy = nullptr;
        CHECK_RESULT(tqkv_cache_fork(caches.caches[side], &smaller, &copy), TQKV_OK);
        tqkv_cache_destroy(caches.caches[side]);
        caches.caches[side] = copy;
    }
    CHECK(!test_keys(caches.caches[1])->channel_scale, "the copy has learned from less");
    caches.compare("copied");
    caches.attend(0, 3, nullptr);
    caches.append(18, 4);
    CHECK(test_keys(caches.caches[1])->channel_scale, "the copy has not learned");
    caches.compare("gone on");
    caches.attend(18, 4, nullptr);
}

// Rows that halves do not hold are refused as on the processor, while the cache learns and later; and a scale is so
// large that halves hold the first positions, which are not learned from.
void run_range(const void *parameters)
{
    const learn_row *row = (const learn_row *)parameters;
    pair_of_caches caches(row);
    const size_t each = caches.strides[0].token;
    std::vector<float> odd(each);
    for (int t = 0; t < row->tokens; t++) { // a channel that is the same in all but the first position
        float *channel = (float *)(void *)&caches.rows[0][(size_t)t * each * sizeof(float)];
        *channel = t ? 1.0f : 6e4f;
    }
    for (int end : {0, row->learns_at - 1, row->learns_at + 2}) {
        if (end) caches.append((int)tqkv_cache_end(caches.caches[0]), end - (int)tqkv_cache_end(caches.caches[0]));
        for (float size : {1e-9f, 7e-6f, 7e-5f, 1.0f, 65519.0f, 6e5f, 1e9f}) {
            std::fill(odd.begin(), odd.end(), 0.0f);
            for (int h = 0; h < CACHE_HEADS; h++) odd[(size_t)(h * row->head_dim)] = size;
            tqkv_result results[2];
            for (int side = 0; side < 2; side++)
                results[side] = tqkv_cache_append(caches.caches[side], caches.at(0, 0), odd.data(), 1);
            CHECK(results[0] == results[1], "a row of %g at %d: %s and on a GPU %s", (double)size, end,
                  tqkv_result_string(results[0]), tqkv_result_string(results[1]));
            CHECK(results[0] == (size < 1e-5f || size > 65520.0f ? TQKV_NOT_FINITE : TQKV_OK), "a row of %g at %d: %s",
                  (double)size, end, tqkv_result_string(results[0]));
            for (int side = 0; side < 2 && results[0] == TQKV_OK; side++)
                CHECK_RESULT(tqkv_cache_truncate(caches.caches[side], end), TQKV_OK);
        }
        caches.compare("refused");
    }
}

// Without a context the halves lie apart from the cache: kernels cannot reach them.
void run_apart(const void *parameters)
{
    const learn_row *row = (const learn_row *)parameters;
    const tqkv_metal_buffer none = {nullptr, 0};
    tqkv_metal_plan plan;
    pair_of_caches caches(row);
    tqkv_cache *c = caches.caches[0];
    for (int end = 0; end <= row->learns_at; end += row->learns_at) {
        CHECK_RESULT(tqkv_metal_plan_cache_append(c, gpu_buffer(c), nullptr, none, none, 1, none, &plan),
                     end ? TQKV_OK : TQKV_UNSUPPORTED);
        CHECK_RESULT(tqkv_metal_plan_cache_attend(c, gpu_buffer(c), nullptr, nullptr, none, 1, none, none, &plan),
                     TQKV_UNSUPPORTED);
        caches.append(end, end ? 1 : row->learns_at);
    }
    CHECK_RESULT(tqkv_metal_plan_cache_attend(c, gpu_buffer(c), nullptr, nullptr, none, 1, none, none, &plan), TQKV_OK);
}

} // namespace

void learn_shader_cases()
{
    const tqkv_type f32 = TQKV_TYPE_F32;
    const tqkv_format none = TQKV_FORMAT_DEFAULT;
    const learn_row rows[] = {
        {"plain", TQKV_TQ4, TQKV_TQ4, 64, 0, 120, 20, 20, 0, 0, 0, 0, 34, none, 0, 0, 0, 0, 0, f32, 0},
        {"ends", TQKV_TQ4, TQKV_TQ3, 64, 0, 200, 20, 20, 4, 9, 0, 0, 48, none, 0, 0, 0, 0, 0, f32, 0},
        {"small", TQKV_TQ5, TQKV_TQ3, 64, 0, 40, 512, 16, 4, 128, 0, 0, 40, none, 0, 0, 0, 0, 0, f32, 0},
        {"many_first", TQKV_TQ3, TQKV_TQ2, 32, 0, 200, 20, 20, 30, 5, 0, 0, 40, none, 0, 0, 0, 1, 0, f32, 0},
        {"window", TQKV_I8, TQKV_TQ4, 64, 0, 70, 17, 17, 3, 12, 0, 30, 110, none, 1, 0, 0, 0, 0, f32, 0},
        {"ring", TQKV_F16, TQKV_TQ5, 32, 0, 40, 16, 16, 5, 6, 0, 0, 60, none, 1, 0, 0, 0, 0, f32, 0},
        {"wide_keys", TQKV_TQ6, TQKV_F16, 192, 128, 90, 20, 20, 2, 5, 0, 0, 30, none, 0, 0, 0, 0, 0, TQKV_TYPE_BF16, 0},
        {"matrices", TQKV_TQ4, TQKV_TQ4, 64, 0, 100, 18, 18, 3, 8, 0, 0, 34, none, 0, 0, 0, 1, 2, TQKV_TYPE_F16, 0},
        {"latent", TQKV_TQ4, none, 512, 0, 100, 16, 16, 2, 5, 64, 0, 24, TQKV_I8, 0, 1, 0, 0, 0, f32, 0},
        {"latent_ring", TQKV_TQ4, none, 448, 0, 30, 16, 16, 20, 3, 64, 8, 36, none, 1, 1, 0, 0, 0, f32, 0},
        {"apart_ring", TQKV_TQ4, TQKV_TQ5, 448, 0, 40, 16, 16,  20, 3, 64, 9,
         34,           none,     1,        0,   0, 0,  0,  f32, 0}, // 13 dispatches
        {"tail_apart", TQKV_TQ4, TQKV_TQ5, 512, 0, 100, 16, 16, 2, 5, 64, 0, 24, TQKV_TQ6, 0, 0, 0, 0, 0, f32, 0},
        {"non_causal", TQKV_TQ4, TQKV_TQ4, 64, 0, 100, 18, 18, 3, 8, 0, 0, 34, none, 0, 0, 1, 0, 0, f32, 0},
        {"repeated", TQKV_TQ5, TQKV_TQ3, 64, 0, 180, 40, 40, 4, 9, 0, 0, 50, none, 0, 0, 0, 0, 0, f32, 2},
        {"one_new", TQKV_I8, TQKV_TQ4, 64, 0, 120, 20, 20, 0, 8, 0, 0, 34, none, 0, 0, 0, 0, 0, f32, 40},
        {"latent_repeated", TQKV_TQ4, none, 512, 0, 140, 34, 34, 2, 5, 64, 0, 40, TQKV_I8, 0, 1, 0, 0, 0, f32, 2},
    };
    for (int seed = 0; seed < (gpu_record ? 24 : gpu_on_device ? 4 : 60); seed++)
        test_add(run_history, &seed, sizeof seed, "cache/history/%d", seed);
    for (const learn_row &row : rows) {
        if (gpu_on_device && (&row - rows) % 3 != 1) continue; // each has pipelines of its own
        test_add(run_chunks, &row, sizeof row, "learn/chunks/%s", row.name);
        test_add(run_failures, &row, sizeof row, "learn/failures/%s", row.name);
        if (!row.ring && !row.non_causal) test_add(run_lists, &row, sizeof row, "learn/some/%s", row.name);
    }
    for (int i : {0, 1, 7})
        test_add(run_failed_commands, &rows[i], sizeof *rows, "learn/failed_commands/%s", rows[i].name);
    test_add(run_set, &rows[4], sizeof *rows, "learn/set");
    for (int i : {0, 1}) test_add(run_smaller, &rows[i], sizeof *rows, "learn/smaller/%s", rows[i].name);
    test_add(run_apart, &rows[1], sizeof *rows, "learn/apart");
    test_add(run_range, &rows[1], sizeof *rows, "learn/range");
}
