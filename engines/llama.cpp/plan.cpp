#include "plan.h"

#include "ends.h"

#include <algorithm>
#include <cstring>

namespace tqkv_llama
{
namespace
{

enum : uint16_t { HIDDEN = 0xfc00, SIGN = 0x8000 };

const uint16_t *row_of(const mask_view &m, int stream, int query)
{
    return (const uint16_t *)((const char *)m.data + (size_t)stream * m.stream_bytes + (size_t)query * m.row_bytes);
}

bool same(const uint16_t *x, const uint16_t *y, int64_t from, int64_t end)
{
    return from >= end || memcmp(x + from, y + from, (size_t)(end - from) * sizeof *x) == 0;
}

/* Equal but at a and b; b < 0: at a alone. */
bool equal_but(const uint16_t *x, const uint16_t *y, int64_t n, int64_t a, int64_t b)
{
    const int64_t low = b < 0 ? a : std::min(a, b), high = std::max(a, b);
    return same(x, y, 0, low) && same(x, y, low + 1, high) && same(x, y, high + 1, n);
}

/* The cells that a query sees, in the order of their positions. */
bool list_visible(const uint16_t *row, int n, int32_t base, const uint32_t *order, std::vector<int32_t> *cells)
{
    bool sorted = true;
    for (int i = 0; i < n; i++) {
        if (row[i] == HIDDEN) continue;
        if ((row[i] & ~SIGN) != 0) return false;
        if (!cells->empty()) sorted &= order[cells->back()] <= order[base + i];
        cells->push_back(base + i);
    }
    const auto before = [&](int32_t x, int32_t y) { return order[x] < order[y]; };
    if (!sorted) std::stable_sort(cells->begin(), cells->end(), before);
    return true;
}

/* Queries behind the first of a run that go on with it. */
void extend(const mask_view &m, int stream, int query, const int32_t *own, int32_t base, run *r)
{
    const size_t seen = r->cells.size();
    size_t gone = 0;
    for (int i = query + 1; own && i < m.n_queries; i++) {
        const uint16_t *last = row_of(m, stream, i - 1), *next = row_of(m, stream, i);
        const int64_t cell = own[i] - base;
        if (cell < 0 || cell >= m.n_cells || last[cell] != HIDDEN || next[cell] == HIDDEN) return;
        const int64_t oldest = r->cells[gone] - base;
        const bool alone = r->cells.size() - gone == 1;
        const bool drops = !alone && next[oldest] == HIDDEN;
        if (r->window && !drops) return;
        if (!equal_but(last, next, m.n_cells, cell, drops ? oldest : -1)) return;
        if (drops && !r->window) r->window = (int)seen + r->n_queries - 1;
        gone += drops;
        r->cells.push_back(own[i]);
        r->n_queries++;
    }
}

void find_pages(run *r)
{
    const size_t n = r->cells.size(), pad = (size_t)(r->cells[0] % PAGE);
    r->pages.resize((n + pad + PAGE - 1) / PAGE);
    for (size_t i = 0; i < n; i++) {
        int32_t &page = r->pages[(i + pad) / PAGE];
        if (i == 0 || (i + pad) % PAGE == 0) page = r->cells[i] / PAGE;
        if (r->cells[i] == page * PAGE + (int32_t)((i + pad) % PAGE)) continue;
        r->pages.clear();
        return;
    }
}

} // namespace

bool make_runs(const mask_view &m, const int32_t *own, const uint32_t *order, std::vector<run> *runs)
{
    runs->clear();
    for (int s = 0; s < m.n_streams; s++) {
        const int32_t base = m.first_cell + s * m.cells_a_stream;
        const int32_t *cells = own ? own + (size_t)s * (size_t)m.n_queries : nullptr;
        for (int i = 0; i < m.n_queries;) {
            run r = {s * m.n_queries + i, 1, {}, 0, {}};
            if (!list_visible(row_of(m, s, i), m.n_cells, base, order, &r.cells)) return false;
            /* Only a query whose own cell is the newest of what it sees can be gone on with. */
            if (!r.cells.empty() && cells && r.cells.back() == cells[i]) extend(m, s, i, cells, base, &r);
            if (!r.cells.empty()) find_pages(&r);
            i += r.n_queries;
            runs->push_back(std::move(r));
        }
    }
    return true;
}

} // namespace tqkv_llama
