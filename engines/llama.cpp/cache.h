/* A KV cache of an engine: a pool of cells for all its sequences, with keys and values of each layer in tqkv's formats,
 * and the newest and first positions of each sequence as halves. It has nothing of ggml in it: nodes.cpp calls it. */
#pragma once
#include "options.h"
#include "plan.h"
#include "stream.h"

#include <map>
#include <memory>

namespace tqkv_llama
{

enum side { KEYS = 0, VALUES = 1 };

struct layer {
    int number = 0;
    int key_dim = 0, value_dim = 0, n_heads = 0; /* 0: not known yet */
    stream streams[2];
    std::vector<float> center, scale; /* of the keys, [n_heads][key_dim] */
    int lessons = 0;                  /* what it has learned, of cache.lessons */
    uint64_t written[2] = {0, 0};     /* the batch that wrote it last */
    uint64_t attended = 0;            /* the plan that it used last */
};

/* Attention of a graph's node over one layer; strides in values. */
struct attention_call {
    const float *queries, *sinks;
    float *out;
    tqkv_strides query_strides;
    size_t query_stream_stride;
    int n_heads;
    float scale, softcap;
};

class cache
{
  public:
    cache(const options &o, int n_cells, int cells_a_stream, tqkv_type nominal);

    /* The layer of this number, made on first use. */
    layer *find(int number);
    /* Makes room for a layer's rows once its shape is known. False: tqkv has no code for it, or no memory. */
    bool open(layer *l);
    static bool fits(const options &o, int key_dim, int value_dim, int n_heads);

    /* What a graph does: rows of its tokens to their cells, then attention with what is there. */
    tqkv_result write(layer *l, side s, const rows &source, const int32_t *cells, int n);
    tqkv_result attend(layer *l, const mask_view &mask, const attention_call &call);
    tqkv_result turn(layer *l, const int32_t *cells, int n, const float *keys);

    /* What happens between graphs: rows come and go as the engine's own type, see row_tag.h. */
    tqkv_result save(const layer &l, side s, int32_t first, int n, void *out) const;
    tqkv_result load(layer *l, side s, int32_t first, int n, const void *source);
    tqkv_result read(const layer &l, side s, const int32_t *cells, int n, float *out) const;
    tqkv_result copy(layer *l, side s, int32_t from, int32_t to, int n);
    void forget(layer *l, side s, int32_t first, int n);
    void clear();

    void set_threads(tqkv_parallel threads) { threads_ = threads; }
    tqkv_type nominal() const { return nominal_; }
    int n_cells() const { return n_cells_; }
    int cells_a_stream() const { return cells_a_stream_; }
    /* Makes room for all layers whose shape is known; the bytes that they have. */
    size_t open_all();
    const ends_map &ends() const { return ends_; }
    bool is_learning() const { return learning_; }
    size_t n_runs() const { return runs_.size(); }

  private:
    void begin_batch(const int32_t *cells, int n);
    bool has_heard_enough() const;
    bool is_teacher(const layer &l) const;
    void listen(const rows &values, const layer &l, const int32_t *cells, int n);
    tqkv_result learn(layer *l);
    void end_learning();
    void give_back();
    tqkv_result make_plan(const mask_view &mask);
    void mark_ends(const run &r);

    struct item;
    void fill_item(const layer &l, const run &r, const attention_call &call, item *to) const;
    void find_ends(const layer &l, const run &r, item *to) const;
    void list_slots(const run &r, bool by_page, item *to) const;
    int exact_last(size_t n) const { return learning_ ? (int)n : preset_.exact_last; }

    tqkv_cache_desc preset_;
    const profile *profile_;
    int n_cells_, cells_a_stream_;
    tqkv_type nominal_;
    tqkv_parallel threads_ = {};
    std::map<int, std::unique_ptr<layer>> layers_;
    std::vector<uint32_t> order_; /* [cells] when the cell's row came: sorts a sequence; 0: never */
    uint32_t clock_ = 0;
    ends_map ends_;

    /* The batch of the graph, and what its mask says. */
    std::vector<int32_t> batch_;
    enum : uint64_t { NO_BATCH = UINT64_MAX };
    uint64_t batches_ = 0, plans_ = 0, planned_batch_ = NO_BATCH;
    mask_view planned_ = {};
    std::vector<run> runs_;

    /* Until it has learned, all rows are halves. The lesson: cells whose values tell something new. */
    bool learning_ = false, settling_ = false; /* settling: it has learned, and has more halves than it needs */
    int lessons_ = 0, lesson_size_ = 0, heard_ = 0;
    std::vector<int32_t> lesson_;
    std::vector<float> last_heard_;
};

} // namespace tqkv_llama
