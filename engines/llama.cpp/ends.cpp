#include "ends.h"

#include <algorithm>

namespace tqkv_llama
{

void ends_map::open(size_t n_cells, int limit)
{
    page_of_.assign((n_cells + PAGE - 1) / PAGE, -1);
    limit_ = limit;
}

ends_map::page_state ends_map::state_of(size_t page) const
{
    page_state state;
    for (size_t i = page * PAGE; i < (page + 1) * PAGE; i++) {
        if (slots_[i].cell < 0) continue;
        state.empty = false;
        state.needed |= !slots_[i].passed;
        state.used = std::max(state.used, slots_[i].used);
    }
    return state;
}

/* Free pages, then those that were passed, the longest ago first, then new ones up to the limit, then ends of the
   sequence that has been idle for longest. */
void ends_map::find_free(size_t n, uint64_t graph, std::vector<int32_t> *found)
{
    std::vector<std::pair<page_state, int32_t>> idle;
    size_t n_passed = 0;
    for (size_t i = 0; i < cells_of_.size(); i++) {
        const page_state state = state_of(i);
        if (state.empty && found->size() < n) found->push_back((int32_t)i);
        if (state.empty || state.used == graph) continue;
        n_passed += !state.needed;
        idle.push_back({state, (int32_t)i});
    }
    const size_t growth = found->size() + n_passed < n ? n - found->size() - n_passed : 0;
    const size_t most = (size_t)(limit_ + PAGE - 1) / PAGE, room = most - std::min(most, cells_of_.size());
    for (size_t i = 0; i < std::min(room, growth); i++) {
        found->push_back((int32_t)cells_of_.size());
        cells_of_.push_back(-1);
    }
    slots_.resize(cells_of_.size() * PAGE);
    std::sort(idle.begin(), idle.end(), [](const auto &x, const auto &y) {
        return x.first.needed != y.first.needed ? y.first.needed : x.first.used < y.first.used;
    });
    for (size_t i = 0; i < idle.size() && found->size() < n; i++) found->push_back(idle[i].second);
}

void ends_map::give_page(int32_t page, int32_t cells)
{
    int32_t &before = cells_of_[(size_t)page];
    if (before >= 0) page_of_[(size_t)before] = -1;
    for (int i = 0; i < PAGE; i++) slots_[(size_t)(page * PAGE + i)].cell = -1;
    before = cells;
    page_of_[(size_t)cells] = page;
}

/* A slot for a cell whose page has slots. */
void ends_map::give(int32_t cell, uint64_t graph)
{
    const int32_t page = page_of(cell / PAGE);
    if (page < 0) return;
    slot &s = slots_[(size_t)(page * PAGE + cell % PAGE)];
    if (s.cell < 0) s = {cell, s.generation + 1, graph, 0, false};
    s.used = graph;
    s.passed = false;
}

void ends_map::take(const int32_t *cells, size_t n, uint64_t graph)
{
    enum { WANTED = -2 };
    std::vector<int32_t> wanted, found;
    for (size_t i = 0; i < n; i++) {
        int32_t &page = page_of_[(size_t)(cells[i] / PAGE)];
        give(cells[i], graph);
        if (page == -1) wanted.push_back(cells[i] / PAGE);
        if (page == -1) page = WANTED;
    }
    if (wanted.empty()) return;
    find_free(wanted.size(), graph, &found);
    for (int32_t page : wanted) page_of_[(size_t)page] = -1;
    /* Of too few the newest cells get them. */
    for (size_t i = 0; i < found.size(); i++) give_page(found[i], wanted[wanted.size() - found.size() + i]);
    for (size_t i = 0; i < n; i++) give(cells[i], graph);
}

void ends_map::release(int32_t cell)
{
    const int32_t at = slot_of(cell);
    if (at >= 0) slots_[(size_t)at].cell = -1;
}

void ends_map::release_all()
{
    std::fill(page_of_.begin(), page_of_.end(), -1);
    std::fill(cells_of_.begin(), cells_of_.end(), -1);
    for (slot &s : slots_) s.cell = -1;
}

void ends_map::keep(int32_t cell, uint64_t graph)
{
    const int32_t at = slot_of(cell);
    if (at < 0) return;
    slots_[(size_t)at].used = slots_[(size_t)at].kept = graph;
    slots_[(size_t)at].passed = false;
}

void ends_map::pass(int32_t cell, uint64_t graph)
{
    const int32_t at = slot_of(cell);
    if (at >= 0 && slots_[(size_t)at].kept != graph) slots_[(size_t)at].passed = true;
}

int ends_map::n_needed() const
{
    int n = 0;
    for (size_t i = 0; i < cells_of_.size(); i++) n += state_of(i).needed ? PAGE : 0;
    return n;
}

ends_map::moves ends_map::shrink()
{
    moves moved;
    std::vector<slot> left;
    std::vector<int32_t> cells_of;
    for (size_t page = 0; page < cells_of_.size(); page++) {
        if (cells_of_[page] >= 0) page_of_[(size_t)cells_of_[page]] = -1;
        if (!state_of(page).needed) continue;
        page_of_[(size_t)cells_of_[page]] = (int32_t)cells_of.size();
        cells_of.push_back(cells_of_[page]);
        for (size_t i = page * PAGE; i < (page + 1) * PAGE; i++) {
            const bool needed = slots_[i].cell >= 0 && !slots_[i].passed;
            if (needed) moved.push_back({(int32_t)i, (int32_t)left.size()});
            left.push_back(needed ? slots_[i] : slot());
        }
    }
    slots_.swap(left);
    cells_of_.swap(cells_of);
    return moved;
}

} // namespace tqkv_llama
