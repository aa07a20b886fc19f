#ifndef TQKV_TESTS_CUDA_CASES_H
#define TQKV_TESTS_CUDA_CASES_H

// listing: small sizes, to find out which pipelines the cases need.
void cuda_shader_cases(bool listing);

#endif
