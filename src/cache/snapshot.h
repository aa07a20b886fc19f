/* >>snapshot: caches and stores as bytes, all little-endian

   A cache:
     offset  bytes  field                                 offset  bytes  field
          0      8  "tqkv" CR LF SUB LF                        80      4  softcap (float32)
          8      4  snapshot version                           84      4  calibrate
         12      4  bytes of the header, with its hash         88      4  exact_first
         16      8  tag                                        92      4  exact_last
         24      4  version of the codes                       96      4  first positions that are kept besides
         28      4  head_dim                                  100      4  positions whose queries need halves that
         32      4  head_dim of the values                                are not here
         36      4  head_dim of the tail, or 0                104      4  while it learns: new positions to learn from
         40      4  n_kv_heads                                108      4  and the positions after which it learns
         44      4  n_heads                                   112      4  pairs
         48      4  capacity                                  116      4  rotary_dim
         52      4  key format                                120      8  oldest resident position
         56      4  value format                              128      8  end
         60      4  tail format, or 0                         136      8  exact_from
         64      4  0                                         144      8  XXH3-64 of the bytes before
         68      4  bit 0: ring; 1: shared; 2: the          then, for each stream (keys, values unless shared, tail):
                    cache has not learned yet; 8 to 10:               centre, then scale [n_kv_heads][head_dim], if any
                    keys, values and tail have a                      codes [n_kv_heads][positions][row_bytes]
                    centre; 16 to 18: a scale                         norms [n_kv_heads][positions][norms_per_row]
         72      4  window                                         8  XXH3-64 of these
         76      4  scale (float32)

   Behind the streams come, likewise but without centre and scale, what is kept of the first positions' keys, values and
   tail, then the halves of the newest keys and values, as far as the cache has these stores. The newest halves are
   those of the positions from exact_from on, but no more than an edit leaves, see tqkv__exact_kept. In a cache that has
   not learned yet all these have no positions; behind them come the rows as they came, of keys and values as halves,
   and of the tail.

   Positions of a store:
     offset  bytes  field                                 offset  bytes  field
          0      8  "tqks" CR LF SUB LF                        32      4  block_scale (float32); 1 without effect
          8      4  snapshot version                           36      4  0
         12      4  bytes of the header, with its hash         40      8  first position
         16      4  format                                     48      8  number of positions
         20      4  head_dim                                   56      8  XXH3-64 of centre and scale, as there are,
         24      4  n_kv_heads                                            [n_kv_heads][head_dim] each; 0 without
         28      4  bit 0: unrotated; 1: has a centre;         64      8  XXH3-64 of the bytes before
                    2: F16, rotated; 3: has a scale         then codes, norms and their hash, as above

   All versions begin with magic, version and size, so that a build knows an older or newer snapshot from a damaged
   one. */

#define TQKV__SNAPSHOT_VERSION  7  /* of both kinds */
#define TQKV__CODES_VERSION     3  /* changes with the bytes that encoding gives */
#define TQKV__NAME_SIZE         16 /* magic, version, size */
#define TQKV__HEADER_FIELDS     24
#define TQKV__HEADER_SIZE       144 /* without its hash */
#define TQKV__STORE_HEADER_SIZE 64
#define TQKV__HASH_SIZE         8

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

#define TQKV__CUT     "the snapshot is cut short"
#define TQKV__NEWER   "the snapshot was written by a newer version of tqkv"
#define TQKV__OLDER   "the snapshot was written by an older version of tqkv, whose codes are others: make it anew"
#define TQKV__DAMAGED "the snapshot is damaged: a checksum differs"

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
        if (moved > left) return TQKV__REFUSE(IO, "read or write: more bytes than were asked for");
        if (moved == 0) return pipe->write ? TQKV__REFUSE(IO, "write: no byte") : TQKV__REFUSE(CORRUPT, TQKV__CUT);
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
    return memcmp(bytes, expected, sizeof bytes) == 0 ? TQKV_OK : TQKV__REFUSE(CORRUPT, TQKV__DAMAGED);
}

static tqkv_result tqkv__move_floats(tqkv__pipe *pipe, const float *from, float *to, size_t n)
{
    uint8_t bytes[1024];
    for (size_t done = 0; done < n;) {
        const size_t count = n - done < sizeof bytes / 4 ? n - done : sizeof bytes / 4;
        if (pipe->write)
            for (size_t i = 0; i < count; i++) tqkv__put(bytes + 4 * i, 4, tqkv__bits(from[done + i]));
        const tqkv_result r = tqkv__move(pipe, bytes, 4 * count);
        if (r != TQKV_OK) return r;
        if (pipe->read)
            for (size_t i = 0; i < count; i++) to[done + i] = tqkv__float((uint32_t)tqkv__get(bytes + 4 * i, 4));
        done += count;
    }
    return TQKV_OK;
}

static tqkv_result tqkv__move_stored(tqkv__pipe *pipe, const tqkv__stream *s, tqkv__range range)
{
    tqkv_result r = TQKV_OK;
    for (int norms = 0; norms < 2; norms++)
        for (int h = 0; h < s->n_kv_heads; h++)
            for (int64_t position = range.from, n; position < range.to; position += n) {
                const int slot = tqkv__slot(s, position), room = tqkv__slots_left(s, position);
                n = range.to - position < room ? range.to - position : room;
                float *of_rows = tqkv__norms_at(s, h, slot);
                if (!norms)
                    r = tqkv__move(pipe, tqkv__codes_at(s, h, slot), (size_t)n * s->row_bytes);
                else
                    r = tqkv__move_floats(pipe, of_rows, of_rows, (size_t)n * (size_t)s->norms_per_row);
                if (r != TQKV_OK) return r;
            }
    return tqkv__move_hash(pipe);
}

/* Moves centre and scale. to_center, to_scale: the same in the cache's memory; NULL where nothing is read */
static tqkv_result tqkv__move_channels(tqkv__pipe *pipe, const tqkv__stream *s, float *to_center, float *to_scale)
{
    const size_t n = tqkv__center_size(s) / sizeof(float);
    tqkv_result r = s->center ? tqkv__move_floats(pipe, s->center, to_center, n) : TQKV_OK;
    if (r == TQKV_OK && s->channel_scale) r = tqkv__move_floats(pipe, s->channel_scale, to_scale, n);
    const bool valid = (!s->center || tqkv__all_finite(s->center, n)) &&
                       (!s->channel_scale || tqkv__scales_valid(s->channel_scale, n));
    if (r == TQKV_OK && !valid) return TQKV__REFUSE(CORRUPT, "the snapshot has a centre or a scale that none can be");
    return r;
}

static tqkv_result tqkv__move_stores(tqkv__pipe *pipe, const tqkv_cache *c)
{
    tqkv_result r = TQKV_OK;
    for (int i = 0; r == TQKV_OK && i < TQKV__CACHE_STORES; i++) {
        tqkv__stream s;
        const tqkv_store *store = tqkv__store_of(c, i);
        if (!store || (i >= TQKV__RAW && !c->learning)) continue;
        r = store->codes ? tqkv__stream_open(store, &s) : tqkv__stream_shape(store, &s); /* nothing is raw yet */
        if (r == TQKV_OK && i < TQKV__CACHE_STREAMS)
            r = tqkv__move_channels(pipe, &s, tqkv__channel_room(c, i, TQKV__CENTERS),
                                    tqkv__channel_room(c, i, TQKV__SCALES));
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

static const char tqkv__magic[9] = "tqkv\r\n\x1a\n", tqkv__store_magic[9] = "tqks\r\n\x1a\n";

static void tqkv__put_name(const char *magic, size_t size, uint8_t *header)
{
    memcpy(header, magic, 8);
    tqkv__put(header + 8, 4, TQKV__SNAPSHOT_VERSION);
    tqkv__put(header + 12, 4, size + TQKV__HASH_SIZE);
}

static tqkv_result tqkv__read_header(tqkv__pipe *pipe, const char *magic, size_t size, uint8_t *header)
{
    uint8_t name[TQKV__NAME_SIZE];
    tqkv_result r = tqkv__move(pipe, header, TQKV__NAME_SIZE);
    if (r != TQKV_OK) return r;
    tqkv__put_name(magic, size, name);
    if (memcmp(header, magic, 8) != 0) return TQKV__REFUSE(CORRUPT, "no snapshot of this kind: its first bytes differ");
    const uint64_t version = tqkv__get(header + 8, 4);
    if (version > TQKV__SNAPSHOT_VERSION) return TQKV__REFUSE(CORRUPT, TQKV__NEWER);
    if (version < TQKV__SNAPSHOT_VERSION) return TQKV__REFUSE(CORRUPT, TQKV__OLDER);
    if (memcmp(header, name, sizeof name) != 0) return TQKV__REFUSE(CORRUPT, "the snapshot's header has another size");
    r = tqkv__move(pipe, header + sizeof name, size - sizeof name);
    return r == TQKV_OK ? tqkv__move_hash(pipe) : r;
}

static uint32_t tqkv__streams_with(const tqkv_cache *c, tqkv__channels kind)
{
    uint32_t bits = 0;
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++) {
        const tqkv_store *s = tqkv__store_of(c, i);
        if (s && (kind == TQKV__SCALES ? s->channel_scale : s->center)) bits |= 1u << i;
    }
    return bits;
}

static void tqkv__cache_header(const tqkv_cache *c, uint8_t *header)
{
#define TQKV__FIELD_TO_HEADER(field, member, number, type) fields[number] = (uint32_t)c->member;
    uint32_t fields[TQKV__HEADER_FIELDS] = {TQKV__CODES_VERSION};
    TQKV__CACHE_NUMBERS(TQKV__FIELD_TO_HEADER)
    fields[11] = (c->keys.ring ? 1u : 0u) | (c->shared ? 2u : 0u) | (c->learning ? 4u : 0u) |
                 tqkv__streams_with(c, TQKV__CENTERS) << 8 | tqkv__streams_with(c, TQKV__SCALES) << 16;
    fields[13] = tqkv__bits(c->attention.scale);
    fields[14] = tqkv__bits(c->attention.softcap);
    fields[18] = (uint32_t)tqkv__range_of(c, TQKV__FIRST_KEYS).to;
    fields[c->learning ? 20 : 19] = (uint32_t)(c->learning ? c->learn_from : c->raw_below);
    tqkv__put_name(tqkv__magic, TQKV__HEADER_SIZE, header);
    tqkv__put(header + 16, 8, c->tag);
    for (int i = 0; i < TQKV__HEADER_FIELDS; i++) tqkv__put(header + 24 + 4 * i, 4, fields[i]);
    tqkv__put(header + 120, 8, (uint64_t)c->first);
    tqkv__put(header + 128, 8, (uint64_t)c->attention.end);
    tqkv__put(header + 136, 8, (uint64_t)c->exact_from);
}

TQKV__COLD TQKV_API tqkv_result tqkv_cache_save(const tqkv_cache *c, tqkv_write write, void *user)
{
    tqkv__pipe pipe;
    uint8_t header[TQKV__HEADER_SIZE];
    if (!c || !write) return TQKV__INVALID("the cache or write is NULL");
    tqkv__cache_header(c, header);
    tqkv__pipe_open(&pipe, write, NULL, user);
    tqkv_result r = tqkv__move(&pipe, header, sizeof header);
    if (r == TQKV_OK) r = tqkv__move_hash(&pipe);
    return r == TQKV_OK ? tqkv__move_stores(&pipe, c) : r;
}

/* What a header says. */
typedef struct tqkv__header {
    tqkv_cache_desc desc;
    uint32_t has[2]; /* a bit a stream: TQKV__CENTERS, TQKV__SCALES */
    bool learning;
    int learn_from;    /* 0 unless it learns */
    int64_t raw_below; /* 0 while it does */
    int64_t first, end, exact_below, exact_from;
} tqkv__header;

/* Takes the shape that a header's fields describe; false if no cache has it. */
static bool tqkv__parse_shape(const uint32_t fields[TQKV__HEADER_FIELDS], tqkv_cache_desc *d)
{
#define TQKV__FIELD_FROM_HEADER(field, member, number, type) d->field = (type)fields[number];
    for (int i = 1; i < TQKV__HEADER_FIELDS; i++)
        if (fields[i] > (uint32_t)INT_MAX && i != 13 && i != 14) return false; /* scale and softcap are floats */
    for (int i = 7; i < 10; i++) /* formats; in C++ the enum takes 4 bits */
        if (fields[i] > 15 || (!tqkv__format_known((tqkv_format)fields[i]) && (i < 9 || fields[i]))) return false;
    if (fields[10] || fields[21] || !fields[2] || !fields[5] || !fields[3] != !fields[9] || fields[22] > 2)
        return false;
    TQKV__CACHE_NUMBERS(TQKV__FIELD_FROM_HEADER)
    d->ring = fields[11] & 1;
    d->shared = fields[11] & 2;
    d->scale = tqkv__float(fields[13]);
    d->softcap = tqkv__float(fields[14]);
    if (fields[14] >> 31 || d->scale == 0.0f) return false; /* no cache has a negative softcap */
    return !d->shared || (d->value_format == d->key_format && d->value_dim == d->head_dim);
}

/* Whether a cache can be where a header says. One that learns holds its first positions, and nothing else. */
static bool tqkv__check_positions_of(const tqkv__header *h)
{
    const tqkv_cache_desc *d = &h->desc;
    if (h->first < 0 || h->first > h->end || h->end - h->first > d->capacity || (!d->ring && h->first)) return false;
    if (h->exact_from < 0 || h->exact_from > h->end || (h->exact_from && !d->exact_last)) return false;
    if (h->exact_below > h->end || h->exact_below > d->exact_first || h->exact_below > d->capacity) return false;
    if (h->raw_below > d->calibrate || (d->calibrate && d->calibrate < TQKV__LEAST_POSITIONS)) return false;
    if (!h->learning) return !h->learn_from;
    return d->calibrate && !h->has[0] && !h->has[1] && !h->exact_below && !h->exact_from && !h->first &&
           !h->raw_below && h->learn_from >= TQKV__LEAST_POSITIONS && h->learn_from <= d->calibrate &&
           h->learn_from <= d->capacity && h->learn_from <= INT_MAX / 4 && h->end < h->learn_from;
}

/* Takes what a header says, and the shape of that cache. */
static bool tqkv__parse_header(const uint8_t *header, tqkv__header *h, tqkv_cache *checked)
{
    uint32_t fields[TQKV__HEADER_FIELDS];
    tqkv_cache_desc *d = &h->desc;
    memset(h, 0, sizeof *h);
    for (int i = 0; i < TQKV__HEADER_FIELDS; i++) fields[i] = (uint32_t)tqkv__get(header + 24 + 4 * i, 4);
    if (!tqkv__parse_shape(fields, d)) return false;
    const uint32_t streams = 1u | (d->shared ? 0u : 2u) | (d->tail_dim ? 4u : 0u);
    d->tag = tqkv__get(header + 16, 8);
    h->has[TQKV__CENTERS] = fields[11] >> 8 & streams;
    h->has[TQKV__SCALES] = fields[11] >> 16 & streams;
    h->learning = fields[11] & 4;
    if (fields[11] != ((fields[11] & 7) | h->has[TQKV__CENTERS] << 8 | h->has[TQKV__SCALES] << 16)) return false;
    h->exact_below = fields[18];
    h->raw_below = fields[19];
    h->learn_from = (int)fields[20];
    h->first = (int64_t)tqkv__get(header + 120, 8);
    h->end = (int64_t)tqkv__get(header + 128, 8);
    h->exact_from = (int64_t)tqkv__get(header + 136, 8);
    tqkv_cache_desc desc = *d;
    if (!h->learning) desc.calibrate = 0;
    return tqkv__check_positions_of(h) && tqkv__cache_resolve(&desc, checked) == TQKV_OK;
}

static void tqkv__set_range(tqkv_cache *c, const tqkv__header *h)
{
    c->first = h->first;
    c->attention.end = h->end;
    c->exact_below = h->exact_below;
    c->exact_from = h->exact_from;
    c->learning = h->learning;
    c->raw_below = h->learning ? INT64_MAX : h->raw_below;
    c->exact_held = tqkv__range_of(c, TQKV__LAST_KEYS).from;
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
        if (n > room) return TQKV__REFUSE(IO, "read: more bytes than were asked for");
        if (n == 0) return TQKV__REFUSE(CORRUPT, TQKV__CUT);
        a->filled += n;
    }
    return TQKV_OK;
}

/* Returns the bytes to read before the cache is created: none up to 1 MiB, then a sixteenth of the cache's size, or all
   that the header announces. So a file that was cut short cannot make load allocate much. */
static size_t tqkv__wanted_ahead(const tqkv_cache *c, const uint32_t has[2])
{
    size_t all = 0, announced = 0;
    for (int i = 0; i < TQKV__CACHE_STORES; i++) {
        const tqkv_store *s = tqkv__store_of(c, i); /* has no memory yet */
        const tqkv__range range = tqkv__range_of(c, i);
        if (!s || (i >= TQKV__RAW && !c->learning)) continue;
        const size_t rows = tqkv_codes_size(s) + tqkv_norms_size(s);
        const size_t center = i < TQKV__CACHE_STREAMS ? (size_t)s->n_kv_heads * (size_t)s->head_dim * sizeof(float) : 0;
        all += rows + TQKV__CHANNELS * center; /* there is always room for them */
        announced += rows / (size_t)s->capacity * (size_t)(range.to - range.from) + 8; /* and a hash */
        announced += center * ((has[TQKV__CENTERS] >> i & 1) + (has[TQKV__SCALES] >> i & 1));
    }
    return all <= 1048576 ? 0 : announced < all / 16 ? announced : all / 16;
}

/* Takes centres, or scales, of the streams whose bits are set: before they are read, scales also after it. */
static void tqkv__take_channels(tqkv_cache *c, tqkv__channels kind, uint32_t has)
{
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++)
        if (has >> i & 1)
            tqkv__cache_channels(c, i, kind, tqkv__channel_room(c, i, kind), (size_t)TQKV__STORE_AT(c, i)->head_dim);
}

/* Creates a cache to read into. One that has learned needs no raw memory. */
static tqkv_result tqkv__create_found(const tqkv__header *found, tqkv_cache **out)
{
    tqkv_cache_desc desc = found->desc;
    size_t channels = 0;
    if (!found->learning) desc.calibrate = 0;
    tqkv_result r = tqkv__create(&desc, found->learn_from, out);
    if (r != TQKV_OK) return r;
    (*out)->calibrate = found->desc.calibrate;
    tqkv__set_range(*out, found);
    (void)tqkv__count_channels(*out, TQKV__CACHE_STREAMS, &channels);
    for (size_t i = 0; i < TQKV__CHANNELS * channels; i++) (*out)->channels[i] = 1.0f; /* until they are read */
    tqkv__take_channels(*out, TQKV__CENTERS, found->has[TQKV__CENTERS]);
    tqkv__take_channels(*out, TQKV__SCALES, found->has[TQKV__SCALES]);
    if (found->learning && found->end) r = tqkv__get_raw(*out);
    if (r != TQKV_OK) tqkv_cache_destroy(*out);
    return r;
}

TQKV__COLD TQKV_API tqkv_result tqkv_cache_load(const tqkv_cache_desc *desc, tqkv_read read, void *user,
                                                tqkv_cache **out)
{
    tqkv__pipe pipe;
    tqkv__read_ahead ahead = {read, user, {NULL, NULL, NULL}, NULL, 0, 0, 0};
    tqkv__header found;
    uint8_t header[TQKV__HEADER_SIZE];
    tqkv__cache_memory at, raw;
    tqkv_cache *c, checked;
    if (!out) return TQKV__INVALID("out is NULL");
    *out = NULL;
    if (!desc || !read) return TQKV__INVALID("desc or read is NULL");
    if (!tqkv__type_size(desc->type)) return TQKV__REFUSE(UNSUPPORTED, TQKV__NO_TYPE);
    tqkv__pipe_open(&pipe, NULL, tqkv__read_held, &ahead);
    tqkv_result r = tqkv__read_header(&pipe, tqkv__magic, sizeof header, header);
    if (r != TQKV_OK) return r;
    if (tqkv__get(header + 24, 4) != TQKV__CODES_VERSION)
        return TQKV__REFUSE(CORRUPT, tqkv__get(header + 24, 4) > TQKV__CODES_VERSION ? TQKV__NEWER : TQKV__OLDER);
    if (!tqkv__parse_header(header, &found, &checked) || !tqkv__divide_memory(&checked, 0, &at) ||
        !tqkv__divide_raw(&checked, &raw))
        return TQKV__REFUSE(CORRUPT, "the snapshot's header is one that no cache writes");
    if ((r = tqkv__check_match(desc, &found.desc)) != TQKV_OK) return r;
    found.desc.type = desc->type;
    tqkv__take_use(desc, &found.desc);
    ahead.memory = found.desc.allocator;
    if (!tqkv__resolve_allocator(&ahead.memory)) return TQKV__INVALID("allocator: one of alloc and free is missing");
    tqkv__set_range(&checked, &found);
    r = tqkv__hold(&ahead, tqkv__wanted_ahead(&checked, found.has));
    if (r == TQKV_OK) r = tqkv__create_found(&found, &c);
    if (r != TQKV_OK) {
        tqkv__drop_held(&ahead);
        return r;
    }
    r = tqkv__move_stores(&pipe, c);
    if (r == TQKV_OK) tqkv__follow_tail(c);
    if (r == TQKV_OK) tqkv__take_channels(c, TQKV__SCALES, found.has[TQKV__SCALES]);
    if (r == TQKV_OK) r = tqkv__check_same_given(desc, c);
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

/* Returns the hash of the bytes of centre and scale in a snapshot; 0 without. */
static uint64_t tqkv__channels_hash(const tqkv__stream *s)
{
    tqkv__pipe pipe;
    if (!s->center && !s->channel_scale) return 0;
    tqkv__pipe_open(&pipe, tqkv__write_nowhere, NULL, NULL);
    (void)tqkv__move_channels(&pipe, s, NULL, NULL);
    return XXH3_64bits_digest(&pipe.hash);
}

static void tqkv__store_header(const tqkv__stream *s, int64_t position, int n, uint8_t *header)
{
    const bool half = s->kind == TQKV__HALF, scaled = s->kind == TQKV__BOOK && s->norms_per_row > 1;
    const uint32_t other_basis = s->rotated == half ? half ? 4u : 1u : 0u;
    const uint32_t fields[6] = {(uint32_t)s->format,
                                (uint32_t)s->head_dim,
                                (uint32_t)s->n_kv_heads,
                                other_basis | (s->center ? 2u : 0u) | (s->channel_scale ? 8u : 0u),
                                tqkv__bits(scaled ? s->block_scale : 1.0f),
                                0};
    tqkv__put_name(tqkv__store_magic, TQKV__STORE_HEADER_SIZE, header);
    for (int i = 0; i < 6; i++) tqkv__put(header + 16 + 4 * i, 4, fields[i]);
    tqkv__put(header + 40, 8, (uint64_t)position);
    tqkv__put(header + 48, 8, (uint64_t)n);
    tqkv__put(header + 56, 8, tqkv__channels_hash(s));
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

/* A header that differs from the one that this store writes is refused, but for the first position. */
TQKV_API tqkv_result tqkv_store_load(const tqkv_store *store, int64_t position, int n_positions, tqkv_read read,
                                     void *user)
{
    enum { position_at = 40 }; /* in the header; where the positions were is not compared */
    tqkv__stream s;
    tqkv__pipe pipe;
    uint8_t header[TQKV__STORE_HEADER_SIZE], expected[TQKV__STORE_HEADER_SIZE];
    if (!read) return TQKV__INVALID("read is NULL");
    tqkv_result r = tqkv__open_positions(store, n_positions, position, &s);
    if (r == TQKV_OK) r = tqkv__check_written(&s, n_positions, position);
    if (r != TQKV_OK) return r;
    tqkv__store_header(&s, position, n_positions, expected);
    tqkv__pipe_open(&pipe, NULL, read, user);
    r = tqkv__read_header(&pipe, tqkv__store_magic, sizeof header, header);
    if (r != TQKV_OK) return r;
    if (tqkv__get(header + position_at, 8) > (uint64_t)INT64_MAX)
        return TQKV__REFUSE(CORRUPT, "the snapshot's first position is negative");
    memcpy(expected + position_at, header + position_at, 8);
    if (memcmp(header, expected, sizeof header) != 0)
        return TQKV__INVALID("the snapshot is of another store or of another number of positions");
    const tqkv__range range = {position, position + n_positions};
    return tqkv__move_stored(&pipe, &s, range);
}
