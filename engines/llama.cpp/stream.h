/* The keys or the values of one layer: a row for each cell in codes, and for some cells as halves, too. A half counts
 * only while it is of the same row as the code: each writing of a code writes the half with it, or marks it as gone. So
 * no call can leave an old half beside a new code. */
#pragma once
#include "ends.h"
#include "tqkv.h"

namespace tqkv_llama
{

/* Rows of a caller: [row][head][dim] of this type and these strides; 0: without gaps. */
struct rows {
    const void *data;
    tqkv_type type;
    tqkv_strides strides;
};

class stream
{
  public:
    stream() = default;
    ~stream();
    stream(const stream &) = delete;
    stream &operator=(const stream &) = delete;

    /* with_ends: false for a format that is exact itself. center, scale: [heads][dim] or NULL, kept by the caller. */
    bool open(tqkv_format format, int head_dim, int n_heads, int n_cells, const float *center, const float *scale,
              bool with_ends);
    /* One cell for each row, none twice. */
    tqkv_result write(const rows &source, const int32_t *cells, int n, const ends_map &ends, tqkv_parallel threads);
    /* Halves where there are any, else decoded codes; out: [n][heads][dim] of the type. */
    tqkv_result read(const int32_t *cells, int n, const ends_map &ends, tqkv_type type, void *out,
                     tqkv_parallel threads) const;
    tqkv_result copy(const int32_t *from, const int32_t *to, int n, const ends_map &ends);
    /* Halves of these cells are of other rows now. */
    void forget(const int32_t *cells, int n, const ends_map &ends);
    /* ends_map.shrink() has moved the slots; false: no memory, and no halves are left. */
    bool move_slots(const ends_map::moves &moved, const ends_map &ends);

    bool has_half(int32_t cell, const ends_map &ends) const;
    bool is_open() const { return codes_.codes != nullptr; }
    bool has_ends() const { return with_ends_; }
    size_t row_values() const { return (size_t)codes_.head_dim * (size_t)codes_.n_kv_heads; }
    size_t bytes() const { return codes_.codes_size + codes_.norms_size + halves_.codes_size; }
    const tqkv_store &codes() const { return codes_; }
    const tqkv_store &halves() const { return halves_; }

  private:
    bool reserve(int n_slots);

    tqkv_store codes_ = {}, halves_ = {};
    bool with_ends_ = false;
    std::vector<uint32_t> written_; /* [slots] the generation whose half it has */
};

} // namespace tqkv_llama
