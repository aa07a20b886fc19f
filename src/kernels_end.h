static const tqkv__codec TQKV__(codec) = {TQKV__(rows_finite), TQKV__(widen),     TQKV__(narrow_row), TQKV__(rotate),
                                          TQKV__(unrotate),    TQKV__(scale_row), TQKV__(encode_rows)};

static const tqkv__isa TQKV__(isa) = {TQKV__ISA_NAME,    TQKV__LANES,        {TQKV__NIBBLE_ORDER},
                                      &TQKV__(codec),    TQKV__(score_tile), TQKV__(softmax_tile),
                                      TQKV__(end_piece), TQKV__(value_tile), TQKV__(sum_heads)};

/* These macros belong to one set. */
#undef TQKV__VECTOR
#undef TQKV__ROW_LOOPS
#undef TQKV__DECODE_LOOP
#undef TQKV__LOOPS_OF
#undef TQKV__WIDTH
#undef TQKV__SCORE_ROWS
#undef TQKV__DECODED_SCORE_ROWS
#undef TQKV__ROWS
#undef TQKV__SUMS
#undef TQKV__SHORTER
#undef TQKV__SHORT_RUNS
#undef TQKV__LANES
#undef TQKV__NIBBLE_ORDER
#undef TQKV__NIBBLE_RUN
#undef TQKV__RUN_TOGETHER
#undef TQKV__ISA_NAME
#undef TQKV__MIX_SHORT_RUNS
#undef TQKV__
#undef TQKV__TARGET
