/* The macros that a set defines, and two that depend on it. Those of the loops are the same for all. */
#undef TQKV__
#undef TQKV__DECODED
#undef TQKV__DOT_LANES
#undef TQKV__ENCODES
#undef TQKV__I
#undef TQKV__INTEGER_LANES
#undef TQKV__ISA_NAME
#undef TQKV__LANES
#undef TQKV__LANES_ROWS
#undef TQKV__LOOKED_UP
#undef TQKV__PRODUCTS
#undef TQKV__PRODUCT_ROWS
#undef TQKV__ROUNDED
#undef TQKV__S
#undef TQKV__TARGET
#undef TQKV__WHOLE_LANES
#undef TQKV__WIDTH
