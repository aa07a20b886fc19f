/* What the user chooses by environment variables, and the lines that the backend prints. */
#pragma once
#include "tqkv.h"

#include "profile.h"

namespace tqkv_llama
{

struct options {
    tqkv_cache_desc preset = {}; /* formats, exact ends, calibrate; all else is not read */
    profile learned = {};        /* TQKV_PROFILE; no layers: none. Its plan's formats come before the preset's */
    int log = 1;                 /* TQKV_LOG: 0 nothing, 1 a line at start and warnings, 2 what each graph does */
    char name[32] = "";          /* of the preset, or of the formats */
    bool is_preset = false;      /* a name, not two formats */
    bool valid = false;
};

/* Read once, when the backend is loaded. What is wrong with it has been said. */
const options &get_options();
/* For tests: reads the environment again. */
void reset_options();

/* To stderr, with "tqkv: " before it and a line's end behind, unless TQKV_LOG is 0. */
#if defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
void say(const char *format, ...);

} // namespace tqkv_llama
