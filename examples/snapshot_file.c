/* Saves a cache to a file. A second process is killed while it saves another cache; the first file is still whole. */
#define _POSIX_C_SOURCE 200809L
#include "snapshot_file.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>

enum { HEAD_DIM = 64, KV_HEADS = 2 };

static float rows[8 * KV_HEADS * HEAD_DIM]; /* [token][kv head][dim] */

static tqkv_cache *make_cache(int n_tokens)
{
    tqkv_cache_desc desc = {.head_dim = HEAD_DIM, .n_kv_heads = KV_HEADS, .n_heads = KV_HEADS, .capacity = 4096};
    tqkv_cache *cache = NULL;
    if (tqkv_cache_create(&desc, &cache) != TQKV_OK) exit(1);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) rows[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    if (tqkv_cache_append(cache, rows, rows, n_tokens) != TQKV_OK) exit(1);
    return cache;
}

/* Writes as snapshot_write does, and kills the process when more than 1000 bytes are written. */
static size_t write_and_die(void *file, const void *bytes, size_t n)
{
    size_t written = fwrite(bytes, 1, n, (FILE *)file);
    if (ftell((FILE *)file) > 1000) {
        fflush((FILE *)file);
        raise(SIGKILL);
    }
    return written;
}

/* Leaves what a crash leaves: half a snapshot under the temporary name. */
static void save_and_die(const tqkv_cache *cache, const char *path)
{
    FILE *file = fopen(path, "wb");
    if (file) tqkv_cache_save(cache, write_and_die, file);
    exit(0);
}

static void report(const char *what, const char *path)
{
    tqkv_cache_desc any = {0};
    tqkv_cache *cache;
    tqkv_result result = snapshot_load(&any, path, &cache);
    printf("%s: %s", what, tqkv_result_string(result));
    if (cache) printf(", %d positions", (int)tqkv_cache_end(cache));
    printf("\n");
    tqkv_cache_destroy(cache);
}

int main(int argc, char **argv)
{
    const char *path = argc > 1 ? argv[1] : "cache.tqkv", *half = argc > 2 ? argv[2] : "cache.tqkv.tmp";
    tqkv_cache *first = make_cache(5), *second = make_cache(8);
    tqkv_result result = snapshot_save(first, path);
    if (result != TQKV_OK) {
        printf("%s: %s\n", path, tqkv_result_string(result));
        return 1;
    }
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) save_and_die(second, half);
    if (child > 0) waitpid(child, NULL, 0);
    report("the file that was being written", half);
    report("the file before it", path);
    result = snapshot_save(second, path);
    report("saved again", path);
    remove(path);
    remove(half);
    tqkv_cache_destroy(first);
    tqkv_cache_destroy(second);
    return result != TQKV_OK;
}
