/* Attention of a graph over a cache: from its mask to runs of queries and from these to calls of tqkv. */
#include "cache.h"

#include <cstring>

namespace tqkv_llama
{

/* What an attention over a run reads. */
struct cache::item {
    tqkv_store keys, values, halves[2];
    tqkv_attention call;
    std::vector<int32_t> slots; /* of the halves, by position, or pages of them */
    const void *queries;
    void *out;
};

/* The ends of a run's sequence stay, what lies between them may go. */
void cache::mark_ends(const run &r)
{
    const size_t n = r.cells.size(), last = (size_t)exact_last(n), first = (size_t)preset_.exact_first;
    for (size_t i = 0; i < n; i++) {
        const bool newest = i + last >= n;
        const int32_t at = ends_.slot_of(r.cells[i]);
        if (at < 0) continue;
        /* Under a window what is the oldest now has been passed. */
        const bool sink = i < first && !ends_.slots()[(size_t)at].passed;
        if (newest || sink)
            ends_.keep(r.cells[i], batches_);
        else
            ends_.pass(r.cells[i], batches_);
    }
}

tqkv_result cache::make_plan(const mask_view &mask)
{
    const bool whole = batch_.size() == (size_t)mask.n_queries * (size_t)mask.n_streams;
    plans_++;
    planned_ = mask;
    planned_batch_ = batches_;
    if (!make_runs(mask, whole ? batch_.data() : nullptr, order_.data(), &runs_)) {
        planned_batch_ = NO_BATCH;
        say("a mask that adds to scores (ALiBi) is not supported: run without -dev TQKV");
        return TQKV_UNSUPPORTED;
    }
    if (preset_.exact_last > 0)
        for (const run &r : runs_) mark_ends(r);
    return TQKV_OK;
}

/* Halves count where keys and values have them: the first ones, and the newest without a gap. */
void cache::find_ends(const layer &l, const run &r, item *to) const
{
    const stream &keys = l.streams[KEYS], &values = l.streams[VALUES];
    const int n = (int)r.cells.size();
    const auto has = [&](int i) {
        const int32_t c = r.cells[(size_t)i];
        return (!keys.has_ends() || keys.has_half(c, ends_)) && (!values.has_ends() || values.has_half(c, ends_));
    };
    const auto is_sink = [&](int i) {
        const int32_t at = ends_.slot_of(r.cells[(size_t)i]);
        return at >= 0 && !ends_.slots()[(size_t)at].passed && has(i);
    };
    const int oldest = n - r.n_queries - exact_last((size_t)n) + 1;
    int from = n, first = 0;
    while (from > 0 && from > oldest && has(from - 1)) from--;
    while (first < preset_.exact_first && first < n && is_sink(first)) first++;
    to->call.first.n = first;
    to->call.last.n = exact_last((size_t)n);
    to->call.last.from = from;
}

void cache::list_slots(const run &r, bool by_page, item *to) const
{
    const int n = (int)r.cells.size(), first = (int)to->call.first.n, from = (int)to->call.last.from;
    if (by_page) {
        for (int32_t page : r.pages) to->slots.push_back(ends_.page_of(page));
        return;
    }
    to->slots.assign((size_t)n, -1);
    for (int i = 0; i < first; i++) to->slots[(size_t)i] = ends_.slot_of(r.cells[(size_t)i]);
    for (int i = from; i < n; i++) to->slots[(size_t)i] = ends_.slot_of(r.cells[(size_t)i]);
}

static void set_pages(tqkv_store *s, const std::vector<int32_t> &pages, int page_size)
{
    s->pages = pages.data();
    s->n_pages = (int)pages.size();
    s->page_size = page_size;
}

void cache::fill_item(const layer &l, const run &r, const attention_call &call, item *to) const
{
    tqkv_attention *a = &to->call;
    const int n = (int)r.cells.size();
    to->keys = l.streams[KEYS].codes();
    to->values = l.streams[VALUES].codes();
    *a = tqkv_attention();
    a->last.from = n;
    const bool ends = l.streams[KEYS].has_ends() || l.streams[VALUES].has_ends();
    if (ends) find_ends(l, r, to);
    /* Cells that begin within a page have unseen positions in front of them, which cannot have exact first ones. */
    const int within = r.pages.empty() ? 0 : r.cells[0] % PAGE;
    const bool by_page = !r.pages.empty() && n_cells_ % PAGE == 0 && (within == 0 || a->first.n == 0);
    const int pad = by_page ? within : 0, page_size = by_page ? PAGE : 1;
    if (ends) list_slots(r, by_page, to);
    a->last.from += pad;
    set_pages(&to->keys, by_page ? r.pages : r.cells, page_size);
    set_pages(&to->values, by_page ? r.pages : r.cells, page_size);
    for (int s = 0; ends && s < 2; s++) {
        if (!l.streams[s].has_ends() || !l.streams[s].halves().codes) continue;
        to->halves[s] = l.streams[s].halves();
        set_pages(&to->halves[s], to->slots, page_size);
        (s == KEYS ? a->last.keys : a->last.values) = &to->halves[s];
        if (a->first.n > 0) (s == KEYS ? a->first.keys : a->first.values) = &to->halves[s];
    }
    a->keys = &to->keys;
    a->values = &to->values;
    a->n_heads = call.n_heads;
    a->n_queries = r.n_queries;
    a->end = n + pad;
    a->kv_len = n;
    a->window = r.window;
    a->scale = call.scale;
    a->softcap = call.softcap;
    a->sinks = call.sinks;
    a->query_strides = call.query_strides;
    a->parallel = threads_;
}

tqkv_result cache::attend(layer *l, const mask_view &mask, const attention_call &call)
{
    const bool planned = planned_batch_ == batches_ && l->attended != plans_ && planned_.data == mask.data &&
                         planned_.n_cells == mask.n_cells && planned_.n_queries == mask.n_queries &&
                         planned_.n_streams == mask.n_streams && planned_.first_cell == mask.first_cell;
    const tqkv_result r = planned ? TQKV_OK : make_plan(mask);
    if (r != TQKV_OK) return r;
    l->attended = plans_;
    std::vector<item> items(runs_.size());
    std::vector<tqkv_attention> calls(runs_.size());
    std::vector<const void *> queries(runs_.size());
    std::vector<void *> outs(runs_.size());
    const size_t row = (size_t)call.n_heads * (size_t)l->value_dim;
    size_t n = 0;
    for (size_t i = 0; i < runs_.size(); i++) {
        const size_t first = (size_t)runs_[i].first, n_q = (size_t)mask.n_queries;
        if (runs_[i].cells.empty()) {
            memset(call.out + first * row, 0, row * sizeof *call.out);
            continue;
        }
        fill_item(*l, runs_[i], call, &items[n]);
        calls[n] = items[n].call;
        queries[n] = call.queries + first % n_q * call.query_strides.token + first / n_q * call.query_stream_stride;
        outs[n++] = call.out + first * row;
    }
    return tqkv_attend_batch(calls.data(), (int)n, queries.data(), outs.data());
}

} // namespace tqkv_llama
