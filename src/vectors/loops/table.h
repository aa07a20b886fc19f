/* >>k-table: the functions of a set. */

static const tqkv__isa TQKV__(isa) = {TQKV__ISA_NAME, TQKV__LANES, &TQKV__(codec)};
