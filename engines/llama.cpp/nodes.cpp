#include "nodes.h"

#include "threads.h"

#include <cstdio>
#include <cstring>

namespace tqkv_llama
{
namespace
{

float parameter(const ggml_tensor *node, int i)
{
    float f;
    memcpy(&f, (const char *)node->op_params + (size_t)i * sizeof f, sizeof f);
    return f;
}

/* ---- What it takes ---- */

const char *refuse_write(const ggml_tensor *node, const ggml_tensor *root)
{
    const ggml_tensor *rows = node->src[0], *cells = node->src[1];
    if (rows->ne[0] != root->ne[0]) return "flash attention is off (-fa on turns it on)";
    if (rows->type != GGML_TYPE_F32 || rows->nb[0] != sizeof(float) || rows->ne[2] != 1 || rows->ne[3] != 1 ||
        cells->type != GGML_TYPE_I64)
        return "its rows are written in a way that tqkv does not know";
    return nullptr;
}

const char *refuse_attention(const ggml_tensor *node, const cache_tensor &k, const cache_tensor &v)
{
    const ggml_tensor *q = node->src[0], *keys = node->src[1], *values = node->src[2], *mask = node->src[3];
    if (!k.owner || k.at != v.at || k.which != KEYS || v.which != VALUES) return "its keys are its values, too (MLA)";
    if (parameter(node, 1) != 0.0f) return "its scores have a bias by distance (ALiBi)";
    if (!mask || mask->type != GGML_TYPE_F16 || mask->ne[2] != 1) return "its mask is none of one for all heads";
    if (q->type != GGML_TYPE_F32 || q->nb[0] != sizeof(float)) return "its queries are no floats";
    if (!cache::fits(get_options(), (int)keys->ne[0], (int)values->ne[0], (int)keys->ne[2]))
        return "tqkv has no code for this head size in these formats (TQKV=safe has the most)";
    return nullptr;
}

bool takes_attention(const ggml_tensor *node)
{
    const ggml_tensor *keys = node->src[1], *values = node->src[2];
    if (is_measured(keys)) return true;
    const cache_tensor k = find_cache_tensor(keys), v = find_cache_tensor(values);
    if (!k.owner && !v.owner) return false;
    const char *reason = refuse_attention(node, k, v);
    if (reason) {
        if (k.owner) leave_to_host(keys, reason);
        if (v.owner && v.owner != k.owner) leave_to_host(values, nullptr);
        return false;
    }
    layer *l = k.at;
    const int key_dim = (int)keys->ne[0], value_dim = (int)values->ne[0], n_heads = (int)keys->ne[2];
    if (l->n_heads) return l->key_dim == key_dim && l->value_dim == value_dim && l->n_heads == n_heads;
    l->key_dim = key_dim;
    l->value_dim = value_dim;
    l->n_heads = n_heads;
    return true;
}

bool takes_write(const ggml_tensor *node)
{
    if (!node->view_src || is_measured(node)) return node->view_src != nullptr;
    const cache_tensor c = find_cache_tensor(node);
    if (!c.owner) return false;
    const char *reason = refuse_write(node, c.root);
    return !reason || (leave_to_host(node, reason), false);
}

bool takes_shift(const ggml_tensor *node)
{
    return node->view_src && (is_measured(node) || find_cache_tensor(node).owner);
}

/* Any other node that would look into a cache. */
bool touches_cache(const ggml_tensor *node)
{
    for (const ggml_tensor *source : node->src)
        if (source && find_cache_tensor(source).owner) {
            leave_to_host(source, "a node of its graph is none that tqkv knows");
            return true;
        }
    return false;
}

/* ---- What it does with them ---- */

tqkv_result write_rows(const ggml_tensor *node, tqkv_parallel threads)
{
    const cache_tensor c = find_cache_tensor(node);
    const ggml_tensor *source = node->src[0], *index = node->src[1];
    announce(node);
    if (!c.owner->open(c.at)) return TQKV_OUT_OF_MEMORY;
    c.owner->set_threads(threads);
    std::vector<int32_t> cells((size_t)index->ne[0]);
    for (size_t i = 0; i < cells.size(); i++) cells[i] = (int32_t)((const int64_t *)index->data)[i];
    const size_t dim = (size_t)(c.which == KEYS ? c.at->key_dim : c.at->value_dim);
    const rows r = {source->data, TQKV_TYPE_F32, {source->nb[1] / sizeof(float), dim}};
    return c.owner->write(c.at, c.which, r, cells.data(), (int)cells.size());
}

tqkv_result attend(const ggml_tensor *node, tqkv_parallel threads)
{
    const ggml_tensor *q = node->src[0], *keys = node->src[1], *mask = node->src[3], *sinks = node->src[4];
    const cache_tensor k = find_cache_tensor(keys);
    if (!k.owner->open(k.at)) return TQKV_OUT_OF_MEMORY;
    k.owner->set_threads(threads);
    mask_view m = {mask->data, mask->nb[1], mask->nb[3], (int)keys->ne[1], (int)q->ne[1], (int)q->ne[3], 0, 0};
    m.cells_a_stream = k.owner->cells_a_stream();
    m.first_cell = (int)(keys->view_offs / k.root->nb[2]) * m.cells_a_stream;
    attention_call a = {};
    a.queries = (const float *)q->data;
    a.sinks = sinks ? (const float *)sinks->data : nullptr;
    a.out = (float *)node->data;
    a.query_strides = {q->nb[1] / sizeof(float), q->nb[2] / sizeof(float)};
    a.query_stream_stride = q->nb[3] / sizeof(float);
    a.n_heads = (int)q->ne[2];
    a.scale = parameter(node, 0);
    a.softcap = parameter(node, 2);
    return k.owner->attend(k.at, m, a);
}

/* keys: [cell][head][dim]; turns the part of each row that the node's view has, by the node's own parameters. */
bool rotate(const ggml_tensor *node, const cache_tensor &c, std::vector<int32_t> *positions, std::vector<float> *keys)
{
    static ggml_backend_t cpu = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    const ggml_tensor *view = node->src[0];
    const int64_t n = (int64_t)positions->size(), heads = c.at->n_heads;
    ggml_init_params memory = {ggml_tensor_overhead() * 8 + ggml_graph_overhead(), nullptr, true};
    ggml_context *context = ggml_init(memory);
    if (!context || !cpu) return false;
    ggml_tensor *x = ggml_new_tensor_3d(context, GGML_TYPE_F32, c.at->key_dim, heads, n);
    x->data = keys->data();
    const size_t at = view->view_offs % c.root->nb[1] / ggml_type_size(c.root->type) * sizeof(float);
    ggml_tensor *part = ggml_view_3d(context, x, view->ne[0], heads, n, x->nb[1], x->nb[2], at);
    ggml_tensor *by = ggml_new_tensor_1d(context, GGML_TYPE_I32, n);
    by->data = positions->data();
    ggml_tensor *turned = ggml_rope_ext_inplace(context, part, by, node->src[2], 2, 0, 0, 1, 1, 0, 1, 0, 0);
    memcpy(turned->op_params, node->op_params, sizeof turned->op_params);
    ggml_cgraph *graph = ggml_new_graph(context);
    ggml_build_forward_expand(graph, turned);
    const bool done = ggml_backend_graph_compute(cpu, graph) == GGML_STATUS_SUCCESS;
    ggml_free(context);
    return done;
}

/* A context shift. */
tqkv_result shift(const ggml_tensor *node, tqkv_parallel threads)
{
    const cache_tensor c = find_cache_tensor(node);
    const int32_t *by = (const int32_t *)node->src[1]->data;
    std::vector<int32_t> cells, positions;
    for (int32_t i = 0; i < (int32_t)node->src[1]->ne[0]; i++) {
        if (by[i] == 0) continue;
        cells.push_back(i);
        positions.push_back(by[i]);
    }
    if (cells.empty()) return TQKV_OK;
    if (!c.owner->open(c.at)) return TQKV_OUT_OF_MEMORY;
    c.owner->set_threads(threads);
    std::vector<float> keys(cells.size() * c.at->streams[KEYS].row_values());
    const tqkv_result r = c.owner->read(*c.at, KEYS, cells.data(), (int)cells.size(), keys.data());
    if (r != TQKV_OK) return r;
    if (!rotate(node, c, &positions, &keys)) return TQKV_UNSUPPORTED;
    return c.owner->turn(c.at, cells.data(), (int)cells.size(), keys.data());
}

} // namespace

bool takes_node(const ggml_tensor *node)
{
    switch (node->op) {
    case GGML_OP_NONE:
    case GGML_OP_VIEW:
    case GGML_OP_RESHAPE:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE:
        return true;
    case GGML_OP_SET_ROWS:
        return takes_write(node);
    case GGML_OP_FLASH_ATTN_EXT:
        return takes_attention(node);
    case GGML_OP_ROPE:
        return takes_shift(node);
    default:
        touches_cache(node);
        return false;
    }
}

ggml_status compute_nodes(ggml_cgraph *graph, int n_threads)
{
    const tqkv_parallel threads = threads_hook(&n_threads);
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor *node = ggml_graph_node(graph, i);
        tqkv_result r = TQKV_OK;
        if (node->op == GGML_OP_SET_ROWS) r = write_rows(node, threads);
        if (node->op == GGML_OP_FLASH_ATTN_EXT) r = attend(node, threads);
        if (node->op == GGML_OP_ROPE) r = shift(node, threads);
        if (r == TQKV_OK) continue;
        say("%s of %s failed: %s", ggml_op_name(node->op), node->name, tqkv_result_string(r));
        return GGML_STATUS_FAILED;
    }
    return GGML_STATUS_SUCCESS;
}

} // namespace tqkv_llama
