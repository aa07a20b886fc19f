/* Prompts in files: a common beginning is computed once, also by other processes and after a restart. Copy this file.
 *
 * A file holds the caches of all layers after a prefix of whole blocks of tokens, as tqkv_cache_save writes them. Its
 * name is the XXH3 of the model's tag and of the prefix's tokens, block after block, so the longest stored prefix of a
 * prompt is the first of its names, from the longest on, that is there.
 *
 *     tqkv_cache *caches[N_LAYERS];
 *     int done = prompt_cache_load(&p, tokens, n_tokens, descs, N_LAYERS, caches);
 *     if (done == 0) create_caches(caches);
 *     while (done < n_tokens) {
 *         const int next = prompt_cache_next(&p, done, n_tokens);
 *         compute(tokens + done, next - done);              // appends to the caches
 *         prompt_cache_save(&p, tokens, next, caches, N_LAYERS);
 *         done = next;
 *     }
 *
 * Any number of processes may use one folder: a file is written under a temporary name and then renamed. Nothing is
 * synced: what a crash or a power cut leaves is found by the checksums of the snapshots, skipped, and written again.
 * Files hold the text of prompts, and are readable by their owner alone. Needs POSIX, and xxhash.h: _POSIX_C_SOURCE
 * 200809L, on a Mac _DARWIN_C_SOURCE, too. */
#ifndef PROMPT_CACHE_H
#define PROMPT_CACHE_H

#include "tqkv.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

typedef struct prompt_cache {
    const char *folder; /* is there */
    /* Of the model and of all else that decides the bytes of keys and values: the weights, the formats, the arithmetic,
       how many positions go through a layer together. */
    uint64_t tag;
    int block; /* tokens; at least 1 */
    /* Bytes of all files together; 0: no limit. The least recently used go first, also where the disk is full. */
    uint64_t limit;
    /* Told which file was skipped, or not written, and why; NULL: nobody */
    void (*say)(void *user, const char *text);
    void *user;
} prompt_cache;

enum {
    PROMPT_CACHE_PATH = 4096,
    PROMPT_CACHE_FIXED = 24, /* bytes of a head before its tokens: magic, tag, layers, tokens */
    PROMPT_CACHE_HASH = 32,  /* digits */
    PROMPT_CACHE_NAME = 64
};

static inline void prompt_cache_say(const prompt_cache *p, const char *name, const char *what, const char *why)
{
    char text[PROMPT_CACHE_PATH + 512];
    if (!p->say) return;
    snprintf(text, sizeof text, "%.*s/%s: %s: %s", PROMPT_CACHE_PATH, p->folder, name, what, why);
    p->say(p->user, text);
}

/* ---- heads and names ---- */

static inline void prompt_cache_put(unsigned char *at, uint64_t value, int n_bytes)
{
    for (int i = 0; i < n_bytes; i++) at[i] = (unsigned char)(value >> 8 * i);
}

/* The head of the file of these tokens, little-endian, for the caller to free; NULL: out of memory. A file whose head
   is another one is that of another prompt or model, whatever its name. */
static inline unsigned char *prompt_cache_head(const prompt_cache *p, const int32_t *tokens, int n_tokens, int n_layers)
{
    unsigned char *head = (unsigned char *)malloc(PROMPT_CACHE_FIXED + 4 * (size_t)n_tokens);
    if (!head) return NULL;
    memcpy(head, "TQKVPRMT", 8);
    prompt_cache_put(head + 8, p->tag, 8);
    prompt_cache_put(head + 16, (uint64_t)n_layers, 4);
    prompt_cache_put(head + 20, (uint64_t)n_tokens, 4);
    for (int i = 0; i < n_tokens; i++) prompt_cache_put(head + PROMPT_CACHE_FIXED + 4 * i, (uint32_t)tokens[i], 4);
    return head;
}

/* Hashes on from the state of the blocks before: a prompt's names take one pass over its tokens. */
static inline XXH128_hash_t prompt_cache_hash(XXH3_state_t *state, const unsigned char *head, int first, int n_tokens)
{
    if (first == 0) {
        XXH3_128bits_reset(state);
        XXH3_128bits_update(state, head, 20);
    }
    XXH3_128bits_update(state, head + PROMPT_CACHE_FIXED + 4 * (size_t)first, 4 * (size_t)n_tokens);
    return XXH3_128bits_digest(state);
}

static inline void prompt_cache_name(XXH128_hash_t hash, char name[PROMPT_CACHE_NAME])
{
    snprintf(name, PROMPT_CACHE_NAME, "%016llx%016llx.prompt", (unsigned long long)hash.high64,
             (unsigned long long)hash.low64);
}

/* false, and errno: longer than a path may be */
static inline bool prompt_cache_path(const prompt_cache *p, const char *name, const char *end, char *path)
{
    const int length = snprintf(path, PROMPT_CACHE_PATH, "%s/%s%s", p->folder, name, end);
    const bool fits = length > 0 && length < PROMPT_CACHE_PATH;
    if (!fits) errno = ENAMETOOLONG;
    return fits;
}

/* ---- reading ---- */

/* Returns NULL and sets errno on failure. Opening must not wait: a pipe of that name may have no writer. */
static inline FILE *prompt_cache_open(const char *path)
{
    struct stat info;
    const int descriptor = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    FILE *file = NULL;
    if (descriptor < 0) return NULL;
    if (fstat(descriptor, &info) == 0 && !S_ISREG(info.st_mode))
        errno = S_ISDIR(info.st_mode) ? EISDIR : EINVAL;
    else
        file = fdopen(descriptor, "rb");
    if (!file) close(descriptor);
    return file;
}

static inline size_t prompt_cache_read(void *file, void *bytes, size_t n) { return fread(bytes, 1, n, (FILE *)file); }

/* NULL, and the caches of all layers; or the reason why this is not the file of the head, and no cache. */
static inline const char *prompt_cache_read_file(FILE *file, const unsigned char *head, int n_tokens,
                                                 const tqkv_cache_desc *descs, int n_layers, tqkv_cache **caches)
{
    const size_t size = PROMPT_CACHE_FIXED + 4 * (size_t)n_tokens;
    for (size_t at = 0; at < size; at++)
        if (fgetc(file) != head[at]) return at < 8 ? "is no prompt" : "is damaged, or of another prompt or model";
    const char *reason = NULL;
    int made = 0;
    for (; !reason && made < n_layers; made++) {
        const tqkv_result result = tqkv_cache_load(&descs[made], prompt_cache_read, file, &caches[made]);
        if (result == TQKV_INVALID_ARGUMENT)
            reason = "is of caches of another description or model";
        else if (result != TQKV_OK)
            reason = tqkv_result_string(result);
        else if (tqkv_cache_end(caches[made]) != n_tokens)
            reason = "has other positions than tokens";
    }
    if (!reason && fgetc(file) != EOF) reason = "has bytes after its end";
    for (int i = 0; reason && i < made; i++) {
        tqkv_cache_destroy(caches[i]);
        caches[i] = NULL;
    }
    return reason;
}

/* Returns whether the caches are those of the first n_tokens tokens of `head`. The file then counts as used now. */
static inline bool prompt_cache_load_file(const prompt_cache *p, const char *name, unsigned char *head, int n_tokens,
                                          const tqkv_cache_desc *descs, int n_layers, tqkv_cache **caches)
{
    char path[PROMPT_CACHE_PATH];
    FILE *file = prompt_cache_path(p, name, "", path) ? prompt_cache_open(path) : NULL;
    if (!file) {
        if (errno != ENOENT) prompt_cache_say(p, name, "skipped", strerror(errno));
        return false;
    }
    prompt_cache_put(head + 20, (uint64_t)n_tokens, 4);
    const char *reason = prompt_cache_read_file(file, head, n_tokens, descs, n_layers, caches);
    if (reason)
        prompt_cache_say(p, name, "skipped", ferror(file) ? "cannot be read" : reason);
    else
        futimens(fileno(file), NULL); /* where that is not allowed, the file goes earlier */
    fclose(file);
    return !reason;
}

/* Finds the longest stored prefix of the tokens, in whole blocks, and loads it. Returns its tokens, and in
   caches[n_layers] caches like descs[n_layers], to which tqkv_cache_load has more to say; or 0 and NULL everywhere. A
   tag in the descs, as in those that the caches were made with, is checked, too. */
static inline int prompt_cache_load(const prompt_cache *p, const int32_t *tokens, int n_tokens,
                                    const tqkv_cache_desc *descs, int n_layers, tqkv_cache **caches)
{
    const int n_blocks = n_tokens / p->block;
    unsigned char *head = prompt_cache_head(p, tokens, n_tokens, n_layers);
    XXH128_hash_t *hashes = (XXH128_hash_t *)malloc(((size_t)n_blocks + 1) * sizeof *hashes);
    XXH3_state_t state;
    int found = 0;
    for (int i = 0; i < n_layers; i++) caches[i] = NULL;
    for (int i = 0; head && hashes && i < n_blocks; i++)
        hashes[i] = prompt_cache_hash(&state, head, i * p->block, p->block);
    for (int i = n_blocks; head && hashes && !found && i > 0; i--) {
        char name[PROMPT_CACHE_NAME];
        prompt_cache_name(hashes[i - 1], name);
        if (prompt_cache_load_file(p, name, head, i * p->block, descs, n_layers, caches)) found = i * p->block;
    }
    free(head);
    free(hashes);
    return found;
}

/* ---- writing ---- */

/* Up to which token to compute before the next save: after 1, 2, 4, 8 ... blocks, and after the last whole block. So
   all files of one prompt take at most three times its longest, and of any common beginning at least half is found. */
static inline int prompt_cache_next(const prompt_cache *p, int done, int n_tokens)
{
    const int last = n_tokens - n_tokens % p->block;
    int next = p->block;
    while (next <= done && next <= last / 2) next *= 2;
    if (next <= done || next > last) next = last;
    return next > done ? next : n_tokens;
}

typedef struct prompt_cache_entry {
    char name[PROMPT_CACHE_NAME];
    struct timespec used;
    uint64_t size;
} prompt_cache_entry;

static inline int prompt_cache_compare(const void *a, const void *b)
{
    const struct timespec *x = &((const prompt_cache_entry *)a)->used, *y = &((const prompt_cache_entry *)b)->used;
    if (x->tv_sec != y->tv_sec) return x->tv_sec < y->tv_sec ? -1 : 1;
    return (x->tv_nsec > y->tv_nsec) - (x->tv_nsec < y->tv_nsec);
}

/* Whether a file is a prompt, or one that is being written, or that a process left behind when it was killed. */
static inline bool prompt_cache_is_ours(const char *name)
{
    const size_t length = strlen(name), whole = PROMPT_CACHE_HASH + sizeof ".prompt" - 1;
    return length >= whole && length < PROMPT_CACHE_NAME && strspn(name, "0123456789abcdef") == PROMPT_CACHE_HASH &&
           strncmp(name + PROMPT_CACHE_HASH, ".prompt", 7) == 0 && (name[whole] == 0 || name[whole] == '.');
}

/* All files of the folder but `kept`, for the caller to free. *count is 0 if there are none or memory is short. */
static inline prompt_cache_entry *prompt_cache_list(DIR *folder, const char *kept, size_t *count)
{
    prompt_cache_entry *entries = NULL;
    size_t room = 0;
    *count = 0;
    for (struct dirent *found; (found = readdir(folder));) {
        struct stat info;
        if (!prompt_cache_is_ours(found->d_name) || strcmp(found->d_name, kept) == 0 ||
            fstatat(dirfd(folder), found->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0)
            continue;
        if (*count == room) {
            room = 2 * room + 16;
            prompt_cache_entry *more = (prompt_cache_entry *)realloc(entries, room * sizeof *more);
            if (!more) break;
            entries = more;
        }
        prompt_cache_entry *entry = &entries[(*count)++];
        memcpy(entry->name, found->d_name, strlen(found->d_name) + 1);
        entry->size = (uint64_t)info.st_size;
#ifdef __APPLE__
        entry->used = info.st_mtimespec;
#else
        entry->used = info.st_mtim;
#endif
    }
    return entries;
}

/* Removes the files that were used least recently, but `kept`, until they are no more than `limit` bytes; at most `n`.
   Returns how many it removed. */
static inline size_t prompt_cache_trim(const prompt_cache *p, const char *kept, uint64_t limit, size_t n)
{
    DIR *folder = opendir(p->folder);
    size_t count, removed = 0;
    if (!folder) return 0;
    prompt_cache_entry *entries = prompt_cache_list(folder, kept, &count);
    uint64_t total = 0;
    if (count) qsort(entries, count, sizeof *entries, prompt_cache_compare);
    for (size_t i = 0; i < count; i++) total += entries[i].size;
    for (size_t i = 0; i < count && total > limit && removed < n; i++) {
        /* Another process may have removed it, or be reading it, and then reads on. */
        if (unlinkat(dirfd(folder), entries[i].name, 0) != 0 && errno != ENOENT) continue;
        total -= entries[i].size;
        removed++;
    }
    free(entries);
    closedir(folder);
    return removed;
}

static inline size_t prompt_cache_write(void *file, const void *bytes, size_t n)
{
    return fwrite(bytes, 1, n, (FILE *)file);
}

/* Writes and closes the file, and says its size. NULL, or why it failed, with errno 0 or the system's. */
static inline const char *prompt_cache_write_file(FILE *file, const unsigned char *head, int n_tokens,
                                                  tqkv_cache *const *caches, int n_layers, uint64_t *bytes)
{
    const size_t size = PROMPT_CACHE_FIXED + 4 * (size_t)n_tokens;
    struct stat info;
    tqkv_result result = fwrite(head, 1, size, file) == size ? TQKV_OK : TQKV_IO;
    for (int i = 0; result == TQKV_OK && i < n_layers; i++)
        result = tqkv_cache_save(caches[i], prompt_cache_write, file);
    if (result == TQKV_OK && (fflush(file) != 0 || fstat(fileno(file), &info) != 0)) result = TQKV_IO;
    int error = result == TQKV_IO ? errno : 0;
    if (fclose(file) != 0 && result == TQKV_OK) {
        result = TQKV_IO;
        error = errno;
    }
    *bytes = result == TQKV_OK ? (uint64_t)info.st_size : 0;
    errno = error;
    return result == TQKV_OK ? NULL : error ? strerror(error) : tqkv_result_string(result);
}

/* Writes a file under another name and then renames it. NULL, or the reason of a failure, as above. */
static inline const char *prompt_cache_write_name(const prompt_cache *p, const char *name, const unsigned char *head,
                                                  int n_tokens, tqkv_cache *const *caches, int n_layers,
                                                  uint64_t *bytes)
{
    char path[PROMPT_CACHE_PATH], temporary[PROMPT_CACHE_PATH];
    const bool fits = prompt_cache_path(p, name, "", path) && prompt_cache_path(p, name, ".XXXXXX", temporary);
    const int descriptor = fits ? mkstemp(temporary) : -1;
    FILE *file = descriptor < 0 ? NULL : fdopen(descriptor, "wb");
    const char *reason =
        file ? prompt_cache_write_file(file, head, n_tokens, caches, n_layers, bytes) : strerror(errno);
    if (!reason && p->limit && *bytes > p->limit) reason = "larger than the limit of all files";
    if (!reason && rename(temporary, path) != 0) reason = strerror(errno);
    const int error = errno;
    if (!file && descriptor >= 0) close(descriptor);
    if (reason && descriptor >= 0) unlink(temporary);
    errno = error;
    return reason;
}

/* Stores the caches of the first n_tokens tokens, if these are whole blocks. Returns false if the file was not
   written. */
static inline bool prompt_cache_save(const prompt_cache *p, const int32_t *tokens, int n_tokens,
                                     tqkv_cache *const *caches, int n_layers)
{
    char name[PROMPT_CACHE_NAME];
    XXH3_state_t state;
    uint64_t bytes = 0;
    if (n_tokens == 0 || n_tokens % p->block != 0) return true;
    unsigned char *head = prompt_cache_head(p, tokens, n_tokens, n_layers);
    if (!head) return false;
    prompt_cache_name(prompt_cache_hash(&state, head, 0, n_tokens), name);
    const char *reason;
    do { /* a full disk: the oldest file goes, and it is written again */
        reason = prompt_cache_write_name(p, name, head, n_tokens, caches, n_layers, &bytes);
    } while (reason && (errno == ENOSPC || errno == EDQUOT) && prompt_cache_trim(p, name, 0, 1));
    free(head);
    if (reason)
        prompt_cache_say(p, name, "not written", reason);
    else if (p->limit)
        prompt_cache_trim(p, name, p->limit - bytes, SIZE_MAX);
    return !reason;
}

#endif
