/* >>k-table: the functions of a set. */

static const tqkv__codec TQKV__(codec) = {TQKV__(rows_finite), TQKV__(scales_valid), TQKV__(invert),
                                          TQKV__(widen),       TQKV__(narrow_row),   TQKV__(rotate),
                                          TQKV__(unrotate),    TQKV__(scale_row),    TQKV__(encode_rows)};

static const tqkv__isa TQKV__(isa) = {TQKV__ISA_NAME, TQKV__LANES, &TQKV__(codec)};
