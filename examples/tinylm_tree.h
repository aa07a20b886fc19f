/* Guesses with branches: a tree of bytes goes through the model in one call, in which a byte sees the bytes on its own
 * path alone. Read attend_tree first. */
#ifndef TINYLM_TREE_H
#define TINYLM_TREE_H

#include "tinylm_logits.h"
#include "tinylm_session.h"

enum { TREE_DEPTH = 6, TREE_NODES = 23 };

/* Guesses after each node of a level: two for the next two bytes, one for the others. 1 + 2 + 5 * 4 nodes. */
static const int tree_branches[TREE_DEPTH] = {2, 2, 1, 1, 1, 1};

/* Node 0 is the last byte of the text; level after level follows. */
typedef struct guess_tree {
    unsigned char bytes[TREE_NODES];
    int parents[TREE_NODES], depths[TREE_NODES], n;
    int levels[TREE_DEPTH + 2]; /* where each begins, and the end of the last */
    int depth;                  /* of the last level */
    uint64_t seen[TREE_NODES];  /* bit j: node j is on the path to this one */
} guess_tree;

static void tree_start(guess_tree *t, unsigned char last)
{
    memset(t, 0, sizeof *t);
    t->bytes[0] = last;
    t->seen[0] = 1;
    t->n = t->levels[1] = 1;
}

/* The next level: below each node of the last one its likeliest bytes. logits: [n][VOCABULARY] */
static void tree_grow(guess_tree *t, float *logits)
{
    int first = t->levels[t->depth], end = t->n, branches = tree_branches[t->depth];
    t->depth++;
    for (int node = first; node < end; node++)
        for (int i = 0; i < branches; i++, t->n++) {
            float *row = logits + node * VOCABULARY;
            int byte = largest(row);
            row[byte] = -INFINITY; /* for the next one */
            t->bytes[t->n] = (unsigned char)byte;
            t->parents[t->n] = node;
            t->depths[t->n] = t->depth;
            t->seen[t->n] = t->seen[node] | (uint64_t)1 << t->n;
        }
    t->levels[t->depth + 1] = t->n;
}

/* ---- attention ---- */

/* A window counts positions of the text. In the cache the nodes lie one after the other, so node i stands up to i
 * places after its position. All nodes see one slice, [inner, end). Before that lie TREE_DEPTH positions; each level
 * sees all but the first few of them, as a slice that is merged into the sums of its nodes. */
static void attend_window(session *s, const tqkv_attention *all, const guess_tree *t, int window)
{
    static float max[TREE_NODES * 64], sum[TREE_NODES * 64], level_max[TREE_NODES * 64], level_sum[TREE_NODES * 64];
    tqkv_attention a = *all;
    int row = a.n_heads * a.keys->head_dim;
    int64_t first = a.end - t->n - window + 1, inner = first + t->depth;
    if (inner < 0) inner = 0;
    a.kv_len = (int)(a.end - (first > 0 ? first : 0));
    check(tqkv_attend_partial(&a, s->q, inner, (int)(a.end - inner), s->wide, max, sum), "slice of all");
    for (int level = 0; level < t->depth; level++) {
        tqkv_attention b = a;
        int64_t from = first + level > 0 ? first + level : 0;
        int node = t->levels[level], head = node * a.n_heads;
        b.tree = NULL;
        b.n_queries = t->levels[level + 1] - node;
        if (from >= inner) continue;
        check(tqkv_attend_partial(&b, s->q + node * row, from, (int)(inner - from), s->up, level_max, level_sum),
              "slice");
        check(tqkv_attend_merge(&b, s->wide + node * row, max + head, sum + head, &b, s->up, level_max, level_sum),
              "merge");
    }
    check(tqkv_attend_finish(&a, s->wide, max, sum), "finish");
}

/* In the place of attend_cached; s->user is the tree. */
static void attend_tree(session *s, int index, int n)
{
    const guess_tree *t = (const guess_tree *)s->user;
    const model_layer *layer = &s->m->layers[index];
    tqkv_cache *cache = s->caches[index];
    check(tqkv_cache_append(cache, s->k, s->v, n), "append");
    tqkv_attention a;
    check(tqkv_cache_view(cache, 1, &a), "view"); /* of the newest: where the cache has just learned, all read codes */
    a.n_queries = n;
    a.window = 0;
    a.whole_window = false;
    a.tree = t->seen;
    if (layer->window > 0)
        attend_window(s, &a, t, layer->window);
    else
        check(tqkv_attend(&a, s->q, s->wide), "attend");
}

/* All nodes in one call: they stand in the caches behind the text. logits: [n][VOCABULARY] */
static void tree_forward(session *s, guess_tree *t, float *logits)
{
    s->attend = attend_tree;
    s->user = t;
    s->depths = t->depths;
    forward(s, t->bytes, t->n, logits);
    s->attend = attend_cached;
    s->depths = NULL;
}

/* ---- guesses, their verification, and what stays ---- */

/* The draft guesses; its caches end where they did. Each level is one call over the tree so far. */
static void tree_guess(session *draft, guess_tree *t)
{
    static float logits[TREE_NODES * VOCABULARY];
    int end = draft->end;
    while (t->depth < TREE_DEPTH) {
        tree_forward(draft, t, logits);
        session_truncate(draft, end);
        tree_grow(t, logits);
    }
}

/* The child of a node with that byte; 0: none. */
static int tree_child(const guess_tree *t, int node, int byte)
{
    for (int i = 1; i < t->n; i++)
        if (t->parents[i] == node && t->bytes[i] == byte) return i;
    return 0;
}

/* Verifies all guesses in one call, and keeps the path that greedy decoding takes. Writes its bytes and the one after
 * them; the caches hold all but the last. Returns the number of guesses that stay. */
static int tree_verify(session *s, guess_tree *t, unsigned char *bytes /* [TREE_DEPTH + 1] */)
{
    static float logits[TREE_NODES * VOCABULARY];
    int kept[TREE_DEPTH + 1] = {0}, n = 1, end = s->end;
    tree_forward(s, t, logits);
    for (int node = 0;; n++) {
        int byte = largest(logits + node * VOCABULARY);
        bytes[n - 1] = (unsigned char)byte;
        node = tree_child(t, node, byte);
        if (node == 0) break;
        kept[n] = node;
    }
    for (int i = 0; i < s->m->n_layers; i++) check(tqkv_cache_keep(s->caches[i], t->n, kept, n), "keep");
    s->end = end + n;
    return n - 1;
}

#endif
