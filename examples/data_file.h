/* Reads the little-endian files of examples/data; data/README.md has the formats. Every read is checked against the end
 * of the file. A short or damaged file sets `failed`; later reads give zeros. The caller checks `failed` once, at the
 * end. */
#ifndef DATA_FILE_H
#define DATA_FILE_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct data_file {
    unsigned char *bytes; /* [size] */
    size_t size, at;
    bool failed;
} data_file;

/* Reads a whole file into memory. False if it cannot be read, or has 1 GiB or more: int must index its values. The
 * caller frees `bytes`. */
static inline bool data_file_open(data_file *file, const char *path)
{
    memset(file, 0, sizeof *file);
    FILE *stream = fopen(path, "rb");
    if (!stream) return false;
    long size = fseek(stream, 0, SEEK_END) == 0 ? ftell(stream) : -1;
    if (size > 0 && size < 1L << 30 && fseek(stream, 0, SEEK_SET) == 0 &&
        (file->bytes = (unsigned char *)malloc((size_t)size))) {
        file->size = fread(file->bytes, 1, (size_t)size, stream);
        if (file->size != (size_t)size) {
            free(file->bytes);
            file->bytes = NULL;
        }
    }
    fclose(stream);
    return file->bytes != NULL;
}

/* The next `count` items of `item_size` bytes; NULL past the end. Divides, because a product could overflow. */
static inline const unsigned char *data_file_take(data_file *file, size_t count, size_t item_size)
{
    if (file->failed || count > (file->size - file->at) / item_size) {
        file->failed = true;
        return NULL;
    }
    const unsigned char *bytes = file->bytes + file->at;
    file->at += count * item_size;
    return bytes;
}

static inline uint32_t data_file_u32(data_file *file)
{
    const unsigned char *b = data_file_take(file, 1, 4);
    return b ? (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24 : 0;
}

static inline float data_file_f32(data_file *file)
{
    uint32_t bits = data_file_u32(file);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* A count in [low, high]. Any other value sets `failed` and gives `low`. */
static inline int data_file_count(data_file *file, uint32_t low, uint32_t high)
{
    uint32_t value = data_file_u32(file);
    if (value < low || value > high) {
        file->failed = true;
        value = low;
    }
    return (int)value;
}

/* Checks the magic and version 1. */
static inline void data_file_magic(data_file *file, const char *magic)
{
    const unsigned char *b = data_file_take(file, 8, 1);
    if (!b || memcmp(b, magic, 8) != 0 || data_file_u32(file) != 1) file->failed = true;
}

/* Checks the size that the file gives for itself. */
static inline void data_file_size(data_file *file)
{
    uint64_t low = data_file_u32(file), high = data_file_u32(file);
    if ((low | high << 32) != file->size) file->failed = true;
}

static inline float half_to_float(const unsigned char *bytes)
{
    int bits = bytes[0] | bytes[1] << 8, exponent = bits >> 10 & 31, fraction = bits & 1023;
    float value = exponent == 31  ? (fraction ? NAN : INFINITY)
                  : exponent == 0 ? ldexpf((float)fraction, -24)
                                  : ldexpf((float)(fraction + 1024), exponent - 25);
    return bits & 0x8000 ? -value : value;
}

/* rows * row_size halves as a new array of floats. NULL and `failed` if the file is too short or memory runs out. */
static inline float *data_file_halves(data_file *file, int rows, int row_size)
{
    if ((size_t)rows > file->size / 2 / (size_t)row_size) {
        file->failed = true;
        return NULL;
    }
    const size_t count = (size_t)rows * (size_t)row_size;
    const unsigned char *bytes = data_file_take(file, count, 2);
    float *values = bytes && count <= SIZE_MAX / sizeof *values ? (float *)malloc(count * sizeof *values) : NULL;
    if (!values) file->failed = true;
    for (size_t i = 0; values && i < count; i++) values[i] = half_to_float(bytes + 2 * i);
    return values;
}

#endif
