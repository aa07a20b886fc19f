#include "ends.h"

#include <algorithm>

namespace tqkv_llama
{

void ends_map::open(size_t n_cells, int limit)
{
    slot_of_.assign(n_cells, -1);
    limit_ = limit;
}

void ends_map::give(int32_t at, int32_t cell, uint64_t graph)
{
    slot &s = slots_[(size_t)at];
    if (s.cell >= 0) slot_of_[(size_t)s.cell] = -1;
    s.cell = cell;
    s.generation++;
    s.used = graph;
    s.kept = 0;
    s.passed = false;
    slot_of_[(size_t)cell] = at;
}

/* Free slots, then those that were passed, the longest ago first, then new ones up to the limit, then ends of the
   sequence that has been idle for longest. */
void ends_map::find_free(size_t n, uint64_t graph, std::vector<int32_t> *found)
{
    std::vector<int32_t> idle;
    size_t n_passed = 0;
    for (int32_t i = 0; i < capacity(); i++) {
        const slot &s = slots_[(size_t)i];
        if (s.cell < 0 && found->size() < n) found->push_back(i);
        if (s.cell < 0 || s.used == graph) continue;
        n_passed += s.passed;
        idle.push_back(i);
    }
    const size_t growth = found->size() + n_passed < n ? n - found->size() - n_passed : 0;
    const size_t room = limit_ > capacity() ? (size_t)(limit_ - capacity()) : 0;
    for (size_t i = 0; i < std::min(room, (growth + 63) / 64 * 64); i++) {
        if (found->size() < n) found->push_back(capacity());
        slots_.emplace_back();
    }
    const size_t more = std::min(n - found->size(), idle.size());
    const auto order = [&](int32_t a, int32_t b) {
        const slot &x = slots_[(size_t)a], &y = slots_[(size_t)b];
        return x.passed != y.passed ? x.passed : x.used < y.used;
    };
    if (more > 0) std::nth_element(idle.begin(), idle.begin() + (ptrdiff_t)more - 1, idle.end(), order);
    found->insert(found->end(), idle.begin(), idle.begin() + (ptrdiff_t)more);
}

void ends_map::take(const int32_t *cells, size_t n, uint64_t graph)
{
    std::vector<int32_t> without, found;
    for (size_t i = 0; i < n; i++) {
        const int32_t at = slot_of_[(size_t)cells[i]];
        if (at < 0) {
            without.push_back(cells[i]);
            continue;
        }
        slots_[(size_t)at].used = graph;
        slots_[(size_t)at].passed = false;
    }
    if (without.empty()) return;
    find_free(without.size(), graph, &found);
    /* Of too few the newest cells get them. */
    for (size_t i = 0; i < found.size(); i++) give(found[i], without[without.size() - found.size() + i], graph);
}

void ends_map::release(int32_t cell)
{
    const int32_t at = slot_of_[(size_t)cell];
    if (at < 0) return;
    slots_[(size_t)at].cell = -1;
    slot_of_[(size_t)cell] = -1;
}

void ends_map::release_all()
{
    std::fill(slot_of_.begin(), slot_of_.end(), -1);
    for (slot &s : slots_) s.cell = -1;
}

void ends_map::keep(int32_t cell, uint64_t graph)
{
    const int32_t at = slot_of_[(size_t)cell];
    if (at < 0) return;
    slots_[(size_t)at].used = slots_[(size_t)at].kept = graph;
    slots_[(size_t)at].passed = false;
}

void ends_map::pass(int32_t cell, uint64_t graph)
{
    const int32_t at = slot_of_[(size_t)cell];
    if (at >= 0 && slots_[(size_t)at].kept != graph) slots_[(size_t)at].passed = true;
}

int ends_map::n_needed() const
{
    return (int)std::count_if(slots_.begin(), slots_.end(), [](const slot &s) { return s.cell >= 0 && !s.passed; });
}

std::vector<int32_t> ends_map::shrink()
{
    std::vector<int32_t> kept;
    for (int32_t i = 0; i < capacity(); i++) {
        const slot &s = slots_[(size_t)i];
        if (s.cell < 0) continue;
        if (s.passed)
            slot_of_[(size_t)s.cell] = -1;
        else
            kept.push_back(i);
    }
    std::vector<slot> left((kept.size() + 63) / 64 * 64);
    for (size_t i = 0; i < kept.size(); i++) {
        left[i] = slots_[(size_t)kept[i]];
        slot_of_[(size_t)left[i].cell] = (int32_t)i;
    }
    slots_.swap(left);
    return kept;
}

} // namespace tqkv_llama
