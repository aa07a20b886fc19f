/* Runs a fuzzer's entry point on each file, and on each file of each folder: PROGRAM PATH...
   Prints 'N passed, N failed'. A finding ends the program. */
#include "fuzz.h"

#include <dirent.h>
#include <sys/stat.h>

static int n_files, n_unread;

static void replay_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    size_t size = 0, room = 1 << 16;
    uint8_t *bytes = (uint8_t *)test_alloc(room);
    for (size_t n = 1; file && n; size += n) {
        if (size == room) {
            uint8_t *larger = (uint8_t *)realloc(bytes, room *= 2);
            if (!larger) exit(2);
            bytes = larger;
        }
        n = fread(bytes + size, 1, room - size, file);
    }
    if (file && !ferror(file)) {
        uint8_t *exact = (uint8_t *)test_alloc(size); /* of the exact size: the sanitizer reports a read beyond it */
        if (size) memcpy(exact, bytes, size);
        LLVMFuzzerTestOneInput(exact, size);
        free(exact);
        n_files++;
    } else {
        printf("FAIL %s: cannot be read\n", path);
        n_unread++;
    }
    if (file) fclose(file);
    free(bytes);
}

static void replay(const char *path)
{
    struct stat status;
    DIR *folder = stat(path, &status) == 0 && S_ISDIR(status.st_mode) ? opendir(path) : NULL;
    if (!folder) {
        replay_file(path);
        return;
    }
    for (struct dirent *entry = readdir(folder); entry; entry = readdir(folder)) {
        char name[4096];
        if (entry->d_name[0] == '.') continue;
        if (snprintf(name, sizeof name, "%s/%s", path, entry->d_name) >= (int)sizeof name) exit(2);
        replay(name);
    }
    closedir(folder);
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) replay(argv[i]);
    if (n_files + n_unread == 0) n_unread = 1; /* an empty folder must not look like success */
    printf("%d passed, %d failed\n", n_files, n_unread);
    return n_unread != 0;
}
