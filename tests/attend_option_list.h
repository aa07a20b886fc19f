/* The options of attend_options.h as a table: a name, and what it changes in a row. */
#ifndef TQKV_TESTS_ATTEND_OPTION_LIST_H
#define TQKV_TESTS_ATTEND_OPTION_LIST_H

#include "attend_fixture.h"

static void place(attend_row *row, bool ring, int capacity, int64_t end)
{
    row->key_ring = row->value_ring = ring;
    row->key_capacity = row->value_capacity = capacity;
    row->end = end;
    row->n_queries = 3;
}

typedef struct option {
    const char *name;
    void (*apply)(attend_row *row);
} option;

#define OPTION(name, statement) \
    static void name(attend_row *row) { statement; }
#include "attend_options.h"
#undef OPTION

#define OPTION(name, statement) {#name, name},
static const option options[] = {
#include "attend_options.h"
};
#undef OPTION

#endif
