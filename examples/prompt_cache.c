/* Prompts that begin alike, with a cache on disk: tinylm loads what an earlier prompt left in a folder and computes the
 * rest, to the same logits. prompt_cache.h is the code to copy, tinylm_prompt.h shows its use.
 *   prompt_cache [FOLDER]    without one: in a folder of /tmp, removed at the end */
#define _XOPEN_SOURCE    700
#define _DARWIN_C_SOURCE /* the number of processors, which POSIX does not give */
#include "tqkv.h"
#include "tinylm_logits.h"
#include "tinylm_prompt.h"

enum { LONGEST = 1200, LIMIT = 6 << 20 /* bytes of the last prompts' folder */ };

/* The logits after the last byte; p: NULL, or where to look. Returns how many positions were loaded. */
static int read_prompt(model *m, const prompt_cache *p, const unsigned char *text, int n, float *logits)
{
    session s;
    int loaded = 0;
    session_create(&s, m, find_format("i8"), find_format("tq4"), LONGEST);
    if (p)
        loaded = session_read_prompt(&s, p, text, n - 1);
    else
        prefill(&s, text, n - 1);
    forward(&s, text + n - 1, 1, logits);
    session_destroy(&s);
    return loaded;
}

/* Reads a prompt with the folder and without, and compares. */
static void show_prompt(model *m, const prompt_cache *p, const unsigned char *text, int n, int expected,
                        const char *what)
{
    float logits[VOCABULARY], fresh[VOCABULARY];
    const double start = seconds();
    const int loaded = read_prompt(m, p, text, n, logits);
    const double cached = seconds() - start;
    read_prompt(m, NULL, text, n, fresh);
    const double computed = seconds() - start - cached;
    const bool same = memcmp(logits, fresh, sizeof fresh) == 0;
    printf("%5d bytes, %4d of them from a file: %4.0f ms (%4.0f without), %s logits: %s\n", n, loaded, 1e3 * cached,
           1e3 * computed, same ? "the same" : "OTHER", what);
    fflush(stdout);
    if (!same || loaded != expected) stop(what, "not as it should be");
}

static uint64_t folder_bytes(const char *folder, size_t *count)
{
    DIR *open = opendir(folder);
    if (!open) stop(folder, "cannot be read");
    prompt_cache_entry *entries = prompt_cache_list(open, "", count);
    uint64_t bytes = 0;
    for (size_t i = 0; entries && i < *count; i++) bytes += entries[i].size;
    free(entries);
    closedir(open);
    return bytes;
}

/* Changes a byte in the middle of every file. */
static void damage_all(const char *folder)
{
    DIR *open = opendir(folder);
    size_t count;
    if (!open) stop(folder, "cannot be read");
    prompt_cache_entry *entries = prompt_cache_list(open, "", &count);
    for (size_t i = 0; entries && i < count; i++) {
        const int file = openat(dirfd(open), entries[i].name, O_RDWR);
        const off_t middle = (off_t)(entries[i].size / 2);
        unsigned char byte = 0;
        bool good = file >= 0 && pread(file, &byte, 1, middle) == 1;
        byte = (unsigned char)~byte;
        good = good && pwrite(file, &byte, 1, middle) == 1;
        if (!good || close(file) != 0) stop(entries[i].name, "cannot be changed");
    }
    free(entries);
    closedir(open);
}

int main(int argc, char **argv)
{
    char made[] = "/tmp/tqkv_prompts_XXXXXX", line[PROMPT_CACHE_PATH];
    options o = parse(1, (char *[]){"prompt_cache", NULL});
    data_file file;
    model m;
    size_t count;
    o.folder = argc > 1 ? argv[1] : mkdtemp(made);
    if (!o.folder || !data_file_open(&file, o.file) || file.size < LONGEST) stop(o.file, "cannot be read");
    if (!model_load(&m, o.model_path, o.n_threads)) stop(o.model_path, "is no model, or damaged");
    unsigned char *text = file.bytes;
    session shape = {.m = &m, .keys = find_format("i8"), .values = find_format("tq4")};
    prompt_cache p = session_prompts(&shape, &o), other = p;

    show_prompt(&m, &p, text, 1000, 0, "nothing is stored");
    show_prompt(&m, &p, text, 1000, 896, "the same again");
    show_prompt(&m, &p, text, 1150, 896, "a longer one");
    text[700] ^= 1;
    show_prompt(&m, &p, text, 1000, 512, "another text after 700 bytes");
    other.tag++;
    show_prompt(&m, &other, text, 1000, 0, "another model");
    damage_all(o.folder);
    p.say = NULL; /* it would name each file that is skipped */
    show_prompt(&m, &p, text, 1000, 0, "all files are damaged");
    show_prompt(&m, &p, text, 1000, 896, "and were written again");
    p.limit = LIMIT;
    show_prompt(&m, &p, text + 10, 1000, 0, "a folder of 6 MiB");
    const uint64_t bytes = folder_bytes(o.folder, &count);
    printf("%zu files of %.1f MiB are left in the folder\n", count, (double)bytes / (1 << 20));

    free(text);
    model_free(&m);
    snprintf(line, sizeof line, "rm -r '%s'", o.folder);
    return bytes > LIMIT || (argc <= 1 && system(line) != 0);
}
