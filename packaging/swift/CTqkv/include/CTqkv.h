/* The module is this header and what it includes. It does not name tqkv.h, which other files include with macros. */
#ifdef __swift__
/* Swift drops results of C functions silently, unless they say otherwise. Those that return nothing say so in vain. */
#define TQKV_API extern __attribute__((warn_unused_result))
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wignored-attributes"
#endif
#include "../../../../tqkv.h"
#ifdef __swift__
#pragma clang diagnostic pop
#endif
