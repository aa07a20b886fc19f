#include "stream.h"

#include <sys/mman.h>

namespace tqkv_llama
{
namespace
{

/* Zeros in pages of their own, which take memory when they are written and give it back at once. */
void *zeros(size_t size)
{
    void *at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return at == MAP_FAILED ? nullptr : at;
}

void release(void *at, size_t size)
{
    if (at) munmap(at, size);
}

tqkv_store of_cells(const tqkv_store &s, const int32_t *cells, int n)
{
    tqkv_store view = s;
    view.pages = cells;
    view.n_pages = n;
    view.page_size = 1;
    return view;
}

tqkv_result encode(const tqkv_store &to, const rows &source, const int32_t *slots, int n, tqkv_parallel threads)
{
    tqkv_store s = of_cells(to, slots, n);
    s.type = source.type;
    s.strides = source.strides;
    s.parallel = threads;
    return tqkv_encode(&s, source.data, n, 0);
}

} // namespace

stream::~stream()
{
    release(codes_.codes, codes_.codes_size);
    release(codes_.norms, codes_.norms_size);
    release(halves_.codes, halves_.codes_size);
}

bool stream::open(tqkv_format format, int head_dim, int n_heads, int n_cells, const float *center, const float *scale,
                  bool with_ends)
{
    codes_.format = format;
    codes_.head_dim = head_dim;
    codes_.n_kv_heads = n_heads;
    codes_.capacity = n_cells;
    codes_.center = center;
    codes_.channel_scale = scale;
    codes_.codes_size = tqkv_codes_size(&codes_);
    codes_.norms_size = tqkv_norms_size(&codes_);
    if (!codes_.codes_size) return false;
    codes_.codes = zeros(codes_.codes_size);
    codes_.norms = codes_.norms_size ? (float *)zeros(codes_.norms_size) : nullptr;
    with_ends_ = with_ends && format != TQKV_F16;
    halves_ = codes_;
    halves_.format = TQKV_F16;
    halves_.rotation = TQKV_ROTATION_ON;
    halves_.capacity = 0;
    halves_.codes = nullptr;
    halves_.norms = nullptr;
    halves_.codes_size = halves_.norms_size = 0;
    return codes_.codes && (codes_.norms || !codes_.norms_size);
}

bool stream::reserve(int n_slots)
{
    if (n_slots <= halves_.capacity) return true;
    tqkv_store larger = halves_;
    larger.capacity = n_slots;
    larger.codes_size = tqkv_codes_size(&larger);
    larger.codes = larger.codes_size ? zeros(larger.codes_size) : nullptr;
    if (!larger.codes) return false;
    if (halves_.codes) tqkv_store_convert(&larger, &halves_, 0, halves_.capacity);
    release(halves_.codes, halves_.codes_size);
    halves_ = larger;
    written_.resize((size_t)n_slots, 0);
    return true;
}

bool stream::move_slots(const ends_map::moves &moved, const ends_map &ends)
{
    if (!with_ends_ || !halves_.codes) return true;
    const tqkv_store old = halves_;
    const std::vector<uint32_t> written = written_;
    std::vector<int32_t> from, to;
    halves_.codes = nullptr;
    halves_.capacity = 0;
    written_.clear();
    const bool done = ends.capacity() == 0 || reserve(ends.capacity());
    for (const auto &m : moved) {
        if (!done || m.first >= old.capacity) continue;
        written_[(size_t)m.second] = written[(size_t)m.first];
        from.push_back(m.first);
        to.push_back(m.second);
    }
    const int n = (int)from.size();
    const tqkv_store source = of_cells(old, from.data(), n), target = of_cells(halves_, to.data(), n);
    if (n > 0) tqkv_store_convert(&target, &source, 0, n);
    release(old.codes, old.codes_size);
    return done;
}

void stream::forget(const int32_t *cells, int n, const ends_map &ends)
{
    for (int i = 0; i < n; i++) {
        const int32_t at = ends.slot_of(cells[i]);
        if (at >= 0 && (size_t)at < written_.size()) written_[(size_t)at] = 0;
    }
}

bool stream::has_half(int32_t cell, const ends_map &ends) const
{
    const int32_t at = ends.slot_of(cell);
    return at >= 0 && (size_t)at < written_.size() && written_[(size_t)at] == ends.generation(at);
}

tqkv_result stream::write(const rows &source, const int32_t *cells, int n, const ends_map &ends, tqkv_parallel threads)
{
    const tqkv_result r = encode(codes_, source, cells, n, threads);
    if (r != TQKV_OK || !with_ends_) return r;
    forget(cells, n, ends);
    std::vector<int32_t> slots((size_t)n);
    bool any = false;
    for (int i = 0; i < n; i++) any |= (slots[(size_t)i] = ends.slot_of(cells[i])) >= 0;
    if (!any) return r;
    if (!reserve(ends.capacity())) return TQKV_OUT_OF_MEMORY;
    const tqkv_result halves = encode(halves_, source, slots.data(), n, threads);
    for (int32_t at : slots)
        if (at >= 0 && halves == TQKV_OK) written_[(size_t)at] = ends.generation(at);
    return halves;
}

tqkv_result stream::read(const int32_t *cells, int n, const ends_map &ends, tqkv_type type, void *out,
                         tqkv_parallel threads) const
{
    const size_t size = row_values() * (type == TQKV_TYPE_F32 ? 4 : 2);
    for (int i = 0; i < n;) {
        const bool half = has_half(cells[i], ends);
        std::vector<int32_t> slots;
        for (; i < n && has_half(cells[i], ends) == half; i++)
            slots.push_back(half ? ends.slot_of(cells[i]) : cells[i]);
        tqkv_store s = of_cells(half ? halves_ : codes_, slots.data(), (int)slots.size());
        s.type = type;
        s.strides = {};
        s.parallel = threads;
        char *to = (char *)out + ((size_t)i - slots.size()) * size;
        const tqkv_result r = tqkv_decode(&s, 0, (int)slots.size(), TQKV_ORIGINAL, to);
        if (r != TQKV_OK) return r;
    }
    return TQKV_OK;
}

tqkv_result stream::copy(const int32_t *from, const int32_t *to, int n, const ends_map &ends)
{
    const tqkv_store source = of_cells(codes_, from, n), target = of_cells(codes_, to, n);
    const tqkv_result r = tqkv_store_convert(&target, &source, 0, n);
    if (r != TQKV_OK || !with_ends_) return r;
    forget(to, n, ends);
    std::vector<int32_t> old_slots, new_slots;
    if (!reserve(ends.capacity())) return TQKV_OUT_OF_MEMORY;
    for (int i = 0; i < n; i++) {
        if (!has_half(from[i], ends) || ends.slot_of(to[i]) < 0) continue;
        old_slots.push_back(ends.slot_of(from[i]));
        new_slots.push_back(ends.slot_of(to[i]));
    }
    const int count = (int)new_slots.size();
    if (count == 0) return TQKV_OK;
    const tqkv_store halves = of_cells(halves_, old_slots.data(), count),
                     copied = of_cells(halves_, new_slots.data(), count);
    const tqkv_result moved = tqkv_store_convert(&copied, &halves, 0, count);
    for (int32_t at : new_slots)
        if (moved == TQKV_OK) written_[(size_t)at] = ends.generation(at);
    return moved;
}

} // namespace tqkv_llama
