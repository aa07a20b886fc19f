/* >>k-table: the functions of a set. */

static const tqkv__isa TQKV__(isa) = {TQKV__ISA_NAME,     TQKV__LANES,        TQKV__COLUMNS,        &TQKV__(codec),
                                      TQKV__(reorder),    TQKV__(score_tile), TQKV__(softmax_tile), TQKV__(end_piece),
                                      TQKV__(value_tile), TQKV__(sum_heads)};
