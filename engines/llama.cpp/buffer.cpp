#include "buffer.h"

#include "ggml-backend.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

namespace tqkv_llama
{
namespace
{

struct kv_buffer {
    void *base = nullptr;
    size_t size = 0;
    std::unique_ptr<cache> rows; /* NULL: the processor's own */
    bool used = false;
};

/* Tensors whose sizes were asked for: the next allocation is theirs. */
struct asked {
    std::string name;
    ggml_type type;
    int64_t row_values, n_cells, n_streams;
};
thread_local std::vector<asked> pending;
std::atomic<bool> asked_for_cache{false};

/* "cache_k_l7" -> KEYS, 7 */
bool parse_name(const char *name, side *which, int *number)
{
    char *end = nullptr;
    if (strncmp(name, "cache_", 6) != 0 || (name[6] != 'k' && name[6] != 'v') || strncmp(name + 7, "_l", 2) != 0)
        return false;
    *which = name[6] == 'k' ? KEYS : VALUES;
    *number = (int)strtol(name + 9, &end, 10);
    return end != name + 9 && (*end == '\0' || *end == ' '); /* "cache_k_l7 (view)" */
}

const ggml_tensor *root_of(const ggml_tensor *t) { return t->view_src ? t->view_src : t; }

bool read_type(ggml_type type, tqkv_type *out)
{
    *out = type == GGML_TYPE_F16 ? TQKV_TYPE_F16 : type == GGML_TYPE_BF16 ? TQKV_TYPE_BF16 : TQKV_TYPE_F32;
    return type == GGML_TYPE_F16 || type == GGML_TYPE_BF16 || type == GGML_TYPE_F32;
}

/* ---- Rows of cells, as bytes of a tensor ---- */

struct span {
    int64_t first, n;
    size_t row, skip; /* bytes of a row; of the first that come before */
};

span find_span(const ggml_tensor *t, size_t offset, size_t size)
{
    const size_t row = root_of(t)->nb[1], at = (t->view_src ? t->view_offs : 0) + offset;
    const int64_t first = (int64_t)(at / row), end = (int64_t)((at + size + row - 1) / row);
    return {first, end - first, row, at % row};
}

void get_rows(const cache_tensor &c, const ggml_tensor *t, void *data, size_t offset, size_t size)
{
    const span s = find_span(t, offset, size);
    std::vector<float> bytes(((size_t)s.n * s.row + sizeof(float) - 1) / sizeof(float));
    memset(data, 0, size);
    if (!c.owner->open(c.at)) return;
    const tqkv_result r = c.owner->save(*c.at, c.which, (int32_t)s.first, (int)s.n, bytes.data());
    if (r == TQKV_OK)
        memcpy(data, (const char *)bytes.data() + s.skip, size);
    else
        say("rows of layer %d cannot be read: %s", c.at->number, tqkv_result_string(r));
}

void set_rows(const cache_tensor &c, const ggml_tensor *t, const void *data, size_t offset, size_t size)
{
    const span s = find_span(t, offset, size);
    if (s.skip || size % s.row || !c.owner->open(c.at)) {
        say("a state of layer %d is not whole rows, or came before a graph: it is left out", c.at->number);
        return;
    }
    std::vector<float> aligned((size + sizeof(float) - 1) / sizeof(float));
    memcpy(aligned.data(), data, size);
    const tqkv_result r = c.owner->load(c.at, c.which, (int32_t)s.first, (int)s.n, aligned.data());
    if (r != TQKV_OK) say("a state of layer %d cannot be loaded: %s", c.at->number, tqkv_result_string(r));
}

/* ---- The interface of a KV buffer ---- */

kv_buffer *context_of(ggml_backend_buffer_t b) { return (kv_buffer *)b->context; }

void buffer_free(ggml_backend_buffer_t b)
{
    munmap(context_of(b)->base, context_of(b)->size);
    delete context_of(b);
}

void *buffer_base(ggml_backend_buffer_t b) { return context_of(b)->base; }

void buffer_memset(ggml_backend_buffer_t, ggml_tensor *t, uint8_t value, size_t offset, size_t size)
{
    const cache_tensor c = find_cache_tensor(t);
    if (!c.owner) {
        memset((char *)t->data + offset, value, size);
        return;
    }
    const span s = find_span(t, offset, size);
    if (c.owner->open(c.at)) c.owner->forget(c.at, c.which, (int32_t)s.first, (int)s.n);
}

void buffer_set(ggml_backend_buffer_t b, ggml_tensor *t, const void *data, size_t offset, size_t size)
{
    const cache_tensor c = find_cache_tensor(t);
    context_of(b)->used = true;
    if (c.owner)
        set_rows(c, t, data, offset, size);
    else
        memcpy((char *)t->data + offset, data, size);
}

void buffer_get(ggml_backend_buffer_t, const ggml_tensor *t, void *data, size_t offset, size_t size)
{
    const cache_tensor c = find_cache_tensor(t);
    if (c.owner)
        get_rows(c, t, data, offset, size);
    else
        memcpy(data, (const char *)t->data + offset, size);
}

/* Between streams of a cache, codes and halves as they are. */
bool buffer_copy(ggml_backend_buffer_t, const ggml_tensor *from, ggml_tensor *to)
{
    const cache_tensor x = find_cache_tensor(from), y = find_cache_tensor(to);
    if (!x.owner || x.at != y.at || x.which != y.which || ggml_nbytes(from) != ggml_nbytes(to)) return false;
    if (!x.owner->open(x.at)) return false;
    const span s = find_span(from, 0, ggml_nbytes(from)), d = find_span(to, 0, ggml_nbytes(to));
    return x.owner->copy(x.at, x.which, (int32_t)s.first, (int32_t)d.first, (int)s.n) == TQKV_OK;
}

void buffer_clear(ggml_backend_buffer_t b, uint8_t value)
{
    kv_buffer *k = context_of(b);
    if (k->rows)
        k->rows->clear();
    else
        memset(k->base, value, k->size);
}

ggml_backend_buffer_i buffer_interface()
{
    ggml_backend_buffer_i i = {};
    i.free_buffer = buffer_free;
    i.get_base = buffer_base;
    i.memset_tensor = buffer_memset;
    i.set_tensor = buffer_set;
    i.get_tensor = buffer_get;
    i.cpy_tensor = buffer_copy;
    i.clear = buffer_clear;
    return i;
}

/* ---- The two types ---- */

/* Why these tensors stay llama.cpp's own; "" without words, NULL: they are a KV cache for tqkv. */
const char *refuse(const std::vector<asked> &tensors)
{
    int n_keys = 0, n_values = 0;
    if (tensors.empty() || !get_options().valid) return "";
    for (const asked &t : tensors) {
        side which;
        int number;
        tqkv_type type;
        if (!parse_name(t.name.c_str(), &which, &number)) return "";
        if (!read_type(t.type, &type) || t.type != tensors[0].type)
            return "leave -ctk and -ctv at f16: what is stored is chosen by TQKV";
        if (t.n_cells != tensors[0].n_cells || t.n_streams != tensors[0].n_streams) return "layers of different sizes";
        (which == KEYS ? n_keys : n_values)++;
    }
    return n_keys == n_values ? nullptr : "its keys are its values, too (MLA)";
}

size_t device_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor *t)
{
    if (t->op == GGML_OP_NONE && !t->view_src && !t->data && strncmp(t->name, "cache_", 6) == 0)
        pending.push_back({t->name, t->type, t->ne[0], t->ne[1], t->ne[2]});
    return ggml_nbytes(t);
}

ggml_backend_buffer_t device_alloc(ggml_backend_buffer_type_t, size_t size)
{
    std::vector<asked> tensors;
    tensors.swap(pending);
    if (!tensors.empty()) asked_for_cache = true;
    const char *reason = refuse(tensors);
    if (reason && *reason) say("%s: this cache stays llama.cpp's own, on the processor", reason);
    if (reason) return ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    std::unique_ptr<kv_buffer> k(new kv_buffer);
    k->size = size;
    k->base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (k->base == MAP_FAILED) return nullptr;
    const asked &t = tensors[0];
    tqkv_type nominal;
    read_type(t.type, &nominal);
    k->rows.reset(new cache(get_options(), (int)(t.n_cells * t.n_streams), (int)t.n_cells, nominal));
    return ggml_backend_buffer_init(cache_buffer_type(), buffer_interface(), k.release(), size);
}

const char *device_name(ggml_backend_buffer_type_t) { return "TQKV"; }
const char *cache_name(ggml_backend_buffer_type_t) { return "TQKV_cache"; }
size_t alignment(ggml_backend_buffer_type_t) { return 64; }
bool is_host(ggml_backend_buffer_type_t) { return true; }
bool is_not_host(ggml_backend_buffer_type_t) { return false; }

ggml_backend_buffer_type device_type = {}, cache_type = {};

} // namespace

ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t device)
{
    device_type.iface.get_name = device_name;
    device_type.iface.alloc_buffer = device_alloc;
    device_type.iface.get_alignment = alignment;
    device_type.iface.get_alloc_size = device_alloc_size;
    device_type.iface.is_host = is_host;
    device_type.device = device;
    cache_type.iface.get_name = cache_name;
    cache_type.iface.alloc_buffer = device_alloc;
    cache_type.iface.get_alignment = alignment;
    cache_type.iface.is_host = is_not_host;
    cache_type.device = device;
    return &device_type;
}

ggml_backend_buffer_type_t cache_buffer_type() { return &cache_type; }

cache_tensor find_cache_tensor(const ggml_tensor *t)
{
    cache_tensor found;
    int number;
    const ggml_tensor *root = root_of(t);
    if (!root->buffer || root->buffer->buft != &cache_type || root->op != GGML_OP_NONE) return found;
    if (!parse_name(root->name, &found.which, &number)) return found;
    found.owner = context_of(root->buffer)->rows.get();
    found.at = found.owner->find(number);
    found.root = root;
    return found;
}

bool is_measured(const ggml_tensor *t)
{
    side which;
    int number;
    const ggml_tensor *root = root_of(t);
    return root->buffer && root->buffer->buft == &device_type && parse_name(root->name, &which, &number);
}

void warn_without_cache()
{
    static std::atomic<bool> warned{false};
    if (asked_for_cache || warned.exchange(true)) return;
    say("llama.cpp gave this device no KV cache, so nothing changes: leave out -ngl 0 and -nkvo, which keep it away");
}

void announce(const ggml_tensor *t)
{
    kv_buffer *k = context_of(root_of(t)->buffer);
    if (k->used) return;
    k->used = true;
    const options &o = get_options();
    const double mib = 1024.0 * 1024.0;
    const char *calibration = o.preset.key_format == TQKV_F16 ? "no calibration"
                              : o.learned.n_layers            ? "calibrated by TQKV_PROFILE"
                                                              : "calibrated by the first text";
    say("%s: keys %s, values %s, %d first and %d newest positions of a sequence exact, %s, %s", o.name,
        tqkv_format_name(o.preset.key_format), tqkv_format_name(o.preset.value_format), o.preset.exact_first,
        o.preset.exact_last, calibration, tqkv_isa_name());
    say("%d positions in %.1f MiB of codes, which llama.cpp counts as %.1f MiB", k->rows->n_cells(),
        (double)k->rows->open_all() / mib, (double)k->size / mib);
}

bool leave_to_host(const ggml_tensor *t, const char *reason)
{
    ggml_backend_buffer_t b = root_of(t)->buffer;
    kv_buffer *k = context_of(b);
    if (k->used) return false;
    if (reason) say("%s: this cache stays llama.cpp's own, on the processor", reason);
    k->rows.reset();
    b->buft = ggml_backend_cpu_buffer_type();
    return true;
}

} // namespace tqkv_llama
