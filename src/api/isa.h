/* >>isa
   The instruction set in use: "avx512" (with VBMI and VNNI), "avx2" (with FMA), "neon" or "scalar". The first call
   chooses the best set of the processor, or the one named by the environment variable TQKV_ISA: where that one is not
   there, TQKV_EXPLAIN gets a sentence. The bits of all results are the same in all sets. */
TQKV_API const char *tqkv_isa_name(void);
/* For tests: uses that set from now on, in all threads. NULL: chooses again. TQKV_INVALID_ARGUMENT for an unknown name,
   TQKV_UNSUPPORTED if the processor lacks the set. */
TQKV_API tqkv_result tqkv_isa_force(const char *name);
