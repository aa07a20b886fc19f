/* >>snapshot: caches and stores as bytes, all little-endian

   A cache:
     offset  bytes  field                                 offset  bytes  field
          0      8  "tqkv" CR LF SUB LF                        44      4  window
          8      4  snapshot version                           48      4  scale (float32)
         12      4  version of the codes                       52      4  softcap (float32)
         16      4  head_dim                                   56      8  oldest resident position
         20      4  n_kv_heads                                 64      8  end
         24      4  n_heads                                    72      8  XXH3-64 of the 72 bytes before
         28      4  capacity
         32      4  key format                            then, keys first, values second:
         36      4  value format                                       centre [n_kv_heads][head_dim], if there is one
         40      4  bit 0: ring; bits 1 and 2: keys                    codes [n_kv_heads][resident][row_bytes]
                    and values have a centre; bits 5                   norms [n_kv_heads][resident][norms_per_row]
                    to 15: the type; bits 16 to 31:                 8  XXH3-64 of this centre, codes and norms
                    the values' head_dim, or 0 where
                    it is the keys'. Older builds
                    wrote 0 for each type

   Version 1, always with version 1 of the codes, has one head_dim, no centres and neither TQ3 nor TQ2. Version 3, for
   caches whose keys are the values (bit 4 at 40: there are no others) or with a tail, which comes last (bit 3: it has a
   centre), has 16 more bytes before the header's hash: the tail's head_dim, its format, and two zeros. Version 4, for
   caches with halves of the first and the newest positions, has exact_first and exact_last in place of the zeros, and
   8 more bytes: how many first and how many newest positions have halves. These follow the streams: first positions' keys and
   values, newest ones' keys and values, as codes with a hash; those of F16 streams, and values that are the keys, have none.

   Positions of a store:
     offset  bytes  field                                 offset  bytes  field
          0      8  "tqks" CR LF SUB LF                        32      8  first position
          8      4  version: 1                                 40      8  number of positions
         12      4  format                                     48      8  XXH3-64 of the centre [n_kv_heads][head_dim];
         16      4  head_dim                                              0 without one
         20      4  n_kv_heads                                 56      8  XXH3-64 of the 56 bytes before
         24      4  bit 0: unrotated; bit 1: has a           then:
                    centre; bit 2: F16, rotated                       codes, norms and their hash, as above
         28      4  block_scale (float32); 1 where it
                    has no effect                                                                                     */

#define TQKV__SNAPSHOT_VERSION  4 /* 2 or 3 for caches that need no more */
#define TQKV__CODES_VERSION     2 /* changes with the tables or the rotation */
#define TQKV__CODES_VERSION_OLD 6 /* builds wrote 2 to 6 for the same ones */
#define TQKV__STORE_VERSION     1
#define TQKV__HEADER_SIZE       72 /* without its hash */
#define TQKV__HEADER_MORE       24 /* of version 4; version 3 has 16 */
#define TQKV__STORE_HEADER_SIZE 56

static void tqkv__put(uint8_t *bytes, int n, uint64_t x)
{
    for (int i = 0; i < n; i++) bytes[i] = (uint8_t)(x >> (8 * i));
}

static uint64_t tqkv__get(const uint8_t *bytes, int n)
{
    uint64_t x = 0;
    for (int i = 0; i < n; i++) x |= (uint64_t)bytes[i] << (8 * i);
    return x;
}

/* A snapshot being written or read: one of `write` and `read` is set. Hashes every byte. */
typedef struct tqkv__pipe {
    tqkv_write write;
    tqkv_read read;
    void *user;
    XXH3_state_t hash;
} tqkv__pipe;

static tqkv_result tqkv__move(tqkv__pipe *pipe, uint8_t *bytes, size_t n)
{
    for (size_t done = 0; done < n;) {
        const size_t left = n - done;
        const size_t moved =
            pipe->write ? pipe->write(pipe->user, bytes + done, left) : pipe->read(pipe->user, bytes + done, left);
        if (moved > left) return TQKV_IO;
        if (moved == 0) return pipe->write ? TQKV_IO : TQKV_CORRUPT;
        done += moved;
    }
    XXH3_64bits_update(&pipe->hash, bytes, n);
    return TQKV_OK;
}

/* Writes the hash of the bytes since the last hash, or compares it with the next eight bytes. */
static tqkv_result tqkv__move_hash(tqkv__pipe *pipe)
{
    uint8_t expected[8], bytes[8];
    tqkv__put(expected, 8, XXH3_64bits_digest(&pipe->hash));
    memcpy(bytes, expected, sizeof bytes);
    const tqkv_result r = tqkv__move(pipe, bytes, sizeof bytes);
    XXH3_64bits_reset(&pipe->hash);
    if (r != TQKV_OK) return r;
    return memcmp(bytes, expected, sizeof bytes) == 0 ? TQKV_OK : TQKV_CORRUPT;
}

static tqkv_result tqkv__move_floats(tqkv__pipe *pipe, float *x, size_t n)
{
    uint8_t bytes[1024];
    for (size_t done = 0; done < n;) {
        const size_t count = n - done < sizeof bytes / 4 ? n - done : sizeof bytes / 4;
        if (pipe->write)
            for (size_t i = 0; i < count; i++) tqkv__put(bytes + 4 * i, 4, tqkv__bits(x[done + i]));
        const tqkv_result r = tqkv__move(pipe, bytes, 4 * count);
        if (r != TQKV_OK) return r;
        if (pipe->read)
            for (size_t i = 0; i < count; i++) x[done + i] = tqkv__float((uint32_t)tqkv__get(bytes + 4 * i, 4));
        done += count;
    }
    return TQKV_OK;
}

/* Moves the codes of a range of positions, then their norms, then the hash. */
static tqkv_result tqkv__move_stored(tqkv__pipe *pipe, const tqkv__stream *s, tqkv__range range)
{
    tqkv_result r = TQKV_OK;
    for (int norms = 0; norms < 2; norms++)
        for (int h = 0; h < s->n_kv_heads; h++)
            for (int64_t position = range.from, n; position < range.to; position += n) {
                const int slot = tqkv__slot(s, position), room = tqkv__slots_left(s, position);
                n = range.to - position < room ? range.to - position : room;
                if (!norms)
                    r = tqkv__move(pipe, tqkv__codes_at(s, h, slot), (size_t)n * s->row_bytes);
                else
                    r = tqkv__move_floats(pipe, tqkv__norms_at(s, h, slot), (size_t)n * (size_t)s->norms_per_row);
                if (r != TQKV_OK) return r;
            }
    return tqkv__move_hash(pipe);
}

/* Moves a centre, which when it is read lies in the cache's own memory. */
static tqkv_result tqkv__move_center(tqkv__pipe *pipe, const tqkv__stream *s)
{
    const size_t n = tqkv__center_size(s) / sizeof(float);
    if (!s->center) return TQKV_OK;
    const tqkv_result r = tqkv__move_floats(pipe, (float *)(uintptr_t)s->center, n);
    return r != TQKV_OK || tqkv__all_finite(s->center, n) ? r : TQKV_CORRUPT;
}

/* Moves all stores of a cache: centres of streams, and what the stores hold. */
static tqkv_result tqkv__move_stores(tqkv__pipe *pipe, const tqkv_cache *c)
{
    tqkv_result r = TQKV_OK;
    for (int i = 0; r == TQKV_OK && i < TQKV__CACHE_STORES; i++) {
        tqkv__stream s;
        if (!tqkv__store_of(c, i)) continue;
        r = tqkv__stream_open(tqkv__store_of(c, i), &s);
        if (r == TQKV_OK && i < TQKV__CACHE_STREAMS) r = tqkv__move_center(pipe, &s);
        if (r == TQKV_OK) r = tqkv__move_stored(pipe, &s, tqkv__range_of(c, i));
    }
    return r;
}

static void tqkv__pipe_open(tqkv__pipe *pipe, tqkv_write write, tqkv_read read, void *user)
{
    pipe->write = write;
    pipe->read = read;
    pipe->user = user;
    XXH3_INITSTATE(&pipe->hash);
    XXH3_64bits_reset(&pipe->hash);
}

static const char tqkv__magic[9] = "tqkv\r\n\x1a\n";

/* Bytes of a header of that version. */
static size_t tqkv__header_size(uint32_t version)
{
    return TQKV__HEADER_SIZE + (version == 4 ? TQKV__HEADER_MORE : version == 3 ? 16 : 0);
}

/* header: [tqkv__header_size(version)] */
static void tqkv__cache_header(const tqkv_cache *c, uint32_t version, uint8_t *header)
{
    const tqkv_store *keys = &c->keys;
    const tqkv_attention *a = &c->attention;
    const uint32_t value_dim = c->values.head_dim == keys->head_dim ? 0 : (uint32_t)c->values.head_dim;
    const uint32_t flags = (keys->ring ? 1u : 0u) | (keys->center ? 2u : 0u) |
                           (!c->shared && c->values.center ? 4u : 0u) | (c->tail.center ? 8u : 0u) |
                           (c->shared ? 16u : 0u) | (uint32_t)keys->type << 5 | value_dim << 16;
    const uint32_t fields[12] = {version,
                                 TQKV__CODES_VERSION,
                                 (uint32_t)keys->head_dim,
                                 (uint32_t)keys->n_kv_heads,
                                 (uint32_t)a->n_heads,
                                 (uint32_t)keys->capacity,
                                 (uint32_t)keys->format,
                                 (uint32_t)c->values.format,
                                 flags,
                                 (uint32_t)a->window,
                                 tqkv__bits(a->scale),
                                 tqkv__bits(a->softcap)};
    const tqkv__range newest = tqkv__range_of(c, TQKV__LAST_ENDS);
    const uint32_t more[6] = {(uint32_t)c->tail.head_dim, (uint32_t)c->tail.format,
                              (uint32_t)c->exact_first,   (uint32_t)c->exact_last,
                              (uint32_t)c->exact_below,   (uint32_t)(newest.to - newest.from)};
    memcpy(header, tqkv__magic, 8);
    for (int i = 0; i < 12; i++) tqkv__put(header + 8 + 4 * i, 4, fields[i]);
    tqkv__put(header + 56, 8, (uint64_t)c->first);
    tqkv__put(header + 64, 8, (uint64_t)c->attention.end);
    for (size_t at = TQKV__HEADER_SIZE, i = 0; at < tqkv__header_size(version); at += 4, i++)
        tqkv__put(header + at, 4, more[i]);
}

TQKV__COLD TQKV_API tqkv_result tqkv_cache_save(const tqkv_cache *c, tqkv_write write, void *user)
{
    tqkv__pipe pipe;
    uint8_t header[TQKV__HEADER_SIZE + TQKV__HEADER_MORE];
    if (!c || !write) return TQKV__INVALID("the cache or write is NULL");
    const uint32_t version = c->exact_first || c->exact_last ? 4 : c->shared || c->tail.head_dim ? 3 : 2;
    tqkv__cache_header(c, version, header);
    tqkv__pipe_open(&pipe, write, NULL, user);
    tqkv_result r = tqkv__move(&pipe, header, tqkv__header_size(version));
    if (r == TQKV_OK) r = tqkv__move_hash(&pipe);
    return r == TQKV_OK ? tqkv__move_stores(&pipe, c) : r;
}

/* What a header says. */
typedef struct tqkv__header {
    tqkv_cache_desc desc;
    uint32_t centers; /* a bit a stream */
    int64_t first, end, exact_below, exact_from;
} tqkv__header;

/* Takes what only versions 3 and 4 have. False if no cache can have written it. */
static bool tqkv__parse_more(const uint8_t *header, uint32_t flags, tqkv__header *h)
{
    uint32_t more[6];
    tqkv_cache_desc *d = &h->desc;
    const bool exact = (uint32_t)tqkv__get(header + 8, 4) == 4;
    for (int i = 0; i < 6; i++) more[i] = (uint32_t)tqkv__get(header + TQKV__HEADER_SIZE + 4 * i, 4);
    if (more[0] > TQKV_MAX_HEAD_DIM || more[1] > 15 || !more[0] != !more[1] || exact == (!more[2] && !more[3]))
        return false;
    if (more[2] > (uint32_t)INT_MAX || more[3] > (uint32_t)INT_MAX || more[4] > more[2] || more[4] > h->end ||
        more[5] > tqkv__end_room(more[3], TQKV__TILE) || more[5] > h->end - h->first)
        return false;
    d->shared = flags & 16;
    d->tail_dim = (int)more[0];
    d->tail_format = (tqkv_format)more[1];
    d->exact_first = (int)more[2];
    d->exact_last = (int)more[3];
    h->exact_below = more[4];
    h->exact_from = h->end - more[5];
    if (d->shared && (flags & 4 || d->value_format != d->key_format || d->value_dim != d->head_dim)) return false;
    if (!d->tail_dim) return (d->shared || exact) && !(flags & 8);
    return tqkv__format_known(d->tail_format);
}

/* False if no cache can have written it. */
static bool tqkv__parse_header(const uint8_t *header, tqkv__header *h)
{
    uint32_t fields[12];
    tqkv_cache_desc *d = &h->desc;
    memset(h, 0, sizeof *h);
    if (memcmp(header, tqkv__magic, 8) != 0) return false;
    for (int i = 0; i < 12; i++) fields[i] = (uint32_t)tqkv__get(header + 8 + 4 * i, 4);
    const bool old = fields[0] == 1 && fields[1] == 1, latest = fields[0] >= 3;
    if (fields[0] > TQKV__SNAPSHOT_VERSION || fields[1] > TQKV__CODES_VERSION_OLD) {
        TQKV_EXPLAIN("the snapshot was written by a newer version of tqkv");
        return false;
    }
    if (!old && (fields[0] < 2 || fields[1] < TQKV__CODES_VERSION)) return false;
    for (int i = 6; i < 8; i++) /* in C++ the enum takes 4 bits */
        if (fields[i] > 15 || !tqkv__format_known((tqkv_format)fields[i]) || (old && fields[i] > TQKV_I8)) return false;
    if (old && fields[8] > 1) return false;
    for (int i = 2; i < 10; i++)
        if (fields[i] > (uint32_t)INT_MAX) return false;
    const uint32_t flags = fields[8] & 0xffffu, value_dim = fields[8] >> 16;
    const uint32_t type = flags >> 5;
    if ((flags & 31) > (latest ? 31u : 7u) || type > 2 || fields[4] == 0 || value_dim == fields[2]) return false;
    d->type = (tqkv_type)type;
    d->head_dim = (int)fields[2];
    d->value_dim = (int)(value_dim ? value_dim : fields[2]);
    d->n_kv_heads = (int)fields[3];
    d->n_heads = (int)fields[4];
    d->capacity = (int)fields[5];
    d->key_format = (tqkv_format)fields[6];
    d->value_format = (tqkv_format)fields[7];
    d->ring = flags & 1;
    d->window = (int)fields[9];
    d->scale = tqkv__float(fields[10]);
    d->softcap = tqkv__float(fields[11]);
    h->centers = flags >> 1 & 7;
    h->first = (int64_t)tqkv__get(header + 56, 8);
    h->end = h->exact_from = (int64_t)tqkv__get(header + 64, 8);
    if (h->first < 0 || h->first > h->end || h->end - h->first > d->capacity || (!d->ring && h->first)) return false;
    if (fields[11] >> 31 || d->scale == 0.0f) return false; /* no cache has a negative softcap */
    return !latest || tqkv__parse_more(header, flags, h);
}

/* A cache that holds what a header says. */
static void tqkv__set_range(tqkv_cache *c, const tqkv__header *h)
{
    c->first = h->first;
    c->attention.end = h->end;
    c->exact_below = h->exact_below;
    c->exact_from = c->exact_held = h->exact_from;
}

/* A reader that holds the first `filled` bytes and has passed on `taken` of them. */
typedef struct tqkv__read_ahead {
    tqkv_read read;
    void *user;
    tqkv_allocator memory;
    uint8_t *bytes;
    size_t size, filled, taken;
} tqkv__read_ahead;

static size_t tqkv__read_held(void *user, void *bytes, size_t n)
{
    tqkv__read_ahead *a = (tqkv__read_ahead *)user;
    const size_t held = a->filled - a->taken;
    if (!held) return a->read(a->user, bytes, n);
    n = n < held ? n : held;
    memcpy(bytes, a->bytes + a->taken, n);
    a->taken += n;
    return n;
}

static void tqkv__drop_held(tqkv__read_ahead *a)
{
    if (a->bytes) a->memory.free(a->memory.user, a->bytes, a->size);
}

/* Reads until `wanted` bytes are held. The buffer is at most 64 KiB or twice the bytes that have arrived. */
static tqkv_result tqkv__hold(tqkv__read_ahead *a, size_t wanted)
{
    while (a->filled < wanted) {
        if (a->filled == a->size) {
            const size_t size = a->size ? 2 * a->size : 65536;
            uint8_t *bytes = (uint8_t *)a->memory.alloc(a->memory.user, size);
            if (!bytes) return TQKV_OUT_OF_MEMORY;
            if (a->filled) memcpy(bytes, a->bytes, a->filled);
            tqkv__drop_held(a);
            a->bytes = bytes;
            a->size = size;
        }
        const size_t end = a->size < wanted ? a->size : wanted,
                     room = end - a->filled; /* never reads past the snapshot */
        const size_t n = a->read(a->user, a->bytes + a->filled, room);
        if (n == 0 || n > room) return n ? TQKV_IO : TQKV_CORRUPT;
        a->filled += n;
    }
    return TQKV_OK;
}

/* Bytes to read before the cache is created: none up to 1 MiB; then a sixteenth of the cache's size, or all that the
   header announces if that is less. A file that was cut short cannot make load allocate much. */
static size_t tqkv__wanted_ahead(const tqkv_cache *c, uint32_t centers)
{
    size_t all = 0, announced = 0;
    for (int i = 0; i < TQKV__CACHE_STORES; i++) {
        const tqkv_store *s = tqkv__store_of(c, i);
        const tqkv__range range = tqkv__range_of(c, i);
        if (!s) continue;
        const size_t rows = tqkv_codes_size(s) + tqkv_norms_size(s);
        const size_t center = i < TQKV__CACHE_STREAMS ? (size_t)s->n_kv_heads * (size_t)s->head_dim * sizeof(float) : 0;
        all += rows + center; /* there is always room for centres */
        announced += rows / (size_t)s->capacity * (size_t)(range.to - range.from) + 8; /* and a hash */
        if (centers >> i & 1) announced += center;
    }
    return all <= 1048576 ? 0 : announced < all / 16 ? announced : all / 16;
}

/* Reads a header, as long as its version has it, and its hash. */
static tqkv_result tqkv__read_header(tqkv__pipe *pipe, tqkv__header *h)
{
    uint8_t header[TQKV__HEADER_SIZE + TQKV__HEADER_MORE] = {0};
    tqkv_result r = tqkv__move(pipe, header, TQKV__HEADER_SIZE);
    const size_t size = tqkv__header_size((uint32_t)tqkv__get(header + 8, 4));
    if (r == TQKV_OK) r = tqkv__move(pipe, header + TQKV__HEADER_SIZE, size - TQKV__HEADER_SIZE);
    if (r == TQKV_OK) r = tqkv__move_hash(pipe);
    return r != TQKV_OK || tqkv__parse_header(header, h) ? r : TQKV_CORRUPT;
}

/* Room for the centres that the snapshot has: zeros, until they are read. */
static void tqkv__open_centers(tqkv_cache *c, uint32_t centers)
{
    size_t floats = 0;
    (void)tqkv__center_floats(c, TQKV__CACHE_STREAMS, &floats);
    memset(c->centers, 0, floats * sizeof(float));
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++)
        if (centers >> i & 1)
            tqkv__cache_center(c, i, tqkv__center_room(c, i), (size_t)tqkv__stream_of(c, i)->head_dim);
}

TQKV__COLD TQKV_API tqkv_result tqkv_cache_load(const tqkv_cache_desc *desc, tqkv_read read, void *user,
                                                tqkv_cache **out)
{
    tqkv__pipe pipe;
    tqkv__read_ahead ahead = {read, user, {NULL, NULL, NULL}, NULL, 0, 0, 0};
    tqkv__header found;
    tqkv__cache_block block;
    tqkv_cache *c, checked;
    if (!out) return TQKV__INVALID("out is NULL");
    *out = NULL;
    if (!desc || !read) return TQKV__INVALID("desc or read is NULL");
    tqkv__pipe_open(&pipe, NULL, tqkv__read_held, &ahead);
    tqkv_result r = tqkv__read_header(&pipe, &found);
    if (r != TQKV_OK) return r;
    if (tqkv__cache_resolve(&found.desc, &checked) != TQKV_OK || !tqkv__divide_block(&checked, 0, &block))
        return TQKV_CORRUPT;
    if (!tqkv__desc_matches(desc, &found.desc) || (desc->type && found.desc.type && desc->type != found.desc.type))
        return TQKV__INVALID("a field of desc is not the snapshot's");
    tqkv__take_use(desc, &found.desc);
    ahead.memory = found.desc.allocator;
    if (!tqkv__resolve_allocator(&ahead.memory)) return TQKV__INVALID("allocator: one of alloc and free is missing");
    tqkv__set_range(&checked, &found);
    r = tqkv__hold(&ahead, tqkv__wanted_ahead(&checked, found.centers));
    if (r == TQKV_OK) r = tqkv_cache_create(&found.desc, &c);
    if (r != TQKV_OK) {
        tqkv__drop_held(&ahead);
        return r;
    }
    tqkv__set_range(c, &found);
    tqkv__open_centers(c, found.centers);
    r = tqkv__move_stores(&pipe, c);
    tqkv__drop_held(&ahead);
    if (r == TQKV_OK)
        *out = c;
    else
        tqkv_cache_destroy(c);
    return r;
}

static size_t tqkv__write_nowhere(void *user, const void *bytes, size_t n)
{
    (void)user, (void)bytes;
    return n;
}

/* The hash of a centre's bytes in a snapshot; 0 without one. */
static uint64_t tqkv__center_hash(const tqkv__stream *s)
{
    tqkv__pipe pipe;
    if (!s->center) return 0;
    tqkv__pipe_open(&pipe, tqkv__write_nowhere, NULL, NULL);
    (void)tqkv__move_center(&pipe, s);
    return XXH3_64bits_digest(&pipe.hash);
}

static const char tqkv__store_magic[9] = "tqks\r\n\x1a\n";

/* header: [TQKV__STORE_HEADER_SIZE] */
static void tqkv__store_header(const tqkv__stream *s, int64_t position, int n, uint8_t *header)
{
    const bool half = s->kind == TQKV__HALF, scaled = s->kind == TQKV__BOOK && s->norms_per_row > 1;
    const uint32_t other_basis = s->rotated == half ? half ? 4u : 1u : 0u;
    const uint32_t fields[6] = {TQKV__STORE_VERSION,
                                (uint32_t)s->format,
                                (uint32_t)s->head_dim,
                                (uint32_t)s->n_kv_heads,
                                other_basis | (s->center ? 2u : 0u),
                                tqkv__bits(scaled ? s->block_scale : 1.0f)};
    memcpy(header, tqkv__store_magic, 8);
    for (int i = 0; i < 6; i++) tqkv__put(header + 8 + 4 * i, 4, fields[i]);
    tqkv__put(header + 32, 8, (uint64_t)position);
    tqkv__put(header + 40, 8, (uint64_t)n);
    tqkv__put(header + 48, 8, tqkv__center_hash(s));
}

TQKV_API tqkv_result tqkv_store_save(const tqkv_store *store, int64_t position, int n_positions, tqkv_write write,
                                     void *user)
{
    tqkv__stream s;
    tqkv__pipe pipe;
    uint8_t header[TQKV__STORE_HEADER_SIZE];
    if (!write) return TQKV__INVALID("write is NULL");
    tqkv_result r = tqkv__open_positions(store, n_positions, position, &s);
    if (r != TQKV_OK) return r;
    tqkv__store_header(&s, position, n_positions, header);
    tqkv__pipe_open(&pipe, write, NULL, user);
    r = tqkv__move(&pipe, header, sizeof header);
    if (r == TQKV_OK) r = tqkv__move_hash(&pipe);
    const tqkv__range range = {position, position + n_positions};
    return r == TQKV_OK ? tqkv__move_stored(&pipe, &s, range) : r;
}

/* Every size comes from the store: a header that differs from the one that this store writes is refused, but for the first
   position. */
TQKV_API tqkv_result tqkv_store_load(const tqkv_store *store, int64_t position, int n_positions, tqkv_read read,
                                     void *user)
{
    enum { name = 12 }; /* bytes of magic and version */
    tqkv__stream s;
    tqkv__pipe pipe;
    uint8_t header[TQKV__STORE_HEADER_SIZE], expected[TQKV__STORE_HEADER_SIZE];
    if (!read) return TQKV__INVALID("read is NULL");
    tqkv_result r = tqkv__open_positions(store, n_positions, position, &s);
    if (r == TQKV_OK) r = tqkv__check_written(&s, n_positions, position);
    if (r != TQKV_OK) return r;
    tqkv__store_header(&s, position, n_positions, expected);
    tqkv__pipe_open(&pipe, NULL, read, user);
    r = tqkv__move(&pipe, header, sizeof header);
    if (r == TQKV_OK) r = tqkv__move_hash(&pipe);
    if (r != TQKV_OK) return r;
    if (memcmp(header, expected, name) != 0 || tqkv__get(header + 32, 8) > (uint64_t)INT64_MAX) return TQKV_CORRUPT;
    memcpy(expected + 32, header + 32, 8); /* where the positions were is not compared */
    if (memcmp(header, expected, sizeof header) != 0)
        return TQKV__INVALID("the snapshot is of another store or of another number of positions");
    const tqkv__range range = {position, position + n_positions};
    return tqkv__move_stored(&pipe, &s, range);
}
