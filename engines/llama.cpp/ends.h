/* Which cells of a cache have their rows as halves beside the codes: a cell's half lies in a slot, the same in
 * all layers. Needed are those of the first and of the newest positions of each sequence. Nothing says when a sequence
 * ends, so a slot is taken back when another cell needs it: first from cells that their sequence has left behind. */
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tqkv_llama
{

class ends_map
{
  public:
    struct slot {
        int32_t cell = -1;       /* -1: free */
        uint32_t generation = 0; /* counts the cells that have had it: a half of another one is none */
        uint64_t used = 0;       /* the last graph that wrote it, or read it as an end */
        uint64_t kept = 0;       /* the last graph that read it as an end */
        bool passed = false;     /* its sequence has gone on: it is no end any more */
    };

    void open(size_t n_cells, int limit);
    /* For each cell a slot, while there are any: all slots that the graph does not read may be taken. */
    void take(const int32_t *cells, size_t n, uint64_t graph);
    void release(int32_t cell);
    void release_all();
    /* It is an end of a sequence in this graph, or was one; of two runs that share a cell one may keep it. */
    void keep(int32_t cell, uint64_t graph);
    void pass(int32_t cell, uint64_t graph);
    void set_limit(int limit) { limit_ = limit; }

    int32_t slot_of(int32_t cell) const { return slot_of_[(size_t)cell]; }
    uint32_t generation(int32_t at) const { return slots_[(size_t)at].generation; }
    const std::vector<slot> &slots() const { return slots_; }
    int capacity() const { return (int)slots_.size(); }
    int n_needed() const; /* slots that no sequence has passed */
    /* Slots that are left when those not needed any more go. The moved ones: [new slot] = old slot. */
    std::vector<int32_t> shrink();

  private:
    void find_free(size_t n, uint64_t graph, std::vector<int32_t> *found);
    void give(int32_t at, int32_t cell, uint64_t graph);

    std::vector<int32_t> slot_of_; /* [cells] */
    std::vector<slot> slots_;
    int limit_ = 0;
};

} // namespace tqkv_llama
