/* >>errors: what went wrong, in words */

static tqkv_result tqkv__fail(tqkv_metal *m, tqkv_result result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static tqkv_result tqkv__fail(tqkv_metal *m, tqkv_result result, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    pthread_mutex_lock(&m->lock);
    vsnprintf(m->error, sizeof m->error, format, arguments);
    pthread_mutex_unlock(&m->lock);
    va_end(arguments);
    return result;
}

static const char *tqkv__error_text(NSError *error)
{
    const char *text = [[error localizedDescription] UTF8String];
    return text ? text : "Metal gave no reason";
}

void tqkv_metal_error(tqkv_metal *m, char *text, size_t size)
{
    if (!text || !size) return;
    text[0] = 0;
    if (!m) return;
    pthread_mutex_lock(&m->lock);
    snprintf(text, size, "%s", m->error);
    pthread_mutex_unlock(&m->lock);
}
