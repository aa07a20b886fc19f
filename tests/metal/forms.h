// Other forms of the same rows: in pools behind page tables, in other types, with gaps between them.
#ifndef TQKV_TESTS_FORMS_H
#define TQKV_TESTS_FORMS_H
#include "../attend_fixture.h"
#include <algorithm>
#include <string.h>
#include <vector>

inline void copy_position(const tqkv_store &from, int64_t at, const tqkv_store &to, int64_t position)
{
    const size_t norms = (size_t)reference_norms_per_row(from.format, from.head_dim) * sizeof(float);
    for (int head = 0; head < from.n_kv_heads; head++) {
        memcpy((void *)(uintptr_t)reference_codes_at(&to, head, position), reference_codes_at(&from, head, at),
               reference_row_bytes(from.format, from.head_dim));
        if (norms)
            memcpy((void *)(uintptr_t)reference_norms_at(&to, head, position), reference_norms_at(&from, head, at),
                   norms);
    }
}

// A pool over its own memory, and a table for `positions` positions: pages at random, no entry that nothing uses; or
// the table of another pool.
struct pool {
    tqkv_store store;
    std::vector<int32_t> table;
    pool(const tqkv_store &shape, int page_size, int positions, data_random *random, const pool *same = nullptr)
    {
        const int n_pages = (positions + page_size - 1) / page_size, spare = 1 + data_below(random, 3);
        const int capacity = same ? same->store.capacity : (n_pages + spare) * page_size;
        store = test_store(shape.format, shape.head_dim, shape.n_kv_heads, capacity, false);
        store.type = shape.type;
        store.center = shape.center;
        store.channel_scale = shape.channel_scale;
        store.rotation = shape.rotation;
        store.block_scale = shape.block_scale;
        for (int i = 0; i < n_pages + spare; i++) { // shuffled
            table.push_back(i);
            std::swap(table[(size_t)data_below(random, i + 1)], table.back());
        }
        table.resize((size_t)n_pages);
        store.pages = same ? same->table.data() : table.data();
        store.n_pages = same ? same->store.n_pages : n_pages;
        store.page_size = page_size;
    }
    ~pool() { test_store_free(&store); }
    pool(const pool &) = delete;

    // Copies the positions that some query sees. Entries of the other pages become bad ones.
    void copy_seen(const tqkv_attention &a, const tqkv_store &from, data_random *random)
    {
        const int32_t bad[] = {-1, INT32_MIN, INT32_MAX, store.capacity / store.page_size};
        std::vector<bool> used(table.size());
        for (int64_t p = 0; p < a.end; p++) {
            if (!attend_is_seen(&a, p)) continue;
            copy_position(from, p, store, p);
            used[(size_t)(p / store.page_size)] = true;
        }
        for (size_t i = 0; i < used.size(); i++)
            if (!used[i]) table[i] = bad[data_below(random, 4)];
    }
};

inline size_t size_of(tqkv_type type) { return type == TQKV_TYPE_F32 ? sizeof(float) : sizeof(uint16_t); }

// Rows [n][n_heads] of `dim` values in the caller's memory, which begins at an odd value.
struct layout {
    tqkv_strides strides;
    size_t begin, end; // values
    const char *name;
};

// The first has no gaps; the last is for rows that are read: they share values.
enum { LAYOUTS = 5, READ_LAYOUTS = 6 };

inline layout make_layout(int number, int n, int n_heads, int dim)
{
    const size_t t = (size_t)n, h = (size_t)n_heads, d = (size_t)dim;
    const tqkv_strides all[READ_LAYOUTS] = {
        {h * d, d}, {3 * h * d, d}, {d, (t + 2) * d}, {h * (d + 4) + 12, d + 4}, {d + 1, (t + 1) * (d + 1)}, {d, 4}};
    static const char *const names[] = {"packed", "fused", "head_major", "gaps", "head_major_gaps", "shared"};
    layout l = {all[number], 3, 0, names[number]};
    l.end = l.begin + (t ? (t - 1) * l.strides.token + (h - 1) * l.strides.head + d : 0);
    return l;
}

// Memory in one of the types, and rows in it.
struct typed_rows {
    tqkv_type type;
    int n, n_heads, dim;
    layout at;
    std::vector<char> bytes;
    typed_rows(tqkv_type row_type, int tokens, int heads, int row_dim, int number)
        : type(row_type), n(tokens), n_heads(heads), dim(row_dim), at(make_layout(number, tokens, heads, row_dim)),
          bytes(at.end * size_of(row_type), (char)0xee)
    {
    }
    char *first() { return bytes.data() + at.begin * size_of(type); }
    char *row(int i)
    {
        return first() +
               ((size_t)(i / n_heads) * at.strides.token + (size_t)(i % n_heads) * at.strides.head) * size_of(type);
    }
    // NaN stays NaN; a finite value beyond the largest half becomes that.
    void set(char *to, float x) const
    {
        if (type == TQKV_TYPE_F16 && fabsf(x) > 65504.0f && !isinf(x)) x = copysignf(65504.0f, x);
        const uint16_t half = type == TQKV_TYPE_F32 ? (uint16_t)0 : isnan(x) ? 0x7fff : reference_narrow(type, x);
        memcpy(to, type == TQKV_TYPE_F32 ? (const void *)&x : &half, size_of(type));
    }
    void fill(uint64_t seed, data_kind kind, float factor)
    {
        std::vector<float> values(at.end + (size_t)dim);
        data_rows(seed, kind, values.data(), (int)(at.end / (size_t)dim + 1), dim);
        for (size_t i = 0; i < at.end; i++) set(&bytes[i * size_of(type)], values[i] * factor);
    }
    // Value i of packed rows.
    float value(const std::vector<char> &packed, size_t i) const
    {
        float x;
        uint16_t half;
        memcpy(&x, &packed[i * size_of(type)], type == TQKV_TYPE_F32 ? 4 : 0);
        memcpy(&half, &packed[i * size_of(type)], 2);
        return type == TQKV_TYPE_F32 ? x : (float)reference_wide(type, half);
    }
    std::vector<char> packed()
    {
        std::vector<char> all;
        for (int i = 0; i < n * n_heads; i++) all.insert(all.end(), row(i), row(i) + (size_t)dim * size_of(type));
        return all;
    }
    bool holds(const std::vector<char> &expected) // these rows, and what was there between them
    {
        typed_rows other = *this;
        other.bytes.assign(bytes.size(), (char)0xee);
        const size_t each = (size_t)dim * size_of(type);
        for (int i = 0; i < n * n_heads; i++) memcpy(other.row(i), &expected[(size_t)i * each], each);
        return other.bytes == bytes;
    }
};

#endif
