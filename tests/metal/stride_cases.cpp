// Strides of sources, queries and outputs: the bits of the same rows without gaps, and nothing written between them.
#include "shader_cases.h"
#include <algorithm>

namespace
{

// Rows [n][n_heads] of `dim` values in the caller's memory, which begins at an odd value.
struct layout {
    tqkv_strides strides;
    size_t begin, end; // values
    const char *name;
};

enum { LAYOUTS = 4, READ_LAYOUTS = 5 }; // the last one for rows that are read: they share values

layout make_layout(int number, int n, int n_heads, int dim)
{
    const size_t t = (size_t)n, h = (size_t)n_heads, d = (size_t)dim;
    const tqkv_strides all[READ_LAYOUTS] = {
        {3 * h * d, d}, {d, (t + 2) * d}, {h * (d + 4) + 12, d + 4}, {d + 1, (t + 1) * (d + 1)}, {d, 4}};
    static const char *const names[] = {"fused", "head_major", "gaps", "head_major_gaps", "shared"};
    layout l = {all[number], 3, 0, names[number]};
    l.end = l.begin + (t - 1) * l.strides.token + (h - 1) * l.strides.head + d;
    return l;
}

// Memory in one of the types, and rows in it.
struct rows {
    tqkv_type type;
    int n, n_heads, dim;
    layout at;
    std::vector<char> bytes;
    rows(tqkv_type row_type, int tokens, int heads, int row_dim, int number)
        : type(row_type), n(tokens), n_heads(heads), dim(row_dim), at(make_layout(number, tokens, heads, row_dim)),
          bytes(at.end * size(), (char)0xee)
    {
    }
    size_t size() const { return type == TQKV_TYPE_F32 ? 4 : 2; }
    char *first() { return &bytes[at.begin * size()]; }
    char *row(int i)
    {
        return first() + ((size_t)(i / n_heads) * at.strides.token + (size_t)(i % n_heads) * at.strides.head) * size();
    }
    void fill(uint64_t seed, float factor);
    std::vector<char> packed();
    bool holds(const std::vector<char> &expected); // these rows, and what was there between them
};

void rows::fill(uint64_t seed, float factor)
{
    std::vector<float> values(at.end);
    data_rows(seed, DATA_GAUSSIAN, values.data(), 1, (int)at.end);
    for (size_t i = 0; i < at.end; i++) {
        const float x = values[i] * factor;
        const uint16_t half = type == TQKV_TYPE_F32 ? (uint16_t)0 : reference_narrow(type, x);
        memcpy(&bytes[i * size()], type == TQKV_TYPE_F32 ? (const void *)&x : &half, size());
    }
}

std::vector<char> rows::packed()
{
    std::vector<char> all;
    for (int i = 0; i < n * n_heads; i++) all.insert(all.end(), row(i), row(i) + (size_t)dim * size());
    return all;
}

bool rows::holds(const std::vector<char> &expected)
{
    rows other(type, n, n_heads, dim, 0);
    other.at = at;
    other.bytes.assign(bytes.size(), (char)0xee);
    const size_t each = (size_t)dim * size();
    for (int i = 0; i < n * n_heads; i++) memcpy(other.row(i), &expected[(size_t)i * each], each);
    return other.bytes == bytes;
}

// ---- Encode, encode_kv, encode_slots, probe, decode ----

struct codec_row {
    tqkv_format format, value_format;
    int head_dim, value_dim, n_tokens, capacity, layouts[2]; // of keys and values
    tqkv_type type;
    bool bad; // a row with a NaN
};

struct two_stores { // packed, then with strides
    tqkv_store s[2];
    two_stores(tqkv_format format, int head_dim, const codec_row &row, tqkv_strides strides) : s()
    {
        for (tqkv_store &one : s) {
            one = test_store(format, head_dim, 3, row.capacity, true);
            one.type = row.type;
        }
        s[1].strides = strides;
    }
    ~two_stores()
    {
        for (tqkv_store &one : s) test_store_free(&one);
    }
    two_stores(const two_stores &) = delete;
    bool same() const
    {
        return !memcmp(s[0].codes, s[1].codes, s[0].codes_size) &&
               (!s[0].norms_size || !memcmp(s[0].norms, s[1].norms, s[0].norms_size));
    }
};

void check_slots(two_stores &keys, const void *const sources[2], int n)
{
    std::vector<int32_t> slots;
    for (int i = 0; i < n; i++)
        slots.push_back(i % 5 == 3 || i >= keys.s[0].capacity ? -1 : keys.s[0].capacity - 1 - i);
    for (int i = 0; i < 2; i++) {
        memset(keys.s[i].codes, 0, keys.s[i].codes_size);
        CHECK_RUN(gpu_encode_slots(&keys.s[i], nullptr, sources[i], nullptr, n, slots.data(), nullptr));
    }
    CHECK(keys.same(), "by slots");
}

void check_probe(const two_stores &keys, const void *const sources[2], int n)
{
    const size_t values = (size_t)n * 3 * (size_t)keys.s[0].head_dim;
    std::vector<float> scaled[2];
    for (int i = 0; i < 2; i++) {
        scaled[i].assign(values, 0.0f);
        CHECK_RUN(gpu_probe(&keys.s[i], sources[i], n, scaled[i].data(), nullptr));
    }
    CHECK(!memcmp(scaled[0].data(), scaled[1].data(), values * sizeof(float)), "probed values");
}

void check_decode(const two_stores &keys, int number, int n)
{
    rows to(keys.s[0].type, n, 3, keys.s[0].head_dim, number % LAYOUTS);
    std::vector<char> packed = to.packed();
    tqkv_store strided = keys.s[0];
    strided.strides = to.at.strides;
    CHECK_RUN(gpu_decode(&keys.s[0], 7, n, TQKV_ORIGINAL, packed.data()));
    CHECK_RUN(gpu_decode(&strided, 7, n, TQKV_ORIGINAL, to.first()));
    CHECK(to.holds(packed), "decoded rows");
}

void run_codec(const void *parameters)
{
    const codec_row &row = *(const codec_row *)parameters;
    const int n = row.n_tokens, v_dim = row.value_dim ? row.value_dim : row.head_dim;
    rows k(row.type, n, 3, row.head_dim, row.layouts[0]), v(row.type, n, 3, v_dim, row.layouts[1]);
    k.fill(3, 1.0f);
    v.fill(4, 1.0f);
    if (row.bad) memset(k.row(n * 3 - 2) + (size_t)(row.head_dim - 1) * k.size(), 0xff, k.size());
    const std::vector<char> packed_k = k.packed(), packed_v = v.packed();
    two_stores keys(row.format, row.head_dim, row, k.at.strides), values(row.value_format, v_dim, row, v.at.strides);
    const void *const k_sources[2] = {packed_k.data(), k.first()}, *const v_sources[2] = {packed_v.data(), v.first()};
    uint32_t flags[2];
    for (int i = 0; i < 2; i++) CHECK_RUN(gpu_encode(&keys.s[i], k_sources[i], n, 7, &flags[i]));
    CHECK(keys.same() && flags[0] == flags[1] && flags[0] == (row.bad ? 1 : 0), "keys alone");
    for (int i = 0; i < 2; i++) {
        memset(keys.s[i].codes, 0, keys.s[i].codes_size);
        CHECK_RUN(gpu_encode_kv(&keys.s[i], &values.s[i], k_sources[i], v_sources[i], n, 7, nullptr));
    }
    CHECK(keys.same() && values.same(), "keys and values");
    check_decode(keys, row.layouts[1], std::min(n, row.capacity));
    check_slots(keys, k_sources, n);
    check_probe(keys, k_sources, n);
}

void add_codec()
{
    const int head_dims[] = {64, 128, 32, 80, 192, 96, 256, 448, 48, 512, 1024};
    const tqkv_type types[] = {TQKV_TYPE_F32, TQKV_TYPE_F16, TQKV_TYPE_BF16};
    for (int i = 0; i < 12; i++) {
        codec_row row = {test_formats[i % TEST_FORMATS],
                         test_formats[(i + 5) % TEST_FORMATS],
                         head_dims[i % 11],
                         0,
                         i % 4 == 2 ? 31 : 13, // more than a simdgroup's rows, and than the ring
                         i % 3 ? 40 : 9,
                         {i % READ_LAYOUTS, (i + 2) % READ_LAYOUTS},
                         types[i % 3],
                         i % 4 == 1};
        row.value_dim = row.head_dim == 192 ? 128 : row.head_dim == 448 ? 64 : 0;
        test_add(run_codec, &row, sizeof row, "strides/codec/%s/d%d", tqkv_format_name(row.format), row.head_dim);
    }
}

// ---- Attention: whole, by a list, in slices, with positions as halves ----

struct attend_case {
    attend_row row;
    tqkv_type query_type, output_type;
    int query_layout, output_layout;
    gpu_split split;
    bool slices;
};

// Queries and outputs without gaps, then with them.
struct two_calls {
    attend_problem problem;
    rows q, out;
    std::vector<char> packed_q, packed_out;
    tqkv_attention calls[2];
    explicit two_calls(const attend_case &c);
    ~two_calls() { attend_tear_down(&problem); }
    two_calls(const two_calls &) = delete;
    const void *q_of(int i) { return i ? (const void *)q.first() : packed_q.data(); }
    void *out_of(int i) { return i ? (void *)out.first() : packed_out.data(); }
};

two_calls::two_calls(const attend_case &c)
    : q(c.query_type, c.row.n_queries, c.row.n_kv_heads * c.row.group, c.row.head_dim + c.row.tail_dim, c.query_layout),
      out(c.output_type, c.row.n_queries, c.row.n_kv_heads * c.row.group,
          c.row.value_dim ? c.row.value_dim : c.row.head_dim, c.output_layout)
{
    attend_set_up_floats(&problem, &c.row);
    q.fill(5, 1.5f);
    packed_q = q.packed();
    packed_out = out.packed();
    calls[0] = problem.attention;
    calls[0].query_type = c.query_type;
    calls[0].output_type = c.output_type;
    calls[1] = calls[0];
    calls[1].query_strides = q.at.strides;
    calls[1].output_strides = out.at.strides;
}

void attend_in_slices(two_calls &t, int i, gpu_split split)
{
    const attend_problem &p = t.problem;
    const int cut = (int)p.attention.end / 2;
    gpu_slice total(p.n_rows, p.value_dim), other = total;
    CHECK_RUN(gpu_attend_partial(&t.calls[i], t.q_of(i), 0, cut, total, split));
    CHECK_RUN(gpu_attend_partial(&t.calls[i], t.q_of(i), cut, (int)p.attention.end - cut, other, split));
    CHECK_RUN(gpu_attend_merge(&t.calls[i], total, &t.calls[i], other));
    CHECK_RUN(gpu_attend_finish(&t.calls[i], total, t.out_of(i)));
}

void run_attend(const void *parameters)
{
    const attend_case &c = *(const attend_case *)parameters;
    for (int kernel : {GPU_LANES, GPU_MATRICES}) {
        if (kernel == GPU_MATRICES && !gpu_has_matrices(c.row.head_dim)) continue;
        two_calls t(c);
        gpu_split split = c.split;
        split.kernel = kernel;
        for (int i = 0; i < 2; i++) {
            if (c.slices)
                attend_in_slices(t, i, split);
            else
                CHECK_RUN(gpu_attend(&t.calls[i], t.q_of(i), t.out_of(i), split));
        }
        CHECK(t.out.holds(t.packed_out), "%s to %s%s", t.q.at.name, t.out.at.name,
              kernel == GPU_MATRICES ? ", by matrices" : "");
    }
}

void add_attend()
{
    const int head_dims[] = {64, 128, 80, 192, 256, 512, 64, 32, 448, 128, 1024, 64};
    const tqkv_type types[] = {TQKV_TYPE_F32, TQKV_TYPE_F16, TQKV_TYPE_BF16};
    for (int i = 0; i < 12; i++) {
        attend_case c = {attend_default_row(test_formats[(i + 1) % TEST_FORMATS], test_formats[(i * 3) % TEST_FORMATS],
                                            head_dims[i]),
                         types[i % 3],
                         types[(i + i / 3) % 3],
                         i % READ_LAYOUTS,
                         (i + 1) % LAYOUTS,
                         as_planned,
                         i % 6 == 3};
        attend_row &r = c.row;
        r.value_dim = r.head_dim == 192 ? 128 : 0;
        r.n_queries = 1 + i % 4;
        r.group = 1 + i % 5;
        r.sinks = (attend_sinks)(i % 3);
        r.value_center = i % 4 == 1 ? 0.5f : 0.0f;
        r.key_center = i % 4 == 3 ? 0.5f : 0.0f;
        r.non_causal = i % 3 == 1;
        r.shared = r.head_dim == 512 || r.head_dim == 448;
        r.tail_dim = r.shared ? 64 : 0;
        r.tail_format = TQKV_F16;
        r.list_block = i % 6 == 0 ? 16 : 0;
        r.list_share = 0.5f;
        r.exact_first = i % 6 == 1 ? 5 : 0;
        r.exact_last = r.exact_first ? 9 : 0;
        r.bits_alone = true;
        if (i % 4 == 2) c.split = {GPU_MOST, 2, 3, GPU_EACH + i % 3};
        test_add(run_attend, &c, sizeof c, "strides/attend/%d/d%d", i, r.head_dim);
    }
}

// Sequences whose queries and outputs lie head by head: those of one lie between those of the others.
void run_batch(const void *parameters)
{
    enum { ITEMS = 3 };
    const bool by_heads = *(const bool *)parameters;
    const int n_queries[ITEMS] = {1, 4, 2}, all = 7;
    attend_row row = attend_default_row(TQKV_I8, TQKV_TQ4, 64);
    const int n_heads = row.n_kv_heads * row.group;
    rows q(TQKV_TYPE_F16, all, n_heads, 64, by_heads ? 3 : 0), out(TQKV_TYPE_BF16, all, n_heads, 64, by_heads ? 1 : 2);
    q.fill(5, 1.5f);
    const std::vector<char> packed_q = q.packed();
    std::vector<char> expected = out.packed();
    attend_problem problems[ITEMS];
    std::vector<tqkv_attention> calls;
    std::vector<const void *> sources;
    std::vector<void *> outputs;
    for (int i = 0, token = 0; i < ITEMS; token += n_queries[i++]) {
        row.n_queries = n_queries[i];
        row.end = 40 - 7 * i;
        row.non_causal = i == 1;
        row.window = i ? 9 : 0;
        row.bits_alone = true;
        attend_set_up_floats(&problems[i], &row);
        tqkv_attention a = problems[i].attention;
        a.query_type = TQKV_TYPE_F16;
        a.output_type = TQKV_TYPE_BF16;
        const size_t at = (size_t)(token * n_heads * 64) * 2;
        CHECK_RUN(gpu_attend(&a, &packed_q[at], &expected[at], as_planned));
        a.query_strides = q.at.strides;
        a.output_strides = out.at.strides;
        calls.push_back(a);
        sources.push_back(q.row(token * n_heads));
        outputs.push_back(out.row(token * n_heads));
    }
    CHECK_RUN(gpu_attend_batch(calls, sources, outputs, false));
    CHECK(out.holds(expected), "an item has other bits alone");
    for (attend_problem &p : problems) attend_tear_down(&p);
}

} // namespace

void stride_shader_cases()
{
    add_codec();
    add_attend();
    for (bool by_heads : {false, true})
        test_add(run_batch, &by_heads, sizeof by_heads, "strides/batch/%s", by_heads ? "heads" : "tokens");
}
