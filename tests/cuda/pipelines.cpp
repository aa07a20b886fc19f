#include "pipelines.h"
#include <map>
#include <string.h>
#include <unistd.h>

std::string cuda_pipeline_name(const char *kernel, const bool *set, const uint32_t *constants)
{
    const std::string prefix = "tqkv_";
    std::string name = std::string(kernel).substr(prefix.size());
    for (int i = 0; i < cuda_n_constants; i++)
        name += (i ? "_" : "-") + (set[i] ? std::to_string(constants[i]) : std::string("x"));
    return name;
}

const void *cuda_pipeline(const std::string &folder, const std::string &name, std::string *error)
{
    static std::map<std::string, cudaKernel_t> loaded;
    auto found = loaded.find(name);
    if (found != loaded.end()) return (const void *)found->second;
    cudaLibrary_t library;
    cudaKernel_t kernel;
    const std::string path = folder + "/" + name + ".cubin", entry = "simt_run_tqkv_" + name.substr(0, name.find('-'));
    if (access(path.c_str(), R_OK) != 0) { // a failed call would be an error to compute-sanitizer
        *error = "tqkv_" + name + ": no such pipeline";
        return nullptr;
    }
    cudaError_t result = cudaLibraryLoadFromFile(&library, path.c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (result == cudaSuccess) result = cudaLibraryGetKernel(&kernel, library, entry.c_str());
    if (result != cudaSuccess) {
        *error = "tqkv_" + name + ": " + cudaGetErrorString(result);
        return nullptr;
    }
    loaded[name] = kernel;
    return (const void *)kernel;
}

void cuda_set_value(simt_arguments *arguments, int index, const void *bytes, size_t size)
{
    if (index % 4 == 0 && index < 8 && size <= sizeof arguments->values[0])
        memcpy(arguments->values[index / 4], bytes, size);
}

size_t cuda_lay_out(const size_t *sizes, int n, uint32_t *offsets)
{
    size_t end = 0;
    for (int i = 0; i < n; i++) {
        offsets[i] = (uint32_t)end;
        end += (sizes[i] + 15) / 16 * 16;
    }
    return end;
}
