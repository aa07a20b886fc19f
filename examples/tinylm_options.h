/* The command line of tinylm, the names of the cache formats, and a progress bar. */
#ifndef TINYLM_OPTIONS_H
#define TINYLM_OPTIONS_H

#include "tqkv.h"
#include "plain_cache.h"
#include <time.h>
#include <unistd.h>

typedef struct format_choice {
    const char *name;
    tqkv_format format; /* TQKV_FORMAT_DEFAULT: a preset, or the plain cache */
    round_trip through; /* of the plain cache; NULL: none */
    bool rotated;       /* rotate for the round trip */
    double bits;        /* bits a value, of the plain cache */
    bool is_preset;     /* of keys and values both: their formats, exact ends, and what the cache learns by itself */
    tqkv_preset preset;
} format_choice;

static const format_choice formats[] = {
    {.name = "f16", .format = TQKV_F16},
    {.name = "i8", .format = TQKV_I8},
    {.name = "tq8", .format = TQKV_TQ8},
    {.name = "tq6", .format = TQKV_TQ6},
    {.name = "tq5", .format = TQKV_TQ5},
    {.name = "tq4", .format = TQKV_TQ4},
    {.name = "tq3", .format = TQKV_TQ3},
    {.name = "tq2", .format = TQKV_TQ2},
    {.name = "f32", .bits = 32},
    {.name = "q8_0", .through = q8_0_round_trip, .bits = 8.5},
    {.name = "q4_0", .through = q4_0_round_trip, .bits = 4.5},
    {.name = "q8_0r", .through = q8_0_round_trip, .rotated = true, .bits = 8.5},
    {.name = "q4_0r", .through = q4_0_round_trip, .rotated = true, .bits = 4.5},
    {.name = "safe", .is_preset = true, .preset = TQKV_SAFE},
    {.name = "small", .is_preset = true, .preset = TQKV_SMALL},
    {.name = "tiny", .is_preset = true, .preset = TQKV_TINY},
};
enum { N_FORMATS = sizeof formats / sizeof *formats };

static bool is_tqkv(const format_choice *choice) { return choice->is_preset || choice->format; }

enum { WINDOW_BYTES = 1024 }; /* of text that `score` reads from an empty cache */

typedef struct options {
    const char *command, *model_path, *file, *prompt;
    const char *folder;                 /* of prompts that are kept; NULL: none */
    int limit;                          /* of that folder, in MiB */
    const format_choice *keys, *values; /* both or neither */
    int n_bytes, n_windows, n_threads;
    int exact_first, exact_last, batch;
    int center_tokens;   /* keys whose mean becomes the caches' centre; 0: no centre */
    const char *profile; /* a file with centre and scale of the keys; NULL: none */
    float temperature, bias, before_rotary;
    float bits; /* of a plan; 0: none */
    uint64_t seed;
    bool all, tree;
} options;

static void stop(const char *what, const char *why)
{
    fprintf(stderr, "tinylm: %s: %s\n", what, why);
    exit(1);
}

static const format_choice *find_format(const char *name)
{
    for (int i = 0; i < N_FORMATS; i++)
        if (strcmp(formats[i].name, name) == 0) return &formats[i];
    stop(name, "is no format this program knows");
    return NULL;
}

static void usage(void)
{
    puts("tinylm                          a table and a paragraph\n"
         "tinylm score [--windows N] [--text FILE] [--all | --keys F --values F]\n"
         "             [--bias LENGTHS [--before-rotary SHARE] [--center TOKENS]]\n"
         "tinylm generate PROMPT [options]\n"
         "tinylm save FILE PROMPT [options]\n"
         "tinylm resume FILE [options]\n"
         "tinylm speculate PROMPT [--tree] [options]\n"
         "tinylm learn PROFILE [--windows N] [--text FILE] [--bits N]\n"
         "options: --preset safe|small|tiny; or --keys F --values F (f16 i8 tq8 tq6 tq5 tq4 tq3 tq2; or for both f32 "
         "q8_0\n"
         "         q4_0 q8_0r q4_0r)\n"
         "         --profile PROFILE (centre and scale of the keys, and formats by layer in place of a preset's, from "
         "learn)\n"
         "         --bytes N --temperature T --seed N --threads N --model FILE\n"
         "         --first N --last N (positions as halves, too) --batch N (positions at a time)\n"
         "         --cache FOLDER --limit MIB (prompts kept there are not computed again; the oldest files go)");
    exit(2);
}

static float positive_number(const char *option, const char *text)
{
    char *rest;
    double value = strtod(text, &rest);
    if (*text == 0 || *rest != 0 || !(value > 0 && value <= 1e6)) stop(option, "needs a number in its range");
    return (float)value;
}

/* A whole number from `low` to `high`. */
static int number(const char *option, const char *text, int low, int high)
{
    char *rest;
    long value = strtol(text, &rest, 10);
    if (*text == 0 || *rest != 0 || value < low || value > high) stop(option, "needs a number in its range");
    return (int)value;
}

/* Whether it is an option that names formats. */
static bool parse_formats(options *o, const char *name, const char *value)
{
    const bool preset = strcmp(name, "--preset") == 0;
    if (preset && !find_format(value)->is_preset) stop(value, "is no preset");
    if (preset || strcmp(name, "--keys") == 0) o->keys = find_format(value);
    if (preset || strcmp(name, "--values") == 0) o->values = find_format(value);
    return preset || strcmp(name, "--keys") == 0 || strcmp(name, "--values") == 0;
}

static void parse_option(options *o, const char *name, const char *value)
{
    if (parse_formats(o, name, value)) return;
    if (strcmp(name, "--profile") == 0) {
        o->profile = value;
    } else if (strcmp(name, "--bytes") == 0) {
        o->n_bytes = number(name, value, 0, MAX_CONTEXT);
    } else if (strcmp(name, "--windows") == 0) {
        o->n_windows = number(name, value, 1, 1 << 16);
    } else if (strcmp(name, "--threads") == 0) {
        o->n_threads = number(name, value, 1, POOL_MAX_THREADS);
    } else if (strcmp(name, "--seed") == 0) {
        o->seed = (uint64_t)number(name, value, 0, 1 << 30);
    } else if (strcmp(name, "--temperature") == 0) {
        o->temperature = (float)strtod(value, NULL);
    } else if (strcmp(name, "--bias") == 0) {
        o->bias = positive_number(name, value);
    } else if (strcmp(name, "--bits") == 0) {
        o->bits = positive_number(name, value);
    } else if (strcmp(name, "--before-rotary") == 0) {
        o->before_rotary = positive_number(name, value);
        if (o->before_rotary > 1) stop(name, "is a share, at most 1");
    } else if (strcmp(name, "--center") == 0) {
        o->center_tokens = number(name, value, 1, WINDOW_BYTES);
    } else if (strcmp(name, "--first") == 0) {
        o->exact_first = number(name, value, 0, WINDOW_BYTES / 4);
    } else if (strcmp(name, "--last") == 0) {
        o->exact_last = number(name, value, 0, WINDOW_BYTES / 4);
    } else if (strcmp(name, "--batch") == 0) {
        o->batch = number(name, value, 1, 128);
    } else if (strcmp(name, "--cache") == 0) {
        o->folder = value;
    } else if (strcmp(name, "--limit") == 0) {
        o->limit = number(name, value, 1, 1 << 20);
    } else if (strcmp(name, "--model") == 0) {
        o->model_path = value;
    } else if (strcmp(name, "--text") == 0) {
        o->file = value;
    } else {
        usage();
    }
}

/* How many positional arguments a command takes. */
static int positionals(const char *command)
{
    static const struct {
        const char *command;
        int n;
    } known[] = {{"demo", 0}, {"score", 0}, {"save", 2}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(command, known[i].command) == 0) return known[i].n;
    return 1;
}

/* Positional arguments in the order of usage(), options anywhere. */
static void parse_arguments(options *o, int argc, char **argv)
{
    const char *positional[2] = {NULL, NULL};
    const int wanted = positionals(o->command);
    int n_positional = 0;
    for (int i = 2; i < argc; i++) {
        if (strcmp(argv[i], "--all") == 0) {
            o->all = true;
        } else if (strcmp(argv[i], "--tree") == 0) {
            o->tree = true;
        } else if (strncmp(argv[i], "--", 2) == 0) {
            if (i + 1 == argc) usage();
            parse_option(o, argv[i], argv[i + 1]);
            i++;
        } else if (n_positional < wanted) {
            positional[n_positional++] = argv[i];
        } else {
            usage();
        }
    }
    if (n_positional != wanted) usage();
    if (wanted == 2 || strcmp(o->command, "resume") == 0) o->file = positional[0];
    if (strcmp(o->command, "learn") == 0) o->profile = positional[0];
    o->prompt = positional[wanted == 2];
}

static options parse(int argc, char **argv)
{
    options o = {.model_path = "examples/data/tinylm.bin", .file = "examples/data/heldout.txt"};
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    o.n_threads = processors < 1 ? 1 : processors > POOL_MAX_THREADS ? POOL_MAX_THREADS : (int)processors;
    o.n_bytes = 200;
    o.n_windows = 16;
    o.limit = 1024;
    o.seed = 1;
    o.command = argc < 2 ? "demo" : argv[1];
    parse_arguments(&o, argc, argv);
    if (!o.keys != !o.values) o.keys = o.values = o.keys ? o.keys : o.values;
    if (!o.keys && o.prompt) o.keys = o.values = find_format("safe");
    return o;
}

static inline double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* A progress bar, if stderr is a terminal. It is erased at the end. */
static inline void progress(const char *label, int done, int all)
{
    if (!isatty(STDERR_FILENO)) return;
    if (done < all)
        fprintf(stderr, "\r%-10s [%-32.*s] %d/%d ", label, 32 * done / all, "################################", done,
                all);
    else
        fprintf(stderr, "\r%60s\r", "");
}

#endif
