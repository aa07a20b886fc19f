/* tqkv as a backend that an unmodified llama.cpp loads: one device, whose memory is llama.cpp's KV cache. */
#include "nodes.h"

#include <unistd.h>

#include <cstring>

using namespace tqkv_llama;

namespace
{

/* ---- The device ---- */

const char *device_name(ggml_backend_dev_t) { return "TQKV"; }
const char *device_description(ggml_backend_dev_t) { return "KV cache in fewer bits, on the processor"; }
/* A GPU, because llama.cpp puts the KV cache of a layer where the layer is. */
enum ggml_backend_dev_type device_kind(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }

/* Bytes of a value of the cache here, against the two of a half, which llama.cpp counts: at head_dim 128. */
double share_of_half()
{
    const tqkv_cache_desc &p = get_options().preset;
    tqkv_store s = {};
    s.head_dim = 128;
    s.n_kv_heads = s.capacity = 1;
    size_t bytes = 0;
    for (tqkv_format f : {p.key_format, p.value_format}) {
        s.format = f;
        bytes += tqkv_codes_size(&s) + tqkv_norms_size(&s);
    }
    return (double)bytes / (2 * 2 * 128);
}

/* llama.cpp counts a cache as halves: memory is as much as holds them, in tqkv's formats. */
void device_memory(ggml_backend_dev_t, size_t *free, size_t *total)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t available = (size_t)sysconf(_SC_PHYS_PAGES) * page;
    *total = (size_t)((double)available / share_of_half());
#ifdef _SC_AVPHYS_PAGES
    available = (size_t)sysconf(_SC_AVPHYS_PAGES) * page;
#endif
    *free = (size_t)((double)available / share_of_half());
}

/* Weights never come here: the processor's stay mapped. Older versions do not ask. */
template <typename Caps>
auto keep_mapped(Caps &caps, int) -> decltype(caps.mmap_support, void())
{
    caps.mmap_support = true;
}
template <typename Caps>
void keep_mapped(Caps &, long)
{
}

void device_properties(ggml_backend_dev_t d, ggml_backend_dev_props *p)
{
    memset(p, 0, sizeof *p);
    p->name = device_name(d);
    p->description = device_description(d);
    p->type = device_kind(d);
    device_memory(d, &p->memory_free, &p->memory_total);
    keep_mapped(p->caps, 0);
}

bool takes(ggml_backend_dev_t, const ggml_tensor *node) { return takes_node(node); }

bool reads(ggml_backend_dev_t d, ggml_backend_buffer_type_t t)
{
    return t == device_buffer_type(d) || t == cache_buffer_type() || ggml_backend_buft_is_host(t);
}

/* ---- A backend of it, one for each context ---- */

ggml_guid GUID = {0x74, 0x71, 0x6b, 0x76, 0x2d, 0x6c, 0x6c, 0x61, 0x6d, 0x61, 0x2d, 0x6b, 0x76, 0x2d, 0x30, 0x31};

struct backend_context {
    int n_threads = 1;
};

const char *backend_name(ggml_backend_t) { return "TQKV"; }

void backend_free(ggml_backend_t b)
{
    delete (backend_context *)b->context;
    delete b;
}

ggml_status backend_compute(ggml_backend_t b, ggml_cgraph *graph)
{
    return compute_nodes(graph, ((backend_context *)b->context)->n_threads);
}

/* llama.cpp calls this for each of a context's backends, before each batch. */
void set_n_threads(ggml_backend_t b, int n)
{
    warn_without_cache();
    ((backend_context *)b->context)->n_threads = n > 0 ? n : 1;
}

ggml_backend_t device_backend(ggml_backend_dev_t device, const char *)
{
    ggml_backend *b = new ggml_backend();
    b->guid = &GUID;
    b->iface.get_name = backend_name;
    b->iface.free = backend_free;
    b->iface.graph_compute = backend_compute;
    b->device = device;
    b->context = new backend_context;
    return b;
}

/* ---- The registry ---- */

const char *registry_name(ggml_backend_reg_t) { return "TQKV"; }
size_t registry_count(ggml_backend_reg_t) { return 1; }

ggml_backend_dev_t registry_device(ggml_backend_reg_t registry, size_t)
{
    static ggml_backend_device device = {};
    device.iface.get_name = device_name;
    device.iface.get_description = device_description;
    device.iface.get_memory = device_memory;
    device.iface.get_type = device_kind;
    device.iface.get_props = device_properties;
    device.iface.init_backend = device_backend;
    device.iface.get_buffer_type = device_buffer_type;
    device.iface.supports_op = takes;
    device.iface.supports_buft = reads;
    device.reg = registry;
    return &device;
}

void *registry_function(ggml_backend_reg_t, const char *name)
{
    return strcmp(name, "ggml_backend_set_n_threads") == 0 ? (void *)set_n_threads : nullptr;
}

/* The loader compares GGML_BACKEND_API_VERSION alone; this also numbers of operations, the size of a tensor, and the
   version, which is that of the source tree it was built with. */
bool is_built_for_this()
{
    static const struct {
        ggml_op number;
        const char *name;
    } operations[] = {{GGML_OP_SET_ROWS, "SET_ROWS"},  {GGML_OP_FLASH_ATTN_EXT, "FLASH_ATTN_EXT"},
                      {GGML_OP_ROPE, "ROPE"},          {GGML_OP_VIEW, "VIEW"},
                      {GGML_OP_RESHAPE, "RESHAPE"},    {GGML_OP_PERMUTE, "PERMUTE"},
                      {GGML_OP_TRANSPOSE, "TRANSPOSE"}};
    for (const auto &o : operations)
        if (strcmp(ggml_op_name(o.number), o.name) != 0) return false;
    return ggml_tensor_overhead() == sizeof(ggml_tensor) + 32 && strcmp(ggml_version(), TQKV_GGML_VERSION) == 0;
}

} // namespace

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void);
ggml_backend_reg_t ggml_backend_init(void)
{
    static ggml_backend_reg registry = {};
    if (!is_built_for_this()) {
        say("built for ggml %s, and this is %s: build it with `make llama-backend LLAMA=` and the source of this "
            "llama.cpp",
            TQKV_GGML_VERSION, ggml_version());
        return nullptr;
    }
    if (!get_options().valid) return nullptr;
    registry.api_version = GGML_BACKEND_API_VERSION;
    registry.iface.get_name = registry_name;
    registry.iface.get_device_count = registry_count;
    registry.iface.get_device = registry_device;
    registry.iface.get_proc_address = registry_function;
    return &registry;
}
