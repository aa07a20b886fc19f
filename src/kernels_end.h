<<<<<<< HEAD
/* These macros belong to one set. */
#undef TQKV__ADD_NIBBLES
#undef TQKV__SUM_NIBBLES
#undef TQKV__SUM_QUARTERS
#undef TQKV__ADD_QUARTERS
#undef TQKV__BYTES
#undef TQKV__BOOK_VECTORS
#undef TQKV__IS_LARGE
#undef TQKV__BY_FOUR_ROWS
#undef TQKV__BY_NIBBLES
#undef TQKV__BY_QUARTERS
#undef TQKV__COLUMNS
#undef TQKV__NIBBLES
=======
/* The macros that a set defines, and two that depend on it. Those of the loops are the same for all. */
#undef TQKV__
>>>>>>> main
#undef TQKV__DECODED
#undef TQKV__DECODED_SCORE_ROWS
#undef TQKV__DOT_LANES
<<<<<<< HEAD
#undef TQKV__HALF_KEY_ROWS
#undef TQKV__HALF_ROWS
=======
#undef TQKV__I
>>>>>>> main
#undef TQKV__INTEGER_LANES
#undef TQKV__ISA_NAME
#undef TQKV__LANES
#undef TQKV__LANES_ROWS
#undef TQKV__LOOKED_UP
<<<<<<< HEAD
#undef TQKV__LOOPS_OF
#undef TQKV__MATRIX_ROWS
=======
>>>>>>> main
#undef TQKV__MIX_SHORT_SUBROWS
#undef TQKV__NIBBLE_STRIP
#undef TQKV__PRODUCTS
#undef TQKV__PRODUCT_ROWS
#undef TQKV__ROUNDED
#undef TQKV__ROWS
#undef TQKV__S
#undef TQKV__SCORE_ROWS
#undef TQKV__STRIP_TOGETHER
#undef TQKV__SUMS
#undef TQKV__TARGET
#undef TQKV__WHOLE_LANES
#undef TQKV__WIDTH
