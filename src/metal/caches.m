/* >>caches: each is one block of shared memory */

tqkv_result tqkv_metal_cache_append(tqkv_metal *m, tqkv_metal_object encoder, tqkv_cache *c, tqkv_metal_buffer k,
                                    tqkv_metal_buffer v, int n_tokens, tqkv_metal_buffer not_finite)
{
    tqkv_metal_plan plan;
    tqkv_metal_buffer memory;
    tqkv_result r = tqkv_metal_find(m, c, &memory);
    if (r != TQKV_OK) return r;
    tqkv_metal_plan_cache_append(c, memory, NULL, k, v, n_tokens, not_finite, &plan);
    if ((r = tqkv_metal_record(m, encoder, &plan)) == TQKV_OK) tqkv_metal_cache_appended(c, n_tokens);
    return r;
}

tqkv_result tqkv_metal_cache_attend(tqkv_metal *m, tqkv_metal_object encoder, const tqkv_cache *c, tqkv_metal_buffer q,
                                    int n_queries, tqkv_metal_buffer scratch, tqkv_metal_buffer out)
{
    tqkv_metal_plan plan;
    tqkv_metal_buffer memory;
    const tqkv_result r = tqkv_metal_find(m, c, &memory);
    if (r != TQKV_OK) return r;
    tqkv_metal_plan_cache_attend(c, memory, NULL, NULL, q, n_queries, scratch, out, &plan);
    return tqkv_metal_record(m, encoder, &plan);
}
