/* The loops of attention and of encoding. The implementation includes this file again for each instruction set.
   TQKV__(name) is that set's version of name, TQKV__LANES the number of floats in its vector, TQKV__TARGET the
   attribute that enables it in the compiler. */
#ifdef TQKV__LANES

#include "loops/begin.h"
#include "loops/softmax.h"

#ifdef TQKV__ENCODES
#include "loops/widen.h"
#include "loops/rotate.h"
#include "loops/norms.h"
#include "loops/search.h"
#include "loops/quantise.h"
#endif

#endif /* TQKV__LANES */

#ifdef TQKV__INTEGER_LANES

#include "loops/halves.h"
#include "loops/rows.h"

#endif /* TQKV__INTEGER_LANES */

#if defined(TQKV__LANES) || defined(TQKV__INTEGER_LANES)
#include "loops/end.h"
#endif
