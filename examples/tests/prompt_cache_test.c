/* Tests of prompt_cache.h over small caches: what is found, what is skipped, what a full disk, a crash and other
 * processes leave. Each check prints `pass NAME` or `FAIL NAME`; test.sh counts the lines. Usage: prompt_cache_test
 * FOLDER, which it fills. */
#define _XOPEN_SOURCE    700
#define _DARWIN_C_SOURCE /* st_mtimespec */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/wait.h>

/* In a child: the crash between write and rename. */
static int dies_before_rename;
static int rename_or_die(const char *from, const char *to)
{
    if (dies_before_rename) raise(SIGKILL);
    return rename(from, to);
}
/* The disk has room for so many bytes; 0: for all */
static uint64_t disk_room;
static char full_folder[4096];
static int flush_or_full(FILE *file);
#define rename rename_or_die
#define fflush flush_or_full
#include "../prompt_cache.h"
#undef rename
#undef fflush

enum { N_LAYERS = 2, BLOCK = 16, LONGEST = 400, WIDEST = 2 * 64 };

static const char *top; /* folder of all tests */
static char said[PROMPT_CACHE_PATH + 512];
static int n_said;

static void report(bool good, const char *name)
{
    printf("%s prompt_cache/%s%s%s\n", good ? "pass" : "FAIL", name, good ? "" : ": said ", good ? "" : said);
    fflush(stdout);
}

static void need(bool good, const char *what)
{
    if (good) return;
    printf("FAIL prompt_cache: %s\n", what);
    exit(1);
}

static void listen(void *user, const char *text)
{
    (void)user;
    snprintf(said, sizeof said, "%s", text);
    n_said++;
}

/* Whether just one text was heard since the last time, and has these words; NULL: none was heard. */
static bool heard(const char *words)
{
    const bool good = words ? n_said == 1 && strstr(said, words) : n_said == 0;
    n_said = 0;
    return good;
}

/* A new folder. */
static prompt_cache open_folder(const char *name, char path[PROMPT_CACHE_PATH])
{
    snprintf(path, PROMPT_CACHE_PATH, "%s/%s", top, name);
    need(mkdir(path, 0700) == 0, path);
    n_said = 0;
    said[0] = 0;
    return (prompt_cache){.folder = path, .tag = 1, .block = BLOCK, .say = listen};
}

/* ---- a model: rows of a position depend on all tokens up to it ---- */

static tqkv_cache_desc desc_of(int layer)
{
    tqkv_cache_desc whole = {.head_dim = 64, .n_kv_heads = 2, .n_heads = 4, .capacity = LONGEST};
    tqkv_cache_desc ring = {.head_dim = 32, .n_kv_heads = 1, .n_heads = 2, .capacity = 128, .ring = true, .window = 64};
    whole.exact_first = 4;
    whole.exact_last = 32;
    ring.key_format = TQKV_TQ5;
    ring.value_format = TQKV_TQ3;
    whole.tag = ring.tag = 7;
    return layer == 0 ? whole : ring;
}

static void make_row(uint64_t state, float *row)
{
    for (int i = 0; i < WIDEST; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        row[i] = (float)(int32_t)(state >> 32) / 2147483648.0f;
    }
}

static void compute(tqkv_cache **caches, const int32_t *tokens, int first, int n)
{
    for (int i = first; i < n; i++) {
        float k[WIDEST], v[WIDEST];
        make_row(XXH3_64bits(tokens, sizeof *tokens * (size_t)(i + 1)), k);
        make_row(XXH3_64bits_withSeed(tokens, sizeof *tokens * (size_t)(i + 1), 1), v);
        for (int layer = 0; layer < N_LAYERS; layer++)
            need(tqkv_cache_append(caches[layer], k, v, 1) == TQKV_OK, "append");
    }
}

static void create(tqkv_cache **caches)
{
    for (int i = 0; i < N_LAYERS; i++) {
        const tqkv_cache_desc desc = desc_of(i);
        need(tqkv_cache_create(&desc, &caches[i]) == TQKV_OK, "create");
    }
}

static void destroy(tqkv_cache **caches)
{
    for (int i = 0; i < N_LAYERS; i++) tqkv_cache_destroy(caches[i]);
}

/* Whether attention over these caches has the bits of attention over caches that were computed. */
static bool are_as_computed(tqkv_cache **caches, const int32_t *tokens, int n)
{
    tqkv_cache *fresh[N_LAYERS];
    float q[2 * WIDEST], out[2 * WIDEST], wanted[2 * WIDEST];
    bool same = true;
    create(fresh);
    compute(fresh, tokens, 0, n);
    make_row(7, q);
    make_row(8, q + WIDEST);
    for (int i = 0; i < N_LAYERS; i++) {
        const size_t bytes = sizeof *out * (i == 0 ? 4 * 64 : 2 * 32);
        need(tqkv_cache_attend(caches[i], q, 1, out) == TQKV_OK, "attend");
        need(tqkv_cache_attend(fresh[i], q, 1, wanted) == TQKV_OK, "attend");
        same = same && tqkv_cache_end(caches[i]) == n && memcmp(out, wanted, bytes) == 0;
    }
    destroy(fresh);
    return same;
}

static int load(const prompt_cache *p, const int32_t *tokens, int n, tqkv_cache **caches)
{
    tqkv_cache_desc descs[N_LAYERS];
    for (int i = 0; i < N_LAYERS; i++) descs[i] = desc_of(i);
    return prompt_cache_load(p, tokens, n, descs, N_LAYERS, caches);
}

/* As a user does it. Returns how many tokens were loaded, or -1 if the caches are not those of the tokens. */
static int read_prompt(const prompt_cache *p, const int32_t *tokens, int n)
{
    tqkv_cache *caches[N_LAYERS];
    const int loaded = load(p, tokens, n, caches);
    if (loaded == 0) create(caches);
    for (int done = loaded; done < n;) {
        const int next = prompt_cache_next(p, done, n);
        compute(caches, tokens, done, next);
        prompt_cache_save(p, tokens, next, caches, N_LAYERS);
        done = next;
    }
    const bool good = are_as_computed(caches, tokens, n);
    destroy(caches);
    return good ? loaded : -1;
}

/* The tokens that are found; destroys their caches. */
static int find(const prompt_cache *p, const int32_t *tokens, int n)
{
    tqkv_cache *caches[N_LAYERS];
    const int loaded = load(p, tokens, n, caches);
    for (int i = 0; i < N_LAYERS; i++) need(!caches[i] == (loaded == 0), "a cache of nothing, or nothing of a cache");
    destroy(caches);
    return loaded;
}

static void make_tokens(int32_t *tokens, int n, int seed)
{
    for (int i = 0; i < n; i++) tokens[i] = (int32_t)XXH32(&i, sizeof i, (uint32_t)seed);
}

/* ---- files ---- */

static prompt_cache_entry *list(const prompt_cache *p, size_t *count)
{
    DIR *folder = opendir(p->folder);
    need(folder, p->folder);
    prompt_cache_entry *entries = prompt_cache_list(folder, "", count);
    closedir(folder);
    return entries;
}

static int flush_or_full(FILE *file)
{
    const prompt_cache here = {.folder = full_folder};
    size_t count;
    const int flushed = fflush(file);
    if (flushed != 0 || !disk_room) return flushed;
    prompt_cache_entry *entries = list(&here, &count);
    uint64_t total = 0;
    for (size_t i = 0; i < count; i++) total += entries[i].size;
    free(entries);
    errno = ENOSPC;
    return total > disk_room ? EOF : 0;
}

static size_t count_files(const prompt_cache *p)
{
    size_t count;
    free(list(p, &count));
    return count;
}

static void path_of(const prompt_cache *p, const int32_t *tokens, int n, char path[PROMPT_CACHE_PATH])
{
    unsigned char *head = prompt_cache_head(p, tokens, n, N_LAYERS);
    char name[PROMPT_CACHE_NAME];
    XXH3_state_t state;
    need(head, "memory");
    prompt_cache_name(prompt_cache_hash(&state, head, 0, n), name);
    need(prompt_cache_path(p, name, "", path), "path");
    free(head);
}

static unsigned char *read_bytes(const char *path, size_t *size)
{
    FILE *file = fopen(path, "rb");
    unsigned char *bytes = (unsigned char *)malloc(1 << 20);
    need(file && bytes, path);
    *size = fread(bytes, 1, 1 << 20, file);
    fclose(file);
    return bytes;
}

static void write_bytes(const char *path, const unsigned char *bytes, size_t size)
{
    FILE *file = fopen(path, "wb");
    need(file && fwrite(bytes, 1, size, file) == size && fclose(file) == 0, path);
}

/* ---- the tests ---- */

static void test_next(void)
{
    static const struct {
        int n, done[8];
    } rows[] = {{100, {0, 16, 32, 64, 96, 100}},
                {64, {0, 16, 32, 64}},
                {10, {0, 10}},
                {16, {0, 16}},
                {200, {48, 64, 128, 192, 200}}};
    const prompt_cache p = {.block = BLOCK};
    bool good = true;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int j = 0; rows[i].done[j] < rows[i].n; j++)
            good = good && prompt_cache_next(&p, rows[i].done[j], rows[i].n) == rows[i].done[j + 1];
    report(good, "next");
}

static void test_longest(void)
{
    char path[PROMPT_CACHE_PATH];
    int32_t tokens[LONGEST];
    const prompt_cache p = open_folder("longest", path);
    make_tokens(tokens, LONGEST, 1);
    report(read_prompt(&p, tokens, 100) == 0, "nothing is stored");
    report(read_prompt(&p, tokens, 100) == 96, "all whole blocks");
    report(read_prompt(&p, tokens, 70) == 64 && read_prompt(&p, tokens, 40) == 32, "a shorter prompt");
    report(read_prompt(&p, tokens, 15) == 0, "less than a block");
    report(read_prompt(&p, tokens, LONGEST) == 96, "a longer prompt"); /* its ring has turned around */
    report(read_prompt(&p, tokens, LONGEST) == LONGEST, "all of it");
    tokens[50] ^= 1;
    report(read_prompt(&p, tokens, 100) == 32, "another token");
    report(heard(NULL), "silence");
}

/* A file under another's name is no file of that prompt. */
static void test_foreign(void)
{
    char path[PROMPT_CACHE_PATH], from[PROMPT_CACHE_PATH], to[PROMPT_CACHE_PATH];
    int32_t tokens[64], others[64];
    const prompt_cache p = open_folder("foreign", path);
    prompt_cache other = p;
    other.tag = 2;
    make_tokens(tokens, 64, 1);
    make_tokens(others, 64, 2);
    need(read_prompt(&other, tokens, 32) == 0 && read_prompt(&p, others, 32) == 0, "prompts");
    report(find(&p, tokens, 32) == 0 && heard(NULL), "foreign/another model");
    path_of(&other, tokens, 32, from);
    path_of(&p, tokens, 32, to);
    need(rename(from, to) == 0, to);
    report(find(&p, tokens, 32) == 0 && heard("skipped: is damaged, or of another prompt or model"), "foreign/model");
    report(read_prompt(&p, tokens, 32) == 0 && heard("skipped") && find(&p, tokens, 32) == 32, "foreign/written over");
    path_of(&p, others, 32, from);
    need(rename(from, to) == 0, to);
    report(find(&p, tokens, 32) == 16 && heard("skipped: is damaged, or of another"), "foreign/prompt");
    write_bytes(to, (const unsigned char *)"Dear reader", 11);
    report(find(&p, tokens, 32) == 16 && heard("skipped: is no prompt"), "foreign/text");
    need(remove(to) == 0 && mkdir(to, 0700) == 0, to);
    report(find(&p, tokens, 32) == 16 && heard("skipped: Is a directory"), "foreign/folder");
    report(read_prompt(&p, tokens, 32) == 16 && n_said == 2 && strstr(said, "not written"), "foreign/no room for it");
    need(rmdir(to) == 0, to);
    report(count_files(&p) == 3, "foreign/nothing is left behind");
}

/* A head of 32 tokens before caches of 16. */
static void test_positions(void)
{
    char path[PROMPT_CACHE_PATH], file[PROMPT_CACHE_PATH];
    int32_t tokens[32];
    const prompt_cache p = open_folder("positions", path);
    const size_t short_head = PROMPT_CACHE_FIXED + 4 * 16, long_head = PROMPT_CACHE_FIXED + 4 * 32;
    size_t size;
    make_tokens(tokens, 32, 1);
    need(read_prompt(&p, tokens, 16) == 0, "prompt");
    path_of(&p, tokens, 16, file);
    unsigned char *bytes = read_bytes(file, &size), *head = prompt_cache_head(&p, tokens, 32, N_LAYERS);
    memmove(bytes + long_head, bytes + short_head, size - short_head);
    memcpy(bytes, head, long_head);
    path_of(&p, tokens, 32, file);
    write_bytes(file, bytes, size + long_head - short_head);
    report(find(&p, tokens, 32) == 16 && heard("skipped: has other positions than tokens"), "foreign/positions");
    free(bytes);
    free(head);
}

/* A cache of another description. */
static void test_desc(void)
{
    char path[PROMPT_CACHE_PATH];
    int32_t tokens[32];
    const prompt_cache p = open_folder("desc", path);
    tqkv_cache_desc descs[N_LAYERS] = {desc_of(0), desc_of(1)};
    tqkv_cache *caches[N_LAYERS];
    make_tokens(tokens, 32, 1);
    need(read_prompt(&p, tokens, 16) == 0, "prompt");
    descs[1].value_format = TQKV_TQ4;
    const int loaded = prompt_cache_load(&p, tokens, 16, descs, N_LAYERS, caches);
    report(loaded == 0 && !caches[0] && !caches[1] && heard("skipped: is of caches of another description or model"),
           "another description");
    descs[1] = desc_of(1);
    descs[1].tag = 8;
    report(prompt_cache_load(&p, tokens, 16, descs, N_LAYERS, caches) == 0 && heard("skipped: is of caches of another"),
           "another model's cache");
}

/* Any changed byte is found, and the next shorter prefix taken. */
static void test_damage(void)
{
    char path[PROMPT_CACHE_PATH], file[PROMPT_CACHE_PATH];
    int32_t tokens[64];
    const prompt_cache p = open_folder("damage", path);
    size_t size, missed = 0;
    make_tokens(tokens, 64, 1);
    need(read_prompt(&p, tokens, 32) == 0, "prompt");
    path_of(&p, tokens, 32, file);
    unsigned char *bytes = read_bytes(file, &size);
    for (size_t i = 0; i < size; i += i < 200 ? 1 : 41) {
        bytes[i] ^= (unsigned char)(1u << i % 8);
        write_bytes(file, bytes, size);
        bytes[i] ^= (unsigned char)(1u << i % 8);
        missed += find(&p, tokens, 32) != 16 || !heard("skipped");
    }
    report(missed == 0, "damage/bytes");
    for (size_t i = 0; i < size; i += i < 100 ? 7 : 301) {
        write_bytes(file, bytes, i);
        missed += find(&p, tokens, 32) != 16 || !heard("skipped");
    }
    report(missed == 0, "damage/lengths");
    bytes[size] = 0;
    write_bytes(file, bytes, size + 1);
    report(find(&p, tokens, 32) == 16 && heard("has bytes after its end"), "damage/longer");
    report(read_prompt(&p, tokens, 32) == 16 && heard("skipped") && find(&p, tokens, 32) == 32, "damage/written again");
    free(bytes);
}

/* Files may have 3,000 bytes: the disk is full in the middle of one. */
static void test_full(void)
{
    char path[PROMPT_CACHE_PATH];
    int32_t tokens[64];
    prompt_cache p = open_folder("full", path);
    struct rlimit before = {0}, low;
    make_tokens(tokens, 64, 1);
    need(read_prompt(&p, tokens, 16) == 0 && getrlimit(RLIMIT_FSIZE, &before) == 0, "getrlimit");
    low = before;
    low.rlim_cur = 3000;
    signal(SIGXFSZ, SIG_IGN);
    need(setrlimit(RLIMIT_FSIZE, &low) == 0, "setrlimit");
    const int loaded = read_prompt(&p, tokens, 32);
    need(setrlimit(RLIMIT_FSIZE, &before) == 0, "setrlimit");
    report(loaded == 16 && heard("not written: File too large"), "full");
    report(count_files(&p) == 1 && find(&p, tokens, 32) == 16, "full/nothing is left behind");
    report(read_prompt(&p, tokens, 32) == 16 && find(&p, tokens, 32) == 32 && heard(NULL), "full/room again");
    p.folder = "/nonexistent";
    report(read_prompt(&p, tokens, 16) == 0 && heard("not written: No such file"), "no folder");
}

static void test_crash(void)
{
    char path[PROMPT_CACHE_PATH];
    int32_t tokens[64];
    size_t count;
    int status;
    prompt_cache p = open_folder("crash", path);
    make_tokens(tokens, 64, 1);
    const pid_t child = fork();
    dies_before_rename = child == 0;
    if (child == 0) _exit(read_prompt(&p, tokens, 16));
    need(child > 0 && waitpid(child, &status, 0) == child && WIFSIGNALED(status), "fork");
    prompt_cache_entry *left = list(&p, &count);
    report(count == 1 && strlen(left->name) == 46, "crash/a temporary file is left");
    report(find(&p, tokens, 16) == 0 && read_prompt(&p, tokens, 16) == 0 && heard(NULL), "crash/not looked at");
    p.limit = left->size + left->size / 2;
    report(count_files(&p) == 2 && read_prompt(&p, tokens, 15) == 0, "crash/still there");
    tokens[0]++;
    report(read_prompt(&p, tokens, 16) == 0 && count_files(&p) == 1 && find(&p, tokens, 16) == 16,
           "crash/goes with the limit");
    free(left);
}

static void set_used(const prompt_cache *p, const int32_t *tokens, int n, long seconds, long nanoseconds)
{
    char path[PROMPT_CACHE_PATH];
    const struct timespec times[2] = {{seconds, nanoseconds}, {seconds, nanoseconds}};
    path_of(p, tokens, n, path);
    need(utimensat(AT_FDCWD, path, times, 0) == 0, path);
}

/* Room for two prompts of three: the oldest goes for the newest, with a limit that is never reached and without one. */
static void test_small_disk(void)
{
    char path[PROMPT_CACHE_PATH];
    int32_t tokens[16];
    size_t count;
    prompt_cache p = open_folder("small_disk", path);
    snprintf(full_folder, sizeof full_folder, "%s", path);
    make_tokens(tokens, 16, 0);
    need(read_prompt(&p, tokens, 16) == 0, "prompt");
    prompt_cache_entry *entries = list(&p, &count);
    bool good = true;
    disk_room = 2 * entries->size + entries->size / 2;
    for (int i = 1; i < 6; i++) {
        p.limit = i % 2 ? 0 : 100 * disk_room;
        set_used(&p, tokens, 16, 1000 + i, 0);
        make_tokens(tokens, 16, i);
        good = good && read_prompt(&p, tokens, 16) == 0 && find(&p, tokens, 16) == 16 && count_files(&p) == 2;
    }
    report(good && heard(NULL), "small disk/the oldest go");
    disk_room = entries->size / 2;
    make_tokens(tokens, 16, 9);
    report(read_prompt(&p, tokens, 16) == 0 && heard("not written: No space left") && count_files(&p) == 0,
           "small disk/too small for one");
    disk_room = 0;
    free(entries);
}

/* What has the name of a prompt and is no file: a pipe must not be waited for. */
static void test_pipe(void)
{
    char path[PROMPT_CACHE_PATH], file[PROMPT_CACHE_PATH];
    int32_t tokens[16];
    prompt_cache p = open_folder("pipe", path);
    make_tokens(tokens, 16, 1);
    path_of(&p, tokens, 16, file);
    need(mkfifo(file, 0600) == 0, file);
    alarm(20);
    report(find(&p, tokens, 16) == 0 && heard("skipped: Invalid argument"), "pipe");
    alarm(0);
    memset(path, 'x', sizeof path - 1);
    path[sizeof path - 1] = 0;
    report(find(&p, tokens, 16) == 0 && heard("skipped: File name too long"), "a long path");
}

static void test_limit(void)
{
    char path[PROMPT_CACHE_PATH];
    int32_t tokens[4][32];
    size_t count;
    prompt_cache p = open_folder("limit", path);
    for (int i = 0; i < 4; i++) make_tokens(tokens[i], 32, i);
    for (int i = 0; i < 3; i++) {
        need(read_prompt(&p, tokens[i], 16) == 0, "prompt");
        set_used(&p, tokens[i], 16, 1000, i);
    }
    prompt_cache_entry *entries = list(&p, &count);
    need(count == 3, "three files");
    p.limit = 3 * entries->size;
    need(find(&p, tokens[0], 16) == 16, "use");
    report(read_prompt(&p, tokens[3], 16) == 0 && count_files(&p) == 3, "limit/files");
    report(find(&p, tokens[1], 16) == 0 && find(&p, tokens[0], 16) == 16 && find(&p, tokens[2], 16) == 16 &&
               find(&p, tokens[3], 16) == 16,
           "limit/the least recently used goes");
    p.limit = entries->size - 1;
    report(read_prompt(&p, tokens[1], 16) == 0 && heard("not written: larger than the limit") && count_files(&p) == 3,
           "limit/too large for it");
    char stranger[2 * PROMPT_CACHE_PATH];
    snprintf(stranger, sizeof stranger, "%s/0123.prompt", path);
    write_bytes(stranger, (const unsigned char *)"mine", 4);
    p.limit = entries->size;
    need(read_prompt(&p, tokens[1], 16) == 0, "prompt");
    report(count_files(&p) == 1 && access(stranger, F_OK) == 0, "limit/other files stay");
    free(entries);
}

/* Several processes read and write the same prompts in a folder that holds a part of them. What they load is right or
 * nothing. */
static int read_many(const prompt_cache *p, int seed)
{
    int wrong = 0, loaded = 0;
    for (int i = 0; i < 60; i++) {
        int32_t tokens[128];
        make_tokens(tokens, 128, i * seed % 7);
        const int found = read_prompt(p, tokens, 30 + i * seed % 90);
        wrong += found < 0;
        loaded += found > 0;
    }
    return wrong > 0 || loaded == 0 || (n_said > 0 && strstr(said, "skipped"));
}

static void test_processes(void)
{
    char path[PROMPT_CACHE_PATH];
    prompt_cache p = open_folder("processes", path);
    pid_t children[4];
    bool good = true;
    p.limit = 300000;
    for (int i = 0; i < 4; i++) {
        children[i] = fork();
        if (children[i] == 0) _exit(read_many(&p, 2 * i + 1));
    }
    for (int i = 0; i < 4; i++) {
        int status = 1;
        good = children[i] > 0 && waitpid(children[i], &status, 0) == children[i] && status == 0 && good;
    }
    size_t count;
    uint64_t bytes = 0;
    prompt_cache_entry *entries = list(&p, &count);
    for (size_t i = 0; i < count; i++) {
        bytes += entries[i].size;
        good = good && strlen(entries[i].name) == 39;
    }
    report(good, "processes");
    report(count > 1 && bytes <= p.limit, "processes/limit");
    free(entries);
}

int main(int argc, char **argv)
{
    need(argc == 2, "usage: prompt_cache_test FOLDER");
    top = argv[1];
    test_next();
    test_longest();
    test_foreign();
    test_positions();
    test_desc();
    test_damage();
    test_full();
    test_crash();
    test_small_disk();
    test_pipe();
    test_limit();
    test_processes();
    return 0;
}
