// The one exponential of the online softmax: of a score, of a running maximum, of a split's maximum, against the
// largest. Scores are held in powers of two, which is what a GPU's exponential takes.
#ifndef TQKV_SOFTMAX_H
#define TQKV_SOFTMAX_H
#include "common.h"

#define TQKV_LOG2E 1.44269504f

// 2^(own - most). The maximum of nothing is -INFINITY and has no share: by selection, since -INFINITY minus -INFINITY is
// no number. The fast exponential is within a few units of the last place here, and the result may be off by 2e-5.
inline float share_of(float own, float most) { return own == -INFINITY ? 0.0f : fast::exp2(own - most); }

#endif
