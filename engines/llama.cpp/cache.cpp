#include "cache.h"

#include "row_tag.h"

#include <algorithm>
#include <cstring>

namespace tqkv_llama
{
namespace
{

/* Ends of so many sequences find room in any cache; a larger one has more, an eighth of its cells. */
enum { SEQUENCES = 16 };

/* After a prompt, when so few tokens come, its halves go, but for some that drafts and answers taken back may need. */
enum { FEW = 64, LEFT = 128 };

std::vector<int32_t> range_of(int32_t first, int n)
{
    std::vector<int32_t> cells((size_t)n);
    for (int i = 0; i < n; i++) cells[(size_t)i] = first + i;
    return cells;
}

int pages_of(int n_cells) { return (n_cells + PAGE - 1) / PAGE; }

int ends_limit(const tqkv_cache_desc &preset, int n_cells)
{
    const int each = PAGE * (pages_of(preset.exact_first) + pages_of(preset.exact_last) + 1);
    return std::min(n_cells, std::max(SEQUENCES * each, n_cells / 8));
}

} // namespace

cache::cache(const options &o, int n_cells, int cells_a_stream, tqkv_type nominal)
    : preset_(o.preset), profile_(&o.learned), n_cells_(n_cells), cells_a_stream_(cells_a_stream), nominal_(nominal),
      order_((size_t)n_cells, 0)
{
    ends_.open((size_t)n_cells, ends_limit(preset_, n_cells));
    learning_ = o.learned.n_layers == 0 && preset_.calibrate > 0 && preset_.key_format != TQKV_F16;
    lesson_size_ = std::max(16, std::min(preset_.calibrate, n_cells / 4));
    if (learning_) ends_.set_limit(n_cells);
}

layer *cache::find(int number)
{
    auto &at = layers_[number];
    if (!at) {
        at.reset(new layer);
        at->number = number;
    }
    return at.get();
}

bool cache::fits(const options &o, int key_dim, int value_dim, int n_heads)
{
    tqkv_store s = {};
    s.format = o.preset.key_format;
    s.head_dim = key_dim;
    s.n_kv_heads = n_heads;
    s.capacity = 64;
    if (!tqkv_codes_size(&s)) return false;
    s.format = o.preset.value_format;
    s.head_dim = value_dim;
    return tqkv_codes_size(&s) != 0;
}

bool cache::open(layer *l)
{
    if (l->streams[VALUES].is_open()) return true;
    if (!l->n_heads) return false;
    const size_t n = (size_t)l->n_heads * (size_t)l->key_dim;
    l->center.assign(n, 0.0f);
    l->scale.assign(n, 1.0f);
    bool has_center = preset_.calibrate > 0;
    tqkv_cache_desc desc = preset_;
    desc.head_dim = l->key_dim;
    desc.n_kv_heads = l->n_heads;
    if (profile_->n_layers) {
        const char *reason = profile_desc(profile_, l->number, &desc);
        if (reason) say("layer %d: TQKV_PROFILE %s, so it is not used there", l->number, reason);
        has_center = !reason;
    }
    if (profile_->n_layers && has_center) {
        const profile_layer &learned = profile_->layers[l->number];
        std::copy(learned.center, learned.center + n, l->center.begin());
        std::copy(learned.channel_scale, learned.channel_scale + n, l->scale.begin());
    }
    const float *center = has_center ? l->center.data() : nullptr, *scale = has_center ? l->scale.data() : nullptr;
    const bool ends = preset_.exact_last > 0;
    return l->streams[KEYS].open(desc.key_format, l->key_dim, l->n_heads, n_cells_, center, scale, ends) &&
           l->streams[VALUES].open(desc.value_format, l->value_dim, l->n_heads, n_cells_, nullptr, nullptr, ends);
}

size_t cache::open_all()
{
    size_t sum = 0;
    for (auto &l : layers_)
        if (open(l.second.get())) sum += l.second->streams[KEYS].bytes() + l.second->streams[VALUES].bytes();
    return sum;
}

/* ---- A graph's tokens ---- */

void cache::begin_batch(const int32_t *cells, int n)
{
    if (settling_ || (!learning_ && n <= FEW && ends_.capacity() > ends_.n_needed() + 2 * LEFT)) give_back();
    if (has_heard_enough()) end_learning();
    batches_++;
    batch_.assign(cells, cells + n);
    for (int i = 0; i < n; i++) order_[(size_t)cells[i]] = ++clock_;
    /* A query reads the newest of its own batch as halves. */
    if (preset_.exact_last > 0) ends_.take(cells, (size_t)n, batches_);
}

tqkv_result cache::write(layer *l, side s, const rows &source, const int32_t *cells, int n)
{
    const bool same = batch_.size() == (size_t)n && memcmp(batch_.data(), cells, (size_t)n * sizeof *cells) == 0;
    if (l->written[s] == batches_ || !same) begin_batch(cells, n);
    l->written[s] = batches_;
    tqkv_result r = l->lessons < lessons_ ? learn(l) : TQKV_OK;
    if (r == TQKV_OK) r = l->streams[s].write(source, cells, n, ends_, threads_);
    if (r == TQKV_OK && s == VALUES && is_teacher(*l)) listen(source, *l, cells, n);
    return r;
}

/* ---- Calibration of the pool ---- */

static float value_at(const rows &r, size_t row, size_t head, size_t i, size_t n_heads, size_t dim)
{
    const size_t token = r.strides.token ? r.strides.token : n_heads * dim,
                 step = r.strides.head ? r.strides.head : dim;
    return ((const float *)r.data)[row * token + head * step + i];
}

bool cache::has_heard_enough() const
{
    return learning_ && ((int)lesson_.size() >= lesson_size_ || heard_ >= 4 * lesson_size_);
}

bool cache::is_teacher(const layer &l) const { return learning_ && &l == layers_.begin()->second.get(); }

/* A position tells something new if its values differ from those before by more than a quarter of their squared length:
   one token again and again teaches nothing. The values of the first layer speak for all. */
void cache::listen(const rows &values, const layer &l, const int32_t *cells, int n)
{
    const size_t n_heads = (size_t)l.n_heads, dim = (size_t)l.value_dim;
    last_heard_.resize(n_heads * dim, 0.0f);
    heard_ += n;
    for (int t = 0; t < n; t++) {
        double difference = 0.0, length = 0.0;
        for (size_t i = 0; i < n_heads * dim; i++) {
            const float v = value_at(values, (size_t)t, i / dim, i % dim, n_heads, dim);
            difference += ((double)v - last_heard_[i]) * ((double)v - last_heard_[i]);
            length += (double)v * v;
            last_heard_[i] = v;
        }
        if (difference > length / 4) lesson_.push_back(cells[t]);
    }
}

void cache::end_learning()
{
    std::sort(lesson_.begin(), lesson_.end());
    lesson_.erase(std::unique(lesson_.begin(), lesson_.end()), lesson_.end());
    learning_ = false;
    settling_ = true;
    lessons_++;
}

/* The halves that taught are needed until all layers have learned; then their memory goes. */
void cache::give_back()
{
    settling_ = false;
    lesson_.clear();
    ends_.set_limit(ends_limit(preset_, n_cells_));
    const auto moved = ends_.shrink();
    for (auto &l : layers_)
        for (stream &s : l.second->streams) s.move_slots(moved, ends_);
}

/* Centre and scale from the new positions; fewer than 64 would teach chance. Rows that are there are encoded again,
   from their halves. */
tqkv_result cache::learn(layer *l)
{
    l->lessons = lessons_;
    stream &keys = l->streams[KEYS];
    const size_t n = keys.row_values();
    std::vector<int32_t> taught, there;
    for (int32_t c : lesson_)
        if (keys.has_half(c, ends_)) taught.push_back(c);
    if ((int)taught.size() < std::min(64, lesson_size_)) return TQKV_OK;
    std::vector<char> is_new((size_t)n_cells_, 0);
    for (int32_t c : batch_) is_new[(size_t)c] = 1;
    for (int32_t c = 0; c < n_cells_; c++)
        if (order_[(size_t)c] > 0 && !is_new[(size_t)c]) there.push_back(c);
    std::vector<float> lesson(taught.size() * n), kept(there.size() * n);
    tqkv_result r = keys.read(taught.data(), (int)taught.size(), ends_, TQKV_TYPE_F32, lesson.data(), threads_);
    if (r == TQKV_OK) r = keys.read(there.data(), (int)there.size(), ends_, TQKV_TYPE_F32, kept.data(), threads_);
    if (r != TQKV_OK) return r;
    r = tqkv_calibrate(&keys.codes(), lesson.data(), (int)taught.size(), nullptr, 0, 0, TQKV_PAIRS_NONE,
                       l->center.data(), l->scale.data());
    if (r != TQKV_OK || there.empty()) return r;
    return keys.write({kept.data(), TQKV_TYPE_F32, {}}, there.data(), (int)there.size(), ends_, threads_);
}

/* ---- Between graphs ---- */

tqkv_result cache::read(const layer &l, side s, const int32_t *cells, int n, float *out) const
{
    return l.streams[s].read(cells, n, ends_, TQKV_TYPE_F32, out, threads_);
}

/* A context shift turns keys in place: halves turn with their codes. */
tqkv_result cache::turn(layer *l, const int32_t *cells, int n, const float *keys)
{
    return l->streams[KEYS].write({keys, TQKV_TYPE_F32, {}}, cells, n, ends_, threads_);
}

tqkv_result cache::save(const layer &l, side s, int32_t first, int n, void *out) const
{
    const auto cells = range_of(first, n);
    const size_t size = l.streams[s].row_values();
    const tqkv_result r = l.streams[s].read(cells.data(), n, ends_, nominal_, out, threads_);
    if (r != TQKV_OK || nominal_ != TQKV_TYPE_F16) return r;
    for (int i = 0; i < n; i++) {
        const row_tag tag = {order_[(size_t)(first + i)], l.streams[s].has_half(first + i, ends_)};
        write_tag((uint16_t *)out + (size_t)i * size, size, tag);
    }
    return TQKV_OK;
}

/* Exact rows become ends again: those with a tag, else of what has none the first and the newest. */
tqkv_result cache::load(layer *l, side s, int32_t first, int n, const void *source)
{
    const size_t size = l->streams[s].row_values();
    std::vector<int32_t> exact;
    for (int i = 0; i < n; i++) {
        const int32_t c = first + i;
        row_tag tag;
        if (nominal_ == TQKV_TYPE_F16) tag = read_tag((const uint16_t *)source + (size_t)i * size, size);
        order_[(size_t)c] = tag.order ? tag.order : clock_ + 1;
        clock_ = std::max(clock_, order_[(size_t)c]);
        const bool is_end = i < preset_.exact_first || i >= n - preset_.exact_last;
        if (learning_ || (tag.order ? tag.exact : is_end))
            exact.push_back(c);
        else
            ends_.release(c);
    }
    planned_batch_ = NO_BATCH;
    if (preset_.exact_last > 0) ends_.take(exact.data(), exact.size(), batches_);
    const auto cells = range_of(first, n);
    const tqkv_result r = l->streams[s].write({source, nominal_, {}}, cells.data(), n, ends_, threads_);
    if (r != TQKV_OK || s != VALUES || !is_teacher(*l)) return r;
    std::vector<float> heard((size_t)n * size);
    const tqkv_result done = read(*l, s, cells.data(), n, heard.data());
    if (done == TQKV_OK) listen({heard.data(), TQKV_TYPE_F32, {}}, *l, cells.data(), n);
    return done;
}

tqkv_result cache::copy(layer *l, side s, int32_t from, int32_t to, int n)
{
    std::vector<int32_t> ends;
    const auto source = range_of(from, n), target = range_of(to, n);
    for (int i = 0; i < n; i++) {
        order_[(size_t)(to + i)] = order_[(size_t)(from + i)];
        const int32_t at = ends_.slot_of(from + i);
        if (at < 0) continue;
        if (!ends_.slots()[(size_t)at].passed) ends.push_back(to + i);
    }
    planned_batch_ = NO_BATCH;
    ends_.take(ends.data(), ends.size(), batches_);
    return l->streams[s].copy(source.data(), target.data(), n, ends_);
}

void cache::forget(layer *l, side s, int32_t first, int n)
{
    const auto cells = range_of(first, n);
    l->streams[s].forget(cells.data(), n, ends_);
}

/* What has been heard is not lost: the layers learn before their rows go. */
void cache::clear()
{
    std::fill(order_.begin(), order_.end(), 0u);
    if (has_heard_enough()) {
        end_learning();
        for (auto &l : layers_)
            if (l.second->streams[KEYS].is_open()) learn(l.second.get());
    }
    ends_.release_all();
    lesson_.clear();
    last_heard_.clear();
    heard_ = 0;
    planned_batch_ = NO_BATCH;
}

} // namespace tqkv_llama
