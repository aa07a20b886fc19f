/* Histories: random bytes that a fuzzer's harness reads as calls. Each case runs those of some seeds in a process of
 * its own. What fails, ends the program or takes too long is shrunk to few bytes, which are printed with the seed:
 * keep them as an input of the fuzzer. */
#ifndef TQKV_TESTS_HISTORY_H
#define TQKV_TESTS_HISTORY_H

#include "runner.h"
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { HISTORY_BYTES = 240, HISTORY_SECONDS = 120 };

typedef struct history_row {
    int (*run)(const uint8_t *bytes, size_t size); /* a fuzzer's LLVMFuzzerTestOneInput */
    int first_seed, n_seeds;
} history_row;

/* The bytes of a seed, 40 to HISTORY_BYTES of them. */
static inline size_t history_of_seed(int seed, uint8_t *bytes)
{
    data_random random = {(uint64_t)seed * UINT64_C(0x9e3779b97f4a7c15) + 1};
    const size_t n = 40 + (size_t)data_below(&random, HISTORY_BYTES - 39);
    for (size_t i = 0; i < n; i++) bytes[i] = (uint8_t)data_below(&random, 256);
    return n;
}

/* Starts a process; 0 in the new one, which a signal ends if it takes too long. */
static inline pid_t history_fork(void)
{
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        test_failure_aborts = true;
        (void)alarm(HISTORY_SECONDS);
    }
    return child;
}

/* Ends a new process; what it ran counts where lines are counted. */
static inline void history_exit(void)
{
    fflush(stdout);
#ifdef TEST_COVERAGE
    extern void __gcov_dump(void);
    __gcov_dump();
#endif
    _exit(0);
}

static inline bool history_ended_well(pid_t child)
{
    int status = 0;
    return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/* Whether n bytes fail, without a word or with what the check says. */
static inline bool history_fails(const history_row *row, const uint8_t *bytes, size_t n, bool quiet)
{
    const pid_t child = history_fork();
    if (child == 0) {
        if (quiet && (!freopen("/dev/null", "w", stdout) || !freopen("/dev/null", "w", stderr))) _exit(0);
        (void)row->run(bytes, n);
        history_exit();
    }
    return !history_ended_well(child);
}

/* Leaves out what is not needed to fail, then makes bytes 0; the bytes that remain. */
static inline size_t history_shrink(const history_row *row, uint8_t *bytes, size_t n)
{
    uint8_t fewer[HISTORY_BYTES];
    for (size_t piece = n / 2; piece > 0; piece /= 2)
        for (size_t at = 0; at + piece <= n;) {
            memcpy(fewer, bytes, at);
            memcpy(fewer + at, bytes + at + piece, n - at - piece);
            if (!history_fails(row, fewer, n - piece, true)) {
                at += piece;
                continue;
            }
            n -= piece;
            memcpy(bytes, fewer, n);
        }
    for (size_t i = 0; i < n; i++) {
        const uint8_t was = bytes[i];
        bytes[i] = 0;
        if (!history_fails(row, bytes, n, true)) bytes[i] = was;
    }
    return n;
}

/* The first of the seeds that fails; the one behind them if none does. */
static inline int history_first_failure(const history_row *row)
{
    int pipes[2], seed = row->first_seed, done;
    if (pipe(pipes)) return seed;
    const pid_t child = history_fork();
    if (child == 0) {
        uint8_t bytes[HISTORY_BYTES];
        for (; seed < row->first_seed + row->n_seeds; seed++) {
            const size_t n = history_of_seed(seed, bytes);
            (void)alarm(HISTORY_SECONDS); /* for each */
            (void)row->run(bytes, n);
            if (write(pipes[1], &seed, sizeof seed) != (ssize_t)sizeof seed) _exit(1);
        }
        history_exit();
    }
    close(pipes[1]);
    while (read(pipes[0], &done, sizeof done) == (ssize_t)sizeof done) seed = done + 1;
    close(pipes[0]);
    return history_ended_well(child) || seed < row->first_seed + row->n_seeds ? seed : seed - 1;
}

static inline void check_history(const void *parameters)
{
    const history_row *row = (const history_row *)parameters;
    const int seed = history_first_failure(row);
    uint8_t bytes[HISTORY_BYTES];
    char text[2 * HISTORY_BYTES + 1];
    if (seed == row->first_seed + row->n_seeds) return;
    size_t n = history_of_seed(seed, bytes);
    if (history_fails(row, bytes, n, true)) n = history_shrink(row, bytes, n);
    (void)history_fails(row, bytes, n, false);
    for (size_t i = 0; i < n; i++) (void)snprintf(text + 2 * i, 3, "%02x", bytes[i]);
    text[2 * n] = '\0';
    CHECK(false, "seed %d; these bytes fail: %s", seed, text);
}

/* Cases NAME/0 and so on, of n_seeds each. */
static inline void history_add(int (*function)(const uint8_t *bytes, size_t size), const char *name, int n_cases,
                               int n_seeds)
{
    for (int i = 0; i < n_cases; i++) {
        const history_row row = {function, i * n_seeds, n_seeds};
        test_add(check_history, &row, sizeof row, "history/%s/%d", name, i);
    }
}

#endif
