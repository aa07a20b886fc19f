#ifndef TQKV_TESTS_CUDA_CASES_H
#define TQKV_TESTS_CUDA_CASES_H

// listing: small sizes, to learn which pipelines they ask for.
void cuda_shader_cases(bool listing);

#endif
