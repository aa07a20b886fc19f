/* Which cells of a cache have their rows as halves beside the codes: a cell's half lies in a slot, the same in
 * all layers. Needed are those of the first and of the newest positions of each sequence. Nothing says when a sequence
 * ends, so slots are taken back when other cells need them: first from cells that their sequence has left behind.
 * Slots come in pages, as cells do: attention over whole pages of cells then reads whole pages of halves. */
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace tqkv_llama
{

enum { PAGE = 64 };

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
    typedef std::vector<std::pair<int32_t, int32_t>> moves; /* old slot, new slot */

    void open(size_t n_cells, int limit);
    /* For each cell a slot, while there are any: all pages that the graph does not read may be taken. */
    void take(const int32_t *cells, size_t n, uint64_t graph);
    void release(int32_t cell);
    void release_all();
    /* It is an end of a sequence in this graph, or was one; of two runs that share a cell one may keep it. */
    void keep(int32_t cell, uint64_t graph);
    void pass(int32_t cell, uint64_t graph);
    void set_limit(int limit) { limit_ = limit; }

    int32_t slot_of(int32_t cell) const
    {
        const int32_t page = page_of(cell / PAGE), at = page * PAGE + cell % PAGE;
        return page >= 0 && slots_[(size_t)at].cell == cell ? at : -1;
    }
    /* The page of slots for a page of cells; -1: there is none. */
    int32_t page_of(int32_t page) const { return page_of_[(size_t)page]; }
    uint32_t generation(int32_t at) const { return slots_[(size_t)at].generation; }
    const std::vector<slot> &slots() const { return slots_; }
    int capacity() const { return (int)slots_.size(); }
    int n_needed() const; /* slots of pages that some sequence has not passed */
    /* Only cells that no sequence has passed, and their pages, are left. */
    moves shrink();

  private:
    struct page_state {
        bool empty = true, needed = false;
        uint64_t used = 0;
    };
    page_state state_of(size_t page) const;
    void find_free(size_t n, uint64_t graph, std::vector<int32_t> *found);
    void give_page(int32_t page, int32_t cells);
    void give(int32_t cell, uint64_t graph);

    std::vector<int32_t> page_of_;  /* [pages of cells] */
    std::vector<int32_t> cells_of_; /* [pages of slots] their page of cells, or -1 */
    std::vector<slot> slots_;
    int limit_ = 0; /* slots */
};

} // namespace tqkv_llama
