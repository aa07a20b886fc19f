/* Times several pieces of work in turns: a change of the machine's speed affects all of them alike. */
#ifndef BENCH_TIMING_H
#define BENCH_TIMING_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { TIMING_MAX_ROUNDS = 99, TIMING_MAX_ENTRIES = 48, TIMING_NAME = 32 };

/* Ratios use this thread's processor time. It leaves out other programs on the same cores, but not their use of caches
   and bandwidth. Wall time shows how busy the machine was. */
typedef struct timing_entry {
    char name[TIMING_NAME];
    void (*run)(void *user);
    void *user;
    int repeats;                   /* calls a sample */
    double cpu[TIMING_MAX_ROUNDS]; /* seconds a call */
    double wall[TIMING_MAX_ROUNDS];
} timing_entry;

typedef struct timing {
    timing_entry entries[TIMING_MAX_ENTRIES];
    int n_entries, n_rounds;
} timing;

typedef struct timing_limits {
    int min_rounds, max_rounds;
    double seconds; /* no further round after this time, if min_rounds are done */
    double sample;  /* a sample repeats short calls for about this long */
} timing_limits;

static inline double timing_clock(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline timing_entry *timing_add(timing *t, const char *name, void (*run)(void *user), void *user)
{
    if (t->n_entries == TIMING_MAX_ENTRIES) {
        fprintf(stderr, "bench: more than %d entries\n", TIMING_MAX_ENTRIES);
        exit(1);
    }
    timing_entry *entry = &t->entries[t->n_entries++];
    snprintf(entry->name, sizeof entry->name, "%s", name);
    entry->run = run;
    entry->user = user;
    return entry;
}

static inline void timing_sample(timing_entry *entry, double *cpu, double *wall)
{
    const double wall_begin = timing_clock(CLOCK_MONOTONIC), cpu_begin = timing_clock(CLOCK_THREAD_CPUTIME_ID);
    for (int i = 0; i < entry->repeats; i++) entry->run(entry->user);
    *cpu = (timing_clock(CLOCK_THREAD_CPUTIME_ID) - cpu_begin) / entry->repeats;
    *wall = (timing_clock(CLOCK_MONOTONIC) - wall_begin) / entry->repeats;
}

static inline void timing_run(timing *t, const timing_limits *limits)
{
    const double begin = timing_clock(CLOCK_MONOTONIC);
    for (int i = 0; i < t->n_entries; i++) {
        timing_entry *entry = &t->entries[i];
        double cpu, wall;
        entry->repeats = 1;
        timing_sample(entry, &cpu, &wall); /* touches its memory */
        if (cpu < limits->sample) timing_sample(entry, &cpu, &wall);
        if (cpu < limits->sample) entry->repeats = (int)(limits->sample / (cpu + 1e-9)) + 1;
    }
    for (t->n_rounds = 0; t->n_rounds < limits->max_rounds; t->n_rounds++) {
        if (t->n_rounds >= limits->min_rounds && timing_clock(CLOCK_MONOTONIC) - begin > limits->seconds) break;
        for (int i = 0; i < t->n_entries;
             i++) { /* each round starts with another: no entry always follows the same one */
            timing_entry *entry = &t->entries[(i + t->n_rounds) % t->n_entries];
            timing_sample(entry, &entry->cpu[t->n_rounds], &entry->wall[t->n_rounds]);
        }
    }
}

static inline const timing_entry *timing_find(const timing *t, const char *name)
{
    for (int i = 0; i < t->n_entries; i++)
        if (strcmp(t->entries[i].name, name) == 0) return &t->entries[i];
    return NULL;
}

/* Of an entry that is there. */
static inline const timing_entry *timing_of(const timing *t, const char *name)
{
    const timing_entry *entry = timing_find(t, name);
    if (!entry) abort();
    return entry;
}

static inline int timing_compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The `share` quantile of x: [n]; 0 is the least, 0.5 the median, 1 the largest. */
static inline double timing_quantile(const double *x, int n, double share)
{
    double sorted[TIMING_MAX_ROUNDS];
    memcpy(sorted, x, (size_t)n * sizeof *x);
    qsort(sorted, (size_t)n, sizeof *sorted, timing_compare);
    const double at = share * (n - 1);
    const int low = (int)at;
    return low + 1 < n ? sorted[low] + (at - low) * (sorted[low + 1] - sorted[low]) : sorted[low];
}

static inline double timing_median(const double *x, int n) { return timing_quantile(x, n, 0.5); }

/* x[i] / y[i]: the median over the rounds. */
static inline double timing_median_ratio(const timing *t, const double *x, const double *y)
{
    double ratios[TIMING_MAX_ROUNDS];
    for (int i = 0; i < t->n_rounds; i++) ratios[i] = x[i] / y[i];
    return timing_median(ratios, t->n_rounds);
}

/* The time of `other` divided by that of `entry`. */
static inline double timing_ratio(const timing *t, const timing_entry *entry, const timing_entry *other)
{
    return timing_median_ratio(t, other->cpu, entry->cpu);
}

/* The same of wall times, for work of several threads. */
static inline double timing_wall_ratio(const timing *t, const timing_entry *entry, const timing_entry *other)
{
    return timing_median_ratio(t, other->wall, entry->wall);
}

#endif
