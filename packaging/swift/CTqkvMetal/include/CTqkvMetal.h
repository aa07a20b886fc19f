/* The Metal calls are declared with the others. */
#include "CTqkv.h"
