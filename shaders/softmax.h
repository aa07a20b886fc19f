// The one exponential of the online softmax: of a score, of a running maximum, of a split's maximum, against the
// largest.
#ifndef TQKV_SOFTMAX_H
#define TQKV_SOFTMAX_H
#include "common.h"

// e^(own - most). A masked score and the maximum of nothing are -INFINITY and have no share: by selection, since
// -INFINITY minus -INFINITY is no number. The fast exponential is within a few units of the last place here, and the
// result may be off by 2e-5.
inline float share_of(float own, float most) { return own == -INFINITY ? 0.0f : fast::exp(own - most); }

#endif
