// What products of matrices on an NVIDIA GPU, which are of halves or of bfloat16, add to the error of a result. Metal's
// are of floats.
//
// A weight and a value's centroid are each the sum of two bfloat16 of 8 bits, and what is left out of their product,
// that of the lower ones, is up to 2^-16 of it. A score is a sum that is rounded towards 0 after every 16 values of a
// row, for each of the three products of halves that make one of floats: half a unit, 2^-24 of it, is lost each time.
// Values that cancel each other in the output, and a sink that outweighs all scores, leave these errors as large as
// they are beside a small result.
#ifndef TQKV_CUDA_PRODUCTS_H
#define TQKV_CUDA_PRODUCTS_H
#include "../attend_fixture.h"
#include <vector>

// The length of a value as its store has it: without the centre and the scales of channels.
inline double length_in_store(const tqkv_store &s, int kv_head, const double *value)
{
    const float *center = reference_center(&s, kv_head), *scale = reference_scale(&s, kv_head);
    double squares = 0.0;
    for (int j = 0; j < s.head_dim; j++) {
        const double own = (value[j] - (center ? (double)center[j] : 0.0)) / (scale ? (double)scale[j] : 1.0);
        squares += own * own;
    }
    return sqrt(squares);
}

// The score that a query has with the centre of the keys, which no product adds up.
inline double score_of_center(const tqkv_attention &a, int kv_head, const double *query)
{
    const float *center = reference_center(a.keys, kv_head);
    double sum = 0.0;
    for (int j = 0; center && j < a.keys->head_dim; j++) sum += query[j] * (double)center[j];
    return sum * reference_attention_shape(&a).scale;
}

// The scores of a query head, [end - lowest]; -INFINITY where it sees nothing.
inline std::vector<double> scores_of_row(const tqkv_attention &a, int query, int head, const double *q)
{
    const reference_shape shape = reference_attention_shape(&a);
    const int kv_head = head / shape.group;
    double *keys = reference_decode_side(&a, 0, query, kv_head, REFERENCE_FLOATS);
    std::vector<double> scores((size_t)(shape.end - shape.lowest), -INFINITY);
    for (size_t i = 0; i < scores.size(); i++) {
        const int64_t position = shape.lowest + (int64_t)i;
        if (reference_is_visible(&a, query, position) && reference_is_listed(&a, query, kv_head, position))
            scores[i] = reference_score(&a, q, keys + i * (size_t)shape.key_dim, shape.scale);
    }
    free(keys);
    return scores;
}

// Relative to the length of row `row` of the output. Scales of channels count as 1, the mean of their squares.
inline double error_of_products(const attend_problem *problem, size_t row)
{
    const tqkv_attention &a = problem->attention;
    const reference_shape shape = reference_attention_shape(&a);
    const size_t key_dim = problem->head_dim, value_dim = problem->value_dim;
    const int query = (int)row / shape.n_heads, head = (int)row % shape.n_heads, kv_head = head / shape.group;
    const double roundings = 3.0 * (shape.key_dim < 128 ? shape.key_dim : 128) / 16.0;
    std::vector<double> q(problem->q + row * key_dim, problem->q + (row + 1) * key_dim);
    if (a.query_basis == TQKV_ROTATED) reference_original_query(a.keys, kv_head, q.data());
    const std::vector<double> scores = scores_of_row(a, query, head, q.data());
    const double shift = score_of_center(a, kv_head, q.data()), sink = a.sinks ? (double)a.sinks[head] : -INFINITY;
    double largest = sink, wrong = 0.0, squares = 0.0;
    for (double score : scores) largest = score > largest ? score : largest;
    double weights = exp(sink - largest), *values = reference_decode_side(&a, 1, query, kv_head, REFERENCE_FLOATS);
    for (size_t i = 0; i < scores.size(); i++) {
        const double weight = exp(scores[i] - largest);
        weights += weight;
        if (weight > 0.0)
            wrong += weight * length_in_store(*a.values, kv_head, values + i * value_dim) *
                     (ldexp(1.0, -16) + roundings * ldexp(fabs(scores[i] - shift), -24));
    }
    free(values);
    for (size_t j = row * value_dim; j < (row + 1) * value_dim; j++)
        squares += problem->expected[j] * problem->expected[j];
    return wrong / weights / sqrt(squares);
}

#endif
