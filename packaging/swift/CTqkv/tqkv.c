#define TQKV_IMPLEMENTATION
#include "../../../tqkv.h"
