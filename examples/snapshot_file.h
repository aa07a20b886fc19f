/* Saves a cache to a file under a temporary name, syncs it to the disk and renames it. A crash, a full disk or a power
   cut leaves either the old file or the new one. POSIX. */
#ifndef SNAPSHOT_FILE_H
#define SNAPSHOT_FILE_H

#include "tqkv.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SNAPSHOT_PATH_SIZE = 4096 };

static inline size_t snapshot_write(void *file, const void *bytes, size_t n)
{
    return fwrite(bytes, 1, n, (FILE *)file);
}

static inline size_t snapshot_read(void *file, void *bytes, size_t n) { return fread(bytes, 1, n, (FILE *)file); }

/* Syncs the folder of `path`: without that, a power cut can undo the rename. */
static inline bool snapshot_sync_folder(const char *path)
{
    char folder[SNAPSHOT_PATH_SIZE] = ".";
    const char *slash = strrchr(path, '/');
    if (slash) snprintf(folder, sizeof folder, "%.*s", slash == path ? 1 : (int)(slash - path), path);
    int file = open(folder, O_RDONLY);
    bool ok = file >= 0 && fsync(file) == 0;
    if (file >= 0) close(file);
    return ok;
}

/* Bytes that fwrite accepted may still fail to reach the disk: fflush, fsync and fclose must all succeed. Closes the
   file, which may be NULL. */
static inline tqkv_result snapshot_save_to(const tqkv_cache *cache, FILE *file)
{
    if (!file) return TQKV_IO;
    tqkv_result result = tqkv_cache_save(cache, snapshot_write, file);
    if (result == TQKV_OK && (fflush(file) != 0 || fsync(fileno(file)) != 0)) result = TQKV_IO;
    if (fclose(file) != 0 && result == TQKV_OK) result = TQKV_IO;
    return result;
}

/* On failure the file at `path` is unchanged and the temporary file is removed. If only the sync of the folder fails,
   the new file is in place. Threads and processes may save to one path at once: each has a file of its own. */
static inline tqkv_result snapshot_save(const tqkv_cache *cache, const char *path)
{
    char temporary[SNAPSHOT_PATH_SIZE];
    int length = snprintf(temporary, sizeof temporary, "%s.XXXXXX", path);
    if (length < 0 || length >= (int)sizeof temporary) return TQKV_IO;
    int descriptor = mkstemp(temporary); /* readable by its owner alone */
    if (descriptor < 0) return TQKV_IO;
    FILE *file = fdopen(descriptor, "wb");
    if (!file) close(descriptor);
    tqkv_result result = snapshot_save_to(cache, file);
    if (result == TQKV_OK && rename(temporary, path) != 0) result = TQKV_IO;
    if (result != TQKV_OK) {
        remove(temporary);
        return result;
    }
    return snapshot_sync_folder(path) ? TQKV_OK : TQKV_IO;
}

/* The checksums of the snapshot detect a file that was cut short: TQKV_CORRUPT. */
static inline tqkv_result snapshot_load(const tqkv_cache_desc *desc, const char *path, tqkv_cache **out)
{
    *out = NULL;
    FILE *file = fopen(path, "rb");
    if (!file) return TQKV_IO;
    tqkv_result result = tqkv_cache_load(desc, snapshot_read, file, out);
    if (result == TQKV_OK && fgetc(file) != EOF) result = TQKV_CORRUPT; /* bytes after the snapshot */
    if (result == TQKV_CORRUPT && ferror(file)) result = TQKV_IO;       /* the read failed */
    if (result != TQKV_OK) {
        tqkv_cache_destroy(*out);
        *out = NULL;
    }
    fclose(file);
    return result;
}

#endif
