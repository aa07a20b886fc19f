/* Snapshots in files: a process killed while it saves, a full disk, a limit on the size of files. */
#include "cache_fixture.h"
#include "examples/snapshot_file.h"

#include <glob.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

enum { PATH_SIZE = 128 };

/* The process id makes the path unique: runners may run at once. */
static void make_path(char *path, const char *name)
{
    const char *folder = getenv("TMPDIR");
    if (!folder || strlen(folder) > PATH_SIZE / 2) folder = "/tmp";
    snprintf(path, PATH_SIZE, "%s/tqkv-%ld-%s", folder, (long)getpid(), name);
}

static tqkv_cache *make_cache(int n_tokens)
{
    cache_row row = {TQKV_TQ4, TQKV_I8, 32, 20, true, n_tokens, -1};
    tqkv_cache_desc desc = cache_desc(&row, NULL);
    return cache_make(&row, &desc);
}

/* A cache from a file, or the expected result and none. */
static tqkv_cache *load_any(const char *path, tqkv_result expected)
{
    const tqkv_cache_desc any = test_cache_desc(0, 0, 0, 0);
    tqkv_cache *loaded = (tqkv_cache *)(uintptr_t)1; /* must become NULL on failure */
    const tqkv_result result = snapshot_load(&any, path, &loaded);
    CHECK(result == expected, "%s: %s", path, tqkv_result_string(result));
    CHECK((loaded != NULL) == (result == TQKV_OK), "%s: a cache, or none", path);
    return loaded;
}

/* Checks that the file is the snapshot of the cache, byte for byte. */
static void check_file_holds(const char *path, const tqkv_cache *cache)
{
    tqkv_cache *loaded = load_any(path, TQKV_OK);
    REQUIRE(loaded, "%s holds no cache", path);
    stream a = stream_of_cache(cache), b = stream_of_cache(loaded);
    CHECK(stream_is_equal(&a, &b), "%s holds another cache", path);
    stream_free(&a);
    stream_free(&b);
    tqkv_cache_destroy(loaded);
}

/* ---- Killed, and no room ---- */

/* Saves in a child process whose files cannot grow beyond `limit` bytes: write fails, or the signal SIGXFSZ ends the
   process. The child's status. */
static int save_with_limit(const tqkv_cache *cache, const char *path, size_t limit, bool dies)
{
    int status = 0;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        struct rlimit size = {(rlim_t)limit, (rlim_t)limit};
        signal(SIGXFSZ, dies ? SIG_DFL : SIG_IGN);
        _exit(setrlimit(RLIMIT_FSIZE, &size) ? 99 : (int)snapshot_save(cache, path));
    }
    return child < 0 || waitpid(child, &status, 0) != child ? -1 : status;
}

/* The file of a child that died, beside path: it has n bytes and is no snapshot. */
static void check_left(const char *path, size_t n)
{
    char pattern[PATH_SIZE + 4];
    glob_t left;
    struct stat status;
    snprintf(pattern, sizeof pattern, "%s.*", path);
    REQUIRE(glob(pattern, 0, NULL, &left) == 0 && left.gl_pathc == 1, "no file is left");
    CHECK(stat(left.gl_pathv[0], &status) == 0 && (size_t)status.st_size == n, "%d bytes, not %d", (int)status.st_size,
          (int)n);
    (void)load_any(left.gl_pathv[0], TQKV_CORRUPT);
    remove(left.gl_pathv[0]);
    globfree(&left);
}

/* A process that saves over a snapshot dies, or has no room: the old one stays. */
static void check_limited(const void *parameters)
{
    const bool dies = *(const bool *)parameters;
    char path[PATH_SIZE];
    make_path(path, dies ? "killed" : "limited");
    tqkv_cache *old = make_cache(3), *cache = make_cache(25);
    REQUIRE(old && cache, "no cache");
    stream whole = stream_of_cache(cache);
    CHECK_RESULT(snapshot_save(old, path), TQKV_OK);
    for (size_t limit = 0; limit < whole.size; limit += 1 + whole.size / 40) {
        const int status = save_with_limit(cache, path, limit, dies);
        test_faults++;
        CHECK(dies ? WIFSIGNALED(status) && WTERMSIG(status) == SIGXFSZ
                   : WIFEXITED(status) && WEXITSTATUS(status) == (int)TQKV_IO,
              "at most %d bytes: status %d", (int)limit, status);
        check_file_holds(path, old);
        if (dies) check_left(path, limit);
    }
    CHECK(save_with_limit(cache, path, whole.size, dies) == (int)TQKV_OK, "a limit that is large enough");
    check_file_holds(path, cache);
    remove(path);
    stream_free(&whole);
    tqkv_cache_destroy(old);
    tqkv_cache_destroy(cache);
}

#ifdef __linux__
/* /dev/full refuses every write, as a full disk does. Without a buffer fwrite reports it, with one fflush. */
static void check_full(NO_ROW)
{
    tqkv_cache *cache = make_cache(25);
    REQUIRE(cache, "no cache");
    CHECK_RESULT(snapshot_save_to(cache, fopen("/dev/full", "wb")), TQKV_IO);
    FILE *full = fopen("/dev/full", "wb");
    REQUIRE(full, "no /dev/full");
    setvbuf(full, NULL, _IONBF, 0);
    CHECK_RESULT(tqkv_cache_save(cache, snapshot_write, full), TQKV_IO);
    fclose(full);
    test_faults += 2;
    tqkv_cache_destroy(cache);
}
#endif

static void check_paths(NO_ROW)
{
    char path[PATH_SIZE];
    tqkv_cache *cache = make_cache(2);
    REQUIRE(cache, "no cache");
    make_path(path, "no/such/folder");
    CHECK_RESULT(snapshot_save(cache, path), TQKV_IO);
    (void)load_any(path, TQKV_IO);
    (void)load_any("/dev/null", TQKV_CORRUPT);
    (void)load_any("/", TQKV_IO);
    tqkv_cache_destroy(cache);
}

typedef struct saver {
    const tqkv_cache *cache;
    const char *path;
    int failed;
} saver;

static void *save_often(void *context)
{
    saver *s = (saver *)context;
    for (int i = 0; i < 40; i++) s->failed += snapshot_save(s->cache, s->path) != TQKV_OK;
    return NULL;
}

/* Two threads save to one path; at any time the file is one of the two. */
static void check_two_threads(NO_ROW)
{
    char path[PATH_SIZE];
    make_path(path, "two_threads");
    tqkv_cache *caches[2] = {make_cache(3), make_cache(18)};
    REQUIRE(caches[0] && caches[1], "no cache");
    CHECK_RESULT(snapshot_save(caches[0], path), TQKV_OK);
    pthread_t threads[2];
    saver savers[2] = {{caches[0], path, 0}, {caches[1], path, 0}};
    for (int i = 0; i < 2; i++)
        if (pthread_create(&threads[i], NULL, save_often, &savers[i]) != 0) exit(2);
    for (int i = 0; i < 200; i++) tqkv_cache_destroy(load_any(path, TQKV_OK));
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
        CHECK(savers[i].failed == 0, "%d saves failed", savers[i].failed);
        tqkv_cache_destroy(caches[i]);
    }
    remove(path);
}

/* A file with a byte after its snapshot is corrupt. */
static void check_longer(NO_ROW)
{
    char path[PATH_SIZE];
    tqkv_cache *cache = make_cache(2);
    REQUIRE(cache, "no cache");
    make_path(path, "longer");
    CHECK_RESULT(snapshot_save(cache, path), TQKV_OK);
    FILE *file = fopen(path, "ab");
    REQUIRE(file, "%s", path);
    fputc(0, file);
    fclose(file);
    (void)load_any(path, TQKV_CORRUPT);
    remove(path);
    tqkv_cache_destroy(cache);
}

void test_file_cases(void)
{
    for (int i = 0; i < 2; i++) {
        const bool dies = i > 0;
        test_add(check_limited, &dies, sizeof dies, "file/%s", dies ? "killed" : "limited");
    }
#ifdef __linux__
    test_add(check_full, NULL, 0, "file/full");
#endif
    test_add(check_paths, NULL, 0, "file/paths");
    test_add(check_two_threads, NULL, 0, "file/two_threads");
    test_add(check_longer, NULL, 0, "file/longer");
}
