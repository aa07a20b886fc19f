/* >>store-code: sizes, formats, the checks of a store, of its positions and of rows */

static bool tqkv__size_multiply(size_t a, size_t b, size_t *product)
{
    if (b != 0 && a > SIZE_MAX / b) return false;
    *product = a * b;
    return true;
}

/* a*b*c elements of `size` bytes; false on overflow. */
static bool tqkv__array_size(int a, int b, int c, size_t size, size_t *bytes)
{
    return tqkv__size_multiply((size_t)a, (size_t)b, bytes) && tqkv__size_multiply(*bytes, (size_t)c, bytes) &&
           tqkv__size_multiply(*bytes, size, bytes);
}

static TQKV__NOINLINE bool tqkv__overlap(const void *a, size_t a_size, const void *b, size_t b_size)
{
    uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
    return a && b && a_size && b_size && (x < y ? y - x < a_size : x - y < b_size);
}

/* Whether p is neither NULL nor misaligned. alignment: a power of two */
static bool tqkv__aligned_at(const void *p, size_t alignment) { return p && ((uintptr_t)p & (alignment - 1)) == 0; }
static bool tqkv__floats_at(const void *p) { return tqkv__aligned_at(p, sizeof(float)); }

/* A row of TQKV__FORMATS for a format that the compiler does not know; zeros for what is none. */
typedef struct tqkv__format {
    uint8_t kind, main_bits, upper_bits, book_bits;
} tqkv__format;

static const tqkv__format *tqkv__format_of(tqkv_format f)
{
#define TQKV__FORMAT_ROW(x, format, name, kind, main, upper, book, plain) {kind, main, upper, book},
    static const tqkv__format rows[] = {{0, 0, 0, 0}, TQKV__FORMATS(TQKV__FORMAT_ROW, )};
    return &rows[(unsigned)f < sizeof rows / sizeof *rows ? (unsigned)f : 0];
}
static bool tqkv__format_known(tqkv_format f) { return tqkv__format_of(f)->kind != 0; }

/* Returns the bytes of a value; 0: no tqkv_type. */
static size_t tqkv__type_size(tqkv_type type)
{
    return type == TQKV_TYPE_F32 ? sizeof(float) : type == TQKV_TYPE_F16 || type == TQKV_TYPE_BF16 ? 2 : 0;
}
#define TQKV__ROWS_SHARED "strides: rows that are written share values"
#define TQKV__NO_TYPE     "type, query_type or output_type: no tqkv_type"

#define TQKV__SIZE_TEXT(x, dim, ...) #dim ", "
#define TQKV__HEAD_DIMS \
    "head_dim, value_dim or tail_dim: none of " TQKV__SIZES( \
        TQKV__SIZE_TEXT, ) "to which rows can be padded with zeros; set scale then"

/* A row of TQKV__SIZES for a head_dim that the compiler does not know, where its columns would be half a KB of
   comparisons each; zeros without a row. */
typedef struct tqkv__size {
    int order, subrow, grid; /* subrow: values in each of `order` subrows */
    float root, inverse_root;
} tqkv__size;

static inline const tqkv__size *tqkv__size_of(int head_dim)
{
#define TQKV__SIZE_ROW(x, dim, m, grid, root, inverse) {m, (dim) / (m), grid, root, inverse},
#define TQKV__SIZE_NAME(x, dim, ...)                   TQKV__SIZE_##dim,
#define TQKV__SIZE_CASE(x, dim, ...) \
    case (dim) / 16: \
        row = TQKV__SIZE_##dim; \
        break;
    enum { no_row, TQKV__SIZES(TQKV__SIZE_NAME, ) n_rows };
    static const tqkv__size rows[n_rows] = {{0, 0, 0, 0.0f, 0.0f}, TQKV__SIZES(TQKV__SIZE_ROW, )};
    int row = no_row;
    switch (head_dim / 16) {
        TQKV__SIZES(TQKV__SIZE_CASE, )
    }
    return &rows[head_dim % 16 ? no_row : row];
}
static bool tqkv__head_dim_known(int head_dim) { return tqkv__size_of(head_dim)->order != 0; }

#define TQKV__PANEL 256

/* A store with its defaults resolved and its sizes derived. */
typedef struct tqkv__stream {
    tqkv_format format;
    int kind, main_bits, upper_bits, book_bits; /* the format's row in TQKV__FORMATS */
    const float *codebook, *boundaries;         /* [1 << book_bits], [(1 << book_bits) - 1]; BOOK only */
    const float *factors;                       /* [n_factors], which encoding tries; BOOK only */
    int n_factors;
    int head_dim, n_kv_heads, capacity;
    bool ring, rotated;
    float block_scale;
    size_t row_bytes;
    int norms_per_row, norm_dim; /* values that share a norm */
    int panel_dim;               /* values that attention decodes at a time, all of one norm, at most TQKV__PANEL */
    uint8_t *codes;
    float *norms;
    size_t codes_size, norms_size; /* bytes in use */
    tqkv_type type;                /* of the caller's rows; tqkv__check_rows checks it */
    tqkv_strides strides;
    const float *center;            /* [n_kv_heads][head_dim] or NULL */
    const float *channel_scale;     /* likewise */
    const float *inverses;          /* 1 / channel_scale, where they are kept; else NULL, see tqkv__inverses_of */
    const int32_t *pages;           /* [n_pages] or NULL: no table, or one that the processor does not know */
    int n_pages, page_size;         /* 0 without a table */
    int8_t centroids[64];           /* integers, and their step; see tqkv__fill_integers */
    float step, root, inverse_root; /* root: of head_dim */
} tqkv__stream;

/* Strides with their defaults. n_heads * dim does not overflow. */
static tqkv_strides tqkv__strides_of(tqkv_strides strides, int n_heads, int dim)
{
    if (!strides.head) strides.head = (size_t)dim;
    if (!strides.token) strides.token = (size_t)n_heads * (size_t)dim;
    return strides;
}

/* Finds the bytes from the first of [n][n_heads] rows to the end of the last one; false on overflow. */
static bool tqkv__rows_extent(tqkv_strides strides, int n, int n_heads, int dim, size_t value_size, size_t *bytes)
{
    size_t token, head;
    *bytes = 0;
    if (strides.token > SIZE_MAX / 64 || strides.head > SIZE_MAX / 64) return false;
    if (n <= 0 || n_heads <= 0) return true;
    if (!tqkv__size_multiply((size_t)n - 1, strides.token, &token) ||
        !tqkv__size_multiply((size_t)n_heads - 1, strides.head, &head) || token > SIZE_MAX - head ||
        token + head > SIZE_MAX - (size_t)dim)
        return false;
    return tqkv__size_multiply(token + head + (size_t)dim, value_size, bytes) && *bytes <= SIZE_MAX / 8;
}

/* Whether no two of [n][n_heads] rows share a value; follows tqkv__rows_extent. */
static bool tqkv__rows_distinct(tqkv_strides strides, int n, int n_heads, int dim)
{
    const size_t row = (size_t)dim, heads = n_heads > 1 ? (size_t)(n_heads - 1) * strides.head + row : row;
    const size_t tokens = n > 1 ? (size_t)(n - 1) * strides.token + row : row;
    if (n <= 1) return n_heads <= 1 || strides.head >= row;
    if (n_heads <= 1) return strides.token >= row;
    return (strides.head >= row && strides.token >= heads) || (strides.token >= row && strides.head >= tokens);
}

static tqkv_result tqkv__table_shape(const tqkv_store *store, tqkv__stream *s)
{
    if (store->ring) return TQKV__INVALID("pages: the store is a ring");
    if (store->n_pages < 0) return TQKV__INVALID("n_pages is negative");
    if (store->page_size <= 0 || store->capacity % store->page_size)
        return TQKV__INVALID("page_size: not positive, or does not divide capacity");
    if ((uintptr_t)store->pages % sizeof(int32_t)) return TQKV__INVALID("pages: not aligned as int32_t");
    s->pages = store->pages;
    s->n_pages = store->n_pages;
    s->page_size = store->page_size;
    return TQKV_OK;
}

static void tqkv__take_format(tqkv_format format, tqkv__stream *s)
{
    const tqkv__format *row = tqkv__format_of(format);
    s->format = format;
    s->kind = row->kind;
    s->main_bits = row->main_bits;
    s->upper_bits = row->upper_bits;
    s->book_bits = row->book_bits;
    s->codebook = s->book_bits ? TQKV__CODEBOOK(s->book_bits) : NULL;
    s->boundaries = s->book_bits ? TQKV__BOUNDARIES(s->book_bits) : NULL;
    s->factors = s->book_bits ? TQKV__FACTORS(s->book_bits) : NULL;
    s->n_factors = TQKV__N_FACTORS(s->book_bits);
}

static tqkv_result tqkv__stream_shape(const tqkv_store *store, tqkv__stream *s)
{
    memset(s, 0, sizeof *s);
    if (!store) return TQKV__INVALID("a store is NULL");
    if (!tqkv__format_known(store->format))
        return TQKV__REFUSE(UNSUPPORTED, "format, key_format, value_format or tail_format: not a stored format");
    if (!tqkv__head_dim_known(store->head_dim)) return TQKV__REFUSE(UNSUPPORTED, TQKV__HEAD_DIMS);
    if ((unsigned)store->rotation > TQKV_ROTATION_ON) return TQKV__INVALID("rotation: no tqkv_rotation");
    if (store->rotation == TQKV_ROTATION_OFF && store->format != TQKV_F16 && !TQKV__PLAIN(store->format))
        return TQKV__REFUSE(UNSUPPORTED, "rotation: TQ2, TQ3, TQ4 and I8 have it always");
    if (store->n_kv_heads <= 0) return TQKV__INVALID("n_kv_heads is not positive");
    if (store->capacity <= 0) return TQKV__INVALID("capacity is not positive");
    if (!(store->block_scale >= 0.0f && store->block_scale <= 3.0e38f))
        return TQKV__INVALID("block_scale: negative, NaN or infinite");
    tqkv__take_format(store->format, s);
    s->head_dim = store->head_dim;
    s->root = tqkv__size_of(s->head_dim)->root;
    s->inverse_root = tqkv__size_of(s->head_dim)->inverse_root;
    s->n_kv_heads = store->n_kv_heads;
    s->capacity = store->capacity;
    s->type = store->type;
    s->strides = tqkv__strides_of(store->strides, store->n_kv_heads, store->head_dim);
    s->ring = store->ring;
    s->rotated = store->rotation ? store->rotation == TQKV_ROTATION_ON : s->kind != TQKV__HALF;
    s->block_scale = store->block_scale > 0.0f ? store->block_scale : 1.0f;
    s->row_bytes = (size_t)(s->head_dim * (s->main_bits + s->upper_bits) / 8);
    s->norm_dim = s->kind == TQKV__GRID ? tqkv__size_of(s->head_dim)->grid : TQKV__NORM_DIM(s->kind, s->head_dim);
    s->norms_per_row = s->kind == TQKV__HALF ? 0 : s->head_dim / s->norm_dim;
    int panels = (s->norm_dim + TQKV__PANEL - 1) / TQKV__PANEL;
    while (s->norm_dim % panels) panels++;
    s->panel_dim = s->norm_dim / panels;
    if (!tqkv__array_size(s->n_kv_heads, s->capacity, 1, s->row_bytes, &s->codes_size) ||
        !tqkv__array_size(s->n_kv_heads, s->capacity, s->norms_per_row, sizeof(float), &s->norms_size))
        return TQKV__INVALID("a store of more than SIZE_MAX bytes");
    return store->pages ? tqkv__table_shape(store, s) : TQKV_OK;
}

/* Whether a value of each channel, x: [n_kv_heads][head_dim], is finite, by the set in use. */
static bool tqkv__channels_finite(const tqkv__stream *s, const float *x);
static bool tqkv__scales_valid(const float *x, size_t n);

static tqkv_result tqkv__stream_channels(const tqkv_store *store, tqkv__stream *s)
{
    const float *scale = store->channel_scale;
    if ((uintptr_t)store->center % sizeof(float)) return TQKV__INVALID("center: not aligned as floats");
    if (store->center && !tqkv__channels_finite(s, store->center))
        return TQKV__REFUSE(NOT_FINITE, "center holds NaN or infinity");
    if ((uintptr_t)scale % sizeof(float)) return TQKV__INVALID("channel_scale: not aligned as floats");
    if (scale && !tqkv__scales_valid(scale, (size_t)s->n_kv_heads * (size_t)s->head_dim)) {
        if (!tqkv__channels_finite(s, scale)) return TQKV__REFUSE(NOT_FINITE, "channel_scale holds NaN or infinity");
        return TQKV__INVALID("channel_scale: not in [2^-32, 2^32]");
    }
    s->center = store->center;
    s->channel_scale = scale;
    return TQKV_OK;
}

/* Returns the bytes of a centre, or of a scale; with 32 bits it may overflow where neither can exist. */
static size_t tqkv__center_size(const tqkv__stream *s)
{
    return (size_t)s->n_kv_heads * (size_t)s->head_dim * sizeof(float);
}

static const float *tqkv__of_head(const tqkv__stream *s, const float *channels, int kv_head)
{
    return channels ? channels + (size_t)kv_head * (size_t)s->head_dim : NULL;
}

static const float *tqkv__center_of(const tqkv__stream *s, int kv_head) { return tqkv__of_head(s, s->center, kv_head); }

static const float *tqkv__scale_of(const tqkv__stream *s, int kv_head)
{
    return tqkv__of_head(s, s->channel_scale, kv_head);
}

static size_t tqkv__table_size(const tqkv__stream *s) { return (size_t)s->n_pages * sizeof(int32_t); }

static bool tqkv__encoding_overlaps(const tqkv__stream *s, const void *p, size_t size)
{
    return tqkv__overlap(s->codes, s->codes_size, p, size) || tqkv__overlap(s->norms, s->norms_size, p, size);
}

static tqkv_result tqkv__stream_memory(const tqkv_store *store, tqkv__stream *s)
{
    const tqkv_result r = tqkv__stream_channels(store, s);
    if (r != TQKV_OK) return r;
    if (!store->codes || store->codes_size < s->codes_size) return TQKV__INVALID("codes: NULL or too small");
    if (s->norms_size && (!store->norms || store->norms_size < s->norms_size))
        return TQKV__INVALID("norms: NULL or too small");
    if ((uintptr_t)store->norms % sizeof(float)) return TQKV__INVALID("norms: not aligned as floats");
    if (tqkv__overlap(store->codes, s->codes_size, store->norms, s->norms_size))
        return TQKV__INVALID("codes and norms overlap");
    s->codes = (uint8_t *)store->codes;
    s->norms = store->norms;
    if (tqkv__encoding_overlaps(s, s->center, tqkv__center_size(s)))
        return TQKV__INVALID("center overlaps codes or norms");
    if (tqkv__encoding_overlaps(s, s->channel_scale, tqkv__center_size(s)))
        return TQKV__INVALID("channel_scale overlaps codes or norms");
    if (tqkv__encoding_overlaps(s, s->pages, tqkv__table_size(s))) return TQKV__INVALID("pages overlap codes or norms");
    return TQKV_OK;
}

static bool tqkv__same_channels(const tqkv__stream *s, const float *a, const float *b)
{
    return a == b || (a && b && memcmp(a, b, tqkv__center_size(s)) == 0);
}

static tqkv_result tqkv__check_channels_match(const tqkv__stream *a, const tqkv__stream *b)
{
    if (!tqkv__same_channels(a, a->center, b->center))
        return TQKV__INVALID("center: that of a store or slice is not that of the other");
    if (!tqkv__same_channels(a, a->channel_scale, b->channel_scale))
        return TQKV__INVALID("channel_scale: that of a store or slice is not that of the other");
    return TQKV_OK;
}

static tqkv_result tqkv__stream_open(const tqkv_store *store, tqkv__stream *s)
{
    const tqkv_result r = tqkv__stream_shape(store, s);
    return r == TQKV_OK ? tqkv__stream_memory(store, s) : r;
}

static bool tqkv__channels_overlap(const tqkv__stream *s, const void *p, size_t size)
{
    return tqkv__overlap(s->center, tqkv__center_size(s), p, size) ||
           tqkv__overlap(s->channel_scale, tqkv__center_size(s), p, size);
}

static bool tqkv__stream_overlaps(const tqkv__stream *s, const void *p, size_t size)
{
    return tqkv__encoding_overlaps(s, p, size) || tqkv__channels_overlap(s, p, size) ||
           tqkv__overlap(s->pages, tqkv__table_size(s), p, size);
}

/* Returns the positions that a store without a ring can have. */
static int64_t tqkv__room(const tqkv__stream *s)
{
    return s->page_size ? (int64_t)s->n_pages * s->page_size : s->capacity;
}

static int tqkv__slot(const tqkv__stream *s, int64_t position)
{
    TQKV_ASSERT(position >= 0 && (s->ring || position < tqkv__room(s)));
    if (s->pages) return s->pages[position / s->page_size] * s->page_size + (int)(position % s->page_size);
    return (int)(s->ring ? position % s->capacity : position);
}

/* Returns how many slots from that of a position on hold the positions behind it, in order. */
static int tqkv__slots_left(const tqkv__stream *s, int64_t position)
{
    if (s->pages) return s->page_size - (int)(position % s->page_size);
    return s->capacity - tqkv__slot(s, position);
}

static uint8_t *tqkv__codes_at(const tqkv__stream *s, int kv_head, int slot)
{
    TQKV_ASSERT(kv_head >= 0 && kv_head < s->n_kv_heads && slot >= 0 && slot < s->capacity);
    return s->codes + ((size_t)kv_head * (size_t)s->capacity + (size_t)slot) * s->row_bytes;
}

static float *tqkv__norms_at(const tqkv__stream *s, int kv_head, int slot)
{
    if (!s->norms_per_row) return NULL;
    return s->norms + ((size_t)kv_head * (size_t)s->capacity + (size_t)slot) * (size_t)s->norms_per_row;
}

TQKV_API const char *tqkv_result_string(tqkv_result r)
{
    static const char *const strings[] = {"no error",
                                          "an argument is invalid",
                                          "this head_dim, format or option is not supported",
                                          "a position lies outside the store",
                                          "out of memory",
                                          "the source holds NaN or infinity",
                                          "the snapshot is damaged or not a snapshot",
                                          "reading or writing failed",
                                          "the metallib was built from another version of tqkv.h",
                                          "Metal reported an error"};
    return (unsigned)r < sizeof strings / sizeof *strings ? strings[r] : "unknown result";
}

TQKV_API const char *tqkv_format_name(tqkv_format f)
{
#define TQKV__NAME_OF(unused, format, name, ...) name,
    static const char *const names[] = {"default", TQKV__FORMATS(TQKV__NAME_OF, )};
    return (unsigned)f < sizeof names / sizeof *names ? names[f] : "?";
}

TQKV_API tqkv_format tqkv_format_from_name(const char *name)
{
    for (int f = TQKV_F16; name && tqkv__format_known((tqkv_format)f); f++)
        if (strcmp(name, tqkv_format_name((tqkv_format)f)) == 0) return (tqkv_format)f;
    return TQKV_FORMAT_DEFAULT;
}

TQKV_API size_t tqkv_codes_size(const tqkv_store *store)
{
    tqkv__stream s;
    return tqkv__stream_shape(store, &s) == TQKV_OK ? s.codes_size : 0;
}

TQKV_API size_t tqkv_norms_size(const tqkv_store *store)
{
    tqkv__stream s;
    return tqkv__stream_shape(store, &s) == TQKV_OK ? s.norms_size : 0;
}

static bool tqkv__basis_known(tqkv_basis basis) { return basis == TQKV_ORIGINAL || basis == TQKV_ROTATED; }

/* Checks the entries of the positions [first, end), which the table has. lowest: -1 where such a page is left out */
static tqkv_result tqkv__check_pages(const tqkv__stream *s, int64_t first, int64_t end, int lowest)
{
    if (!s->pages || first >= end) return TQKV_OK;
    for (int64_t i = first / s->page_size; i <= (end - 1) / s->page_size; i++)
        if (s->pages[i] < lowest || s->pages[i] >= s->capacity / s->page_size)
            return TQKV__REFUSE(OUT_OF_RANGE,
                                "pages: the entry of a position that is seen or written lies outside the pool");
    return TQKV_OK;
}

/* Whether no number of ids, [n], occurs twice or among others, [n_others] or NULL; negative ones do not count. Marks
   32768 numbers at a time in 4 KiB of stack. */
static bool tqkv__all_distinct(const int32_t *ids, int64_t n, const int32_t *others, int64_t n_others)
{
    enum { at_a_time = 32768 };
    uint8_t marks[at_a_time / 8];
    const int64_t all = others ? n + n_others : n;
    int64_t low = all > 1 ? INT32_MAX : 0, high = -1;
    for (int64_t i = 0; i < n && all > 1; i++) {
        if (ids[i] >= 0 && ids[i] < low) low = ids[i];
        if (ids[i] > high) high = ids[i];
    }
    for (; low <= high; low += at_a_time) {
        memset(marks, 0, sizeof marks);
        for (int64_t i = 0; i < all; i++) {
            const int32_t id = i < n || !others ? ids[i] : others[i - n];
            const int64_t at = id - low;
            if (id < 0 || at < 0 || at >= at_a_time) continue;
            if (marks[at / 8] >> (at % 8) & 1) return false;
            if (i < n) marks[at / 8] = (uint8_t)(marks[at / 8] | 1 << (at % 8));
        }
    }
    return true;
}

static tqkv_result tqkv__check_positions(const tqkv__stream *s, int n, int64_t position, int lowest)
{
    if (position < 0 || position > INT64_MAX - n) return TQKV__REFUSE(OUT_OF_RANGE, "position: negative or too large");
    if (!s->ring && position + n > tqkv__room(s))
        return TQKV__REFUSE(OUT_OF_RANGE,
                            "positions beyond the capacity, of a full cache say, or beyond the page table");
    return tqkv__check_pages(s, position, position + n, lowest);
}

/* Refuses a table that names a page twice among those to write; follows tqkv__check_positions. */
static tqkv_result tqkv__check_written(const tqkv__stream *s, int n, int64_t position)
{
    if (!s->pages || n == 0) return TQKV_OK;
    const int64_t page = position / s->page_size, last = (position + n - 1) / s->page_size;
    if (tqkv__all_distinct(s->pages + page, last - page + 1, NULL, 0)) return TQKV_OK;
    return TQKV__INVALID("pages: a page twice among those to write");
}

static tqkv_result tqkv__open_positions(const tqkv_store *store, int n, int64_t position, tqkv__stream *s)
{
    const tqkv_result r = tqkv__stream_open(store, s);
    if (r != TQKV_OK) return r;
    if (n < 0) return TQKV__INVALID("n_positions is negative");
    if (s->ring && n > s->capacity) return TQKV__REFUSE(OUT_OF_RANGE, "n_positions is above the capacity");
    return tqkv__check_positions(s, n, position, 0);
}

static size_t tqkv__row_offset(const tqkv__stream *s, size_t token, size_t head)
{
    return (token * s->strides.token + head * s->strides.head) * tqkv__type_size(s->type);
}

static const void *tqkv__source_row(const tqkv__stream *s, const void *src, size_t token, size_t head)
{
    return (const uint8_t *)src + tqkv__row_offset(s, token, head);
}

/* Checks p: [n][n_kv_heads] rows; *bytes: their size, with gaps. */
static tqkv_result tqkv__check_rows(const tqkv__stream *s, const void *p, int n, size_t *bytes)
{
    const size_t size = tqkv__type_size(s->type);
    if (!size) return TQKV__REFUSE(UNSUPPORTED, TQKV__NO_TYPE);
    if (!p) return TQKV__INVALID("the rows are NULL: src, k, v or dst");
    if (n < 0) return TQKV__INVALID("the number of tokens or positions is negative");
    if ((uintptr_t)p % size) return TQKV__INVALID("the rows are not aligned as their type");
    if (!tqkv__array_size(n, s->n_kv_heads, s->head_dim, sizeof(float), bytes) ||
        !tqkv__rows_extent(s->strides, n, s->n_kv_heads, s->head_dim, size, bytes))
        return TQKV__INVALID("rows of more than SIZE_MAX bytes");
    return TQKV_OK;
}

static void *tqkv__malloc(void *user, size_t size)
{
    (void)user;
    return malloc(size);
}

static void tqkv__mfree(void *user, void *pointer, size_t size)
{
    (void)user;
    (void)size;
    free(pointer);
}

/* Returns the first cache line in memory, of which up to 63 bytes are lost. */
static uint8_t *tqkv__first_line(void *memory) { return (uint8_t *)memory + (64 - (uintptr_t)memory % 64) % 64; }

static bool tqkv__resolve_allocator(tqkv_allocator *allocator)
{
    if (!allocator->alloc != !allocator->free) return false;
    if (allocator->alloc) return true;
    allocator->alloc = tqkv__malloc;
    allocator->free = tqkv__mfree;
    return true;
}

static void tqkv__run_serial(void *user, int count, tqkv_task task, void *context)
{
    (void)user;
    for (int i = 0; i < count; i++) task(context, i);
}
