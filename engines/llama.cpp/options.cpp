#include "options.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace tqkv_llama
{
namespace
{

options current;
bool is_read = false;

const char *environment(const char *name, const char *otherwise)
{
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}

bool read_preset(options *o, const char *text)
{
    static const struct {
        const char *name;
        tqkv_preset preset;
    } presets[] = {{"safe", TQKV_SAFE}, {"small", TQKV_SMALL}, {"tiny", TQKV_TINY}};
    snprintf(o->name, sizeof o->name, "%s", text);
    o->preset = tqkv_cache_preset(TQKV_SMALL);
    for (const auto &p : presets) {
        if (strcmp(text, p.name) != 0) continue;
        o->preset = tqkv_cache_preset(p.preset);
        o->is_preset = true;
        return true;
    }
    const char *slash = strchr(text, '/');
    char key[16] = "";
    if (!slash || (size_t)(slash - text) >= sizeof key) return false;
    memcpy(key, text, (size_t)(slash - text));
    o->preset.key_format = tqkv_format_from_name(key);
    o->preset.value_format = tqkv_format_from_name(slash + 1);
    return o->preset.key_format && o->preset.value_format;
}

void read_options(options *o)
{
    *o = options();
    o->log = atoi(environment("TQKV_LOG", "1"));
    const char *preset = environment("TQKV", "small"), *path = environment("TQKV_PROFILE", "");
    o->valid = read_preset(o, preset);
    if (!o->valid) {
        say("TQKV=%s is none of safe, small, tiny or two formats as in TQKV=tq4/tq4 (f16, i8, tq8, tq6 to tq2)",
            preset);
    } else if (*path && profile_load(path, &o->learned) != TQKV_OK) {
        say("TQKV_PROFILE=%s is not a profile that bench/models/measure.py wrote: keys are calibrated as they come",
            path);
        o->learned = {};
    }
    if (!o->is_preset) profile_forget_plan(&o->learned); /* formats named by hand are meant */
}

} // namespace

const options &get_options()
{
    if (!is_read) {
        is_read = true;
        read_options(&current);
    }
    return current;
}

void reset_options()
{
    profile_free(&current.learned);
    is_read = false;
}

void say(const char *format, ...)
{
    if ((is_read ? current.log : 1) == 0) return;
    va_list arguments;
    va_start(arguments, format);
    fputs("tqkv: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
}

} // namespace tqkv_llama

extern "C" void tqkv_llama_explain(const char *text);
void tqkv_llama_explain(const char *text) { tqkv_llama::say("%s", text); }
