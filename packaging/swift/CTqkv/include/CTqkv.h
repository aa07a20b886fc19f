/* The module is this header and what it includes. It does not name tqkv.h, which other files include with macros. */
#include "../../../../tqkv.h"
