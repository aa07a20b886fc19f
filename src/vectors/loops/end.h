/* The macros that a set defines. Those of the loops are the same for all. */
#undef TQKV__
#undef TQKV__CODE_OFFSET
#undef TQKV__DECODED
#undef TQKV__ENCODES
#undef TQKV__FEW_ROWS
#undef TQKV__I
#undef TQKV__INTEGER_LANES
#undef TQKV__LANES
#undef TQKV__LANES_ROWS
#undef TQKV__PRODUCTS
#undef TQKV__SUM_SIXTEENS
#undef TQKV__TARGET
#undef TQKV__WIDTH
