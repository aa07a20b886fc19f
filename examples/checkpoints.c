/* Prompts that begin alike share their beginning through files: ranges of 256 positions of every layer, saved by
 * tqkv_store_save under the XXH3 of all tokens up to the range's end. A longer prompt with the same beginning loads the
 * ranges that exist and computes the rest. A range counts as soon as its file has its name, so a process that is killed
 * while it writes starts again.
 *   checkpoints [FOLDER]    without one: in a folder of /tmp, removed at the end */
#define _XOPEN_SOURCE    700
#define _DARWIN_C_SOURCE /* the number of processors, which POSIX does not give */
#include "tqkv.h"
#include "tinylm_logits.h"
#include "tinylm_session.h"

#include <signal.h>
#include <sys/wait.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

enum { RANGE = 256, LONGEST = 1024, PATH = 512 };

/* The stores of each layer, in the engine's own memory. */
typedef struct layers {
    tqkv_store keys[MAX_LAYERS], values[MAX_LAYERS];
} layers;

static tqkv_store make_store(tqkv_format format, const model_layer *layer)
{
    tqkv_store s = {.format = format, .head_dim = layer->head_dim, .n_kv_heads = layer->n_kv_heads};
    s.capacity = LONGEST;
    s.codes_size = tqkv_codes_size(&s);
    s.norms_size = tqkv_norms_size(&s);
    s.codes = floats(s.codes_size / sizeof(float) + 1);
    s.norms = floats(s.norms_size / sizeof(float));
    return s;
}

static void attend_stores(session *s, int index, int n)
{
    const model_layer *layer = &s->m->layers[index];
    const layers *l = (const layers *)s->user;
    tqkv_attention a = {.keys = &l->keys[index], .values = &l->values[index], .n_heads = layer->n_heads};
    a.n_queries = n;
    a.end = s->end + n;
    a.window = layer->window;
    a.softcap = layer->softcap;
    a.parallel = (tqkv_parallel){pool_run, &s->m->pool};
    check(tqkv_encode(a.keys, s->k, n, s->end), "encode");
    check(tqkv_encode(a.values, s->v, n, s->end), "encode");
    check(tqkv_attend(&a, s->q, s->wide), "attend");
}

/* ---- one range in a file ---- */

/* The keys and values of a range depend on all tokens before it, too. */
static void range_path(const char *folder, const unsigned char *text, int end, char path[PATH])
{
    snprintf(path, PATH, "%s/%016llx.range", folder, (unsigned long long)XXH3_64bits(text, (size_t)end));
}

typedef struct writer {
    FILE *file;
    long left; /* bytes until this process is killed; -1: it is not */
} writer;

static size_t write_range(void *user, const void *bytes, size_t n)
{
    writer *w = (writer *)user;
    if (w->left >= 0 && (long)n > w->left) raise(SIGKILL);
    if (w->left >= 0) w->left -= (long)n;
    return fwrite(bytes, 1, n, w->file);
}

static size_t read_range(void *user, void *bytes, size_t n) { return fread(bytes, 1, n, (FILE *)user); }

/* Positions [end - RANGE, end) of all layers, under a temporary name, to the disk, then under its own. */
static void save_range(const layers *l, int n_layers, const char *path, int end, long killed_after)
{
    char temporary[PATH + 8];
    snprintf(temporary, sizeof temporary, "%s.XXXXXX", path);
    int descriptor = mkstemp(temporary);
    writer w = {descriptor >= 0 ? fdopen(descriptor, "wb") : NULL, killed_after};
    if (!w.file) stop(temporary, "cannot be written");
    for (int i = 0; i < n_layers; i++) {
        check(tqkv_store_save(&l->keys[i], end - RANGE, RANGE, write_range, &w), "save");
        check(tqkv_store_save(&l->values[i], end - RANGE, RANGE, write_range, &w), "save");
    }
    bool good = fflush(w.file) == 0 && fsync(descriptor) == 0;
    if (fclose(w.file) != 0 || !good || rename(temporary, path) != 0) stop(path, "cannot be written");
}

/* Returns false if the file is missing or damaged; the caller then computes these positions, which overwrites them. */
static bool load_range(const layers *l, int n_layers, const char *path, int end)
{
    FILE *file = fopen(path, "rb");
    tqkv_result result = file ? TQKV_OK : TQKV_IO;
    for (int i = 0; result == TQKV_OK && i < n_layers; i++) {
        result = tqkv_store_load(&l->keys[i], end - RANGE, RANGE, read_range, file);
        if (result == TQKV_OK) result = tqkv_store_load(&l->values[i], end - RANGE, RANGE, read_range, file);
    }
    if (file) fclose(file);
    return result == TQKV_OK;
}

/* ---- a prompt ---- */

/* Loads the ranges that are there, computes the others and saves them. logits: after the last byte. Returns how many
 * positions were loaded. */
static int read_prompt(model *m, const char *folder, const unsigned char *text, int n, long killed_after, float *logits)
{
    session s;
    layers l;
    int loaded = 0, saved = 0;
    float *all = floats(RANGE * VOCABULARY);
    session_scratch(&s, m, LONGEST);
    s.keys = s.values = find_format("i8");
    s.attend = attend_stores;
    s.user = &l;
    for (int i = 0; i < m->n_layers; i++) {
        l.keys[i] = make_store(TQKV_I8, &m->layers[i]);
        l.values[i] = make_store(TQKV_TQ4, &m->layers[i]);
    }
    for (int next; s.end < n; s.end = next) {
        char path[PATH] = "";
        next = s.end + RANGE < n ? s.end + RANGE : n; /* the last positions are computed: their logits are wanted */
        if (folder && next - s.end == RANGE) range_path(folder, text, next, path);
        if (folder && next < n && loaded == s.end && load_range(&l, m->n_layers, path, next)) {
            loaded = next;
            continue;
        }
        const int start = s.end;
        forward(&s, text + start, next - start, all);
        memcpy(logits, all + (next - start - 1) * VOCABULARY, VOCABULARY * sizeof *logits);
        if (folder && next - start == RANGE) {
            save_range(&l, m->n_layers, path, next, killed_after);
            saved++;
        }
    }
    for (int i = 0; i < m->n_layers; i++) {
        tqkv_store *stores[] = {&l.keys[i], &l.values[i]};
        for (int j = 0; j < 2; j++) {
            free(stores[j]->codes);
            free(stores[j]->norms);
        }
    }
    session_destroy(&s);
    free(all);
    if (folder) printf("%4d bytes: %4d positions loaded, %d ranges saved", n, loaded, saved);
    return loaded;
}

/* Reads a prompt with the checkpoints and compares with what a fresh computation gives. */
static void show_prompt(model *m, const char *folder, const unsigned char *text, int n, int expected, const char *what)
{
    float logits[VOCABULARY], fresh[VOCABULARY];
    int loaded = read_prompt(m, folder, text, n, -1, logits);
    read_prompt(m, NULL, text, n, -1, fresh);
    bool same = memcmp(logits, fresh, sizeof fresh) == 0;
    printf(", %s logits: %s\n", same ? "the same" : "OTHER", what);
    fflush(stdout);
    if (!same || loaded != expected) stop(what, "not as it should be");
}

/* A process that is killed in the middle of its second file. The pool's threads do not live on in it: one thread. */
static void kill_in_the_middle(const options *o, const char *folder, const unsigned char *text, int n, long bytes)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        model m;
        float logits[VOCABULARY];
        if (model_load(&m, o->model_path, 1)) read_prompt(&m, folder, text, n, bytes, logits);
        _exit(1);
    }
    int status;
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFSIGNALED(status)) stop("child", "was not killed");
    puts("     a process was killed while it wrote a range");
}

static void damage(const char *folder, const unsigned char *text, int end)
{
    char path[PATH];
    range_path(folder, text, end, path);
    FILE *file = fopen(path, "r+b");
    if (!file || fseek(file, 1000, SEEK_SET) != 0 || fputc(0x55, file) == EOF || fclose(file) != 0)
        stop(path, "cannot be changed");
}

int main(int argc, char **argv)
{
    char made[] = "/tmp/tqkv_checkpoints_XXXXXX", path[2 * PATH];
    const char *folder = argc > 1 ? argv[1] : mkdtemp(made);
    options o = parse(1, (char *[]){"checkpoints", NULL});
    data_file file;
    model m;
    if (!folder || !data_file_open(&file, o.file) || file.size < LONGEST) stop(o.file, "cannot be read");
    unsigned char *text = file.bytes;
    kill_in_the_middle(&o, folder, text, 700, 100000);
    if (!model_load(&m, o.model_path, o.n_threads)) stop(o.model_path, "is no model, or damaged");
    show_prompt(&m, folder, text, 700, 0, "its file has no name: computed");
    show_prompt(&m, folder, text, 1000, 512, "a longer prompt with the same beginning");
    damage(folder, text, 512);
    show_prompt(&m, folder, text, 700, 256, "one range was damaged: computed again");
    text[300] ^= 1;
    show_prompt(&m, folder, text, 700, 256, "another text after 300 bytes");
    free(text);
    model_free(&m);
    snprintf(path, sizeof path, "rm -r '%s'", folder);
    return argc > 1 ? 0 : system(path) != 0;
}
