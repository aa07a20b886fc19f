#include "shader_cases.h"
void defect_shader_cases() {}
void machine_cases() {}
