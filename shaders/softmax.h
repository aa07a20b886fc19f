// Shares of maxima in the online softmax. Scores are in powers of two, because a GPU's exponential takes these.
#ifndef TQKV_SOFTMAX_H
#define TQKV_SOFTMAX_H
#include "common.h"

#define TQKV_LOG2E 1.44269504f
#define TQKV_LN2   0.693147181f

// A maximum of a slice, in powers of e as on the processor. Maxima here are whole numbers, in powers of two: rounding
// to powers of e and back is undone, so slices have the bits of the whole call.
// A processor's maximum is as close as it was.
inline float maximum_of_slice(float max)
{
    float maximum = max * TQKV_LOG2E, whole = rint(maximum);
    return fabs(maximum - whole) <= fabs(maximum) * (1.0f / 4194304.0f) ? whole : maximum;
}

// 2^(own - largest), and exactly 1 where the two are equal: then adding nothing changes no bit. The maximum of nothing
// is -INFINITY and its share is 0. Both are selected, because -INFINITY minus -INFINITY is NaN. The fast exponential
// errs by a few units in the last place; the result may err by 2e-5.
inline float share_of(float own, float largest)
{
    return own == largest ? 1.0f : own == -INFINITY ? 0.0f : fast::exp2(own - largest);
}

// The factors of two sums of weights with these maxima, kept and added, under the larger one.
struct shares {
    float largest, kept, added;
};

inline shares shares_of(float kept, float added)
{
    shares result;
    result.largest = max(kept, added);
    result.kept = share_of(kept, result.largest);
    result.added = share_of(added, result.largest);
    return result;
}

#endif
