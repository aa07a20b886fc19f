// Shares of maxima in the online softmax. Scores are in powers of two, because a GPU's exponential takes these.
#ifndef TQKV_SOFTMAX_H
#define TQKV_SOFTMAX_H
#include "common.h"

#define TQKV_LOG2E 1.44269504f

// 2^(own - largest). The maximum of nothing is -INFINITY and its share is 0. This is selected, because -INFINITY minus
// -INFINITY is NaN. The fast exponential errs by a few units in the last place; the result may err by 2e-5.
inline float share_of(float own, float largest) { return own == -INFINITY ? 0.0f : fast::exp2(own - largest); }

#endif
